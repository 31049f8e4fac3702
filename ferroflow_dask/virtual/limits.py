"""Which numbers virtual clusters and their tasks take: others would end in a run that means nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from ferroflow_dask.exceptions import UsageError


def check_count(name: str, value: Any, least: int) -> None:
    """Raise `UsageError` unless a value is a whole number, at least `least`."""
    if not (_is(Integral, value) and value >= least):
        raise UsageError(f"{name} is {value!r}; it must be a whole number, at least {least}")


def check_amount(name: str, value: Any) -> None:
    """Raise `UsageError` unless a value is a finite number, at least 0."""
    if not (_is(Real, value) and 0 <= value < math.inf):
        raise UsageError(f"{name} is {value!r}; it must be a finite number, at least 0")


def check_positive(name: str, value: Any, *, may_be_infinite: bool = False) -> None:
    """Raise `UsageError` unless a value is a number above 0, and finite if it must be."""
    if not (_is(Real, value) and value > 0 and (value < math.inf or may_be_infinite)):
        raise UsageError(
            f"{name} is {value!r}; it must be a {'' if may_be_infinite else 'finite '}number above 0"
        )


def check_members(name: str, chosen: Iterable[object], workers: int) -> None:
    """Raise `UsageError` if something is said of workers that a cluster does not start with."""
    if lost := [worker for worker in chosen if worker not in range(workers)]:
        there = f"the workers are 0 to {workers - 1}" if workers else "there are no workers"
        raise UsageError(f"{name} has worker {lost[0]!r}; {there}")


def check_cluster(workers: int, workers_per_host: int, times_s: Sequence[float]) -> None:
    """Raise `UsageError` unless counts and times of a cluster are allowed: latency, service, batches."""
    check_count("workers", workers, 0)
    check_count("workers_per_host", workers_per_host, 1)
    for name, seconds in zip(("latency_s", "service_s", *["batching_s"] * 2), times_s, strict=True):
        check_amount(name, seconds)


def check_rates(rates: Mapping[str, float | None]) -> None:
    """Raise `UsageError` unless the rates that are given are numbers above 0."""
    for name, rate in rates.items():
        if rate is not None:
            check_positive(name, rate, may_be_infinite=True)


def check_worker(nthreads: int, speed: float, resources: Mapping[str, float]) -> None:
    """Raise `UsageError` unless there can be a worker like this."""
    check_count("nthreads", nthreads, 1)
    check_positive("speed", speed)
    for resource, amount in resources.items():
        check_amount(f"the amount of {resource}", amount)


def _is(kind: type, value: Any) -> bool:
    # mypy knows of no order among `Real`s.
    return isinstance(value, kind)
