"""ferroflow's published throughput, simulated: its static placement and its stealing in a ring."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ferroflow_dask.bench.markdown import table
from ferroflow_dask.bench.published import FERROFLOW, FERROFLOW_SOURCE
from ferroflow_dask.graph import generate_graph
from ferroflow_dask.replay import job_of_graph
from ferroflow_dask.topology import Host, Link, Runtime, Topology, Worker
from ferroflow_dask.virtual import VirtualCluster

#: Linux wakes a sleeping thread so much too late by default: the timer slack of prctl(2) [s].
_TIMER_SLACK_S = 5e-5
#: DAGs of declared durations; those of computing ops depend on a machine that is not at hand.
SLEEPING = ("imbalanced", "large-wide", "xlarge-wide")


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Throughput [1/s] of a DAG under `static`, or under `ring`, as the source's stealing is called here."""

    dag: str
    workers: int
    policy: str
    published: float
    simulated: float

    @property
    def error(self) -> float:
        """Relative error of the simulation."""
        return self.simulated / self.published - 1


def simulated_runs() -> Iterator[SimulatedRun]:
    """Yield each published run of sleeping ops with its simulation.

    The runtime of the source takes microseconds for an op, so the topology has no costs.
    """
    for name in SLEEPING:
        dag = FERROFLOW[name]
        (sent,) = job_of_graph(generate_graph(name, **dag.arguments)).graphs
        tasks = {
            key: replace(task, duration_s=task.duration_s + _TIMER_SLACK_S) if task.duration_s else task
            for key, task in sent.tasks.items()
        }
        n_ops = len(tasks) + 1  # the source counts the input
        for run in dag.runs:
            host = Host("node", math.inf, (Worker(),) * run.workers, inside=Link(1e-6, 1e10))
            topology = Topology([host], runtime=Runtime.without_costs())
            for policy, published in (("static", run.static_ops_per_s), ("ring", run.stealing_ops_per_s)):
                cluster = VirtualCluster.on(topology, policy=policy, without=("bundles",))
                cluster.submit(tasks, keep=sent.wanted)
                yield SimulatedRun(name, run.workers, policy, published, n_ops / cluster.run())


def simulated_table() -> str:
    """Return the published and the simulated throughput in markdown."""
    header = ("DAG", "workers", "policy", "published [ops/s]", "simulated [ops/s]", "error")
    rows = [
        (
            one.dag,
            str(one.workers),
            one.policy,
            f"{one.published:,.0f}",
            f"{one.simulated:,.0f}",
            f"{one.error:+.1%}",
        )
        for one in simulated_runs()
    ]
    return f"Published: {FERROFLOW_SOURCE}.\n\n" + table(header, rows, right=(header[1], *header[3:]))
