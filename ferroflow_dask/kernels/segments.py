"""Neighbouring ops of a plan as one onnxruntime session, from the second time on that the plan is run.

That saves what lies between their kernels, which for small ops is most of the time, and changes no bit of
their results: see `ort_provider.open_segment`. To open a session takes longer than to run its ops once, so
the first run of a plan goes op by op. It tells how the ops share the time of a session, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from zict import LRU

from ferroflow_dask.graph.nodes import Op

#: For an op the number of its kernel, of the values that it reads (-1 for none), of those that it makes, and
#: of those that nothing reads after it.
Step = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]

#: Computes a segment: takes its inputs and returns its outputs, in the order of `Segment`.
Session = Callable[[Sequence[Any]], list[Any]]

#: Plans that a process remembers. Their sessions hold no weights, which are inputs of them.
_KEPT = 64
_SHORTEST = 2

#: The provider whose sessions they are.
PROVIDER = "onnxruntime"


class Segment(NamedTuple):
    """Steps of a plan from `start` up to `stop`, what they read of others, and what others read of them."""

    start: int
    stop: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Member(NamedTuple):
    """What decides of a step which segment it may be part of.

    Parameters
    ----------
    joins : bool
        Whether it may be part of one.
    needs : bool
        Whether it is onnxruntime's anyway: there must be one in each segment.
    rank : str
        Of its results: `given` by what it is, or as its operands' are (`follows`), or `open` until it runs.
    reads_rank : bool
        Whether its operands' ranks must be known before it runs.
    """

    joins: bool
    needs: bool
    rank: str = "follows"
    reads_rank: bool = False


class Repeated:
    """A plan that this process has run before.

    Parameters
    ----------
    ops : sequence of Op
        One for each kernel.
    computed_by : sequence of str
        The provider that has computed each step.
    opsets : mapping of str to int
    steps : sequence of Step
    spent_s : sequence of float
        What each step took in the first run [s].
    """

    def __init__(
        self,
        ops: Sequence[Op],
        computed_by: Sequence[str],
        opsets: Mapping[str, int],
        steps: Sequence[Step],
        spent_s: Sequence[float],
    ) -> None:
        self._ops = ops
        self._opsets = dict(opsets)
        self._steps = steps
        self._spent_s = spent_s
        members = [_member(ops[step[0]], provider) for step, provider in zip(steps, computed_by, strict=True)]
        self._segments = {segment.start: segment for segment in segments_of(steps, members)}
        self._sessions: dict[Hashable, Session | None] = {}
        self._lock = threading.Lock()

    def run(self, at: int, values: list[Any]) -> Sequence[float] | None:
        """Compute the segment that begins with a step, if one does; return each step's part of its time.

        The values of the plan are read and its outputs written there. None where ops must run one by one:
        for values that onnxruntime does not take, and where an op fails, which it does by itself with
        its name.
        """
        segment = self._segments.get(at)
        if segment is None:
            return None
        inputs = [values[i] for i in segment.inputs]
        if not all(isinstance(value, np.ndarray | np.generic) for value in inputs):
            return None
        types = tuple((value.dtype, value.ndim) for value in inputs)
        with self._lock:
            key = (at, types)
            if key not in self._sessions:
                self._sessions[key] = self._open(segment, types)
            session = self._sessions[key]
        if session is None:
            return None
        try:
            found = session(inputs)
        except Exception:  # noqa: BLE001 -- whatever it is, the op that it comes from raises it again
            return None
        for i, value in zip(segment.outputs, found, strict=True):
            values[i] = value
        alone_s = self._spent_s[segment.start : segment.stop]
        total_s = sum(alone_s)
        return [each_s / total_s if total_s else 1 / len(alone_s) for each_s in alone_s]

    def _open(self, segment: Segment, types: Sequence[tuple[np.dtype[Any], int]]) -> Session | None:
        from ferroflow_dask.kernels.ort_provider import open_segment

        ops = []
        for kernel, inputs, outputs, _ in self._steps[segment.start : segment.stop]:
            names = tuple(map(_name, inputs)), tuple(map(_name, outputs))
            ops.append(replace(self._ops[kernel], inputs=names[0], outputs=names[1]))
        given = dict(zip(map(_name, segment.inputs), types, strict=True))
        return open_segment(ops, self._opsets, given, list(map(_name, segment.outputs)))


def _name(value: int) -> str:
    return f"v{value}" if value >= 0 else ""


def _member(op: Op, provider: str) -> Member:
    from ferroflow_dask.kernels.deviations import rank_of_results, reads_ranks
    from ferroflow_dask.kernels.ort_provider import may_join

    return Member(may_join(op, provider), provider == PROVIDER, rank_of_results(op), reads_ranks(op))


def segments_of(steps: Sequence[Step], members: Sequence[Member]) -> list[Segment]:
    """Return the longest runs of steps that can be sessions.

    One that must know its operands' ranks begins a segment where those made before it have an open one.

    Parameters
    ----------
    steps : sequence of Step
    members : sequence of Member
        One for each step.
    """
    found = []
    start = 0
    open_ranks: set[int] = set()  # of values that are made since the start
    for at in range(len(steps) + 1):
        is_member = at < len(steps) and members[at].joins
        if is_member:
            _, inputs, outputs, _ = steps[at]
            is_open = not open_ranks.isdisjoint(inputs)
            begins = is_open and members[at].reads_rank
        if not is_member or begins:
            run = steps[start:at]
            if len(run) >= _SHORTEST and any(member.needs for member in members[start:at]):
                found.append(_segment(start, at, run))
            start = at if is_member else at + 1
            open_ranks.clear()
            is_open = False
        if is_member and (members[at].rank == "open" or (is_open and members[at].rank == "follows")):
            open_ranks.update(outputs)
    return found


def _segment(start: int, stop: int, run: Sequence[Step]) -> Segment:
    made: dict[int, None] = {}
    read: dict[int, None] = {}
    gone: set[int] = set()
    for _, inputs, outputs, last_reads in run:
        read.update(dict.fromkeys(i for i in inputs if i >= 0 and i not in made))
        made.update(dict.fromkeys(i for i in outputs if i >= 0))
        gone.update(last_reads)
    return Segment(start, stop, tuple(read), tuple(i for i in made if i not in gone))


#: The plans that were run last, by what decides their results apart from their arguments.
plans: LRU[Hashable, Repeated] = LRU(_KEPT, {})
