"""How well bundles are balanced in virtual time: makespan ÷ bound, tasks and messages of the scheduler.

`python tests/balance.py --save FILE` writes one line for each run, and `--against FILE` compares with the
lines of another version, which `PYTHONPATH=OTHER python tests/balance.py --save FILE` has written.

The makespan is the time from the first start of a task to the last completion. The bound is the work divided
by the speeds of all threads, or the longest task on the fastest thread, whichever is longer. `summed`
programs have one task that reads all others: of `wanted` ones the client wants each result.

Tasks that only hand a delivered value on, deliveries, and the releases of delivered bundles do not count, as
versions before virtual workers ran bundles step by step did not have them. Those also took the steps behind a
late one of a `wanted` program for tasks of their own from the start, before anything was late.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from ferroflow_dask.topology import Host, Link, Runtime, Topology, Worker
from ferroflow_dask.virtual import VirtualCluster, VirtualTask

#: Tasks for each thread, and their mean duration [s].
_PER_THREAD, _MEAN_S = 250, 0.002
_SEEDS = 3
#: A quarter of the workers in clusters of unequal ones.
_SLOW = 0.4
#: Messages that come with deliveries.
_DELIVERY = ("ferroflow-delivered", "release-worker-data")


def exact(n: int, rng: random.Random) -> list[float]:
    del rng
    return [_MEAN_S] * n


def lognormal(sigma: float) -> Callable[[int, random.Random], list[float]]:
    return lambda n, rng: [_MEAN_S * rng.lognormvariate(-(sigma**2) / 2, sigma) for _ in range(n)]


def stragglers(n: int, rng: random.Random) -> list[float]:
    """2 % of the tasks take 100 times as long."""
    long = set(rng.sample(range(n), max(1, n // 50)))
    return [_MEAN_S * (100 if i in long else 1) for i in range(n)]


def long_neighbours(n: int, rng: random.Random) -> list[float]:
    """One task in 20 takes 20 times as long, and they follow each other."""
    first = rng.randrange(n - n // 20)
    return [_MEAN_S * (20 if first <= i < first + n // 20 else 1) for i in range(n)]


CLASSES: dict[str, Callable[[int, random.Random], list[float]]] = {
    "exact": exact,
    "lognormal, σ 1": lognormal(1.0),
    "lognormal, σ 2": lognormal(2.0),
    "2 % stragglers": stragglers,
    "long neighbours": long_neighbours,
}


def one_run(name: str, threads: int, is_equal: bool, is_summed: bool, seed: int) -> dict[str, Any]:
    durations_s = CLASSES[name](_PER_THREAD * threads, random.Random(seed))
    if name == "exact" and seed:
        durations_s = [_MEAN_S * (1 + seed / 10)] * len(durations_s)
    speeds = [1.0] * threads if is_equal else [_SLOW if i % 4 == 0 else 1.0 for i in range(threads)]
    workers = tuple(Worker(1, speed=speed) for speed in speeds)
    topology = Topology([Host("here", 1e9, workers, inside=Link(1e-4, 1e9))], runtime=Runtime(noise=0.0))
    cluster = VirtualCluster.on(topology, seed=seed)
    graph: dict[Any, VirtualTask] = {
        ("t", i): VirtualTask(duration_s, nbytes=100) for i, duration_s in enumerate(durations_s)
    }
    if is_summed:
        graph["sum"] = VirtualTask(0.0, tuple(graph), nbytes=100)
    cluster.submit(graph)
    cluster.run()
    cluster.check()
    record: Any = cluster.record
    ran = [one for one in record.executions if one.stop > one.start]
    bound_s = max(sum(durations_s) / sum(speeds), *durations_s)
    messages = record.n_messages
    if hasattr(record, "messages"):
        messages -= sum(record.messages[op] for op in _DELIVERY)
    return {
        "class": name,
        "threads": threads,
        "equal": is_equal,
        "summed": is_summed,
        "seed": seed,
        "ratio": (record.makespan_s - min(one.start for one in ran)) / bound_s,
        "tasks": len(ran),
        "messages": messages,
    }


def all_runs() -> Iterator[dict[str, Any]]:
    for threads in (4, 8, 64):
        for name in CLASSES:
            for is_equal in (True, False):
                for is_summed in (False, True):
                    for seed in range(_SEEDS if threads < 64 else 1):
                        yield one_run(name, threads, is_equal, is_summed, seed)


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    ratios = [run["ratio"] for run in runs]
    tasks, messages = (sum(run[one] for run in runs) for one in ("tasks", "messages"))
    return {"mean": geometric_mean(ratios), "worst": max(ratios), "tasks": tasks, "messages": messages}


def report(runs: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    names: dict[str, Callable[[dict[str, Any]], bool]] = {"all": lambda _: True}
    names |= {name: lambda run, name=name: run["class"] == name for name in CLASSES}  # type: ignore[misc]
    names |= {"equal": lambda run: run["equal"], "a quarter at .4": lambda run: not run["equal"]}
    names |= {"wanted": lambda run: not run["summed"], "summed": lambda run: run["summed"]}
    names |= {f"{n} threads": lambda run, n=n: run["threads"] == n for n in (4, 8, 64)}  # type: ignore[misc]
    for name, is_in in names.items():
        found = summary([run for run in runs if is_in(run)])
        line = f"{name:16} mean {found['mean']:.3f} worst {found['worst']:.3f}"
        line += f" tasks {found['tasks']:6.0f} messages {found['messages']:6.0f}"
        if others:
            other = summary([run for run in others if is_in(run)])
            line += " | ÷ other:"
            line += "".join(f" {one} {found[one] / other[one]:.3f}" for one in found)
        print(line)
    if others:
        by_run: defaultdict[str, list[float]] = defaultdict(list)
        for one, other in zip(runs, others, strict=True):
            by_run[f"{one['class']}, {one['threads']}, {one['equal']}, {one['summed']}"].append(
                one["ratio"] / other["ratio"]
            )
        worst = sorted(by_run.items(), key=lambda item: -geometric_mean(item[1]))[:5]
        print("largest ratios:", *(f"{name}: {geometric_mean(values):.3f};" for name, values in worst))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--against", type=Path)
    arguments = parser.parse_args()
    logging.disable()
    runs = list(all_runs())
    others = []
    if arguments.against is not None:
        others = [json.loads(line) for line in arguments.against.read_text().splitlines()]
    if arguments.save is not None:
        arguments.save.write_text("".join(f"{json.dumps(run)}\n" for run in runs))
    report(runs, others)
    return 0


if __name__ == "__main__":
    sys.exit(main())
