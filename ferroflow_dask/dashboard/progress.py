"""How far a graph is, by level, and when it should be done.

The level of a task is the number of tasks on the longest way to it. The critical path is the longest way by
expected durations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.dashboard.prediction import Durations, Interval, Left

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

#: Tasks that are followed; of what comes beyond them only the number is known.
MOST_TASKS = 200_000
#: Levels that are told apart, about as many as a figure has pixels; what comes later counts with the last.
MOST_LEVELS = 1000
#: What a task of unknown duration is taken to last, to find the longest way [s].
_UNKNOWN_S = 0.001
#: What a task that was declared to take no time is taken to last [s].
_SHORTEST_S = 1e-6


@dataclass(slots=True)
class Level:
    """The tasks of a level.

    Parameters
    ----------
    n_tasks, n_done : int
    n_critical, n_critical_done : int
        Those on the critical path: one, or none if the path skips the level. The last level has all that come
        from there on.
    critical_key : str
        The first of them.
    """

    n_tasks: int = 0
    n_done: int = 0
    n_critical: int = 0
    n_critical_done: int = 0
    critical_key: str = ""


@dataclass(slots=True)
class _Task:
    """A task that is followed.

    `left_s` is the longest way of tasks that had not ended when it came, up to and with this one; `before` is
    the task before it on that way.
    """

    key: Key
    level: int
    name: str
    weight: float
    place: int
    left_s: float = 0.0
    before: _Task | None = None
    is_critical: bool = False
    is_done: bool = False


class GraphProgress:
    """Progress of what was submitted since nothing was left to do.

    Parameters
    ----------
    declared : callable
        Returns the duration that a task was declared to have [s]; None without one.
    mean : callable, optional
        Returns the mean duration of tasks of the prefix of a task, for prefixes of which nothing was learned
        [s]; None if it is not known.

    Attributes
    ----------
    levels : list of Level
        At most `MOST_LEVELS`.
    n_beyond : int
        Tasks that are not followed.
    started_at : float or None
        [s]
    ended_at : float or None
        [s]
    predicted : Interval or None
        The time for all, predicted when the last of it was submitted, or as soon as all prefixes were known.
    """

    def __init__(
        self,
        declared: Callable[[TaskState], float | None],
        mean: Callable[[TaskState], float | None] | None = None,
    ) -> None:
        self._declared = declared
        self._mean = _unknown if mean is None else mean
        self._durations = Durations()
        self._tasks: dict[Key, _Task] = {}
        self._reset()

    def _reset(self) -> None:
        self.levels: list[Level] = []
        self.n_beyond = 0
        self.n_done = 0
        self.n_tasks = 0
        self.predicted: Interval | None = None
        self.started_at: float | None = None
        self.ended_at: float | None = None
        self._left: dict[str, Left] = {}
        self._path: dict[str, Left] = {}
        self._path_end: _Task | None = None
        # The time of the last event, and what was predicted when the last part came.
        self._changed_at = self._submitted_at = 0.0
        self._whole: Any = None
        self._worked_s = 0.0  # of tasks that have ended since that
        self._n_threads = 1

    def has_any(self, keys: Iterable[Key]) -> bool:
        """Return whether some tasks are followed."""
        return any(key in self._tasks for key in keys)

    def add(
        self, states: Iterable[TaskState], n_threads: int, now_s: float, *, goes_on: bool = False
    ) -> None:
        """Follow tasks that were submitted; `goes_on` if they belong to those before, even if these ended."""
        if self.n_done == self.n_tasks and not goes_on:
            self._tasks.clear()
            self._reset()
        # Tasks whose results are there already are not counted: they do not run.
        new = {ts.key: ts for ts in states if ts.key not in self._tasks and ts.state != "memory"}
        room = max(0, MOST_TASKS - len(self._tasks))
        self.n_beyond += max(0, len(new) - room)
        order = _sorted(dict(list(new.items())[:room]))
        if not order:
            return
        self.started_at = now_s if self.started_at is None else self.started_at
        self.ended_at, self._n_threads = None, max(1, n_threads)
        for ts in order:
            self._follow(ts)
        self._mark_critical([self._tasks[ts.key] for ts in order])
        for ts in order:
            if ts.state == "erred":
                self.done(ts.key, now_s)
        self._changed_at = self._submitted_at = now_s
        self._predict()

    def _follow(self, ts: TaskState) -> None:
        before = [self._tasks[d.key] for d in ts.dependencies if d.key in self._tasks]
        level = min(1 + max((task.level for task in before), default=-1), MOST_LEVELS - 1)
        name, weight = key_split(ts.key), self._declared(ts)
        if weight is None:
            mean_s = self._mean(ts)
            if mean_s is not None:
                self._durations.assume(name, 1.0, mean_s)
            weight = 1.0
        else:
            name, weight = f"{name} as declared", max(weight, _SHORTEST_S)
            self._durations.assume(name, weight, weight)
        task = self._tasks[ts.key] = _Task(ts.key, level, name, weight, self.n_tasks)
        self.n_tasks += 1
        if ts.state != "erred":
            rate = self._durations.rate(name)
            task.left_s = weight * (_UNKNOWN_S if rate is None else rate)
        if before:
            # Of ways that take the same time, the one with most tasks; of these, the one that came first.
            task.before = max(before, key=lambda one: (one.left_s, one.level, -one.place))
            task.left_s += 0.0 if task.before.is_done else task.before.left_s
        while len(self.levels) <= level:
            self.levels.append(Level())
        self.levels[level].n_tasks += 1
        self._left.setdefault(name, Left()).add(weight)

    def _mark_critical(self, new: list[_Task]) -> None:
        """Mark the longest way, unless the one that is marked takes longer still."""
        end = max(new, key=lambda task: (task.left_s, task.level, -task.place))
        if self._path_end is not None and end.left_s <= self._path_left_s():
            return
        way = []
        at: _Task | None = end
        while at is not None and not at.is_critical:
            way.append(at)
            at = at.before
        old = self._path_end
        while old is not None and old is not at:
            self._mark(old, -1)
            old = old.before
        for task in reversed(way):
            self._mark(task, 1)
        self._path_end = end

    def _mark(self, task: _Task, n: int) -> None:
        task.is_critical = n > 0
        level = self.levels[task.level]
        level.n_critical += n
        level.n_critical_done += n * task.is_done
        if n < 0:
            level.critical_key = ""
        else:
            level.critical_key = level.critical_key or str(task.key)
        if not task.is_done:
            self._path.setdefault(task.name, Left()).add(task.weight, n)

    def _path_left_s(self) -> float:
        rates = {name: self._durations.rate(name) for name in self._path}
        return sum(
            left.weight * (_UNKNOWN_S if (rate := rates[name]) is None else rate)
            for name, left in self._path.items()
        )

    def done(self, key: Key, now_s: float, seconds: float | None = None) -> None:
        """Note that a task has ended, and how long it took if it has run."""
        task = self._tasks.get(key)
        if task is None or task.is_done:
            return
        task.is_done = True
        level = self.levels[task.level]
        level.n_done += 1
        self.n_done += 1
        self._left[task.name].add(task.weight, -1)
        if task.is_critical:
            level.n_critical_done += 1
            self._path[task.name].add(task.weight, -1)
        self._changed_at = now_s
        if seconds is not None:
            self._durations.add(task.name, task.weight, seconds)
            self._worked_s += seconds
            if self._whole is None and self.n_done < self.n_tasks:
                self._predict()
        if self.n_done == self.n_tasks:
            self.ended_at = now_s
            if self._whole is not None:
                self._durations.ended(self._whole, now_s - self._submitted_at, self._worked_s)

    def forget(self, key: Key, now_s: float) -> None:
        """Follow a task no longer: it was released, whether it has run or not."""
        self.done(key, now_s)
        self._tasks.pop(key, None)

    def _predict(self) -> None:
        """Note the time for all that is predicted now, if something is known of all tasks."""
        self._whole = self._durations.predict(_some(self._left), _some(self._path), self._n_threads)
        if self._whole is not None and self.started_at is not None:
            self._submitted_at, self._worked_s = self._changed_at, 0.0
            self.predicted = self._whole.interval.after(self._changed_at - self.started_at)

    def left(self, n_threads: int, now_s: float | None = None) -> Interval | None:
        """Return the time until all should be done [s]; None if it is not known.

        Parameters
        ----------
        n_threads : int
        now_s : float, optional
            The time; by default that of the last event.
        """
        whole_s = 0.0 if self._whole is None else self._whole.seconds
        found = self._durations.predict(_some(self._left), _some(self._path), max(1, n_threads), whole_s)
        if found is None:
            return None
        return found.interval.before(max(0.0, (now_s or self._changed_at) - self._changed_at))

    def summary(self, has_levels: bool = True) -> GraphProgress:
        """Return the numbers, without the tasks."""
        found = copy(self)
        found._tasks, found._declared, found._mean, found._path_end = {}, _unknown, _unknown, None
        found._durations = self._durations.of({*self._left, *self._path})
        found._left, found._path = deepcopy(self._left), deepcopy(self._path)
        found.levels = [replace(level) for level in self.levels] if has_levels else []
        return found

    def in_words(self, n_threads: int, now_s: float | None = None) -> str:
        """Return how many tasks are done, and how long the rest should take, or how long all took."""
        # Of what is not followed nobody knows whether it is done.
        beyond = f"; {self.n_beyond:,} more are not followed" if self.n_beyond else ""
        return f"{self._followed_in_words(n_threads, now_s)}{beyond}"

    def _followed_in_words(self, n_threads: int, now_s: float | None) -> str:
        told = f"{self.n_done:,} of {self.n_tasks:,} tasks"
        if self.started_at is not None and self.ended_at is not None:
            predicted = "" if self.predicted is None else f"; predicted {self.predicted}"
            return f"{told} took {self.ended_at - self.started_at:.2f} s{predicted}"
        left = self.left(n_threads, now_s)
        return f"{told} · time left: {'not known yet' if left is None else left}"

    @property
    def is_all_done(self) -> bool:
        """Whether nothing is left to do, as far as is known: not where tasks are not followed."""
        return self.n_done == self.n_tasks and not self.n_beyond


def _unknown(_: TaskState) -> float | None:
    return None


def _some(left: dict[str, Left]) -> dict[str, Left]:
    """Leave out prefixes of which no task is left."""
    return {name: tasks for name, tasks in left.items() if tasks.n > 0}


def _sorted(states: dict[Key, TaskState]) -> list[TaskState]:
    """Return tasks so that each comes after those that it waits for."""
    missing = {key: sum(d.key in states for d in ts.dependencies) for key, ts in states.items()}
    ready = [states[key] for key, n in missing.items() if not n]
    order = []
    while ready:
        ts = ready.pop()
        order.append(ts)
        for follower in ts.dependents:
            if follower.key in missing:
                missing[follower.key] -= 1
                if not missing[follower.key]:
                    ready.append(follower)
    return order
