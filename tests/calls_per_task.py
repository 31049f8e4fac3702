"""Calls of functions of the plugin and the policy per task, and hashes of virtual timelines.

`python tests/calls_per_task.py [GRAPH…]` prints the calls, by function if graphs are named, and the modules.
`python tests/calls_per_task.py --arrival` prints the calls of the plan for a tree of 999 tasks that arrives.
`python tests/calls_per_task.py --timelines` prints a hash for each graph, setting and seed: run it before and
after a change that must not change decisions.
"""

from __future__ import annotations

import logging
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from dask._task_spec import GraphNode, List, Task, TaskRef
from fault_injection import ON_WORKERS

from ferroflow_dask.bundling.averages import Averages
from ferroflow_dask.bundling.plan import Plan
from ferroflow_dask.bundling.rewrite import revalidate, rewrite
from ferroflow_dask.bundling.snapshot import SentGraph, Snapshot
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.virtual import VirtualCluster

sys.path.append(str(Path(__file__).parent / "benchmarks"))  # if it runs as a program
from overhead_graphs import GRAPHS, stencil

#: Modules that take part in a virtual run and are not the plugin's, or stand for functions of Dask's.
_AROUND = (
    "ferroflow_dask.virtual",
    "ferroflow_dask.topology",
    "ferroflow_dask.scheduler._distributed_transitions",
)


def calls(name: str, n_tasks: int = 1000, workers: int = 8) -> tuple[int, Counter[str]]:
    """Return the number of tasks of a graph, and the calls on the scheduler by function."""
    graph = GRAPHS[name](n_tasks)
    cluster = VirtualCluster(workers, validate=False)

    def run() -> None:
        cluster.submit(graph)
        cluster.run()

    found = calls_of(run)
    cluster.check()
    return len(graph), found


def calls_of(run: Callable[[], object]) -> Counter[str]:
    """Return the calls of our functions that do not run on workers, by module and function."""
    counted: Counter[Any] = Counter()
    modules: dict[Any, str] = {}

    def profile(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            code = frame.f_code
            counted[code] += 1
            if code not in modules:
                modules[code] = frame.f_globals.get("__name__", "")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    found: Counter[str] = Counter()
    for code, module in modules.items():
        is_ours = module.startswith("ferroflow_dask.") and not module.startswith(_AROUND)
        if is_ours and module not in ON_WORKERS:
            found[f"{module.removeprefix('ferroflow_dask.')}:{code.co_qualname}"] += counted[code]
    return found


def arrival_calls(n_tasks: int = 999) -> tuple[int, Counter[str]]:
    """Return the number of tasks of a tree, and the calls of the plan for it, whose tasks are short."""
    leaves = (n_tasks + 1) // 2
    tasks: dict[Any, GraphNode] = {("leaf", i): Task(("leaf", i), int, i) for i in range(leaves)}
    level, n = [*tasks], 0
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = []
        for pair in pairs:
            key = ("sum", n := n + 1)
            tasks[key] = Task(key, sum, List(*map(TaskRef, pair)))
            level.append(key)
    learned = dict.fromkeys(("leaf", "sum"), Averages(1e-4, 28.0))
    graph = SentGraph(tasks, frozenset(level))
    snapshot = Snapshot(ClusterProfile((1,) * 8), learned, has_idle_threads=True)
    plans: list[Plan] = []
    found = calls_of(lambda: plans.append(rewrite(graph, snapshot, "1")))
    found += calls_of(lambda: revalidate(plans[0], snapshot))
    assert plans[0].bundles
    return len(tasks), found


#: Clusters on which timelines are compared.
_SETTINGS: Mapping[str, dict[str, Any]] = {
    "usual": {"workers": 8},
    "threads, one slow worker": {"workers": 5, "nthreads": 3, "speeds": {0: 0.25}},
    "hosts, late messages": {
        "workers": 12,
        "workers_per_host": 3,
        "latency_s": 0.005,
        "bandwidth": 1e8,
        "host_bandwidth": 1e9,
        "service_s": 1e-4,
    },
}


def timelines(n_tasks: int = 300, seeds: int = 3) -> Iterator[tuple[str, int]]:
    """Yield names of runs, and hashes of what ran where and when."""
    for name, make in (GRAPHS | {"stencil": stencil}).items():
        for setting, options in _SETTINGS.items():
            for seed in range(seeds):
                cluster = VirtualCluster(**options, seed=seed)
                # Two graphs with other durations, of which the second finds all averages known.
                cluster.submit(make(n_tasks, seed, 0.002))
                cluster.at(0.5, cluster.submit, _renamed(make(n_tasks, seed + 1)))
                cluster.at(0.6, cluster.pause, 1)
                cluster.at(0.9, cluster.resume, 1)
                cluster.at(0.8, cluster.leave, 2)
                cluster.at(1.0, cluster.join)
                cluster.run()
                cluster.check()
                told = (cluster.record.timeline(), cluster.record.transfers, cluster.n_steals)
                yield f"{name} · {setting} · {seed}", zlib.crc32(repr(told).encode())


def _renamed(graph: Mapping[Any, Any]) -> dict[Any, Any]:
    def other(key: Any) -> Any:
        return (f"{key[0]}-again", key[1])

    return {
        other(key): type(task)(task.duration_s, tuple(map(other, task.dependencies)), task.nbytes)
        for key, task in graph.items()
    }


if __name__ == "__main__":
    logging.getLogger("distributed").setLevel(logging.ERROR)
    if sys.argv[1:] == ["--timelines"]:
        for run, value in timelines():
            print(f"{value:08x} {run}")
        raise SystemExit
    for asked in sys.argv[1:] or GRAPHS:
        n, found = arrival_calls() if asked == "--arrival" else calls(asked)
        n_modules = len({function.partition(":")[0] for function in found})
        print(f"{asked}: {sum(found.values()) / n:.1f} calls per task, in {n_modules} modules")
        for function, times in found.most_common(80) if sys.argv[1:] else ():
            print(f"    {times / n:6.2f} {function}")
