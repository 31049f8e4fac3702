"""Programs in which tasks wait for other tasks of the same graph: run on a stock cluster and on ours.

`python tests/partner_programs.py --select "file map" --timeout 10` prints for each selected program whether
it ends, and its seconds. `--list` prints the programs; `--stock` and `--plugin` run one of the two clusters.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import numpy as np
from assume_short import assume_short
from distributed import Client, LocalCluster, wait
from partners import PARTNERS, Work

import ferroflow_dask
from ferroflow_dask.scheduler import extension_on

N_TASKS = 60
# Programs


def _delayed(client: Client, work: Work) -> list[Any]:
    function = dask.delayed(work, pure=True, traverse=False)
    return list(client.compute([function(i) for i in range(N_TASKS)]))


def _bag(client: Client, work: Work) -> list[Any]:
    return [client.compute(db.from_sequence(range(N_TASKS), npartitions=N_TASKS).map(work))]


def _array(client: Client, work: Work) -> list[Any]:
    x = da.arange(N_TASKS, chunks=1)
    return [client.compute(x.map_blocks(work, dtype=x.dtype, meta=x._meta))]


#: Ways to submit a program; each returns futures of all results.
WAYS: dict[str, Callable[[Client, Work], list[Any]]] = {
    "map": lambda client, work: list(client.map(work, range(N_TASKS))),
    "delayed": _delayed,
    "bag": _bag,
    "array": _array,
}


@dataclass(frozen=True)
class Program:
    """Tasks of which some wait for others.

    Parameters
    ----------
    partner, way : str
    ms : float
        Duration of tasks that do not wait [ms].
    at : str
        Place of the waiting tasks in the graph: `first`, `middle` or `last`. They wait for all that do not
        wait. Or `pairs`: each even task waits for the next one.
    n_waiting : int
    workers, threads : int
    """

    partner: str
    way: str
    ms: float
    at: str
    n_waiting: int
    workers: int
    threads: int

    @property
    def name(self) -> str:
        """Words by which the program is selected."""
        shape = f"{self.workers}x{self.threads}"
        return f"{self.partner} {self.way} {self.ms:g}ms {self.at} {self.n_waiting} {shape}"

    @property
    def waits(self) -> dict[int, tuple[int, ...]]:
        """The tasks for which each waiting task waits."""
        if self.at == "pairs":
            return {i: (i + 1,) for i in range(0, N_TASKS, 2)}
        start = {"first": 0, "middle": N_TASKS // 2, "last": N_TASKS - self.n_waiting}[self.at]
        waiting = range(start, start + self.n_waiting)
        return dict.fromkeys(waiting, tuple(i for i in range(N_TASKS) if i not in waiting))


_PLACES = [(at, n) for at in ("first", "middle", "last") for n in (1, 3)] + [("pairs", N_TASKS // 2)]
PROGRAMS: dict[str, Program] = {
    program.name: program
    for shape, partner, way, ms, place in itertools.product(
        ((4, 1), (2, 2)), PARTNERS, WAYS, (0, 0.1, 2), _PLACES
    )
    for program in [Program(partner, way, ms, *place, *shape)]
}


def selected(words: str) -> list[Program]:
    """Return the programs whose names have all words."""
    return [program for name, program in PROGRAMS.items() if set(words.split()) <= set(name.split())]


# Running


@dataclass(frozen=True)
class Outcome:
    """End of a program: whether it came in time, the seconds, and the number of bundles."""

    ends: bool
    seconds: float
    n_bundles: int


def run(program: Program, client: Client, limit_s: float, folder: Path) -> Outcome:
    """Run a program in an empty folder. If it hangs, its waiting tasks raise `GivenUpError`."""
    meeting = PARTNERS[program.partner](folder, program.waits)
    meeting.prepare(client)
    n_before, start_s = _n_bundles(client), time.perf_counter()
    futures = WAYS[program.way](client, Work(meeting, program.ms / 1e3))
    ends = True
    try:
        wait(futures, timeout=limit_s)
    except TimeoutError:
        ends = False
        (folder / "given up").touch()
    seconds = time.perf_counter() - start_s
    if ends:
        values = client.gather(futures)
        assert np.array_equal(np.ravel(values), range(N_TASKS)), values
    return Outcome(ends, seconds, _n_bundles(client) - n_before)


def _n_bundles(client: Client) -> int:
    extension = extension_on(client.cluster.scheduler)
    return extension.graphs.bundles.counts["created"] if extension is not None else 0


@contextmanager
def cluster(workers: int, threads: int, *, with_ferroflow: bool, processes: bool = False) -> Iterator[Client]:
    """Start a cluster. With our plugin, tasks of all prefixes are taken for short, so they are bundled."""
    with (
        LocalCluster(
            n_workers=workers,
            threads_per_worker=threads,
            processes=processes,
            dashboard_address=":0",
            silence_logs=logging.CRITICAL,  # each GivenUpError is logged as a warning
        ) as local,
        Client(local) as client,
    ):
        if with_ferroflow:
            assume_short()
            ferroflow_dask.install(client)
        yield client


def run_all(
    programs: Collection[Program], limit_s: float, *, with_ferroflow: bool, processes: bool = False
) -> Iterator[tuple[Program, Outcome]]:
    """Run programs one after the other; yield their outcomes.

    A program that hangs ends its cluster, and the next program gets a new one.
    """
    left = list(reversed(programs))
    with tempfile.TemporaryDirectory() as root:
        while left:
            shape = left[-1].workers, left[-1].threads
            with cluster(*shape, with_ferroflow=with_ferroflow, processes=processes) as client:
                ends = True
                while ends and left and (left[-1].workers, left[-1].threads) == shape:
                    program = left.pop()
                    folder = tempfile.mkdtemp(prefix=f"{program.partner.replace('-', '_')}_", dir=root)
                    outcome = run(program, client, limit_s, Path(folder))
                    ends = outcome.ends
                    yield program, outcome


def main() -> None:
    """Run the selected programs and print a row for each; exit with 1 if one hangs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stock", action="store_true", help="only Dask's own scheduling")
    parser.add_argument("--plugin", action="store_true", help="only our plugin")
    parser.add_argument("--select", default="", help="words that a program's name has")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds after which a program hangs")
    parser.add_argument("--processes", action="store_true", help="workers are processes")
    parser.add_argument("--list", action="store_true", help="print the names of the selected programs")
    options = parser.parse_args()
    programs = selected(options.select)
    if options.processes:
        programs = [program for program in programs if program.partner != "in-process"]
    if options.list:
        print(*(program.name for program in programs), sep="\n")
        return
    n_hanging = 0
    modes = [name for name in ("stock", "plugin") if getattr(options, name)] or ["stock", "plugin"]
    for mode in modes:
        rows = run_all(
            programs, options.timeout, with_ferroflow=mode == "plugin", processes=options.processes
        )
        for program, outcome in rows:
            n_hanging += not outcome.ends
            end = "ends " if outcome.ends else "HANGS"
            bundles = f" {outcome.n_bundles:3} bundles" if mode == "plugin" else ""
            print(f"{mode:6} {program.name:36} {end} {outcome.seconds:6.2f} s{bundles}", flush=True)
    print(f"{len(programs) * len(modes)} runs, {n_hanging} hang")
    sys.exit(n_hanging > 0)


if __name__ == "__main__":
    main()
