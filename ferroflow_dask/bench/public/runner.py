"""Run programs on all sides, in rounds, and yield a row for each run.

Each side has a cluster of its own, started as a user starts it. The plugin's side calls `install` and does
nothing else. A seed gives the order of the sides in each round. Answers are compared after the clock has
stopped. A wrong answer, a hang, an exception or a task that ran twice makes a run broken.
"""

from __future__ import annotations

import os
import pickle
import signal
import uuid
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np

from ferroflow_dask.bench.machine import stamp
from ferroflow_dask.bench.public.base import Options, Program, Suite, programs_of
from ferroflow_dask.bench.public.host import Outcome, Place, Prepare, plugin, serve
from ferroflow_dask.bench.public.probe import cpu_seconds
from ferroflow_dask.bench.schema import OK, BenchRecord, written
from ferroflow_dask.exceptions import ClusterError

#: The sides, by the names that policies have in rows.
SIDES: Mapping[str, Prepare | None] = {"dask": None, "dask-again": None, "ferroflow": plugin}
#: Rounds of a program, and of one with a run that takes longer than `LONG_S` [s].
ROUNDS, FEWER, LONG_S = 9, 3, 10.0
#: Time that a cluster may take to start [s], and processes to end [s].
_START_S, _END_S = 120.0, 10.0


@dataclass(frozen=True, slots=True)
class Rules:
    """How programs are run.

    Parameters
    ----------
    place : Place
    rounds : int
        Of each program; at most `FEWER` if a run takes longer than `LONG_S`.
    is_new_for_each : bool
        Whether each program gets new clusters, whose first runs are rows too. Otherwise the programs of a
        suite share their clusters, and the first run of each is not measured.
    timeout_s : float
        After which a run counts as hung [s].
    seed : int
    sides : mapping of str to callable
        Functions that prepare each side, None for stock Dask; by name.
    """

    place: Place = field(default_factory=Place)
    rounds: int = ROUNDS
    is_new_for_each: bool = True
    timeout_s: float = 300.0
    seed: int = 0
    sides: Mapping[str, Prepare | None] = field(default_factory=lambda: dict(SIDES))

    @property
    def n_runs(self) -> int:
        """Rows of a program at most."""
        return len(self.sides) * (self.rounds + self.is_new_for_each)


class Side:
    """A process that has a cluster and runs programs; stopped between its turns.

    Parameters
    ----------
    name : str
    start : callable
        Takes a connection; the function of the process.
    """

    def __init__(self, name: str, start: Callable[[Any], None]) -> None:
        self.name = name
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=start, args=(theirs,))
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        """Wait for the cluster, then stop the process group.

        Raises
        ------
        ClusterError
            The cluster did not start.
        """
        if isinstance(answer := self._answer(_START_S), Outcome):
            raise ClusterError(f"the cluster of {self.name} did not start: {answer.status}")
        self._signal(signal.SIGSTOP)

    @property
    def group(self) -> int:
        """The process group."""
        assert self._process.pid is not None
        return self._process.pid

    def run(self, program: Program, seed: int, timeout_s: float) -> Outcome:
        """Run a program in this side's turn; a side that hangs or dies is ended."""
        self._signal(signal.SIGCONT)
        self._connection.send((program.suite, program.name, seed))
        outcome: Outcome = self._answer(timeout_s)
        if outcome.status == OK:
            self._signal(signal.SIGSTOP)
        else:
            self.end(is_hung=not outcome.seen and outcome.seconds >= timeout_s)
        return outcome

    def _answer(self, timeout_s: float) -> Any:
        try:
            if self._connection.poll(timeout_s):
                return self._connection.recv()
        except (EOFError, OSError):
            self._process.join(_END_S)
            return Outcome(0.0, {}, f"the process of the client ended with code {self._process.exitcode}")
        return Outcome(timeout_s, {}, f"no result within {timeout_s:g} s")

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.group, number)

    def end(self, *, is_hung: bool = False) -> None:
        """End the cluster and the process, by force if they hang or do not end."""
        self._signal(signal.SIGCONT)
        if not is_hung:
            with suppress(OSError):
                self._connection.send(None)
            self._process.join(_END_S)
        self._signal(signal.SIGKILL)
        self._process.join(_END_S)
        self._connection.close()


class Sides:
    """The sides of some programs; a side that was ended is started again for its next turn."""

    def __init__(self, suites: Sequence[Suite], options: Options, rules: Rules) -> None:
        self._start = partial(_serve, tuple(suites), options, rules.place)
        self._rules = rules
        self._sides: dict[str, Side] = {}

    def __enter__(self) -> Sides:
        self.renew()
        return self

    def __exit__(self, *_: object) -> None:
        for side in self._sides.values():
            side.end()
        self._sides.clear()

    def renew(self) -> None:
        """Start all sides anew, each with a new cluster."""
        self.__exit__()
        self._fill()

    def _fill(self) -> None:
        new = [
            Side(name, partial(self._start, prepare))
            for name, prepare in self._rules.sides.items()
            if name not in self._sides
        ]
        for side in new:
            self._sides[side.name] = side
            side.wait_until_ready()

    def run(self, name: str, program: Program, seed: int) -> Outcome:
        """Run a program on a side; a run that breaks ends the side's cluster."""
        self._fill()
        side, others = self._sides[name], [one for one in self._sides.values() if one.name != name]
        before = sum(cpu_seconds(other.group) for other in others)
        outcome = side.run(program, seed, self._rules.timeout_s)
        others_s = sum(cpu_seconds(other.group) for other in others) - before
        if outcome.status != OK:
            del self._sides[name]
        return replace(outcome, seen={**outcome.seen, "others_cpu_s": max(0.0, others_s)})


def _serve(
    suites: Sequence[Suite], options: Options, place: Place, prepare: Prepare | None, connection: Any
) -> None:
    serve(connection, suites, options, place, prepare)


def run_suites(
    suites: Sequence[Suite],
    options: Options,
    rules: Rules,
    *,
    done: Collection[str] = (),
    on_step: Callable[[str], object] | None = None,
) -> Iterator[BenchRecord]:
    """Yield the row of each run as soon as it is made.

    Parameters
    ----------
    suites : sequence of Suite
    options : Options
    rules : Rules
    done : collection of str
        Runs to leave out, as `identity` of their facts.
    on_step : callable, optional
        Takes a line about the next run.
    """
    step = on_step or (lambda _: None)
    invocation = uuid.uuid4().hex
    for suite in suites:
        limit = getattr(suite, "memory_limit", rules.place.memory_limit)
        own = replace(rules, place=replace(rules.place, memory_limit=limit))
        with ExitStack() as stack:
            sides: Sides | None = None
            for program in programs_of(suite, options):
                runs = _Runs(program, suite, own, invocation, done)
                if program.skipped or not runs.are_left():
                    continue
                step(f"{suite.name} {program.name} · start")
                if sides is None:
                    sides = stack.enter_context(Sides([suite], options, own))
                elif own.is_new_for_each:
                    sides.renew()
                yield from runs.make(sides, step)


class _Runs:
    """The runs of one program on all sides."""

    def __init__(
        self, program: Program, suite: Suite, rules: Rules, invocation: str, done: Collection[str]
    ) -> None:
        self._program, self._suite, self._rules = program, suite, rules
        self._invocation, self._done = invocation, done
        self._expected: Any = None
        self._is_known = False
        self._repeats = 0  # tasks that stock Dask has started twice

    def are_left(self) -> bool:
        """Return whether a run is missing; rounds that a long program does not need may be."""
        names = self._rules.sides
        rounds = range(min(self._rules.rounds, FEWER))
        return any(written(self._facts(name, n, False)) not in self._done for name in names for n in rounds)

    def _order(self, n: int) -> list[str]:
        # With the program's name, else all programs would have the same order.
        rng = np.random.default_rng([self._rules.seed, n, zlib.crc32(self._program.name.encode())])
        return [str(name) for name in rng.permutation(list(self._rules.sides))]

    def make(self, sides: Sides, step: Callable[[str], object]) -> Iterator[BenchRecord]:
        """Make the first run of each side, then the rounds."""
        if self._program.expected is not None:
            self._expected, self._is_known = self._program.expected(), True
        longest_s = 0.0
        for name in self._rules.sides:  # stock Dask comes first, since its answer may be the expected one
            row = self._row(sides, name, 0, is_first=True)
            longest_s = max(longest_s, row.makespan_s)
            is_missing = written(self._facts(name, 0, True)) not in self._done
            if (self._rules.is_new_for_each and is_missing) or row.status != OK:
                yield row
        rounds = min(self._rules.rounds, FEWER) if longest_s > LONG_S else self._rules.rounds
        for n in range(rounds):
            for name in self._order(n):
                if written(self._facts(name, n, False)) not in self._done:
                    step(f"{self._program.suite} {self._program.name} · {name} · {n + 1} of {rounds}")
                    yield self._row(sides, name, n, is_first=False)

    def _facts(self, name: str, n: int, is_first: bool) -> dict[str, Any]:
        place = self._rules.place
        return {
            "workload": self._program.name,
            "arguments": dict(self._program.sizes),
            "policy": name,
            "lowering": "",
            "costs": "unknown" if is_first else "learned",
            "workers": place.workers,
            "threads_per_worker": place.threads,
            "processes": True,
            "cluster": "separate" if place.is_separate else "local",
            "section": "",
            "tls": False,
            "fresh": is_first,
            "seed": self._rules.seed,
            "repetition": n,
        }

    def _row(self, sides: Sides, name: str, n: int, *, is_first: bool) -> BenchRecord:
        outcome = sides.run(name, self._program, self._rules.seed)
        seen = dict(outcome.seen)
        repeats = seen.pop("repeated", 0)
        status = outcome.status
        if status == OK:
            status = self._verdict(name, outcome, repeats)
        tasks = seen.get("tasks", 0)
        return BenchRecord(
            **self._facts(name, n, is_first),
            suite=self._program.suite,
            source=self._program.source,
            invocation=self._invocation,
            makespan_s=outcome.seconds,
            ops=tasks,
            status=status,
            **{"executed": 0, **seen},
            **stamp(),
        )

    def _verdict(self, name: str, outcome: Outcome, repeats: int) -> str:
        if name == next(iter(self._rules.sides)):
            self._repeats = max(self._repeats, repeats)
        elif repeats and not self._repeats:
            return f"tasks that ran twice: {repeats}"
        assert outcome.answer is not None
        answer = pickle.loads(outcome.answer)
        if not self._is_known:
            self._expected, self._is_known = answer, True
        problem = self._program.differs(answer, self._expected)
        return f"wrong answer: {problem}" if problem else OK
