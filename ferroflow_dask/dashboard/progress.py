"""How far a graph is, by level, and when it should be done.

The level of a task is the number of tasks on the longest way to it. The critical path is the longest way by
expected durations (the highest upward rank; H. Topcuoglu et al., 2002).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dask.typing import Key

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

#: Tasks that are followed; of what comes beyond them only the number is known.
MOST_TASKS = 200_000
#: Levels that are told apart, about as many as a figure has pixels; what comes later counts with the last.
MOST_LEVELS = 1000


@dataclass(slots=True)
class Level:
    """The tasks of a level.

    Parameters
    ----------
    n_tasks, n_done : int
    n_critical, n_critical_done : int
        Those on the critical path.
    critical_s : float
        What they should take [s].
    critical_key : str
        The first of them.
    """

    n_tasks: int = 0
    n_done: int = 0
    n_critical: int = 0
    n_critical_done: int = 0
    critical_s: float = 0.0
    critical_key: str = ""


@dataclass(slots=True)
class _Task:
    level: int
    seconds: float
    rank_s: float = 0.0
    is_critical: bool = False
    is_done: bool = False


class GraphProgress:
    """Progress of what was submitted since nothing was left to do.

    Parameters
    ----------
    duration : callable
        Returns how long a task should take [s].

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
    predicted_s : float
        What all should take, expected when the last of it was submitted: the time until then, and the work
        left shared by all threads, or what is left of the critical path, whichever takes longer [s].
    """

    def __init__(self, duration: Callable[[TaskState], float]) -> None:
        self._duration = duration
        self._tasks: dict[Key, _Task] = {}
        self._reset()

    def _reset(self) -> None:
        self.levels: list[Level] = []
        self.n_beyond = 0
        self.n_done = 0
        self.n_tasks = 0
        self.work_s = 0.0
        self.critical_s = 0.0
        self._marked_s = self._marked_left_s = 0.0
        self.predicted_s = 0.0
        self.started_at: float | None = None
        self.ended_at: float | None = None

    def add(self, states: Iterable[TaskState], n_threads: int, now_s: float) -> None:
        """Follow tasks that were submitted."""
        if self.n_done == self.n_tasks:
            self._tasks.clear()
            self._reset()
        new = {ts.key: ts for ts in states if ts.key not in self._tasks}
        room = max(0, MOST_TASKS - len(self._tasks))
        self.n_beyond += max(0, len(new) - room)
        order = _sorted(dict(list(new.items())[:room]))
        if not order:
            return
        self.started_at = now_s if self.started_at is None else self.started_at
        self.ended_at = None
        for ts in order:
            level = 1 + max(
                (self._tasks[d.key].level for d in ts.dependencies if d.key in self._tasks), default=-1
            )
            level = min(level, MOST_LEVELS - 1)
            self._tasks[ts.key] = _Task(level, self._duration(ts))
            while len(self.levels) <= level:
                self.levels.append(Level())
            self.levels[level].n_tasks += 1
        self.n_tasks += len(order)
        self.work_s += sum(self._tasks[ts.key].seconds for ts in order)
        self._mark_critical(order)
        for ts in order:
            if ts.state in ("memory", "erred"):
                self.done(ts.key, now_s)
        new_tasks = (self._tasks[ts.key] for ts in order)
        longest_s = max((task.rank_s for task in new_tasks if not task.is_done), default=0.0)
        self.predicted_s = now_s - self.started_at + max(self.remaining_s(n_threads), longest_s)

    def _mark_critical(self, order: list[TaskState]) -> None:
        for ts in reversed(order):
            followers = [self._tasks[d.key].rank_s for d in ts.dependents if d.key in self._tasks]
            self._tasks[ts.key].rank_s = self._tasks[ts.key].seconds + max(followers, default=0.0)
        head = max(order, key=lambda ts: self._tasks[ts.key].rank_s)
        self.critical_s = max(self.critical_s, self._tasks[head.key].rank_s)
        at: TaskState | None = head
        while at is not None:
            task = self._tasks[at.key]
            if not task.is_critical:
                task.is_critical = True
                level = self.levels[task.level]
                level.n_critical += 1
                level.critical_s += task.seconds
                level.critical_key = level.critical_key or str(at.key)
                self._marked_s += task.seconds
                self._marked_left_s += task.seconds
            known = [d for d in at.dependents if d.key in self._tasks]
            at = max(known, key=lambda d: self._tasks[d.key].rank_s, default=None)

    def done(self, key: Key, now_s: float) -> None:
        """Note that a task has ended."""
        task = self._tasks.get(key)
        if task is None or task.is_done:
            return
        task.is_done = True
        level = self.levels[task.level]
        level.n_done += 1
        if task.is_critical:
            level.n_critical_done += 1
            self._marked_left_s -= task.seconds
        self.n_done += 1
        self.work_s -= task.seconds
        if self.n_done == self.n_tasks:
            self.ended_at = now_s

    def forget(self, key: Key, now_s: float) -> None:
        """Follow a task no longer: it was released, whether it has run or not."""
        self.done(key, now_s)
        self._tasks.pop(key, None)

    def summary(self, has_levels: bool = True) -> GraphProgress:
        """Return the numbers, without the tasks."""
        found = copy(self)
        found._tasks, found._duration = {}, _nothing
        found.levels = [replace(level) for level in self.levels] if has_levels else []
        return found

    def in_words(self, n_threads: int) -> str:
        """Return how many tasks are done, and when all should be, or how long they took."""
        # Of what is not followed nobody knows whether it is done.
        beyond = f"; {self.n_beyond:,} more are not followed" if self.n_beyond else ""
        return f"{self._followed_in_words(n_threads)}{beyond}"

    def _followed_in_words(self, n_threads: int) -> str:
        told = f"{self.n_done:,} of {self.n_tasks:,} tasks"
        if self.started_at is not None and self.ended_at is not None:
            return f"{told} in {self.ended_at - self.started_at:.2f} s (predicted {self.predicted_s:.2f} s)"
        left_s = self.remaining_s(n_threads)
        return f"{told} · done in {left_s:.1f} s (predicted {self.predicted_s:.2f} s in all)"

    @property
    def is_all_done(self) -> bool:
        """Whether nothing is left to do, as far as is known: not where tasks are not followed."""
        return self.n_done == self.n_tasks and not self.n_beyond

    def remaining_s(self, n_threads: int) -> float:
        """Return when all should be done, from now [s]."""
        # A graph that came in parts has several paths: the part that is left of all is that of the longest.
        left = max(0.0, self._marked_left_s / self._marked_s) if self._marked_s > 0 else 0.0
        return max(max(0.0, self.work_s) / max(1, n_threads), left * self.critical_s)


def _nothing(_: TaskState) -> float:
    return 0.0


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
