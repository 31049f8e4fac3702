"""Run programs on all sides, in rounds, and yield a row for each run.

A seed gives the order of the sides in each round. Answers are compared after the clock has stopped. A wrong
answer, a hang, an exception or a task that ran twice makes a run broken.
"""

from __future__ import annotations

import pickle
import uuid
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from ferroflow_dask.bench.machine import stamp
from ferroflow_dask.bench.public.base import SKIPPED, Options, Program, Suite, programs_of
from ferroflow_dask.bench.public.host import AUTO, Outcome, Place
from ferroflow_dask.bench.public.policies import STOCK
from ferroflow_dask.bench.public.sides import FEWER, LONG_S, Anchors, Rules, Sides
from ferroflow_dask.bench.schema import OK, BenchRecord, identity_of, written


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
        own = replace(rules, place=_place_of(suite, rules.place))
        with ExitStack() as stack:
            sides: Sides | None = None
            anchors = stack.enter_context(Anchors(suite, options, own.timeout_s))
            for program in programs_of(suite, options):
                runs = Runs(program, own, invocation, done)
                if program.skipped:
                    yield from runs.skipped()
                if program.skipped or not runs.are_left():
                    continue
                step(f"{suite.name} {program.name} · start")
                if sides is None:
                    sides = stack.enter_context(Sides([suite], options, own))
                elif own.is_new_for_each:
                    sides.renew()
                yield from runs.make(sides, step)
                for name in program.anchors:
                    step(f"{suite.name} {program.name} · {name}")
                    yield from runs.anchor(name, anchors, options)
        if not options.only:
            yield from _others(suite, options, own, invocation, done)


def _place_of(suite: Suite, place: Place) -> Place:
    """Return the place with the settings and the limit of the suite."""
    limit = place.memory_limit
    if limit == AUTO and suite.memory_limit:
        limit = suite.memory_limit
    return replace(place, memory_limit=limit, settings=suite.settings)


def _others(
    suite: Suite, options: Options, rules: Rules, invocation: str, done: Collection[str]
) -> Iterator[BenchRecord]:
    """Yield the rows of runs that the suite makes by itself, with other schedulers."""
    for other in suite.others(options):
        program = Program(suite=suite.name, name=other.program, source=suite.source, run=_never)
        own = replace(rules, place=replace(rules.place, workers=other.workers))
        row = Runs(program, own, invocation, done).row(
            other.by, 0, Outcome(other.seconds, {"worker_cpu_s": other.cpu_s}, other.status)
        )
        row = replace(row, lowering=other.way, cluster=other.cluster)
        if identity_of(row) not in done:
            yield row


def _never(*_: object) -> None:
    raise AssertionError("runs of other schedulers are made by their suite")


class Runs:
    """The runs of one program on all sides."""

    def __init__(self, program: Program, rules: Rules, invocation: str, done: Collection[str]) -> None:
        self._program, self._rules = program, rules
        self._invocation, self._done = invocation, done
        self._expected: Any = None
        self._is_known = False
        self._repeats = 0  # tasks that stock Dask has started twice

    def are_left(self) -> bool:
        """Return whether a run is missing; rounds that a long program does not need may be."""
        rounds = range(min(self._rules.rounds, FEWER))
        runs = [(n, False) for n in rounds] + [(0, True)] * self._rules.is_new_for_each
        return any(self._is_left(name, n, is_first=new) for name in self._rules.sides for n, new in runs)

    def _is_left(self, name: str, n: int, *, is_first: bool = False) -> bool:
        return written(self._facts(name, n, is_first)) not in self._done

    def skipped(self) -> Iterator[BenchRecord]:
        """Yield a row with the reason why the program does not run."""
        if self._is_left(STOCK, 0):
            yield self.row(STOCK, 0, Outcome(0.0, {}, f"{SKIPPED}{self._program.skipped}"))

    def anchor(self, name: str, anchors: Anchors, options: Options) -> Iterator[BenchRecord]:
        """Yield the rows of the same computation by other means, without a cluster."""
        for n in range(min(self._rules.rounds, FEWER) if options.is_full else 1):
            if self._is_left(name, n):
                outcome = anchors.run(self._program, name)
                yield self.row(name, n, self._judged(name, outcome, 0))

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
            row = self._measured(sides, name, 0, is_first=True)
            if row.status.startswith(SKIPPED):
                yield self.row(name, 0, Outcome(0.0, {}, row.status))
                return
            longest_s = max(longest_s, row.makespan_s)
            is_wanted = self._rules.is_new_for_each and self._is_left(name, 0, is_first=True)
            if is_wanted or row.status != OK:
                yield row
        rounds = min(self._rules.rounds, FEWER) if longest_s > LONG_S else self._rules.rounds
        for n in range(rounds):
            for name in self._order(n):
                if self._is_left(name, n):
                    step(f"{self._program.suite} {self._program.name} · {name} · {n + 1} of {rounds}")
                    yield self._measured(sides, name, n, is_first=False)

    def _facts(self, name: str, n: int, is_first: bool) -> dict[str, Any]:
        place, jobs = self._rules.place, self._rules.jobs
        return {
            "workload": self._program.name,
            "arguments": dict(self._program.sizes),
            "policy": name,
            "lowering": "",
            "costs": "unknown" if is_first else "learned",
            "workers": place.workers,
            "threads_per_worker": place.threads,
            "processes": True,
            "cluster": "slurm" if jobs else "separate" if place.is_separate else "local",
            "section": jobs.section if jobs else "",
            "tls": bool(jobs and jobs.is_encrypted),
            "fresh": is_first,
            "seed": self._rules.seed,
            "repetition": n,
        }

    def _measured(self, sides: Sides, name: str, n: int, *, is_first: bool) -> BenchRecord:
        outcome = sides.run(name, self._program, self._rules.seed)
        seen = dict(outcome.seen)
        if (busy_s := seen.pop("busy_s", None)) is not None and outcome.seconds:
            place = self._rules.place
            available_s = outcome.seconds * place.workers * place.threads
            seen["idle_fraction"] = max(0.0, 1 - busy_s / available_s)
        outcome = self._judged(name, replace(outcome, seen=seen), seen.pop("repeated", 0))
        return self.row(name, n, outcome, is_first=is_first)

    def row(self, name: str, n: int, outcome: Outcome, *, is_first: bool = False) -> BenchRecord:
        """Return the row of a run."""
        bound_s = outcome.seen.get("bound_s")
        return BenchRecord(
            **self._facts(name, n, is_first),
            suite=self._program.suite,
            source=self._program.source,
            invocation=self._invocation,
            makespan_s=outcome.seconds,
            efficiency=bound_s / outcome.seconds if bound_s and outcome.status == OK else None,
            status=outcome.status,
            **{"ops": outcome.seen.get("tasks", 0), "executed": 0, **outcome.seen},
            **stamp(),
        )

    def _judged(self, name: str, outcome: Outcome, repeats: int) -> Outcome:
        """Return the outcome of a run with its final status."""
        if outcome.status != OK:
            return outcome
        if name == STOCK:
            self._repeats = max(self._repeats, repeats)
        elif repeats and not self._repeats:
            return replace(outcome, status=f"tasks that ran twice: {repeats}")
        assert outcome.answer is not None
        answer = pickle.loads(outcome.answer)
        if not self._is_known:
            self._expected, self._is_known = answer, True
        if self._program.fields is not None:
            outcome = replace(outcome, seen={**outcome.seen, **self._program.fields(answer)})
        try:
            problem = self._program.differs(answer, self._expected)
        except Exception as error:  # noqa: BLE001 -- an answer that cannot be compared is wrong
            problem = f"{type(error).__name__}: {error}"
        return replace(outcome, status=f"wrong answer: {problem}") if problem else outcome
