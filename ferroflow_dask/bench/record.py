"""One row of a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What one execution of a graph did and how long it took: each field with its meaning."""

    dag: Annotated[str, "Name of the graph."]
    policy: str
    workers: int
    threads_per_worker: int
    processes: Annotated[
        bool | None, "Whether each worker is a process of its own; None on a cluster that was there before."
    ]
    compute_ops: Annotated[int, "Ops that the outputs depend on."]
    executed_ops: Annotated[
        int, "Executions of ops, counted on the workers; more than `compute_ops` if some were retried."
    ]
    dask_tasks: Annotated[int, "Tasks given to Dask: one per op or bundle of ops, and one per input."]
    makespan_s: Annotated[
        float,
        "From the un-lowered graph, cluster up and constants scattered, until all outputs are gathered [s].",
    ]
    ops_per_s: Annotated[float, "compute_ops / makespan_s."]
    bound_ops_per_s: Annotated[
        float | None,
        "compute_ops / max(T1/P, T∞), with declared durations where ops have them and otherwise those "
        "measured in this run; None if the graph ran whole, where no op without a declared one has a "
        "time.",
    ]
    efficiency: Annotated[float | None, "max(T1/P, T∞) / makespan_s, likewise."]
    predicted_s: Annotated[
        float | None,
        "The makespan that was expected when the graph was cut into bundles [s]; None if it was not.",
    ]
    granularity: Annotated[str | None, "`whole`, `bundles` or `ops`; None without a cluster."]
    providers: Annotated[Mapping[str, int], "Ops by the kernel provider that was to compute them."]
    in_session: Annotated[bool, "Whether one provider computed the whole graph in one session."]
    device: Annotated[
        Mapping[str, float] | None,
        "What GPUs did, as `DeviceUsage` tells it: ops, batches and the ops in them, bytes that crossed "
        "to GPUs and back, memory in use; None if there were none.",
    ]
    bytes_moved: Annotated[int, "Fetched by workers from each other [B]."]
    predicted_bytes: Annotated[int | None, "What was expected of that [B]."]
    idle_fraction: Annotated[float, "Part of makespan_s × P in which threads were in no kernel."]
    idle_s: Annotated[
        Mapping[str, float],
        "Time that each worker's threads spent in no task, by the name of the worker [s].",
    ]
    steals: Annotated[int, "Tasks that moved from one worker to another."]
    steals_asked: Annotated[int, "Requests for that."]
    steal_hit_rate: Annotated[float | None, "steals / steals_asked; None if nothing was asked."]
    steals_per_s: float
    steal_threshold: Annotated[
        int | None,
        "Largest threshold of all thieves at the end [waiting tasks]; None for policies without any.",
    ]
    steal_threshold_changes: Annotated[
        int | None, "How often the thresholds changed during the run, likewise."
    ]
    seed: int
    versions: Annotated[Mapping[str, str], "Of Python and of the packages that matter."]
    stock_s: Annotated[
        float | None,
        "Makespan of a simulated list schedule of the ops as single tasks, with the durations of this run "
        "[s]. Stock Dask usually takes longer. None if it was not simulated.",
    ] = None
