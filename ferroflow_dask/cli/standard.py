"""Standard workloads of `ferroflow simulate`: policies compared on twelve graphs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ferroflow_dask.bench.markdown import number, table
from ferroflow_dask.bench.simulated_graphs import SLEEPS, virtual_graph
from ferroflow_dask.replay import Job, JobGraph, Outcome
from ferroflow_dask.topology import Topology
from ferroflow_dask.virtual.task import sinks


class StandardRun(NamedTuple):
    """A standard workload under each policy, on a number of workers."""

    graph: str
    workers: int
    makespans_s: tuple[float, ...]


def standard_jobs() -> list[Job]:
    """Return the standard workloads."""
    jobs = []
    for name, make in SLEEPS.items():
        tasks = virtual_graph(make(), name)
        jobs.append(Job((JobGraph(tasks, tuple(sinks(tasks))),), name))
    return jobs


def run_standard(
    jobs: Sequence[Job],
    policies: Sequence[str],
    topologies: Sequence[Topology],
    run: Callable[[Job, str, Topology], Outcome],
) -> list[StandardRun]:
    """Run each job on each topology under each policy."""
    found = []
    for job in jobs:
        for one in topologies:
            makespans_s = tuple(run(job, policy, one).makespan_s for policy in policies)
            found.append(StandardRun(job.name, len(one.workers), makespans_s))
    return found


def standard_table(policies: Sequence[str], runs: Sequence[StandardRun]) -> str:
    """Return makespans in markdown, and how much longer than under the first policy the others take."""
    header = ("graph", "workers", *(f"{policy} [s]" for policy in policies))
    rows = [(one.graph, str(one.workers), *map(number, one.makespans_s)) for one in runs]
    lines = [table(header, rows, right=header[1:])]
    first = policies[0]
    for at, policy in enumerate(policies[1:], 1):
        factor = math.exp(
            statistics.fmean(math.log(one.makespans_s[at] / one.makespans_s[0]) for one in runs)
        )
        lines.append(f"{policy} takes {factor:.3g} times as long as {first} (geometric mean).")
    return "\n\n".join(lines)
