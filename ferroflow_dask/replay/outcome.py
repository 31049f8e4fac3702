"""Outcomes of simulations: a job on a topology under a policy."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from dask._task_spec import Alias
from dask.typing import Key

from ferroflow_dask.bundling.plan import Plan
from ferroflow_dask.bundling.snapshot import Snapshot
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.exceptions import UnknownNameError, UsageError
from ferroflow_dask.policy import policy_names
from ferroflow_dask.replay.job import Job, JobGraph, in_order
from ferroflow_dask.simulation import Machine, TaskGraph, run_listed
from ferroflow_dask.topology import Topology
from ferroflow_dask.virtual import VirtualCluster, VirtualTask
from ferroflow_dask.virtual.sent import averages_by_prefix, planned, sent_graph

ENGINES = ("exact", "light")
#: Policies that are not ferroflow's own.
DASK_POLICIES = ("dask", "no-stealing")
#: The light engine simulates a list schedule, with bundles or without.
_LIGHT_POLICIES = ("dask", "ferroflow")
#: A task without a duration would trip an assertion of Dask's stealing [s].
_LEAST_S = 1e-6


class Execution(NamedTuple):
    """A task that ran on a worker, from `start_s` to `stop_s` [s]."""

    key: Key
    worker: int
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulation found.

    Parameters
    ----------
    policy, engine : str
    workers, threads : int
    makespan_s : float
        The median of all repetitions, as are the other numbers [s].
    low_s, high_s : float
        The shortest and the longest makespan [s].
    bound_s : float
        max(T1/P, T∞): no schedule is shorter [s].
    scheduler_busy : float
        Part of the makespan in which the scheduler works, from 0 to 1.
    nbytes_moved : int
        [B]
    steals : int
    executions : int
        Tasks that ran; a bundle counts as one.
    timeline : list of Execution
        Of the first repetition.
    """

    policy: str
    engine: str
    workers: int
    threads: int
    makespan_s: float
    low_s: float
    high_s: float
    bound_s: float
    scheduler_busy: float
    nbytes_moved: int
    steals: int
    executions: int
    timeline: list[Execution] = field(default_factory=list, repr=False, compare=False)

    @property
    def efficiency(self) -> float:
        """Part of the makespan that no schedule could do without."""
        return self.bound_s / self.makespan_s if self.makespan_s else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers by name."""
        values = asdict(replace(self, timeline=[]))
        del values["timeline"]
        return {**values, "efficiency": self.efficiency}


class _Run(NamedTuple):
    makespan_s: float
    busy_s: float
    nbytes: int
    steals: int
    timeline: list[Execution]


def simulate_job(
    job: Job,
    topology: Topology,
    policy: str = "ferroflow",
    *,
    engine: str = "exact",
    seed: int = 0,
    repeat: int = 1,
    noise: float | None = None,
) -> Outcome:
    """Run a job in virtual time.

    Parameters
    ----------
    job : Job
    topology : Topology
    policy : str, optional
        `dask`, `no-stealing`, or the name of one of ferroflow's policies.
    engine : str, optional
        `exact` runs Dask's state machines and the policy; `light` a list schedule of the tasks (`dask`) or of
        the bundles (`ferroflow`).
    seed : int, optional
        The same seed gives the same outcome.
    repeat : int, optional
        Repetitions. All but the first vary the durations of tasks and the costs of Dask.
    noise : float, optional
        Standard deviation of that variation, relative; that of the topology if left out.

    Raises
    ------
    UnknownNameError
        There is no such policy or engine.
    """
    noise = topology.runtime.noise if noise is None else noise
    _check(policy, engine, repeat, noise)
    run = _exact if engine == "exact" else _light
    runs = [
        run(
            *_varied(job, topology, np.random.default_rng([seed, at]), noise if at else 0.0),
            policy,
            seed + at,
        )
        for at in range(repeat)
    ]
    spans = [one.makespan_s for one in runs]
    workers = topology.workers
    n_threads = sum(worker.threads for worker in workers)
    capacity = sum(worker.threads * worker.speed for worker in workers)
    fastest = max(worker.speed for worker in workers)
    bound_s = max(job.bound_s(10**9) / fastest, job.work_s / capacity)
    return Outcome(
        policy,
        engine,
        len(workers),
        n_threads,
        statistics.median(spans),
        min(spans),
        max(spans),
        bound_s,
        statistics.median(one.busy_s / one.makespan_s if one.makespan_s else 0.0 for one in runs),
        int(statistics.median(one.nbytes for one in runs)),
        int(statistics.median(one.steals for one in runs)),
        len(runs[0].timeline),
        runs[0].timeline,
    )


def _check(policy: str, engine: str, repeat: int, noise: float) -> None:
    if engine not in ENGINES:
        raise UnknownNameError.of("engine", engine, ENGINES)
    known = (*DASK_POLICIES, *policy_names()) if engine == "exact" else _LIGHT_POLICIES
    if policy not in known:
        raise UnknownNameError.of(f"policy of the {engine} engine", policy, known)
    if repeat < 1:
        raise UsageError(f"repeat must be a whole number, at least 1, got {repeat!r}")
    if not 0 <= noise < 1:
        raise UsageError(f"noise must be a number from 0 to 1, got {noise!r}")


def _varied(job: Job, topology: Topology, rng: np.random.Generator, noise: float) -> tuple[Job, Topology]:
    """Return a job and a topology of slightly other durations and costs."""
    if not noise:
        return job, topology
    sigma = float(np.sqrt(np.log1p(noise**2)))

    def factors(n: int) -> list[float]:
        found: list[float] = rng.lognormal(-(sigma**2) / 2, sigma, n).tolist()
        return found

    graphs = []
    for graph in job.graphs:
        pairs = zip(graph.tasks.items(), factors(len(graph.tasks)), strict=True)
        tasks = {key: replace(task, duration_s=task.duration_s * factor) for (key, task), factor in pairs}
        graphs.append(replace(graph, tasks=tasks))
    runtime = topology.runtime
    (factor,) = factors(1)
    slower = replace(
        runtime,
        submit_s=runtime.submit_s * factor,
        client_task_s=runtime.client_task_s * factor,
        graph_task_s=runtime.graph_task_s * factor,
        worker_task_s=runtime.worker_task_s * factor,
        fetch_s=runtime.fetch_s * factor,
        message_s={op: seconds * factor for op, seconds in runtime.message_s.items()},
    )
    return replace(job, graphs=tuple(graphs)), replace(topology, runtime=slower)


def _exact(job: Job, topology: Topology, policy: str, seed: int) -> _Run:
    cluster = VirtualCluster.on(topology, policy=policy, seed=seed)
    graphs = [
        replace(graph, tasks={key: _at_least(task) for key, task in graph.tasks.items()})
        for graph in job.graphs
    ]
    _Client(cluster, graphs).start()
    cluster.run()
    cluster.check()
    record = cluster.record
    timeline = [Execution(*row) for row in record.timeline()]
    nbytes = sum(transfer.nbytes for transfer in record.transfers)
    return _Run(record.makespan_s, cluster.fabric.scheduler.worked_s, nbytes, cluster.n_steals, timeline)


def _at_least(task: VirtualTask) -> VirtualTask:
    return task if task.duration_s >= _LEAST_S else replace(task, duration_s=_LEAST_S)


class _Client:
    """Sends the graphs of a job when they are due."""

    def __init__(self, cluster: VirtualCluster, graphs: list[JobGraph]) -> None:
        self._cluster = cluster
        self._graphs = graphs
        self._n_sent = 0

    def start(self) -> None:
        self._cluster.record.on_idle = self._idle
        self._next_of(is_idle=True)

    def _next_of(self, is_idle: bool) -> None:
        """Send the next graph when it is due; what waits is sent once the earlier ones have ended."""
        if self._n_sent == len(self._graphs):
            return
        graph = self._graphs[self._n_sent]
        if graph.waits and not is_idle:
            return
        self._n_sent += 1
        self._cluster.time.after(graph.delay_s or 0.0, self._send, graph)

    def _send(self, graph: JobGraph) -> None:
        self._cluster.submit(
            graph.tasks,
            keep=graph.wanted,
            is_sent=graph.delay_s is not None,
            knows_costs=graph.knows_costs,
        )
        self._next_of(is_idle=False)

    def _idle(self) -> None:
        self._next_of(is_idle=True)


def _light(job: Job, topology: Topology, policy: str, seed: int) -> _Run:
    del seed  # nothing is left to chance
    makespan_s, nbytes, busy_s, timeline = 0.0, 0, 0.0, list[Execution]()
    machine = Machine.of_topology(topology)
    for one in _phases(job):
        tasks = one.tasks
        if policy != "dask":
            sent = sent_graph(tasks, one.wanted, knows_costs=one.knows_costs)
            plan = planned(sent, Snapshot(topology.profile(), averages_by_prefix(tasks)), "0")
            tasks = _whole_tasks(plan, tasks)
        keys, graph = _task_graph(tasks)
        found = run_listed(graph, machine)
        starts = zip(keys, found.workers, found.starts_s, found.stops_s, strict=True)
        timeline += [Execution(key, w, makespan_s + a, makespan_s + b) for key, w, a, b in starts]
        makespan_s += found.makespan_s
        nbytes += found.nbytes_moved
        busy_s += found.scheduler_s + len(keys) * topology.runtime.graph_task_s
    return _Run(makespan_s, busy_s, nbytes, 0, timeline)


def _whole_tasks(found: Plan, graph: Mapping[Key, VirtualTask]) -> dict[Key, VirtualTask]:
    """Return a planned graph for an engine that does not divide bundles: each of them is one virtual task.

    A task that reads a delivered value waits for the bundle.
    """
    values = {
        key: next(iter(bundle.places.values()))[0]
        for key, bundle in found.bundles.items()
        if len(bundle.tasks) == 1 and isinstance(bundle.tasks[0], Alias)  # only a key for a value of a bundle
    }
    new: dict[Key, VirtualTask] = {}
    for key, spec in found.tasks.items():
        if key in values:
            continue
        bundle = found.bundles.get(key)
        inside = [graph[key]] if bundle is None else [graph[task.key] for task in bundle.tasks]
        nbytes = sum(graph[one].nbytes for one in (bundle.exports if bundle else (key,)) if one is not None)
        needed = dict.fromkeys(values.get(one, one) for one in sorted(spec.dependencies, key=repr))
        duration_s = sum(task.duration_s for task in inside)
        computes_s = sum(task.duration_s * task.core_share for task in inside)
        core_share = min(1.0, computes_s / duration_s) if duration_s else 1.0
        new[key] = VirtualTask(duration_s, tuple(needed), nbytes, core_share=core_share)
    return new


def _task_graph(tasks: Mapping[Key, VirtualTask]) -> tuple[list[Key], TaskGraph]:
    """Return tasks by number, each after its dependencies, and their keys in this order."""
    keys = in_order(tasks)
    number = {key: at for at, key in enumerate(keys)}
    return keys, TaskGraph(
        [tasks[key].duration_s for key in keys],
        [{number[one]: tasks[one].nbytes for one in tasks[key].dependencies} for key in keys],
    )


def stock_s(job: Job, cluster: ClusterProfile) -> float:
    """Return the makespan of a list schedule of single tasks [s].

    Stock Dask usually takes longer: it does not know the durations at first. If the costs were
    measured on a busy cluster, the result is too long.

    Parameters
    ----------
    job : Job
        With measured durations.
    cluster : ClusterProfile
        Costs of tasks and messages. Those of a cluster with the plugin are lower than stock Dask's.
    """
    machine = Machine.of_profile(cluster)
    return sum(run_listed(_task_graph(one.tasks)[1], machine).makespan_s for one in _phases(job))


def _phases(job: Job) -> list[JobGraph]:
    """Return the graphs that run at the same time, as one; results of earlier ones cost nothing."""
    phases: list[list[JobGraph]] = []
    for graph in job.graphs:
        if graph.waits or not phases:
            phases.append([])
        phases[-1].append(graph)
    merged = []
    for graphs in phases:
        tasks = {key: task for graph in graphs for key, task in graph.tasks.items()}
        own = {
            key: replace(task, dependencies=tuple(one for one in task.dependencies if one in tasks))
            for key, task in tasks.items()
        }
        wanted = tuple(key for graph in graphs for key in graph.wanted)
        merged.append(JobGraph(own, wanted, knows_costs=all(graph.knows_costs for graph in graphs)))
    return merged
