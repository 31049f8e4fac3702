"""One row of a measurement."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = ("ferroflow-dask", "dask", "distributed", "numpy", "onnx")
#: Either may be what `import onnxruntime` finds.
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")


def versions() -> dict[str, str]:
    """Return the versions that a measurement depends on, of packages that are installed as such."""
    found = {"python": platform.python_version()}
    for names in (*((package,) for package in _PACKAGES), _RUNTIMES):
        for name in names:
            with suppress(PackageNotFoundError):
                found[name] = version(name)
                break
    return found


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What one execution of a graph did and how long it took.

    Parameters
    ----------
    dag : str
        Name of the graph.
    policy : str
    workers, threads_per_worker : int
    processes : bool or None
        Whether each worker is a process of its own; None on a cluster that was there before.
    compute_ops : int
        Ops that the outputs depend on.
    executed_ops : int
        Executions of ops, counted on the workers; more than `compute_ops` if some were retried.
    dask_tasks : int
        Tasks given to Dask: one per op or bundle of ops, and one per input.
    makespan_s : float
        From the un-lowered graph, cluster up and constants scattered, until all outputs are gathered [s].
    ops_per_s : float
        compute_ops / makespan_s.
    bound_ops_per_s : float or None
        compute_ops / max(T1/P, T∞), with declared durations where ops have them and otherwise those
        measured in this run; None if the graph ran whole, where no op without a declared one has a time.
    efficiency : float or None
        max(T1/P, T∞) / makespan_s, likewise.
    predicted_s : float or None
        The makespan that was expected when the graph was cut into bundles [s]; None if it was not.
    granularity : str or None
        `whole`, `bundles` or `ops`; None without a cluster.
    providers : mapping of str to int
        Ops by the kernel provider that was to compute them.
    in_session : bool
        Whether one provider computed the whole graph in one session.
    device : mapping of str to float, or None
        What GPUs did, as `DeviceUsage` tells it: ops, batches and the ops in them, bytes that crossed to GPUs
        and back, memory in use; None if there were none.
    bytes_moved : int
        Fetched by workers from each other [B].
    predicted_bytes : int or None
        What was expected of that [B].
    idle_fraction : float
        Part of makespan_s × P in which threads were in no kernel.
    idle_s : mapping of str to float
        Time that each worker's threads spent in no task, by the name of the worker [s].
    steals : int
        Tasks that moved from one worker to another.
    steals_asked : int
        Requests for that.
    steal_hit_rate : float or None
        steals / steals_asked; None if nothing was asked.
    steals_per_s : float
    steal_threshold : int or None
        Largest threshold of all thieves at the end [waiting tasks]; None for policies without any.
    steal_threshold_changes : int or None
        How often the thresholds changed during the run, likewise.
    seed : int
    versions : mapping
        Of Python and of the packages that matter.
    stock_s : float or None
        Makespan of a simulated list schedule of the ops as single tasks, with the durations of this run [s].
        Stock Dask usually takes longer. None if it was not simulated.
    """

    dag: str
    policy: str
    workers: int
    threads_per_worker: int
    processes: bool | None
    compute_ops: int
    executed_ops: int
    dask_tasks: int
    makespan_s: float
    ops_per_s: float
    bound_ops_per_s: float | None
    efficiency: float | None
    predicted_s: float | None
    granularity: str | None
    providers: Mapping[str, int]
    in_session: bool
    device: Mapping[str, float] | None
    bytes_moved: int
    predicted_bytes: int | None
    idle_fraction: float
    idle_s: Mapping[str, float]
    steals: int
    steals_asked: int
    steal_hit_rate: float | None
    steals_per_s: float
    steal_threshold: int | None
    steal_threshold_changes: int | None
    seed: int
    versions: Mapping[str, str]
    stock_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the record as a dict, in the order of its fields."""
        return asdict(self)
