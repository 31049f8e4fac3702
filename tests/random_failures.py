"""Random programs of which some tasks fail, on stock clusters and with bundles: clients see the same.

`python tests/random_failures.py 500` runs so many programs and prints those that differ.
"""

from __future__ import annotations

import io
import logging
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dask
from distributed import wait
from matrix.row import Row, difference
from matrix.tasks import PlannedError, error_of, note, runs
from matrix.trial import BUNDLES, STOCK, Trial, Variant, all_short
from random_divisions import random_names, random_reads

#: How tasks fail.
_KINDS = ("plain", "with a note", "with a cause", "in a call", "of Python")
_LOGGED = ("Key:", "State:", "Exception:")


def step(key: str, folder: str, kind: str | None, *values: int) -> int:
    """Return the sum of the values and one more, or fail; the run is in a file."""
    note(folder, key)
    if kind == "with a note":
        error = ValueError(key)
        error.add_note(f"a note of {key}")
        raise error
    if kind == "with a cause":
        try:
            _fail_within(key, 0)
        except PlannedError as cause:
            raise RuntimeError(key, 3) from cause
    if kind == "of Python":
        raise KeyError(key)
    if kind is not None:
        _fail_within(key, 3 if kind == "in a call" else 0)
    return sum(values) + 1


def _fail_within(key: str, depth: int) -> None:
    if depth:
        _fail_within(key, depth - 1)
    raise PlannedError(key)


class FailingProgram:
    """Random graph with one to four failing tasks; the program of a `Row`."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        n, depth = rng.randint(20, 80), rng.choice((1, 3, 80))
        self._names = random_names(rng, n, seed)
        self._read = random_reads(rng, n, depth)
        self._kinds = {i: rng.choice(_KINDS) for i in rng.sample(range(n), rng.randint(1, 4))}
        kept, inner = rng.choice((0.0, 0.3, 1.0)), {j for read in self._read for j in read}
        self._wanted = [i for i in range(n) if i not in inner or rng.random() < kept]

    def __call__(self, trial: Trial) -> Any:
        """Return what the client sees of each output, and what workers log."""
        with _log() as log:
            futures = trial.client.compute(self._outputs(trial.folder))
            wait(futures)
        ran = runs(trial.folder)
        needed = self._needed()
        found: dict[str, Any] = {"not once": [key for key, n in ran.items() if n > 1]}
        for future, i in zip(futures, self._wanted, strict=True):
            failing = {self._names[j] for j in needed[i] & self._kinds.keys()}
            found[future.key] = self._seen(trial, future, failing)
            if future.status == "finished":
                found["not once"] += [self._names[j] for j in needed[i] if self._names[j] not in ran]
        # Whether a task has run before the error of another one releases it is chance.
        if len(self._kinds) == 1:
            found["log"] = sorted(line for line in log.getvalue().splitlines() if line.startswith(_LOGGED))
        return found

    def _outputs(self, folder: str) -> list[Any]:
        tasks: list[Any] = []
        for i, (name, read) in enumerate(zip(self._names, self._read, strict=True)):
            values = [tasks[j] for j in read]
            arguments = name, folder, self._kinds.get(i), *values
            tasks.append(dask.delayed(step)(*arguments, dask_key_name=name))
        return [tasks[i] for i in self._wanted]

    def _needed(self) -> list[set[int]]:
        """Return for each task itself and the tasks that it depends on."""
        needed: list[set[int]] = []
        for i, read in enumerate(self._read):
            needed.append({i}.union(*(needed[j] for j in read)))
        return needed

    @staticmethod
    def _seen(trial: Trial, future: Any, failing: set[str]) -> Any:
        if future.status != "error":
            return future.status, future.result()
        error = future.exception()
        blamed = str(trial.scheduler.tasks[future.key].exception_blame.key)
        if len(failing) > 1:  # whose error comes first is chance
            return {blamed, error.args[0]} <= failing
        frames = [frame.name for frame in traceback.extract_tb(future.traceback())]
        return error_of(error), frames, blamed


@contextmanager
def _log() -> Iterator[io.StringIO]:
    """Catch the lines that workers log."""
    stream = io.StringIO()
    handler, logger = logging.StreamHandler(stream), logging.getLogger("distributed.worker")
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        yield stream
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


def compare(seeds: range, report: Callable[[str], object] = lambda _: None) -> tuple[list[str], float]:
    """Run programs; return a line for each that differs, and the share of tasks that were in bundles."""
    wrong, n_tasks, n_bundled = [], 0, 0
    with all_short():
        stock, ours = Variant(STOCK), Variant(BUNDLES)
        for seed in seeds:
            row = Row(f"program {seed}", "B", FailingProgram(seed), "fails")
            expected, found = stock.run(row), ours.run(row)
            n_tasks, n_bundled = n_tasks + expected.n_tasks, n_bundled + len(found.bundled)
            differs = difference(expected.observed, found.observed)
            if differs is not None:
                wrong.append(f"{row.name}: {differs}")
                report(wrong[-1])
        stock.close()
        ours.close()
    return wrong, n_bundled / n_tasks


if __name__ == "__main__":
    started = time.perf_counter()
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    faults, share = compare(range(first, first + int(sys.argv[1])), report=print)
    print(f"{len(faults)} differ, {share:.0%} in bundles, {time.perf_counter() - started:.0f} s")
