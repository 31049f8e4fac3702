"""A suite of small programs, for tests of public comparisons; the processes of sides import it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import cloudpickle
import dask
from dask import delayed
from distributed import Client

from ferroflow_dask.bench.public.base import Clock, Options, Other, Program, SkippedError, Suite


def sums(client: Client, clock: Clock) -> int:
    """Add numbers in a tree of tasks."""
    values = [delayed(abs)(n, dask_key_name=f"one-{n}") for n in range(60)]
    while len(values) > 1:
        values = [delayed(sum)(values[i : i + 4]) for i in range(0, len(values), 4)]
    return int(client.compute(values[0]).result())


def prepared(client: Client, clock: Clock) -> list[int]:
    """Start the clock after a preparation."""
    futures = client.map(abs, range(-8, 0))
    client.gather(futures)
    time.sleep(0.3)
    with clock:
        return list(client.gather(client.map(_next, futures)))


def _next(n: int) -> int:
    return n + 1


def skips_itself(client: Client, clock: Clock) -> None:
    """Find a reason not to run."""
    raise SkippedError("the moon is down")


def by_threads() -> int:
    """Return the answer of `sums`."""
    return sum(dask.compute(*[delayed(abs)(n) for n in range(60)], scheduler="threads"))


class SmallSuite:
    """Programs that take milliseconds."""

    name, source, needs = "small", "written here", ()

    def programs(self, options: Options) -> Sequence[Program]:
        """Return two programs that run, and two that do not."""
        common: dict[str, Any] = {"suite": self.name, "source": self.source}
        anchors = {"threads": lambda _: by_threads()}
        return [
            Program(name="sums", run=sums, expected=by_threads, anchors=anchors, **common),
            Program(name="prepared", run=prepared, sizes={"n": 8}, **common),
            Program(name="absent", run=prepared, skipped="it needs a moon", **common),
            Program(name="night", run=skips_itself, **common),
        ]

    def others(self, options: Options) -> Sequence[Other]:
        """Return a run of another scheduler."""
        return [Other(program="sums", by="pool", way="as usual", seconds=0.5, workers=options.workers)]


SUITE = SmallSuite()


class ChosenSuite:
    """One program of a suite; the processes of sides need not collect it, which takes seconds.

    Parameters
    ----------
    suite : Suite
    options : Options
    program : str, optional
        Its name; the first one that runs if left out.
    """

    needs = ()

    def __init__(self, suite: Suite, options: Options, program: str | None = None) -> None:
        self.name, self.source = suite.name, suite.source
        programs = [one for one in suite.programs(options) if not one.skipped]
        self._program = cloudpickle.dumps(next(one for one in programs if program in (None, one.name)))

    def programs(self, options: Options) -> Sequence[Program]:
        """Return the program."""
        return [cloudpickle.loads(self._program)]
