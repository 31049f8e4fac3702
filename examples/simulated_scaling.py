"""How many workers can one Dask scheduler feed? Simulated on Narval's nodes, for stock Dask and ferroflow.

Each worker has one thread and ten tasks.

    python examples/simulated_scaling.py --workers 64
    python examples/simulated_scaling.py --workers 64,256,1000 --seconds 0.1,1 --plot scaling.png

The second command takes half an hour.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from dask.typing import Key

from ferroflow_dask import simulate
from ferroflow_dask.replay import Job, JobGraph
from ferroflow_dask.topology import Topology, Worker, load_topology
from ferroflow_dask.virtual import VirtualTask
from ferroflow_dask.virtual.task import sinks

STEPS = 10
#: Results that a task of the shuffle reads, as many as Dask's shuffle by tasks has in a stage.
READS = 32

Tasks = dict[Key, VirtualTask]


def task(seconds: float, needed: tuple[Key, ...] = (), nbytes: int = 8) -> VirtualTask:
    return VirtualTask(seconds, needed, nbytes, core_share=0.0)


def wide(n: int, seconds: float) -> Tasks:
    return {("wide", i): task(seconds) for i in range(STEPS * n)}


def imbalanced(n: int, seconds: float) -> Tasks:
    # The first 0.4 % of the tasks take 16 times as long as the others.
    return {("some", i): task(10 * seconds if i < n // 25 else 0.64 * seconds) for i in range(STEPS * n)}


def stencil(n: int, seconds: float) -> Tasks:
    tasks: Tasks = {}
    for step in range(STEPS):
        for i in range(n):
            near = range(max(0, i - 1), min(n, i + 2)) if step else ()
            tasks["cell", step, i] = task(seconds, tuple(("cell", step - 1, j) for j in near), 1000)
    return tasks


def shuffle(n: int, seconds: float) -> Tasks:
    """Stages in which each task reads 32 results, of near and of far tasks by turns."""
    tasks: Tasks = {}
    for step in range(STEPS):
        apart = max(1, n // READS) if step % 2 else 1
        for i in range(n):
            read = {(i + j * apart) % n for j in range(READS)} if step else ()
            tasks["part", step, i] = task(
                seconds, tuple(("part", step - 1, j) for j in sorted(read)), 100_000
            )
    return tasks


def transformer(n: int, seconds: float) -> Tasks:
    tasks: Tasks = {("layer", -1): task(seconds)}
    for layer in range(STEPS):
        heads = [("head", layer, head) for head in range(n // 2)]
        for head in heads:
            tasks[head] = task(seconds, (("layer", layer - 1),), 100_000)
        tasks["layer", layer] = task(seconds, tuple(heads), 100_000)
    return tasks


GRAPHS = {one.__name__: one for one in (wide, imbalanced, stencil, shuffle, transformer)}


def narval(n: int) -> Topology:
    preset = load_topology("narval")
    node = replace(preset.hosts[0], workers=tuple(Worker(1) for _ in range(64)))
    return Topology([node], runtime=preset.runtime, name="narval").with_workers(n)


def draw(found: dict[str, Any], path: str) -> None:
    from bokeh.layouts import row

    sys.path.append(str(Path(__file__).parent / "flexflow"))
    from pictures import efficiency_figure, write_picture

    plots = [efficiency_figure(name, policies) for name, policies in found.items()]
    for plot in plots:
        plot.toolbar_location = None
    write_picture(row(*plots), path)


def numbers(of: type) -> Any:
    return lambda text: [of(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=numbers(int), default=[64])
    parser.add_argument("--seconds", type=numbers(float), default=[0.1], help="of a task")
    parser.add_argument("--graphs", type=numbers(str), default=list(GRAPHS))
    parser.add_argument("--plot", help="a file whose name ends in .png")
    options = parser.parse_args()
    logging.getLogger("distributed.scheduler").setLevel(logging.WARNING)
    found: dict[str, Any] = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for name in options.graphs:
        for seconds in options.seconds:
            for n in options.workers:
                tasks = GRAPHS[name](n, seconds)
                job = Job((JobGraph(tasks, tuple(sinks(tasks))),), name)
                for policy in ("dask", "ferroflow"):
                    began_s = time.process_time()
                    (one,) = simulate(job, narval(n), [policy])
                    found[name][policy][f"{seconds:g} s"][n] = one.efficiency
                    took_s = time.process_time() - began_s
                    shown = f"{name:12} {seconds:4g} s {n:5} workers {policy:10} {one.makespan_s:7.2f} s"
                    shown += f", efficiency {one.efficiency:4.0%}, scheduler busy {one.scheduler_busy:4.0%}"
                    print(f"{shown} (simulated in {took_s:.0f} s)", flush=True)
    if options.plot:
        draw(found, options.plot)


if __name__ == "__main__":
    main()
