"""Feeding: how many workers a scheduler keeps busy.

A run in virtual time charges the scheduler for the CPU time that it takes. If there are too many workers,
they wait, and tasks start at the rate at which the scheduler handles them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from garbage import collected_as_by_a_scheduler
from overhead_graphs import Graph, independent, shuffle, stencil

from ferroflow_dask.bench.markdown import number, table
from ferroflow_dask.virtual import VirtualCluster

#: Graphs, and tasks for each worker: enough for a middle in which neither the start nor the end counts.
GRAPHS = {"independent": (independent, 8), "stencil": (stencil, 40), "shuffle": (shuffle, 8)}
#: Part of the time in which workers must be busy.
BUSY = 0.9
#: Durations differ from the mean by up to this part of it, so that tasks do not end at the same time.
_SPREAD = 0.5
_BISECTIONS = 3
#: Of each number of workers: other programs slow down the scheduler now and then.
_RUNS = 3
#: What is compared; names of policies in `VirtualCluster`.
VERSIONS = ("dask", "ferroflow")


@dataclass(frozen=True, slots=True)
class Feeding:
    """What workers did in the middle of a run: while the second and the third quarter of the tasks started.

    Parameters
    ----------
    busy : float
        Part of the time in which they ran tasks.
    starts_per_s : float
        Tasks that were started [1/s].
    """

    busy: float
    starts_per_s: float


def tasks_for(name: str, workers: int, duration_s: float, seed: int = 0) -> Graph:
    """Return a graph that keeps workers busy for several tasks each."""
    make, per_worker = GRAPHS[name]
    rng = random.Random(seed)
    return {
        key: replace(task, duration_s=duration_s * rng.uniform(1 - _SPREAD, 1 + _SPREAD))
        for key, task in make(per_worker * workers).items()
    }


def feed(name: str, policy: str, workers: int, duration_s: float, cpu: str = "charged") -> Feeding:
    """Run a graph on workers with one thread each; `cpu` is as in `VirtualCluster`."""
    cluster = VirtualCluster(workers, policy=policy, validate=False, scheduler_cpu=cpu)
    with collected_as_by_a_scheduler():
        cluster.submit(tasks_for(name, workers, duration_s))
        cluster.run()
    runs = cluster.record.timeline()
    quarter = len(runs) // 4
    first, last = runs[quarter][2], runs[-quarter][2]
    worked_s = sum(max(0.0, min(stop, last) - max(start, first)) for _, _, start, stop in runs)
    window_s = last - first
    return Feeding(worked_s / (workers * window_s), (len(runs) - 2 * quarter) / window_s)


def most_workers(name: str, policy: str, duration_s: float, few: int = 64, many: int = 2**14) -> int:
    """Return about the largest number of workers that are busy; 0 if it is less than `few`.

    The number is doubled up to `many`. Three bisections follow, so the result is exact to an eighth of it.
    """

    def is_fed(workers: int) -> bool:
        return median(feed(name, policy, workers, duration_s).busy for _ in range(_RUNS)) >= BUSY

    good, bad = 0, few
    while is_fed(bad):
        good = bad
        if good >= many:
            return good
        bad = min(many, 2 * good)
    for _ in range(_BISECTIONS if good else 0):
        middle = (good + bad) // 2
        if is_fed(middle):
            good = middle
        else:
            bad = middle
    return good


def feeding_table(durations_s: Sequence[float], names: Sequence[str], few: int, many: int) -> str:
    """Return the largest numbers of busy workers under Dask and the plugin as a table in Markdown."""
    rows = []
    for name in names:
        for duration_s in durations_s:
            found = [most_workers(name, policy, duration_s, few, many) for policy in VERSIONS]
            rows.append([name, number(duration_s), *(f"{n:,}" if n else f"< {few}" for n in found)])
    columns = ("duration of a task [s]", "Dask [workers]", "ferroflow [workers]")
    return table(("graph", *columns), rows, right=columns)
