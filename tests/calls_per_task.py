"""Calls of functions of the plugin and the policy per task, and hashes of virtual timelines.

`python tests/calls_per_task.py [GRAPH…]` prints the calls, by function if graphs are named.
`python tests/calls_per_task.py --timelines` prints a hash for each graph, setting and seed: run it before and
after a change that must not change decisions.
"""

from __future__ import annotations

import logging
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from fault_injection import ON_WORKERS

from ferroflow_dask.bench.overhead_graphs import GRAPHS, stencil
from ferroflow_dask.virtual import VirtualCluster

#: Modules that take part in a virtual run and are not the plugin's, or stand for functions of Dask's.
_AROUND = (
    "ferroflow_dask.virtual",
    "ferroflow_dask.bench",
    "ferroflow_dask.topology",
    "ferroflow_dask.scheduler._distributed_transitions",
)


def calls(name: str, n_tasks: int = 1000, workers: int = 8) -> tuple[int, Counter[str]]:
    """Return the number of tasks of a graph, and the calls on the scheduler by function."""
    graph = GRAPHS[name](n_tasks)
    cluster = VirtualCluster(workers, validate=False)
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
        cluster.submit(graph)
        cluster.run()
    finally:
        sys.setprofile(before)
    cluster.check()
    found: Counter[str] = Counter()
    for code, module in modules.items():
        is_ours = module.startswith("ferroflow_dask.") and not module.startswith(_AROUND)
        if is_ours and module not in ON_WORKERS:
            found[f"{module.removeprefix('ferroflow_dask.')}:{code.co_qualname}"] += counted[code]
    return len(graph), found


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
        n, found = calls(asked)
        print(f"{asked}: {sum(found.values()) / n:.1f} calls per task")
        for function, times in found.most_common(80) if sys.argv[1:] else ():
            print(f"    {times / n:6.2f} {function}")
