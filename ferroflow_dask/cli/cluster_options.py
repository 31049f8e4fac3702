"""Options of commands that start a local cluster or connect to a running one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from dask.utils import parse_timedelta
from distributed import Client

from ferroflow_dask.cli.sections import cluster_option
from ferroflow_dask.config import NO_QUANTITY
from ferroflow_dask.deploy import connect
from ferroflow_dask.exceptions import ClusterError, UsageError
from ferroflow_dask.topology.parts import MOST

F = TypeVar("F", bound=Callable[..., Any])


class Duration(click.FloatRange):
    """Finite durations above 0: a number, or one with a unit like `60s` or `5m`.

    Parameters
    ----------
    unit : str, optional
        Of numbers without a unit, and of the value.
    """

    name = "duration"

    def __init__(self, unit: str = "seconds") -> None:
        super().__init__(min=0, min_open=True)
        self.unit = unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number that a text is."""
        number = super().convert(self._number(value, param, ctx), param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no number of {self.unit}", param, ctx)
        return number

    def _number(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return float(value)
        except ValueError:
            pass
        try:
            number: float = parse_timedelta(value) / parse_timedelta(1, default=self.unit)
        except NO_QUANTITY:
            self.fail(f"{value!r} is no duration; write it like 60, 60s or 5m", param, ctx)
        return number


class Count(click.IntRange):
    """Whole numbers of things that a command starts, with a limit.

    Parameters
    ----------
    least, most : int
    reason : str
        Reason for the limit.
    """

    def __init__(self, least: int, most: int, reason: str) -> None:
        super().__init__(min=least, max=most)
        self._allowed = range(least, most + 1)
        self._told = f"from {least:,} to {most:,} ({reason})"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number that a text is."""
        number = click.INT.convert(value, param, ctx)
        if number not in self._allowed:
            name = value if param is None else max(param.opts, key=len)
            raise UsageError(f"{name} must be {self._told}, got {number:,}")
        return number


#: Most runs of a command: each one is kept until its end.
_MOST_RUNS = 100_000


def repeat_type(least: int = 1) -> Count:
    """Return the type of an option that repeats runs."""
    return Count(least, _MOST_RUNS, "the results of all runs are kept")


#: Workers of a simulated cluster.
simulated_workers = Count(1, MOST, "as in a topology")

#: Largest local clusters. Hosts with more than a thousand cores are rare.
_MOST_WORKERS, _MOST_THREADS = 1024, 4096
_ONE_HOST = "they share this host; --connect and --cluster slurm use others"

_workers_option = cluster_option(
    "--workers",
    type=Count(1, _MOST_WORKERS, _ONE_HOST),
    default=4,
    show_default=True,
    help=f"Local workers to start, at most {_MOST_WORKERS:,}.",
)
threads_option = cluster_option(
    "--threads",
    type=Count(1, _MOST_THREADS, _ONE_HOST),
    default=1,
    show_default=True,
    help=f"Threads of each worker, at most {_MOST_THREADS:,} in all.",
)
_processes_option = cluster_option(
    "--processes/--no-processes", default=True, show_default=True, help="One process for each worker."
)

#: A running cluster, for commands that are of no other.
scheduler_address = cluster_option(
    "--connect",
    "address",
    metavar="ADDRESS",
    help="Address of the scheduler, like tcp://10.0.0.1:8786.  [default: DASK_SCHEDULER_ADDRESS]",
)
#: How long `--connect` waits.
connect_timeout = cluster_option(
    "--connect-timeout",
    type=Duration(),
    default=10.0,
    show_default=True,
    help="How long to wait for --connect [s].",
)


@contextmanager
def client_of(address: str | None, timeout_s: float) -> Iterator[Client]:
    """Yield a client of the scheduler that `scheduler_address` names, or else Dask's setting."""
    with ExitStack() as stack:
        try:
            client = stack.enter_context(connect(address, timeout_s, needs_workers=False))
        except UsageError as error:
            raise UsageError(f"{error}; the option is --connect ADDRESS") from error
        except ClusterError as error:
            if address is not None:
                raise
            raise ClusterError(f"{error}; --connect ADDRESS names another") from error
        yield client


def check_workers(n: int) -> None:
    """Raise `UsageError` for a number of local workers that is not allowed."""
    if not 1 <= n <= _MOST_WORKERS:
        raise UsageError(f"--workers must be from 1 to {_MOST_WORKERS:,} ({_ONE_HOST}), got {n:,}")


def count_options(function: F) -> F:
    """Add the options for the number of local workers, and of their threads."""

    @wraps(function)
    def with_size(*, workers: int, threads: int, **others: Any) -> Any:
        if workers * threads > _MOST_THREADS:
            raise UsageError(
                f"--workers × --threads must be at most {_MOST_THREADS:,} ({_ONE_HOST}), "
                f"got {workers:,} × {threads:,}"
            )
        return function(workers=workers, threads=threads, **others)

    return _workers_option(threads_option(with_size))  # type: ignore[return-value]


def size_options(function: F) -> F:
    """Add the options that give the size of a local cluster."""
    return count_options(_processes_option(function))


def is_given(name: str) -> bool:
    """Return whether the user gave a parameter of the current command."""
    return click.get_current_context().get_parameter_source(name) not in (None, ParameterSource.DEFAULT)


def refuse_given(names: tuple[str, ...], why: str) -> None:
    """Raise `UsageError` if the user gave some of these parameters, which would be ignored."""
    flags = [
        "/".join((*param.opts, *param.secondary_opts))
        for param in click.get_current_context().command.params
        if param.name in names and is_given(param.name)
    ]
    if flags:
        raise UsageError(f"{' and '.join(flags)} {why}; leave {'it' if len(flags) == 1 else 'them'} out")


def refuse_local_sizes(which: str) -> None:
    """Raise `UsageError` if the user gave sizes of a local cluster beside what names another one."""
    sizes = ("workers", "threads", "processes")
    refuse_given(sizes, f"would start a local cluster; {which} names another one")


def check_address(address: str | None) -> None:
    """Raise `UsageError` if the user gave what does not go with `--connect`, or what goes with it only."""
    if address is None:
        refuse_given(("connect_timeout",), "would do nothing without --connect")
    else:
        refuse_local_sizes("--connect")
