"""Features switched off alone in virtual time: exact makespans, tasks and messages, and CPU time per task.

The graphs depend on nothing but their seeds. Each runs twice on its cluster, and the second run counts, so
that durations are learned.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from dask.typing import Key
from garbage import collected_as_by_a_scheduler
from overhead_graphs import GRAPHS, Graph

from ferroflow_dask.bench.public.policies import OURS
from ferroflow_dask.bench.simulated_graphs import SLEEPS
from ferroflow_dask.scheduler.features import VIRTUAL
from ferroflow_dask.topology import Host, Link, Runtime, Topology, Worker
from ferroflow_dask.virtual import VirtualCluster, VirtualTask

#: The features that act in virtual time.
ACTIVE = (*(kind.name for kind in VIRTUAL), "bundles")

_WORKERS = 8
#: Of a message, one way, within a host and to late workers [s]; of a link [B/s].
_LATENCY_S, _LATE_S, _BANDWIDTH = 1e-4, 5e-3, 1e9
#: Speed of a quarter of the workers, where they are unequal.
_SLOW = 0.4
#: Tasks of each graph, about.
_N_TASKS = 400
_N_RANDOM = 6
#: Workers and tasks for which the CPU time per task is measured; its runs take turns.
_CPU_SIZES = {8: 1000, 400: 2000, 1000: 4000}
_CPU_RUNS = 5


class Ratio(NamedTuple):
    """What a feature changes in a class: a measure without it divided by the same with it.

    Parameters
    ----------
    feature, group, measure : str
        `group` is the class of programs.
    value : float
    low, high : float or None
        95 % interval, or the range of the CPU times; None for exact measures.
    """

    feature: str
    group: str
    measure: str
    value: float
    low: float | None = None
    high: float | None = None


def _short() -> Iterator[Graph]:
    return (make(_N_TASKS, seed, 0.001) for seed, make in enumerate(GRAPHS.values()))


def _long() -> Iterator[Graph]:
    return (make(_N_TASKS, seed) for seed, make in enumerate(GRAPHS.values()))


def _sleeping() -> Iterator[Graph]:
    for make in SLEEPS.values():
        yield {
            ("op", i): VirtualTask(duration_s, tuple(("op", j) for j in needed), nbytes)
            for i, (duration_s, needed, nbytes) in enumerate(make())
        }


def _random() -> Iterator[Graph]:
    """Yield layered graphs: each task reads up to three of the layer before, durations are lognormal."""
    for seed in range(_N_RANDOM):
        rng = random.Random(seed)
        width, mean_s = rng.choice((4, 16, 48)), rng.choice((0.002, 0.02, 0.1))
        graph: Graph = {}
        before: list[Key] = []
        for layer in range(_N_TASKS // width):
            keys: list[Key] = [(f"layer-{layer}", i) for i in range(width)]
            for key in keys:
                needed = tuple(rng.sample(before, min(len(before), rng.randint(1, 3))))
                duration_s, nbytes = mean_s * rng.lognormvariate(-0.5, 1.0), rng.choice((28, 10**5, 10**7))
                graph[key] = VirtualTask(duration_s, needed, nbytes)
            before = keys
        yield graph


def _narrow() -> Iterator[Graph]:
    """Yield chains and stencils as wide as half of the cluster, and as the whole."""
    for width in (_WORKERS // 2, _WORKERS):
        for mean_s in (0.002, 0.01, 0.05):
            for reads in ((0,), (-1, 0, 1)):
                rng, graph = random.Random(width), Graph()
                for step in range(_N_TASKS // _WORKERS):
                    for i in range(width):
                        near = sorted({(i + offset) % width for offset in reads}) if step else ()
                        needed: tuple[Key, ...] = tuple(("cell", step - 1, j) for j in near)
                        duration_s = mean_s * rng.uniform(0.8, 1.2)
                        graph["cell", step, i] = VirtualTask(duration_s, needed, nbytes=28)
                yield graph


#: Classes of graphs by name.
GROUPS: Mapping[str, Callable[[], Iterator[Graph]]] = {
    "1 ms tasks": _short,
    "20 ms tasks": _long,
    "sleeping ops": _sleeping,
    "random graphs": _random,
    "narrow graphs": _narrow,
}
#: What is off on both sides, by the end of a class's name. Graphs whose tasks retry, need resources or are
#: followed by plugins of others are not bundled.
_OFF: Mapping[str, tuple[str, ...]] = {"": (), ", not bundled": ("bundles",)}
#: One-way time of a message [s] and the speeds of workers, by setting.
_SETTINGS: Mapping[str, tuple[float, Sequence[float]]] = {
    "": (_LATENCY_S, [1.0] * _WORKERS),
    ", late messages": (_LATE_S, [1.0] * _WORKERS),
    ", unequal workers": (_LATENCY_S, [_SLOW if i % 4 == 0 else 1.0 for i in range(_WORKERS)]),
}
#: Class of the scheduler's CPU time.
CPU_GROUP = "scheduler, {workers:,} workers"


class _Run(NamedTuple):
    time: float
    tasks: int
    messages: int


def _run(graph: Graph, latency_s: float, speeds: Sequence[float], without: Sequence[str]) -> _Run:
    workers = tuple(Worker(1, speed=speed) for speed in speeds)
    host = Host("here", _BANDWIDTH, workers, inside=Link(latency_s, _BANDWIDTH))
    cluster = VirtualCluster.on(Topology([host], runtime=Runtime(noise=0.0)), without=without)
    cluster.submit(_named(graph, 0))
    cluster.run()
    record, start_s = cluster.record, cluster.time.now
    n_tasks, n_messages = len(record.executions), record.n_messages
    cluster.submit(_named(graph, 1))
    cluster.run()
    cluster.check()
    return _Run(record.makespan_s - start_s, len(record.executions) - n_tasks, record.n_messages - n_messages)


def _named(graph: Graph, run: int) -> Graph:
    """Return a graph with keys of its own, whose prefixes stay."""
    names: dict[Key, Key] = {key: (*key, run) if isinstance(key, tuple) else (key, run) for key in graph}
    return {
        names[key]: replace(task, dependencies=tuple(names[other] for other in task.dependencies))
        for key, task in graph.items()
    }


def virtual_ratios(
    features: Sequence[str],
    groups: Sequence[str] = tuple(GROUPS),
    on_run: Callable[[str], object] = lambda _: None,
) -> Iterator[Ratio]:
    """Yield the ratio of each measure for each feature that acts in virtual time, class and setting."""
    for group in groups:
        graphs = list(GROUPS[group]())
        for setting, (latency_s, speeds) in _SETTINGS.items():
            for ending, off in _OFF.items():
                name = group + setting + ending
                on_run(name)
                whole = [_run(graph, latency_s, speeds, off) for graph in graphs]
                for feature in features:
                    if feature not in ACTIVE or feature in off:
                        continue
                    less = [_run(graph, latency_s, speeds, (*off, feature)) for graph in graphs]
                    pairs = list(zip(less, whole, strict=True))
                    for place, measure in enumerate(_Run._fields):
                        value = geometric_mean(one[place] / other[place] for one, other in pairs)
                        yield Ratio(feature, name, measure, value)


def cpu_ratios(features: Sequence[str], on_run: Callable[[str], object] = lambda _: None) -> Iterator[Ratio]:
    """Yield the ratio of the scheduler's CPU time per task for each feature, for several cluster sizes."""
    for workers, n_tasks in _CPU_SIZES.items():
        for name in features:
            if name not in ACTIVE:
                continue
            group = CPU_GROUP.format(workers=workers)
            on_run(f"{group} · {name}")
            found = []
            for seed in range(_CPU_RUNS):
                graph = GRAPHS["array"](n_tasks, seed)
                pair = ((name,), ()) if seed % 2 else ((), (name,))
                spent_s = {off: cpu_per_task(graph, OURS, workers, without=off) for off in pair}
                found.append(spent_s[(name,)] / spent_s[()])
            yield Ratio(name, group, "CPU time", median(found), min(found), max(found))


def cpu_per_task(
    graph: Graph, policy: str, workers: int, seed: int = 0, without: Sequence[str] = ()
) -> float:
    """Return the scheduler's CPU time per task [s] for one run of a graph, without some features."""
    options: dict[str, Any] = {"validate": False, "scheduler_cpu": "measured"}
    cluster = VirtualCluster(workers, policy=policy, seed=seed, without=without, **options)
    with collected_as_by_a_scheduler():
        cluster.submit(graph)
        cluster.run()
    return cluster.cpu.seconds / len(graph)
