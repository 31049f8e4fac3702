"""Cluster profile: the threads, overheads and rates by which work is cut into tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ferroflow_dask.counts import as_count
from ferroflow_dask.exceptions import UsageError

#: Fields that are positive numbers.
_RATES = (
    *("task_s", "round_trip_s", "submit_s", "bandwidth", "flop_rate", "memory_bandwidth"),
    *("gpu_flop_rate", "gpu_memory_bandwidth"),
)


@dataclass(frozen=True, slots=True)
class ClusterProfile:
    """A cluster, as `ferroflow calibrate` measures it.

    Parameters
    ----------
    threads : tuple of int
        Threads of each worker.
    task_s : float
        Time that one more Dask task adds to a run of many tasks while all threads are free [s]: the overhead
        that workers do not share.
    pause_s : float
        Time of a thread from the end of a task to the start of the next one that its worker has [s].
    round_trip_s : float
        Time from the end of a task to the start of a dependent on the same worker [s].
    submit_s : float
        Time from `compute` of one task that does nothing to its result [s].
    bandwidth : float
        Between two workers of one host or of two hosts, whichever is slower [B/s].
    memory_nbytes : int
        Memory of the worker that has the least [B]; 0 if there is no limit.
    cores : int
        Cores that all threads share; 0 if each has one.
    flop_rate : float
        Of one thread in a single-precision matrix product; the median of several workers [FLOP/s].
    memory_bandwidth : float
        Of one thread that copies an array; the median of several workers [B/s].
    n_gpus : int
        Number of workers with a GPU. They come first in `threads`.
    gpu_flop_rate, gpu_memory_bandwidth : float
        The same rates of one GPU.
    """

    threads: tuple[int, ...]
    task_s: float = 5e-4
    pause_s: float = 0.0
    round_trip_s: float = 2e-3
    submit_s: float = 1e-2
    bandwidth: float = 1e8
    memory_nbytes: int = 0
    cores: int = 0
    flop_rate: float = 3e10
    memory_bandwidth: float = 1e10
    n_gpus: int = 0
    gpu_flop_rate: float = 3e13
    gpu_memory_bandwidth: float = 1e12
    #: Time that one more task adds to a run of many tasks while all threads are busy [s].
    added_s: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.threads or any(not as_count(n) for n in self.threads):
            raise UsageError(f"a cluster has workers of at least one thread each; threads are {self.threads}")
        for name in ("memory_nbytes", "cores", "n_gpus"):
            if as_count(value := getattr(self, name)) is None:
                raise UsageError(f"{name} of a cluster is {value!r}; it must be a whole number, at least 0")
        for name in (*_RATES, "pause_s"):
            value = getattr(self, name)
            if name == "pause_s" and value == 0:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise UsageError(f"{name} of a cluster is {value!r}; it must be a positive number")
        object.__setattr__(self, "added_s", max(self.task_s, self.pause_s / self.n_threads))

    @property
    def crowding(self) -> float:
        """Threads of all workers for each core, at least 1."""
        return max(1.0, self.n_threads / self.cores) if self.cores else 1.0

    @property
    def n_threads(self) -> int:
        """Threads of all workers."""
        return sum(self.threads)

    @property
    def all_memory_nbytes(self) -> int:
        """Memory of all workers [B]; 0 if it is unknown."""
        return self.memory_nbytes * len(self.threads)

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers by name, as they are saved."""
        return {name: value for name, value in asdict(self).items() if name != "added_s"}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ClusterProfile:
        """Make a profile of what `as_dict` gave."""
        return cls(**{**values, "threads": tuple(values["threads"])})
