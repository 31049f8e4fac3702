"""Duration of programs on collections, and the regret of cuts: `measure_cuts.py --help`."""

from __future__ import annotations

import json
import random
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from math import inf
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any
from unittest.mock import patch

import click
from collection_programs import COLLECTIONS, queries
from distributed import Client, LocalCluster

import ferroflow_dask
from ferroflow_dask.bench import observe  # each process has its own peak: the module is pickled by name
from ferroflow_dask.bundling import cut as cuts
from ferroflow_dask.bundling import graphs
from ferroflow_dask.bundling.predict import Work
from ferroflow_dask.cluster_profile import ClusterProfile

Program = Callable[[str], Any]
_SINGLE = "single tasks"
#: Runs of a program before its cuts are compared: the last one may try a new cut.
_LEARNING = 4
#: Reports of a run arrive by then [s].
_HEARTBEAT_S = 0.2


@click.command()
@click.argument("what", type=click.Choice(["gain", "regret"]))
@click.argument("names", metavar="[PROGRAM]…", nargs=-1)
@click.option("--rounds", default=3, show_default=True)
@click.option("--workers", default=4, show_default=True)
@click.option("--threads", default=1, show_default=True, help="Of each worker.")
@click.option("--tpch", type=float, help="Scale of TPC-H, whose queries are the programs.")
@click.option("--data", type=Path, default=Path("ferroflow-bench-data"), help="Folder of their tables.")
@click.option("--seed", type=int, help="Of the order of the programs; as listed if left out.")
@click.option("--rows", type=Path, help="File to which rows are appended.")
def main(
    *,
    what: str,
    names: Sequence[str],
    rounds: int,
    workers: int,
    threads: int,
    tpch: float | None,
    data: Path,
    seed: int | None,
    rows: Path | None,
) -> None:
    """Run programs on collections; all programs if none is named.

    `gain` runs each program on stock Dask, on stock Dask again, and with the plugin, in turn. `regret` runs
    it with each cut in turn. The programs run one after another on the same clusters, since learned numbers
    carry over. Memory is the sum over workers of how much a process grew at most.
    """
    programs = queries(data, tpch) if tpch else COLLECTIONS
    chosen = list(names or programs)
    if seed is not None:
        random.Random(seed).shuffle(chosen)
    measure = _gain if what == "gain" else _regret
    ratios = []
    with ExitStack() as stack:
        clients = {
            side: stack.enter_context(_client(side, workers, threads))
            for side in (("stock", "again", "ours") if what == "gain" else ("ours",))
        }
        for name in chosen:
            row = measure(clients, name, programs[name], rounds)
            ratios.append(row["ratio"])
            if rows:
                with rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(f"geometric mean {geometric_mean(ratios):.3f}", flush=True)


@contextmanager
def _client(side: str, workers: int, threads: int) -> Iterator[Client]:
    with (
        LocalCluster(n_workers=workers, threads_per_worker=threads, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        if side == "ours":
            # The plans of a client would serve those of the other sides in this process, too.
            ferroflow_dask.install(client, without=["client_plans"])
        yield client


def _timed(client: Client, program: Program) -> float:
    with client.as_current():
        started = time.perf_counter()
        found = program(uuid.uuid4().hex)
        if hasattr(found, "compute"):  # `head` of a frame has computed it
            found.compute(scheduler=client)
        return time.perf_counter() - started


# Gain


def _gain(clients: Mapping[str, Client], name: str, program: Program, rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = defaultdict(list)
    grown: dict[str, list[float]] = defaultdict(list)
    order = list(clients)
    for _ in range(rounds + 1):
        random.shuffle(order)
        for side in order:
            clients[side].run(_reset_peak)
            seconds[side].append(_timed(clients[side], program))
            grown[side].append(sum(clients[side].run(_peak_growth).values()) / 1e6)
    usual = {side: median(times[1:]) for side, times in seconds.items()}
    peaks = {side: median(each[1:]) for side, each in grown.items()}
    row = {
        "program": name,
        "ratio": usual["stock"] / usual["ours"],
        "again": usual["stock"] / usual["again"],
        "first": seconds["stock"][0] / seconds["ours"][0],
        "seconds": dict(seconds),
        "MB": dict(grown),
    }
    print(
        f"{name:20} {usual['stock']:6.2f} s {row['ratio']:5.2f} (again {row['again']:4.2f}, "
        f"first {row['first']:4.2f})  {peaks['stock']:6.0f} → {peaks['ours']:6.0f} MB",
        flush=True,
    )
    return row


def _reset_peak(dask_worker: Any) -> None:
    observe.PEAK.reset()
    dask_worker.ferroflow_before = observe.PEAK.read()


def _peak_growth(dask_worker: Any) -> float:
    return float(observe.PEAK.read() - dask_worker.ferroflow_before)


# Regret


def _regret(clients: Mapping[str, Client], name: str, program: Program, rounds: int) -> dict[str, Any]:
    """Measure each cut that `best_cut` may choose, and the one that it chooses.

    A cut is the best of a round by the other rounds: the least of several durations would be less by chance.
    What is learned from a forced cut is forgotten.
    """
    client = clients["ours"]
    for _ in range(_LEARNING):
        _timed(client, program)
    seconds: dict[str, list[float]] = defaultdict(list)
    chosen: list[str] = []
    truth: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for one in random.sample(["", *_names()], 1 + len(_names())):
            made: list[tuple[str, float]] = []
            before = deepcopy(_learned(client)._prefixes)
            with _forced(one, made):
                taken_s = _timed(client, program)
            if one:
                time.sleep(_HEARTBEAT_S)
                _learned(client)._prefixes = before
            else:
                chosen.append(" + ".join(cut for cut, _ in made))
            if len(made) == 1:  # else not all of a graph was predicted at once
                ((cut, predicted_s),) = made
                truth[cut].append(predicted_s / taken_s)
            seconds[one].append(taken_s if not one or one in dict(made) else inf)
    made_always = {one: times for one, times in seconds.items() if inf not in times}
    best = [
        min(made_always, key=lambda one: fmean(each for j, each in enumerate(made_always[one]) if j != i))
        for i in range(rounds)
    ]
    ratios = [seconds[""][i] / seconds[best[i]][i] for i in range(rounds)]
    row = {"program": name, "ratio": geometric_mean(ratios), "best": best, "seconds": dict(seconds)}
    row |= {"chosen": chosen, "predicted": dict(truth)}
    usual = {one: median(times) for one, times in made_always.items()}
    others = ", ".join(f"{one or 'CHOSEN'} {taken_s:.2f}" for one, taken_s in usual.items())
    print(f"{name:20} {row['ratio']:5.2f} {chosen[-1]} | {others}", flush=True)
    return row


def _learned(client: Client) -> Any:
    return client.cluster.scheduler.extensions["stealing"].costs


def _names() -> Sequence[str]:
    work = Work([[]], [1.0], lambda _: 0)
    return [name for name, _ in cuts._cuts(work, ClusterProfile(threads=(1,)), False)]


@contextmanager
def _forced(name: str, made: list[tuple[str, float]]) -> Iterator[None]:
    """Restrict `best_cut` to one cut, or to single tasks if it does not fit; an empty name restricts nothing.

    The cuts that graphs get are added to `made` with their predicted durations [s].
    """
    all_cuts, best_cut = cuts._cuts, graphs.best_cut

    def only(*args: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
        for one, make in all_cuts(*args):
            if one in (name, _SINGLE) or not name:
                yield one, make

    def noted(*args: Any, may_try: bool = False) -> Any:
        *args, measured = args
        found, prediction = best_cut(*args, None if name else measured, may_try=may_try)
        made.append((prediction.cut, prediction.makespan_s))
        return found, prediction

    with patch.object(cuts, "_cuts", only), patch.object(graphs, "best_cut", noted):
        yield


if __name__ == "__main__":
    main()
