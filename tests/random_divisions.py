"""Random programs whose bundles are divided at random moments: each task runs once and has Dask's value.

`python tests/random_divisions.py 2000` runs so many programs and prints how many divisions there were.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import dask
import pytest
from bundled import CALLS, Bundling, add, fail, leaves, on_bundling_cluster, take_all_for_short
from distributed import wait
from distributed.core import Status
from waiting import comes

from ferroflow_dask.bundling.deliveries import EXTENSION
from ferroflow_dask.policy import stealing

#: Durations of tasks [s]: most are short, some much longer than is assumed.
_DURATIONS_S = (0.0, 0.0, 0.0, 1e-4, 1e-3, 1e-3, 0.02)
#: A program that takes longer hangs [s].
_LONGEST_S = 20.0
#: What divides bundles: the policy alone, requests, a paused worker, cancelled futures, a failing task.
TRIGGERS = ("late", "half", "free", "all", "pause", "cancel", "fail")


def step(key: str, seconds: float, *values: int) -> int:
    """Take some time, and return the sum of the values and one more."""
    if seconds:
        time.sleep(seconds)
    return add(key, *values)


def step_that_fails(key: str, seconds: float, *values: int) -> int:
    """Raise an exception."""
    return fail(key, *values)


def random_names(rng: random.Random, n: int, seed: int) -> list[str]:
    """Return keys of tasks with three prefixes."""
    return [f"{rng.choice(('one', 'two', 'three'))}-{seed:x}x{i}" for i in range(n)]


def random_reads(rng: random.Random, n: int, depth: int) -> list[list[int]]:
    """Return the up to three tasks that each one reads, of the `depth` ones before it."""
    return [rng.sample(range(max(0, i - depth), i), rng.randint(0, min(3, i, depth))) for i in range(n)]


class Program:
    """Random graph: its tasks, and the ones that the client wants."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.trigger = TRIGGERS[seed % len(TRIGGERS)]
        n, depth = rng.randint(8, 80), rng.choice((1, 3, 80))
        names = random_names(rng, n, seed)
        self.read = random_reads(rng, n, depth)
        self.failing = rng.sample(range(n), rng.randint(1, 3)) if self.trigger == "fail" else []
        self.names, self.tasks, self.values = names, list[Any](), list[int | None]()
        for i, read in enumerate(self.read):
            function = step_that_fails if i in self.failing else step
            values = [self.tasks[j] for j in read]
            seconds = rng.choice(_DURATIONS_S)
            self.tasks.append(dask.delayed(function)(names[i], seconds, *values, dask_key_name=names[i]))
            inputs = [self.values[j] for j in read]
            fails = i in self.failing or None in inputs
            self.values.append(None if fails else 1 + sum(one for one in inputs if one is not None))
        read_ones = {j for read in self.read for j in read}
        kept = rng.choice((0.0, 0.3, 1.0))
        self.wanted = [i for i in range(n) if i not in read_ones or rng.random() < kept]

    def needed(self) -> set[int]:
        """Return the tasks that the wanted ones depend on."""
        found = {*self.wanted}
        for i in range(len(self.read) - 1, -1, -1):
            if i in found:
                found.update(self.read[i])
        return found


async def divide(
    cluster: Bundling, program: Program, is_over: Callable[[], bool], futures: list[Any]
) -> None:
    """Divide bundles until a program is over."""
    rng, dividing = program.rng, cluster.stealing.graphs.dividing
    while not is_over():
        await asyncio.sleep(rng.choice((0.0, 0.0, 0.001, 0.003)))
        running = [key for worker in cluster.workers for key in [*worker.extensions[EXTENSION]._runs]]
        if not running:
            continue
        if program.trigger in ("half", "free", "all"):
            dividing.ask(rng.choice(running), program.trigger, "a test")
        elif program.trigger == "fail":
            dividing.ask(rng.choice(running), rng.choice(("half", "free", "all")), "a test")
        elif program.trigger == "pause":
            worker = rng.choice(cluster.workers)
            worker.status = Status.paused
            await asyncio.sleep(rng.choice((0.0, 0.005)))
            worker.status = Status.running
        elif program.trigger == "cancel" and len(futures) > 1 and rng.random() < 0.2:
            await cluster.client.cancel(
                [futures.pop(rng.randrange(len(futures))) for _ in range(len(futures) // 3)]
            )


async def run(cluster: Bundling, seed: int) -> list[str]:
    """Run a program; return what is wrong."""
    program = Program(seed)
    CALLS.clear()
    wrong, n_split = [], cluster.counts["split"]
    futures = cluster.client.compute([program.tasks[i] for i in program.wanted])
    places = {program.names[i]: i for i in program.wanted}
    ended = asyncio.Event()
    dividing = asyncio.create_task(divide(cluster, program, ended.is_set, futures))
    try:
        await asyncio.wait_for(comes(lambda: all(one.done() for one in futures)), _LONGEST_S)
    except TimeoutError:
        states = [
            (ts.key, ts.state, [one.key for one in ts.waiting_on or ()])
            for ts in cluster.scheduler.tasks.values()
        ]
        wrong.append(f"hangs: {states}")
    ended.set()
    await dividing
    for future in futures:
        expected = program.values[places[future.key]]
        if future.status == "error":
            if expected is not None:
                wrong.append(f"{future.key} fails: {await future.exception()!r}")
            continue
        try:
            value = await future
        except CancelledError:  # with what it depends on
            continue
        if value != expected:
            wrong.append(f"{future.key} is {value}, not {expected}")
    for worker in cluster.workers:
        worker.status = Status.running
    twice = {key: n for key, n in CALLS.items() if n > 1}
    if twice and cluster.counts["split"] == n_split:  # bundles of which only a part fails run again
        wrong.append(f"ran again: {twice}")
    if program.trigger not in ("cancel", "fail"):
        ran = {program.names[i] for i in program.needed()}
        if ran != CALLS.keys():
            wrong.append(f"did not run: {ran - CALLS.keys()}, ran needlessly: {CALLS.keys() - ran}")
    try:
        cluster.scheduler.validate_state()
    except AssertionError as error:
        wrong.append(f"invalid: {error!r}")
    futures.clear()
    future = None
    try:
        await asyncio.wait_for(cluster.is_empty(), _LONGEST_S)
        await asyncio.wait_for(comes(lambda: not left_on(cluster)), _LONGEST_S)
    except TimeoutError:
        wrong.append(f"left: {[*cluster.scheduler.tasks]}, {left_on(cluster)}")
    return [f"program {seed} ({program.trigger}): {one}"[:1500] for one in wrong]


def left_on(cluster: Bundling) -> list[Any]:
    """Return what workers and the plugin keep of programs."""
    kept: list[Any] = [
        *cluster.bundles.keys(),
        *cluster.bundles._holders,
        *cluster.stealing.graphs.dividing.asked,
    ]
    for worker in cluster.workers:
        runs = worker.extensions[EXTENSION]
        kept += [*worker.data, *worker.state.tasks, *runs._runs]
    return kept


def compare(
    seeds: range, report: Callable[[str], object] = lambda _: None
) -> tuple[list[str], dict[str, int]]:
    """Run programs; return a line for each fault, and counts of bundles."""
    wrong: list[str] = []
    counts: dict[str, int] = {}

    async def test(cluster: Bundling) -> None:
        await cluster.stealing.changes.settled()
        warm = cluster.client.compute(leaves("warm", 4))
        await wait(warm)
        del warm
        for seed in seeds:
            for one in await run(cluster, seed):
                wrong.append(one)
                report(one)
            if cluster.stealing.error is not None or (wrong and "hangs" in wrong[-1]):
                break
        counts.update(cluster.counts, asked=cluster.stealing.graphs.dividing.n_asked)

    with pytest.MonkeyPatch.context() as patch:
        take_all_for_short(patch)
        patch.setattr(stealing, "_LATE_S", 0.002)
        # A prefetched task may run twice.
        config = {"ferroflow.features.prefetch": False}
        on_bundling_cluster(test, resources=(None, None, None), config=config, limit_s=3600)
    return wrong, counts


if __name__ == "__main__":
    started = time.perf_counter()
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    faults, counted = compare(range(first, first + int(sys.argv[1])), report=print)
    print(f"{len(faults)} faults, {counted}, {time.perf_counter() - started:.0f} s")
