"""Run a graph under a policy, once, and measure it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distributed import Client, futures_of

from ferroflow_dask.bench.machine import versions
from ferroflow_dask.bench.observe import FetchCounter, RunCounter, RunCounts
from ferroflow_dask.bench.record import RunRecord
from ferroflow_dask.clients import ask_workers
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.cost import AnalyticCost, CostModel
from ferroflow_dask.devices import DeviceUsage
from ferroflow_dask.devices.workers import device_usage
from ferroflow_dask.graph import FERROFLOW_DOMAIN, Graph, Op, bounds
from ferroflow_dask.graph.defaults import with_inputs
from ferroflow_dask.kernels import SESSIONS, evaluate, in_session, provider_counts
from ferroflow_dask.lowering import ExecutionReport, bind_graph, executed, token_of
from ferroflow_dask.lowering.collection import BoundGraph

if TYPE_CHECKING:
    from distributed import Worker
    from distributed.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Run:
    """The outputs of a graph by name, the record of their computation, and the time each op took [s].

    Those that ran on devices are apart. Of a graph that ran whole each op has the same part of the time.
    """

    outputs: Mapping[str, Any]
    record: RunRecord
    seconds: Mapping[int, float]
    device_seconds: Mapping[int, float] = field(default_factory=dict)


def _counts(dask_scheduler: Scheduler, name: str) -> RunCounts:
    counter = dask_scheduler.plugins[name]
    assert isinstance(counter, RunCounter)
    return counter.seen()


@contextmanager
def counting(client: Client) -> Iterator[Callable[[], RunCounts]]:
    """Count steals and the time in tasks on a cluster while the context lasts."""
    counter = RunCounter(f"ferroflow-run-counter-{uuid.uuid4()}")
    client.register_plugin(counter)
    try:
        yield lambda: client.run_on_scheduler(_counts, name=counter.name)
    finally:
        client.unregister_scheduler_plugin(counter.name)


async def _start_counting(name: str, dask_worker: Worker) -> None:
    await dask_worker.plugin_add(FetchCounter(), name=name)


async def _stop_counting(name: str, dask_worker: Worker) -> None:
    if name in dask_worker.plugins:
        await dask_worker.plugin_remove(name)


def _fetched(name: str, dask_worker: Worker) -> int:
    counter: Any = dask_worker.plugins.get(name)
    return 0 if counter is None else int(counter.fetched)


@contextmanager
def counting_fetches(client: Client) -> Iterator[Callable[[], int]]:
    """Count what the workers of a cluster fetch from each other while the context lasts [B].

    Workers may leave meanwhile; those that join are not counted.
    """
    name = f"ferroflow-fetch-counter-{uuid.uuid4()}"
    ask_workers(client, _start_counting, name)
    try:
        yield lambda: sum(ask_workers(client, _fetched, name).values())
    finally:
        ask_workers(client, _stop_counting, name)


def run_on_cluster(
    graph: Graph,
    inputs: Mapping[str, Any],
    client: Client,
    *,
    policy: str,
    processes: bool | None,
    seed: int = 0,
    profile: ClusterProfile | None = None,
    costs: CostModel | None = None,
    granularity: str | None = None,
    gpu_costs: CostModel | None = None,
    gpu_matmul_threshold: int | None = None,
    on_submit: Callable[[BoundGraph], object] | None = None,
) -> Run:
    """Compute a graph on a cluster and measure it.

    Parameters
    ----------
    graph : Graph
        With its constants scattered (`scatter`), if they are not to be part of what is measured.
    inputs : mapping of str to array
    client : distributed.Client
        Of a cluster on which `policy` is installed.
    policy : str
        What the record says of who decided.
    processes : bool or None
        What the record says of the workers.
    seed : int, optional
        What the record says of the random inputs and decisions.
    profile : ClusterProfile, optional
        Cut the graph into bundles for this cluster; one task for each op if left out.
    costs : CostModel, optional
        Of the ops; shapes and nominal rates if left out.
    granularity, gpu_costs, gpu_matmul_threshold
        As in `bind_graph`.
    on_submit : callable, optional
        Called with the bound graph once it was handed to the scheduler, to watch its progress.
    """
    graph = with_inputs(graph, inputs)  # as `bind_graph` does: workers know their session by it
    threads = list(client.nthreads().values())
    before = device_usage(client)
    with counting(client) as counts, counting_fetches(client) as fetched:
        start = time.perf_counter()
        bound = bind_graph(
            graph,
            inputs,
            costs=costs,
            profile=profile,
            granularity=granularity,
            gpu_costs=gpu_costs,
            gpu_matmul_threshold=gpu_matmul_threshold,
        )
        persisted = client.persist(bound)
        if on_submit is not None:
            on_submit(bound)
        futures = {future.key: future for future in futures_of(persisted)}
        outputs = bound.by_name(client.gather([futures[key] for key in bound.__dask_keys__()]))
        makespan_s = time.perf_counter() - start
        counted, bytes_moved = counts(), fetched()
    report = executed(client, bound.run)
    has_session = ask_workers(client, in_session, token_of(graph)) if bound.granularity == "whole" else {}
    record = _record(
        graph,
        report,
        makespan_s,
        threads=threads,
        policy=policy,
        processes=processes,
        dask_tasks=bound.n_tasks,
        counted=counted,
        seed=seed,
        bytes_moved=bytes_moved,
        bound=bound,
        usage=_usage_since(client, before),
        in_session=any(has_session.values()),
    )
    return Run(outputs, record, report.seconds, report.device_seconds)


def _usage_since(client: Client, before: DeviceUsage | None) -> DeviceUsage | None:
    now = device_usage(client)
    return now if now is None or before is None else now.since(before)


def run_sequentially(graph: Graph, inputs: Mapping[str, Any], *, seed: int = 0) -> Run:
    """Compute a graph in this process, one op after another, and measure it."""
    spent: dict[int, float] = {}

    @contextmanager
    def timed(op: Op) -> Iterator[None]:
        start = time.perf_counter()
        yield
        spent[op.id] = time.perf_counter() - start

    start = time.perf_counter()
    outputs = evaluate(graph, inputs, on_op=timed)
    makespan_s = time.perf_counter() - start
    record = _record(
        graph,
        ExecutionReport(len(spent), spent),
        makespan_s,
        threads=[1],
        policy="sequential",
        processes=False,
        dask_tasks=0,
        counted=RunCounts(),
        seed=seed,
    )
    return Run(outputs, record, spent)


def _record(
    graph: Graph,
    report: ExecutionReport,
    makespan_s: float,
    *,
    threads: list[int],
    policy: str,
    processes: bool | None,
    dask_tasks: int,
    counted: RunCounts,
    seed: int,
    bytes_moved: int = 0,
    bound: BoundGraph | None = None,
    usage: DeviceUsage | None = None,
    in_session: bool = False,
) -> RunRecord:
    prediction = None if bound is None else bound.prediction
    compute_ops = len(graph.live_ops)
    # A graph that runs whole is timed whole.
    has_op_times = bound is None or bound.granularity != "whole" or compute_ops == 1
    costs = {op.id: _duration(op, graph, report, has_op_times) for op in graph.live_ops}
    known = {op_id: seconds for op_id, seconds in costs.items() if seconds is not None}
    bound_s = bounds(graph, known).makespan(sum(threads)) if len(known) == len(costs) else None
    asked, steals = (counted.steals.get(name, 0) for name in ("asked", "confirmed"))
    return RunRecord(
        dag=graph.name,
        policy=policy,
        workers=len(threads),
        threads_per_worker=max(threads),
        processes=processes,
        compute_ops=compute_ops,
        executed_ops=report.executed_ops,
        dask_tasks=dask_tasks,
        makespan_s=makespan_s,
        ops_per_s=compute_ops / makespan_s,
        bound_ops_per_s=None if bound_s is None else compute_ops / bound_s if bound_s else 0.0,
        efficiency=None if bound_s is None else bound_s / makespan_s,
        predicted_s=None if prediction is None else prediction.makespan_s,
        granularity=None if bound is None else bound.granularity,
        providers={SESSIONS: compute_ops} if in_session else dict(provider_counts(graph)[0]),
        in_session=in_session,
        device=None if usage is None else usage.as_dict(),
        bytes_moved=bytes_moved,
        predicted_bytes=None if prediction is None else prediction.nbytes_moved,
        idle_fraction=max(0.0, 1 - report.busy_s / (makespan_s * sum(threads))),
        idle_s=counted.idle_s(makespan_s),
        steals=steals,
        steals_asked=asked,
        steal_hit_rate=steals / asked if asked else None,
        steals_per_s=steals / makespan_s,
        steal_threshold=counted.steal_threshold,
        steal_threshold_changes=counted.steal_threshold_changes,
        seed=seed,
        versions=versions(),
    )


def _duration(op: Op, graph: Graph, report: ExecutionReport, has_op_times: bool) -> float | None:
    # A declared duration is what the op takes; a measured one contains the noise of this run.
    if op.domain == FERROFLOW_DOMAIN and op.op_type == "Slow":
        return AnalyticCost().seconds(op, graph) or 0.0
    if not has_op_times:
        return None
    return report.seconds.get(op.id, 0.0) + report.device_seconds.get(op.id, 0.0)
