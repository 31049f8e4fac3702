"""Predicted time left of a graph: learned from the tasks and graphs that have run, with an interval.

Durations are learned by task prefix. The ratio of measured to predicted time is learned by the prefix that
has most of a graph's work: it contains the overheads of the cluster and idle threads at the end of a graph.
The predicted time is corrected by the measured durations first. Otherwise the ratio would also contain their
deviation from the mean, which is chance.

Few long tasks decide how long a graph of widely varying durations takes: its mean time is longer than most of
its times. The predicted time is the one of least expected relative error, under a log-normal distribution.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection
from copy import copy
from dataclasses import dataclass
from typing import Any

#: Prefixes that are remembered.
_KEPT = 1000
#: Tasks of a prefix after which older ones count half.
_WINDOW = 2000.0
#: Weight of an earlier graph against the one after it.
_FADING = 0.8
#: For how many graphs the spread counts that follows from the durations of tasks.
_FIRST_WEIGHT = 2.0
#: The least of that spread: overheads are unknown before a graph has run.
_FIRST_SPREAD = 0.2
#: Half the width of an interval in standard deviations: four of five outcomes are to lie in it, and the
#: deviations are themselves estimated from few graphs.
_WIDTH = 1.6
#: Bound on the spread: an interval from a twentieth to twenty times is no better than none.
_MOST_SPREAD = 2.0
#: Relative deviation of a duration of which one task is known.
_OF_ONE = 0.5


@dataclass(frozen=True, slots=True)
class Interval:
    """A predicted time.

    Parameters
    ----------
    seconds, low, high : float
        The value of least expected relative error, and bounds that should hold for four of five graphs [s].
    """

    seconds: float
    low: float
    high: float

    def after(self, elapsed_s: float) -> Interval:
        """Return the same prediction counted from a time that is so much earlier."""
        return Interval(self.seconds + elapsed_s, self.low + elapsed_s, self.high + elapsed_s)

    def before(self, elapsed_s: float) -> Interval:
        """Return what is left of it after some time."""
        return Interval(*(max(0.0, bound - elapsed_s) for bound in (self.seconds, self.low, self.high)))

    def __str__(self) -> str:
        """Return the value with its bounds; `about 2.1 s (1.8–2.6 s)`."""
        digits = 2 if self.seconds < 1 else 1 if self.seconds < 100 else 0
        value, low, high = (f"{bound:,.{digits}f}" for bound in (self.seconds, self.low, self.high))
        return f"about {value} s ({low}–{high} s)"


@dataclass(slots=True)
class _Prefix:
    """Sums over the tasks of a prefix.

    `w` is the weight of a task: its declared cost, or 1 without one. `m` is its measured duration.
    """

    n: float = 0.0
    w: float = 0.0
    ww: float = 0.0
    m: float = 0.0
    mm: float = 0.0
    mw: float = 0.0

    def add(self, weight: float, measured_s: float) -> None:
        if self.n > _WINDOW:
            for name in self.__slots__:
                setattr(self, name, getattr(self, name) / 2)
        self.n += 1
        self.w += weight
        self.ww += weight * weight
        self.m += measured_s
        self.mm += measured_s * measured_s
        self.mw += measured_s * weight

    @property
    def rate(self) -> float:
        """Seconds for each unit of weight."""
        return self.m / self.w

    @property
    def variance(self) -> float:
        """Of the duration of a task of weight 1."""
        squares = max(0.0, self.mm - 2 * self.rate * self.mw + self.rate**2 * self.ww)
        assumed = (_OF_ONE * self.rate) ** 2
        # One task says nothing of how they vary.
        return squares / self.ww + assumed / self.n


@dataclass(slots=True)
class Left:
    """The tasks of a prefix that have not ended.

    Parameters
    ----------
    weight, squares : float
        Sum of their weights, and of the squares of these.
    n : int
    """

    weight: float = 0.0
    squares: float = 0.0
    n: int = 0

    def add(self, weight: float, n: int = 1) -> None:
        """Count a task; with `n` = -1, no longer."""
        self.weight += n * weight
        self.squares += n * weight * weight
        self.n += n


@dataclass(slots=True)
class _Graphs:
    """Sums over the graphs of a kind, in which earlier ones count less.

    `squares` are of the logarithm of measured to predicted time, for `n` graphs. They leave out the first
    graph: when it was predicted, its durations were hardly known.
    """

    measured_s: float = 0.0
    known_s: float = 0.0
    squares: float = 0.0
    n: float = 0.0

    def add(self, measured_s: float, predicted_s: float, known_s: float) -> None:
        """Add a graph: its time, the predicted one, and the one predicted from its own durations."""
        if self.measured_s > 0:
            self.squares = _FADING * self.squares + math.log(measured_s / (predicted_s * self.factor)) ** 2
            self.n = _FADING * self.n + 1
        self.measured_s = _FADING * self.measured_s + measured_s
        self.known_s = _FADING * self.known_s + known_s

    @property
    def factor(self) -> float:
        return self.measured_s / self.known_s if self.known_s > 0 else 1.0

    def reduction(self, of_tasks: float) -> float:
        """Return the ratio of the best prediction to the mean time.

        The variance of the logarithm of a sum of random durations follows from their deviation. Earlier
        graphs bound it: durations that vary from task to task may be the same in each graph. The median with
        weights 1 / t has the least error relative to t. Under a log-normal distribution, its logarithm is
        less than that of the mean by one and a half variances.
        """
        if not self.n:
            return 1.0
        variance = min(math.log1p(of_tasks**2), self.squares / self.n)
        return math.exp(-1.5 * variance)

    def spread(self, of_tasks: float, part: float) -> float:
        """Return the deviation of the logarithm for a part of a graph: the sums of fewer tasks vary more."""
        squares = self.squares / part + _FIRST_WEIGHT * max(of_tasks, _FIRST_SPREAD) ** 2
        return math.sqrt(squares / (self.n + _FIRST_WEIGHT))


class Durations:
    """What is learned of the durations of tasks and graphs."""

    def __init__(self) -> None:
        self._prefixes: OrderedDict[str, _Prefix] = OrderedDict()
        self._graphs: OrderedDict[str, _Graphs] = OrderedDict()
        # Of all prefixes: an unknown one is taken to be as they are.
        self._any = _Prefix()

    def add(self, name: str, weight: float, measured_s: float) -> None:
        """Learn from a task of a prefix."""
        _kept(self._prefixes, name, _Prefix).add(weight, measured_s)
        self._any.add(1.0, measured_s)

    def assume(self, name: str, weight: float, seconds: float) -> None:
        """Take a duration for that of a task of a prefix, unless something is known of the prefix."""
        if name not in self._prefixes:
            self.add(name, weight, seconds)

    def rate(self, name: str) -> float | None:
        """Return the seconds for each unit of weight of a prefix; None if nothing is known of it."""
        known = self._prefixes.get(name)
        return None if known is None else known.rate

    def of(self, names: Collection[str]) -> Durations:
        """Return what is known of some prefixes."""
        found = Durations()
        found._prefixes.update((name, copy(one)) for name, one in self._prefixes.items() if name in names)
        found._graphs.update((name, copy(one)) for name, one in self._graphs.items() if name in names)
        found._any = copy(self._any)
        return found

    def predict(
        self, left: dict[str, Left], path: dict[str, Left], n_threads: int, whole_s: float = 0.0
    ) -> _Prediction | None:
        """Return how long tasks take; None if nothing is known of most of them.

        Parameters
        ----------
        left, path : dict of str to Left
            All tasks that are left, and those of them on the critical path, by prefix.
        n_threads : int
        whole_s : float, optional
            What was predicted for the whole graph [s].
        """
        n_known = sum(tasks.n for name, tasks in left.items() if name in self._prefixes)
        if 2 * n_known < sum(tasks.n for tasks in left.values()) or not self._any.n:
            return None
        work_s, work_var, task_var, kind = self._sum(left)
        path_s, path_var, _, _ = self._sum(path)
        work_s, work_var = work_s / n_threads, work_var / n_threads**2
        # The threads do not end at the same time: the last task may begin when the others are done.
        seconds, variance = (work_s, work_var + task_var / 4) if work_s > path_s else (path_s, path_var)
        graphs = self._graphs.get(kind, _Graphs())
        if not seconds:
            return _Prediction(kind, 0.0, 1.0, 0.0, 0.0)
        of_tasks, part = math.sqrt(variance) / seconds, seconds / max(whole_s, seconds)
        spread = min(graphs.spread(of_tasks, part), _MOST_SPREAD)
        factor = graphs.factor * graphs.reduction(of_tasks)
        return _Prediction(kind, seconds, factor, spread, work_s * n_threads)

    def _sum(self, left: dict[str, Left]) -> tuple[float, float, float, str]:
        """Return the sum of durations, its variance, the largest variance of one task, the main prefix."""
        total = variance = of_task = most = 0.0
        kind = ""
        for name, tasks in left.items():
            known = self._prefixes.get(name, self._any)
            seconds = known.rate * tasks.weight
            total += seconds
            # Durations vary, and their mean is itself an estimate.
            variance += known.variance * (tasks.squares + tasks.weight**2 * known.ww / known.w**2)
            of_task = max(of_task, known.variance * tasks.squares / tasks.n)
            if seconds >= most:
                most, kind = seconds, name
        return total, variance, of_task, kind

    def ended(self, predicted: _Prediction, measured_s: float, worked_s: float) -> None:
        """Learn from a graph that took so long, and whose tasks took so long together."""
        if predicted.seconds > 0 and measured_s > 0:
            known_s = predicted.seconds * (worked_s / predicted.work_s if worked_s else 1.0)
            _kept(self._graphs, predicted.kind, _Graphs).add(measured_s, predicted.seconds, known_s)


@dataclass(frozen=True, slots=True)
class _Prediction:
    """What is predicted of a graph before the factor of its kind is applied.

    Parameters
    ----------
    kind : str
        The prefix with most of the work.
    seconds : float
        [s]
    factor, spread : float
        Ratio of the best prediction to this time, and the deviation of its logarithm.
    work_s : float
        Duration of all tasks together [s].
    """

    kind: str
    seconds: float
    factor: float
    spread: float
    work_s: float

    @property
    def interval(self) -> Interval:
        """The time that it should take."""
        seconds, bound = self.seconds * self.factor, math.exp(_WIDTH * self.spread)
        return Interval(seconds, seconds / bound, seconds * bound)


def _kept(known: OrderedDict[str, Any], name: str, kind: type) -> Any:
    """Return what is known of a name; forget the name that was used longest ago if there are too many."""
    found = known.setdefault(name, kind())
    known.move_to_end(name)
    if len(known) > _KEPT:
        known.popitem(last=False)
    return found
