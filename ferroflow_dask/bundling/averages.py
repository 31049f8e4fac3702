"""Learned averages of task prefixes, by the size of the data that a task handles."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from dask._task_spec import Alias, GraphNode
from dask.typing import Key

from ferroflow_dask.bundling.sequence import NO_WORK

#: Sizes below this are alike: the call takes longer than the data [B].
_SMALL_NBYTES = 2**14
#: Their class.
SMALL_CLASS = _SMALL_NBYTES.bit_length()
#: Assumed of a task that calls library functions only: duration without data [s], and data in a second [B/s].
_LIBRARY_S, _LIBRARY_RATE = 2e-4, 5e8
#: Bound on the ratio of a duration to one that was learned of another size.
_MOST_SCALED = 8.0


def size_class(size_nbytes: float) -> int:
    """Return the class of a task that handles some data: inputs and, if it is declared, the result [B]."""
    return max(int(size_nbytes).bit_length(), SMALL_CLASS)


class OfSize(Protocol):
    """Averages of tasks of about one size."""

    @property
    def size_nbytes(self) -> float:
        """Mean size of the data [B]."""


def nearest_size(by_size: Mapping[int, OfSize], size_nbytes: float) -> tuple[int, float]:
    """Return the class nearest to a size [B], and the ratio of the size to that of the class."""
    wanted = size_class(size_nbytes)
    nearest = min(by_size, key=lambda one: (abs(one - wanted), -one))
    return nearest, max(size_nbytes, _SMALL_NBYTES) / max(by_size[nearest].size_nbytes, _SMALL_NBYTES)


def scaled_s(duration_s: float, scale: float) -> float:
    """Return the duration of a task that handles `scale` times the data [s]."""
    return duration_s * min(max(scale, 1 / _MOST_SCALED), _MOST_SCALED)


def scaled_nbytes(nbytes: float, scale: float, size_nbytes: float) -> float:
    """Return the size of the result of a task that handles `scale` times the data [B].

    It is at most that of the data (`size_nbytes`), or as it was: some tasks make large results of any data,
    and those of a chain of them would grow without limit.
    """
    return min(scale * nbytes, max(nbytes, size_nbytes))


@dataclass(frozen=True, slots=True)
class Averages:
    """Learned averages of a task prefix.

    Parameters
    ----------
    duration_s : float
        Duration of a task [s]; that on free cores if threads share cores.
    nbytes : float
        Size of a result [B].
    most_nbytes : float
        Size of the largest result of late [B].
    size_nbytes : float
        Mean size of the data that a task handles: inputs and, if it is declared, the result [B]. Not used of
        averages of all sizes.
    by_size : mapping of int to Averages
        Those of tasks of about one size, by `size_class`; empty if sizes are unknown.
    core_share : float
        Part of their duration in which tasks run on a core. Not used if each thread has a core.
    """

    duration_s: float
    nbytes: float = 0.0
    most_nbytes: float = 0.0
    size_nbytes: float = 0.0
    by_size: Mapping[int, Averages] = field(default_factory=dict)
    core_share: float = 1.0

    def of_size(self, size_nbytes: float, declared_nbytes: float = 0.0) -> Averages:
        """Return the averages of tasks that handle some data.

        Parameters
        ----------
        size_nbytes : float
            Size of the inputs and, if it is declared, of the result [B].
        declared_nbytes : float, optional
            Declared size of the result [B].
        """
        exact = self.by_size.get(size_class(size_nbytes))
        if exact is not None:
            return exact
        if not self.by_size:
            if declared_nbytes <= self.most_nbytes:
                return self
            return replace(self, nbytes=declared_nbytes, most_nbytes=declared_nbytes)
        nearest, scale = nearest_size(self.by_size, size_nbytes)
        one = self.by_size[nearest]
        # Of arrays, the declared size is known better than any that was learned of others.
        return Averages(
            scaled_s(one.duration_s, scale),
            declared_nbytes or scaled_nbytes(one.nbytes, scale, size_nbytes),
            declared_nbytes or scaled_nbytes(one.most_nbytes, scale, size_nbytes),
            size_nbytes,
            core_share=one.core_share,
        )


@dataclass(frozen=True, slots=True)
class Expected:
    """What is expected of the tasks of a graph, in lists in the order of the tasks.

    Parameters
    ----------
    costs_s : list of float
        Durations if no thread waits for a core [s].
    cores_s : list of float
        Times on a core [s]; empty if each thread has a core.
    nbytes, most_nbytes : list of float
        Sizes of results in the mean, and at most [B].
    size_classes : list of int
        Classes of the data that tasks handle, by `size_class`.
    unknown : list of int
        Positions of the tasks of which nothing is known.
    """

    costs_s: list[float]
    cores_s: list[float]
    nbytes: list[float]
    most_nbytes: list[float]
    size_classes: list[int]
    unknown: list[int]


def expected(
    tasks: Sequence[GraphNode],
    learned: Sequence[Averages | None],
    edges: Sequence[Collection[int]],
    outside_nbytes: Sequence[float],
    declared_nbytes: Mapping[Key, float],
    *,
    guess_s: float,
    crowding: float = 1.0,
    assumed: Collection[int] = frozenset(),
    many: Collection[int] = frozenset(),
) -> Expected:
    """Return what is expected of the tasks of a graph; O(tasks + edges).

    Sizes are followed through the graph: those of results decide which averages count for their readers.

    Parameters
    ----------
    tasks : sequence of GraphNode
        In an order in which they can run.
    learned : sequence of Averages or None
        What is known of the prefix of each task, or of the task itself.
    edges : sequence of collection of int
        For each task the earlier ones that it reads.
    outside_nbytes : sequence of float
        Size of the other data that each task reads [B].
    declared_nbytes : mapping of Key to float
        Declared sizes of results [B].
    guess_s : float
        Duration of a task of which nothing is known [s].
    crowding : float, optional
        Threads for each core, at least 1.
    assumed : collection of int, optional
        Positions of the tasks whose duration and size follow from their data, if nothing else is known.
    many : collection of int, optional
        Positions of the tasks of prefixes with many tasks. If the size of such a result is unknown, nothing
        is assumed of the tasks that read it, nor of their readers: together they may read any amount.
    """
    found, sizeless = Expected([], [], [], [], [], []), set[int]()
    for i, (task, one) in enumerate(zip(tasks, learned, strict=True)):
        cost_s, core_s, nbytes, most_nbytes, size_class_ = 0.0, 0.0, 0.0, 0.0, SMALL_CLASS
        if isinstance(task, NO_WORK):
            if isinstance(task, Alias) and (target := next(iter(edges[i]), None)) is not None:
                nbytes, most_nbytes = found.nbytes[target], found.most_nbytes[target]  # the same value
                if target in sizeless:
                    sizeless.add(i)
        elif one is None and (i not in assumed or not sizeless.isdisjoint(edges[i])):
            cost_s = guess_s
            nbytes = most_nbytes = declared_nbytes.get(task.key, 0.0)
            if not nbytes and (i in many or i in assumed):
                sizeless.add(i)
            found.unknown.append(i)
        else:
            declared = declared_nbytes.get(task.key, 0.0)
            handled = declared + outside_nbytes[i]
            for j in edges[i]:
                handled += found.nbytes[j]
            size_class_ = max(int(handled).bit_length(), SMALL_CLASS)  # `size_class`, without the call
            if one is None:
                own = Averages(_LIBRARY_S + handled / _LIBRARY_RATE, declared or handled)
            else:
                own = one.by_size.get(size_class_, one)
                if own is one and (one.by_size or declared):
                    own = one.of_size(handled, declared)
            cost_s, nbytes, most_nbytes = own.duration_s, own.nbytes, max(own.nbytes, own.most_nbytes)
            if crowding > 1:
                core_s = own.core_share * cost_s
        found.costs_s.append(cost_s)
        if crowding > 1:
            found.cores_s.append(core_s)
        found.nbytes.append(nbytes)
        found.most_nbytes.append(most_nbytes)
        found.size_classes.append(size_class_)
    return found
