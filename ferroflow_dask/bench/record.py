"""One row of a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What one execution of a graph did and how long it took."""

    dag: str  # name of the graph
    policy: str
    workers: int
    threads_per_worker: int
    #: Whether each worker is a process of its own; None on a cluster that was there before.
    processes: bool | None
    compute_ops: int  # ops that the outputs depend on
    #: Executions of ops, counted on the workers; more than `compute_ops` if some were retried.
    executed_ops: int
    dask_tasks: int  # tasks given to Dask: one per op or bundle of ops, and one per input
    #: From the un-lowered graph, cluster up and constants scattered, until all outputs are gathered [s].
    makespan_s: float
    ops_per_s: float  # compute_ops / makespan_s
    #: compute_ops / max(T1/P, T∞), with declared durations where ops have them and otherwise those measured
    #: in this run; None if the graph ran whole, where no op without a declared one has a time.
    bound_ops_per_s: float | None
    efficiency: float | None  # max(T1/P, T∞) / makespan_s, likewise
    #: The makespan that was expected when the graph was cut into bundles [s]; None if it was not.
    predicted_s: float | None
    granularity: str | None  # `whole`, `bundles` or `ops`; None without a cluster
    providers: Mapping[str, int]  # ops by the kernel provider that was to compute them
    in_session: bool  # whether one provider computed the whole graph in one session
    #: The fields of `DeviceUsage`: ops, batches and the ops in them, bytes that crossed to GPUs and back,
    #: memory in use; None if there were no GPUs.
    device: Mapping[str, float] | None
    bytes_moved: int  # fetched by workers from each other [B]
    predicted_bytes: int | None  # what was expected of that [B]
    idle_fraction: float  # part of makespan_s × P in which threads were in no kernel
    #: Time that each worker's threads spent in no task, by the name of the worker [s].
    idle_s: Mapping[str, float]
    steals: int  # tasks that moved from one worker to another
    steals_asked: int  # requests for that
    steal_hit_rate: float | None  # steals / steals_asked; None if nothing was asked
    steals_per_s: float
    #: Largest threshold of all thieves at the end [waiting tasks]; None for policies without any.
    steal_threshold: int | None
    steal_threshold_changes: int | None  # how often the thresholds changed during the run, likewise
    seed: int
    versions: Mapping[str, str]  # of Python and of the packages that matter
    #: Makespan of a simulated list schedule of the ops as single tasks, with the durations of this run [s].
    #: Stock Dask usually takes longer. None if it was not simulated.
    stock_s: float | None = None
