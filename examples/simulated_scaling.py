"""How many workers can one Dask scheduler feed? Simulated on Narval's nodes, for stock Dask and ferroflow.

Each worker has one thread and ten tasks.

    python examples/simulated_scaling.py [workers [seconds of a task]]
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

from dask.typing import Key

from ferroflow_dask import simulate
from ferroflow_dask.replay import Job, JobGraph
from ferroflow_dask.topology import Topology, Worker, load_topology
from ferroflow_dask.virtual import VirtualTask
from ferroflow_dask.virtual.task import sinks

STEPS = 10


def task(seconds: float, needed: tuple[Key, ...] = (), nbytes: int = 8) -> VirtualTask:
    return VirtualTask(seconds, needed, nbytes, takes_core=False)


def graphs(n: int, seconds: float) -> dict[str, dict[Key, VirtualTask]]:
    wide: dict[Key, VirtualTask] = {("wide", i): task(seconds) for i in range(STEPS * n)}
    # The first 4 % of a worker's tasks in ten take ten times as long.
    imbalanced: dict[Key, VirtualTask] = {
        ("some", i): task(10 * seconds if i < n // 25 else 0.64 * seconds) for i in range(STEPS * n)
    }
    stencil: dict[Key, VirtualTask] = {}
    for step in range(STEPS):
        for i in range(n):
            near = range(max(0, i - 1), min(n, i + 2)) if step else ()
            stencil["cell", step, i] = task(seconds, tuple(("cell", step - 1, j) for j in near), 1000)
    heads: dict[Key, VirtualTask] = {("layer", -1): task(seconds)}
    for layer in range(STEPS):
        for head in range(n // 2):
            heads["head", layer, head] = task(seconds, (("layer", layer - 1),), 100_000)
        before = tuple(("head", layer, head) for head in range(n // 2))
        heads["layer", layer] = task(seconds, before, 100_000)
    return {"wide": wide, "imbalanced": imbalanced, "stencil": stencil, "transformer": heads}


def main(n: int, seconds: float) -> None:
    logging.getLogger("distributed.scheduler").setLevel(logging.WARNING)
    narval = load_topology("narval")
    node = replace(narval.hosts[0], workers=tuple(Worker(1) for _ in range(64)))
    topology = Topology([node], runtime=narval.runtime, name="narval").with_workers(n)
    for name, tasks in graphs(n, seconds).items():
        job = Job((JobGraph(tasks, tuple(sinks(tasks))),), name)
        for found in simulate(job, topology, ["dask", "ferroflow"]):
            took = f"{name:12} {found.policy:10} {found.makespan_s:7.2f} s"
            print(f"{took}, efficiency {found.efficiency:.0%}, scheduler busy {found.scheduler_busy:.0%}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 64, float(sys.argv[2]) if len(sys.argv) > 2 else 0.1)
