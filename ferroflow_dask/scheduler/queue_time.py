"""Queue time: how long the tasks in Dask's queue keep all threads busy, if they are of one graph."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState

#: Characters of a token, which the groups of a collection have in their names after the prefix and a hyphen.
TOKEN = 32
#: Groups of tasks of which it is kept where they lead; a tenth is forgotten at once.
_MOST_GROUPS = 10_000
#: Steps on a way to the end of a graph; the scheduler waits meanwhile.
_MOST_STEPS = 1_000


class QueueTime:
    """Estimates when the queue will be empty.

    Groups of tasks that lead to the same group belong to one graph. Only groups with a token count, since
    other names occur in several graphs.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        # By the name of a group, the last group with a token on a way from it; "" if none is found.
        self._ends: dict[str, str] = {}

    def __call__(self, ts: TaskState) -> float:
        """Return how long queued tasks keep all threads busy [s]; 0 if some are not of the graph of `ts`."""
        queued, end = self._scheduler.queued, self._end_of(ts)
        if not end or self._end_of(first := queued.peek()) != end or self._end_of(queued.peekright()) != end:
            return 0.0
        n_threads = max(1, self._scheduler.total_nthreads)
        return len(queued) * max(0.0, first.prefix.duration_average) / n_threads

    def _end_of(self, ts: TaskState) -> str:
        end = self._ends.get(ts.group.name)
        return self._search(ts) if end is None else end

    def _search(self, ts: TaskState) -> str:
        passed: list[str] = []
        end = ""
        for _ in range(_MOST_STEPS):
            name = ts.group.name
            if not isinstance(name, str) or len(name) - len(ts.prefix.name) <= TOKEN:
                end = passed[-1] if passed else ""
                passed = passed or [name]
                break
            if name in self._ends:
                end = self._ends[name]
                break
            passed.append(name)
            if not ts.dependents:
                end = name
                break
            ts = next(iter(ts.dependents))
        if len(self._ends) > _MOST_GROUPS:
            for name in list(islice(self._ends, _MOST_GROUPS // 10)):
                del self._ends[name]
        self._ends.update(dict.fromkeys(passed, end))
        return end
