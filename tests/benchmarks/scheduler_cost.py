"""Scheduler overhead: CPU time per task of Dask's scheduler, with and without the plugin.

distributed's scheduler runs in virtual time, without comms: only its state machine, its stealing and the
plugin are measured. The versions take turns, so that a machine that becomes slower slows down all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from ablation_virtual import cpu_per_task
from overhead_graphs import GRAPHS

from ferroflow_dask.bench.markdown import number, table

#: What is measured: Dask, Dask without stealing, and the plugin; names of policies in `VirtualCluster`.
VERSIONS = ("dask", "no-stealing", "ferroflow")
_US_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class Overhead:
    """CPU time per task of the scheduler on one graph.

    Parameters
    ----------
    graph : str
    n_tasks : int
    per_task_s : mapping of str to list of float
        CPU time per task [s] of each repetition, by version.
    """

    graph: str
    n_tasks: int
    per_task_s: dict[str, list[float]]

    def us(self, version: str) -> float:
        """Return the median CPU time per task [µs]."""
        return median(self.per_task_s[version]) * _US_PER_S

    @property
    def ratio(self) -> float:
        """Median over the repetitions of the plugin's CPU time relative to Dask's in the same repetition."""
        stock, ours = self.per_task_s["dask"], self.per_task_s["ferroflow"]
        return median(mine / other for mine, other in zip(ours, stock, strict=True))


def measure(
    names: Sequence[str],
    n_tasks: int,
    workers: int,
    repeat: int,
    on_run: Callable[[str, str], object] = lambda *_: None,
) -> Iterator[Overhead]:
    """Measure graphs under all versions.

    Parameters
    ----------
    names : sequence of str
        Keys of `GRAPHS`.
    n_tasks : int
        Approximate size of each graph.
    workers : int
        Workers with one thread each.
    repeat : int
        Runs of each version, with other durations each time.
    on_run : callable, optional
        Called with the names of the graph and of the version before each run.
    """
    for name in names:
        per_task_s: dict[str, list[float]] = {version: [] for version in VERSIONS}
        for seed in range(repeat):
            graph = GRAPHS[name](n_tasks, seed)
            # Who comes first alternates, too.
            for version in VERSIONS if seed % 2 else VERSIONS[::-1]:
                on_run(name, version)
                per_task_s[version].append(cpu_per_task(graph, version, workers))
        yield Overhead(name, len(graph), per_task_s)


def overhead_table(measured: Sequence[Overhead]) -> str:
    """Return CPU times per task as a table in Markdown."""
    rows = [
        [one.graph, str(one.n_tasks), *(number(one.us(version)) for version in VERSIONS), f"{one.ratio:.2f}"]
        for one in measured
    ]
    numbers = ("tasks", "Dask [µs]", "without stealing [µs]", "ferroflow [µs]", "ferroflow / Dask")
    return table(("graph", *numbers), rows, right=numbers)
