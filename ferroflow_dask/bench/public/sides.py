"""Sides of a comparison: each is a process group with a cluster of its own, stopped between its turns."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

from ferroflow_dask.bench.public.base import Options, Program, Suite
from ferroflow_dask.bench.public.host import Outcome, Place, plugin, serve, serve_anchors
from ferroflow_dask.bench.public.jobs import Jobs, serve_on_jobs
from ferroflow_dask.bench.public.policies import AGAIN, OURS, STOCK, Settings, SideOf, sides_of
from ferroflow_dask.bench.public.probe import cpu_seconds
from ferroflow_dask.exceptions import ClusterError

#: The sides, by the names that policies have in rows.
SIDES: Mapping[str, SideOf] = sides_of((STOCK, AGAIN, OURS))
#: Rounds of a program, and of one with a run that takes longer than `LONG_S` [s].
ROUNDS, FEWER, LONG_S = 9, 3, 10.0
#: Time that a cluster may take to start [s], and processes to end [s].
_START_S, _END_S = 120.0, 10.0
#: Kills the process group of its argument for a line of the runner. If its input ends without a line, the
#: runner was killed. Then it also kills the process, which may have no group yet. A stopped side cannot.
_GUARD = 'read -r _ || kill -s KILL "$0"; kill -s KILL -- "-$0"'


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
    sides : mapping of str to callable or Settings
        Functions that prepare each side, settings of the plugin, None for stock Dask; by name.
    jobs : Jobs, optional
        Clusters of jobs instead of local ones.
    """

    place: Place = field(default_factory=Place)
    rounds: int = ROUNDS
    is_new_for_each: bool = True
    timeout_s: float = 300.0
    seed: int = 0
    sides: Mapping[str, SideOf] = field(default_factory=lambda: dict(SIDES))
    jobs: Jobs | None = None

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
    jobs : Jobs, optional
        Where the cluster is, if it is not a local one.
    """

    def __init__(self, name: str, start: Callable[[Any], None], jobs: Jobs | None = None) -> None:
        self.name = name
        self._jobs = jobs
        self._waits = False  # for the next request
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=start, args=(theirs,))
        self._process.start()
        theirs.close()
        # In a session of its own, so that the signals of a terminal do not end it.
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, str(self.group)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the group may have no process any more
            start_new_session=True,
        )

    def wait_until_ready(self) -> None:
        """Wait for the cluster, then stop the process group.

        Raises
        ------
        ClusterError
            The cluster did not start.
        """
        start_s = _START_S if self._jobs is None else self._jobs.start_s + _END_S
        if isinstance(answer := self.answer(start_s), Outcome):
            raise ClusterError(f"the cluster of {self.name} did not start: {answer.status}")
        self._waits = True
        self._signal(signal.SIGSTOP)

    @property
    def group(self) -> int:
        """The process group."""
        assert self._process.pid is not None
        return self._process.pid

    def run(self, request: tuple[str | int, ...], timeout_s: float) -> Outcome:
        """Run a program in this side's turn; a side that hangs or dies is ended."""
        self._signal(signal.SIGCONT)
        self._waits = False
        self._connection.send(request)
        outcome: Outcome = self.answer(timeout_s)
        if outcome.is_clean:
            self._waits = True
            self._signal(signal.SIGSTOP)
        else:
            self.end(is_hung=not outcome.seen and outcome.seconds >= timeout_s)
        return outcome

    def answer(self, timeout_s: float) -> Any:
        """Return the next message of the process, or the failure as an outcome."""
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

    def _leave(self) -> None:
        with suppress(OSError):
            self._connection.send(None)

    def end(self, *, is_hung: bool = False) -> None:
        """End the cluster and the process, by force if they hang or do not end."""
        self._signal(signal.SIGCONT)
        try:
            self._ask_to_end(is_hung=is_hung)
        finally:  # a second signal to this process ends the wait, not the duty
            self._kill()
            self._process.join(_END_S)
            self._connection.close()

    def _ask_to_end(self, *, is_hung: bool) -> None:
        """Wait for a while until the process has ended by itself."""
        if self._jobs is not None:
            # A signal ends a program that hangs, so that its jobs are cancelled. It can miss a process that
            # goes on just now: another thread takes it, and the main thread is back in its system call.
            if self._waits:
                self._leave()
            elif self._process.is_alive():
                os.kill(self.group, signal.SIGTERM)
            self._process.join(self._jobs.end_s)
        elif not is_hung:
            self._leave()
            self._process.join(_END_S)

    def _kill(self) -> None:
        """Kill the process group by its guard; a second call does nothing."""
        assert self._guard.stdin is not None
        if not self._guard.stdin.closed:
            with suppress(BrokenPipeError):
                self._guard.stdin.write(b"\n")
                self._guard.stdin.close()
            self._guard.wait()


class Sides:
    """The sides of some programs; a side that was ended is started again for its next turn."""

    def __init__(self, suites: Sequence[Suite], options: Options, rules: Rules) -> None:
        self._start = partial(_serve, tuple(suites), options, rules)
        self._rules = rules
        self._sides: dict[str, Side] = {}

    def __enter__(self) -> Sides:
        try:
            self.renew()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:  # all, even if a second signal arrives while one ends
            for side in self._sides.values():
                stack.callback(side.end)
        self._sides.clear()

    def renew(self) -> None:
        """Start all sides anew, each with a new cluster."""
        self.__exit__()
        self._begin(self._rules.sides)

    def _begin(self, names: Collection[str]) -> None:
        for name in names:
            self._sides[name] = Side(name, partial(self._start, name), self._rules.jobs)
        for name in names:
            self._sides[name].wait_until_ready()

    def run(self, name: str, program: Program, seed: int) -> Outcome:
        """Run a program on a side; a run that breaks ends the side's cluster."""
        if name not in self._sides:
            self._begin([name])
        side, others = self._sides[name], [one for one in self._sides.values() if one.name != name]
        before = sum(cpu_seconds(other.group) for other in others)
        request = (program.suite, program.name, seed)
        outcome = side.run(request, max(self._rules.timeout_s, program.timeout_s))
        others_s = sum(cpu_seconds(other.group) for other in others) - before
        if not outcome.is_clean:
            del self._sides[name]
        return replace(outcome, seen={**outcome.seen, "others_cpu_s": max(0.0, others_s)})


def _serve(suites: Sequence[Suite], options: Options, rules: Rules, name: str, connection: Any) -> None:
    side = rules.sides[name]
    if isinstance(side, Settings):
        side.apply()
        side = plugin
    if rules.jobs is None:
        serve(connection, suites, options, rules.place, side)
    else:
        serve_on_jobs(connection, suites, options, rules.jobs, side)


class Anchors:
    """A process that runs computations of a suite without a cluster; after a failure it is another one."""

    def __init__(self, suite: Suite, options: Options, timeout_s: float) -> None:
        self._start = partial(serve_anchors, suite, options)
        self._timeout_s = timeout_s
        self._side: Side | None = None

    def __enter__(self) -> Anchors:
        return self

    def __exit__(self, *_: object) -> None:
        if self._side is not None:
            self._side.end()

    def run(self, program: Program, name: str) -> Outcome:
        """Run an anchor of a program."""
        if self._side is None:
            self._side = Side("anchors", self._start)
            self._side.wait_until_ready()
        outcome = self._side.run((program.name, name), self._timeout_s)
        if not outcome.is_clean:  # it was ended
            self._side = None
        return outcome
