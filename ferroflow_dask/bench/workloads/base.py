"""What a workload is: something to compute whose answer, size and bounds are known.

A workload makes instances, each with keys of its own. An instance is built before the clock starts,
up to what a user would hand over (a `Graph`, a Dask collection, a list of calls); `submit` is the first
thing on the clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ferroflow_dask.bench.workloads.needs import nbytes_of
from ferroflow_dask.exceptions import ClusterError, UsageError
from ferroflow_dask.memory import check_memory

if TYPE_CHECKING:
    from distributed import Client, Future


#: Ranges of sizes by name. Other whole numbers are 1 or more, other durations and factors 0 or more.
_RANGES: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("fraction", "heavy_fraction"), (0, 1)),
    **dict.fromkeys(("shrink", "slowdown", "heavy_factor"), (1, math.inf)),
}


#: How often a cluster is asked whether it has another size [s].
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster of a run, as far as a workload may touch it.

    Parameters
    ----------
    client : distributed.Client
    n_workers : int
        Workers that there are when nothing scales them.
    timeout_s : float
        Duration within which the cluster must have another size [s].
    """

    client: Client
    n_workers: int
    timeout_s: float = 60.0

    def scale(self, n: int) -> None:
        """Have `n` workers, and return once they are there."""
        cluster: Any = self.client.cluster
        if cluster is None:
            raise UsageError(
                "the client must have a cluster that it can scale, got an address: --place local"
            )
        cluster.scale(n)
        deadline = time.monotonic() + self.timeout_s
        while len(self.client.nthreads()) != n:
            if time.monotonic() > deadline:
                raise ClusterError(f"the cluster has {len(self.client.nthreads())} workers, not {n}")
            time.sleep(_POLL_S)


@dataclass(frozen=True, slots=True)
class Request:
    """What an instance is made for.

    Parameters
    ----------
    arguments : mapping
        Sizes; every one of the workload's `defaults` has a value.
    seed : int
        Of random numbers.
    salt : str
        Differs between any two instances: names and tokens made of it never meet an older run's.
    n_threads : int
        Of the whole cluster.
    costs : str
        "known": durations are declared by `ferroflow_cost` where the workload knows them; "learned" and
        "unknown": nothing is declared.
    lowering : str
        One of the workload's `lowerings`.
    """

    arguments: Mapping[str, Any]
    seed: int
    salt: str
    n_threads: int
    costs: str = "learned"
    lowering: str = ""


@dataclass(frozen=True, slots=True)
class Instance:
    """One computation, ready to be handed over.

    Parameters
    ----------
    submit : callable
        Takes a client, hands everything over and returns the futures of all results at once.
    check : callable
        Takes the gathered results, in the order of the futures, and raises `ResultError` if they are wrong.
    n_ops : int
        Ops, by which throughput is counted.
    t1_s, t_inf_s : float or None
        Durations of all ops, and of the longest chain [s], if they are declared.
    bound_s : float or None
        What no schedule can beat [s], where max(T1/P, T∞) is not it, since workers differ in speed.
    collect : callable, optional
        Takes the client and the futures and returns the results; `client.gather` if left out.
    count_executed : callable, optional
        Takes the client and returns how many ops were executed, counted where they were; it must be `n_ops`.
        Dask's tasks are counted if left out.
    prepare, during, restore : callable, optional
        Take the cluster: before the clock starts; once all is submitted; after the clock has stopped.
    """

    submit: Callable[[Client], Sequence[Future[Any]]]
    check: Callable[[Sequence[Any]], None]
    n_ops: int
    t1_s: float | None = None
    t_inf_s: float | None = None
    bound_s: float | None = None
    collect: Callable[[Client, Sequence[Future[Any]]], Sequence[Any]] | None = None
    count_executed: Callable[[Client], int] | None = None
    prepare: Callable[[Cluster], None] | None = None
    during: Callable[[Cluster], None] | None = None
    restore: Callable[[Cluster], None] | None = None

    def bound(self, n_threads: int) -> float | None:
        """Return the duration that no schedule can beat [s]; None if ops declare no durations."""
        if self.bound_s is not None or self.t1_s is None or self.t_inf_s is None:
            return self.bound_s
        return max(self.t1_s / n_threads, self.t_inf_s)


@dataclass(frozen=True, slots=True)
class Workload:
    """A named computation of a size that can be chosen.

    Parameters
    ----------
    name : str
    summary : str
        One line.
    build : callable
        Makes an instance.
    defaults : mapping
        Sizes by name; their types are those of the values that may be given.
    small : mapping
        Sizes that tests run, where they differ from `defaults`.
    lowerings : tuple of str
        Ways in which the same computation may be written for stock Dask, whose speed depends on it; the
        first is the plain one. Each is a program of its own.
    suite : str
        Groups workloads in reports: dag, task-bench, rsds, stealing, array, frame.
    needs : tuple of str
        Packages beyond our own dependencies.
    """

    name: str
    summary: str
    build: Callable[[Request], Instance]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    lowerings: tuple[str, ...] = ("",)
    suite: str = "dag"
    needs: tuple[str, ...] = ()

    def arguments(self, given: Mapping[str, Any], *, is_small: bool = False) -> dict[str, Any]:
        """Return a value for every size: the one given, else the small one if asked for, else the default.

        Raises
        ------
        UsageError
            A name that the workload does not have, a value that cannot be read as its type or is out of its
            range, or sizes for which this machine has too little memory.
        """
        unknown = sorted(set(given) - set(self.defaults))
        if unknown:
            known = ", ".join(self.defaults) or "none"
            raise UsageError(f"{self.name!r} has no size {unknown[0]!r}; its sizes are: {known}")
        chosen = {**self.defaults, **(self.small if is_small else {})}
        for name, value in given.items():
            kind = type(self.defaults[name])
            try:
                chosen[name] = kind(value)
            except (TypeError, ValueError) as error:
                raise UsageError(
                    f"size {name!r} of {self.name!r} is {value!r}; it must be {kind.__name__}, "
                    f"like {self.defaults[name]!r}"
                ) from error
        if self.suite != "dag":  # graphs check their own
            _check_ranges(self.name, chosen)
        if given:
            names = ", ".join(given)
            needed = nbytes_of(self.name, self.suite, chosen)
            check_memory(f"workload {self.name!r}", needed, f"give a smaller {names}")
        return chosen


def _check_ranges(workload: str, sizes: Mapping[str, Any]) -> None:
    for name, value in sizes.items():
        if isinstance(value, str):
            continue
        low, high = _RANGES.get(name, (1 if isinstance(value, int) else 0, math.inf))
        if not (math.isfinite(value) and low <= value <= high):
            allowed = f"{low:g} or more" if math.isinf(high) else f"between {low:g} and {high:g}"
            raise UsageError(f"size {name!r} of {workload!r} is {value!r}; it must be {allowed}")
