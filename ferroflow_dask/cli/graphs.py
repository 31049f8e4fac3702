"""A graph, computed as often as asked: what `ferroflow run` does without `--batch`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import click
from dask.utils import format_bytes
from distributed import Client

from ferroflow_dask.annotations import GPU
from ferroflow_dask.bench import Run, RunRecord, run_on_cluster, warm_up
from ferroflow_dask.bench.markdown import count
from ferroflow_dask.cli.progress import late_bar, progress_bar
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.cost import AnalyticCost, MeasuredCost
from ferroflow_dask.deploy import count_gpus, load_durations, profile_of, profiles_file, save_durations
from ferroflow_dask.deploy.calibration import load_profile
from ferroflow_dask.graph import Graph
from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.lowering import AUTO, bind_graph, scatter
from ferroflow_dask.replay import job_of_graph, stock_s

_IN_WORDS = {"whole": "whole", "bundles": "in bundles", "ops": "op by op"}


@dataclass(frozen=True, slots=True)
class Told:
    """What the records of runs say that cannot be seen: see `run_on_cluster`."""

    policy: str
    processes: bool | None
    seed: int


def run_graph(
    graph: Graph,
    inputs: Mapping[str, Any],
    client: Client,
    told: Told,
    *,
    granularity: str,
    repeat: int,
    shows_progress: bool,
    on_run: Callable[[], None] = lambda: None,
    matmul_threshold: int | None = None,
) -> list[Run]:
    """Compute a graph on a cluster some times, and learn from each run for the next."""
    n_gpus = count_gpus(client)
    # One task for each op, or one for all, needs no measurements.
    cluster = None if granularity in ("ops", "whole") and not n_gpus else _profile(client)
    costs = _costs(client, cluster)
    gpu_costs = _gpu_costs(client, cluster) if n_gpus else None
    is_all_gpus = n_gpus == len(client.nthreads())
    if granularity == AUTO and n_gpus and not is_all_gpus:
        granularity = "ops"  # of a bundle nobody could say where each of its ops ends first
    told_costs = gpu_costs if is_all_gpus and gpu_costs is not None else costs
    warm_up(client, graph)
    scattered = scatter_shown(graph, client, is_shown=shows_progress)
    if granularity == AUTO:
        bound = bind_graph(scattered, inputs, costs=told_costs, profile=cluster, granularity=granularity)
        granularity = bound.granularity
    if granularity == "whole":  # opens it
        client.compute(bind_graph(scattered, inputs, costs=told_costs, granularity=granularity)).result()
    runs = []
    for _ in range(repeat):
        on_run()
        with progress_bar(client, is_shown=shows_progress) as watch:
            run = run_on_cluster(
                scattered,
                inputs,
                client,
                policy=told.policy,
                processes=told.processes,
                seed=told.seed,
                profile=None if granularity in ("ops", "whole") else cluster,
                costs=told_costs,
                gpu_costs=None if is_all_gpus else gpu_costs,
                gpu_matmul_threshold=matmul_threshold,
                granularity=granularity,
                on_submit=watch,
            )
        if told.policy == "ferroflow" and granularity in ("bundles", "ops") and not n_gpus:
            run = _with_stock(run, graph, client, cluster)
        runs.append(run)
        if granularity != "whole":  # of which no op has a time of its own
            costs.observe(graph, run.seconds)
            if gpu_costs is not None:
                gpu_costs.observe(graph, run.device_seconds)
    save_durations(client, costs.as_dict())
    if gpu_costs is not None:
        save_durations(client, gpu_costs.as_dict(), GPU)
    return runs


def _with_stock(run: Run, graph: Graph, client: Client, cluster: ClusterProfile | None) -> Run:
    """Return a run whose record has the makespan that stock Dask would have taken."""
    threads = tuple(client.nthreads().values()) or (1,)
    profile = cluster or load_profile(client) or ClusterProfile(threads)
    found_s = stock_s(job_of_graph(graph, _Measured(run.seconds)), profile)
    return replace(run, record=replace(run.record, stock_s=found_s))


@dataclass(frozen=True, slots=True)
class _Measured:
    """Cost model of one run: the durations of its ops by op id [s]."""

    durations_s: Mapping[int, float]

    def seconds(self, op: Op, graph: Graph) -> float:  # noqa: ARG002 -- as in `CostModel`
        """Return the duration of an op [s]."""
        return self.durations_s.get(op.id, 0.0)


def scatter_shown(graph: Graph, client: Client, *, is_shown: bool) -> Graph:
    """Copy the constants of a graph to the workers, and show how far that is."""
    with late_bar("weights", "B", is_shown=is_shown) as update:
        return scatter(graph, client, update)


def _profile(client: Client) -> ClusterProfile:
    profile, is_kept = profile_of(client)
    if is_kept is not None:
        where = profiles_file()
        told = (
            f"kept in {where}; delete this file to measure again"
            if is_kept
            else f"it could not be kept in {where}"
        )
        click.echo(f"measured the costs of this cluster; {told}", err=True)
    return profile


def _costs(client: Client, cluster: ClusterProfile | None) -> MeasuredCost:
    """Return costs that are learned from run to run, and taken from shapes until then."""
    rates = () if cluster is None else (cluster.flop_rate, cluster.memory_bandwidth)
    return MeasuredCost(AnalyticCost(*rates), load_durations(client))


def _gpu_costs(client: Client, cluster: ClusterProfile | None) -> MeasuredCost:
    """Return what ops cost on the GPUs of a cluster, likewise."""
    rates = () if cluster is None else (cluster.gpu_flop_rate, cluster.gpu_memory_bandwidth)
    return MeasuredCost(AnalyticCost(*rates), load_durations(client, GPU))


def as_object(runs: Sequence[Run]) -> str:
    """Return the median of some runs as a JSON object."""
    makespans = [run.record.makespan_s for run in runs]
    more = {"makespans_s": makespans} if len(runs) > 1 else {}
    return json.dumps({**asdict(_median(runs)), **more})


def in_words(runs: Sequence[Run]) -> list[str]:
    """Return the median of some runs in words."""
    makespans = [run.record.makespan_s for run in runs]
    record = _median(runs)
    spread = f", median of {len(runs)} ({min(makespans):.3f}–{max(makespans):.3f} s)" if len(runs) > 1 else ""
    lines = [f"{record.dag} · {record.policy} · {_cluster(record)}: {_result(record)}{spread}"]
    if record.granularity is not None:
        kernels = ", ".join(f"{name} {n}" for name, n in record.providers.items())
        session = " in one session" if record.in_session else ""
        lines.append(
            f"{_IN_WORDS[record.granularity]}: {_tasks(record)}{_expected(record)}; "
            f"kernels: {kernels or 'none'}{session}"
        )
    if record.granularity in ("bundles", "ops"):  # one task runs on one worker, and is stolen by none
        lines.append(_steals(record))
    if record.stock_s is not None:
        lines.append(f"as single tasks of Dask: {record.stock_s:.3f} s (simulated)")
    if record.device is not None:
        lines.append(_on_devices(record.device))
    return lines


def _on_devices(usage: Mapping[str, float]) -> str:
    beside = f", {usage['host_ops']} beside them" if usage["host_ops"] else ""
    return (
        f"GPUs: {count(int(usage['ops']), 'op')}{beside}; {usage['batches']} batches of "
        f"{usage['mean_batch']:.3g} on average; {format_bytes(int(usage['nbytes_to_device']))} to GPUs, "
        f"{format_bytes(int(usage['nbytes_to_host']))} back; {format_bytes(int(usage['used_nbytes']))} in use"
    )


def _median(runs: Sequence[Run]) -> RunRecord:
    # With an even number of runs the lower of the two in the middle, so that it is one that happened.
    makespans = [run.record.makespan_s for run in runs]
    return runs[makespans.index(statistics.median_low(makespans))].record


def _expected(record: RunRecord) -> str:
    if record.predicted_s is None:
        return ""
    expected, moved = map(format_bytes, (record.predicted_bytes or 0, record.bytes_moved))
    return f"; predicted {record.predicted_s:.3f} s; {moved} moved between workers (predicted {expected})"


def _cluster(record: RunRecord) -> str:
    kind = {True: " processes", False: " in one process", None: ""}[record.processes]
    return f"{record.workers} × {record.threads_per_worker}{kind}"


def _result(record: RunRecord) -> str:
    rate = f"{record.executed_ops} ops in {record.makespan_s:.3f} s = {record.ops_per_s:,.0f} ops/s"
    if record.efficiency is None or record.bound_ops_per_s is None:
        return rate
    return f"{rate}, {record.efficiency:.0%} of the bound {record.bound_ops_per_s:,.0f}"


def _tasks(record: RunRecord) -> str:
    if record.granularity != "whole":
        return count(record.dask_tasks, "Dask task")
    n_inputs = record.dask_tasks - 1
    inputs = f", and {count(n_inputs, 'task')} for its {'input' if n_inputs == 1 else 'inputs'}"
    return f"one Dask task{inputs if n_inputs else ''}"


def _steals(record: RunRecord) -> str:
    """Return how many steals succeeded, and how long workers were idle."""
    told = "no steals asked"
    if record.steal_hit_rate is not None:
        told = f"steals: {record.steals_asked} asked, {record.steals} granted ({record.steal_hit_rate:.0%})"
    if record.steal_threshold is not None:
        changes = count(record.steal_threshold_changes or 0, "change")
        told += f"; steal threshold {record.steal_threshold} at the end, after {changes}"
    idle_s = sorted(record.idle_s.values())
    if not idle_s:
        return told
    spread = f" ({idle_s[0]:.3f}–{idle_s[-1]:.3f} s)" if len(idle_s) > 1 else ""
    return f"{told}; idle {statistics.fmean(idle_s):.3f} s per worker{spread}"
