"""Why a worker has free threads: one reason, and the number of tasks that it concerns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

#: Waiting tasks that are looked at.
MOST_TASKS = 1000

PAUSED = "paused"
WAITING_FOR_DATA = "waiting for data"
RESTRICTED = "restricted"
NOT_WORTH_MOVING = "not worth moving"
NO_READY_TASK = "no ready task"

#: What each reason says, for help texts.
MEANINGS = {
    PAUSED: "the worker takes no tasks, mostly because its memory is full; tasks that wait there",
    WAITING_FOR_DATA: "tasks on the worker whose inputs are still being sent",
    RESTRICTED: "ready tasks that may not run on this worker",
    NOT_WORTH_MOVING: "ready tasks on other workers that would not end earlier here",
    NO_READY_TASK: "tasks whose inputs are not computed yet",
}


class Idle(NamedTuple):
    """Why a worker is idle.

    Parameters
    ----------
    word : str
        One of `MEANINGS`.
    n : int
        Number of tasks, of at most `MOST_TASKS` that were looked at.
    """

    word: str
    n: int

    def __str__(self) -> str:
        """Return the reason as it is shown."""
        return f"{self.word} {self.n:,}" if self.n else self.word


def idle_reasons(scheduler: Scheduler) -> dict[str, Idle]:
    """Return why workers with free threads have these, by address; O(workers + `MOST_TASKS`)."""
    found: dict[str, Idle] = {}
    searching = []
    for address, ws in scheduler.workers.items():
        n_tasks = len(ws.processing)
        if ws.status.name != "running":
            found[address] = Idle(PAUSED, n_tasks)
        elif n_tasks and (n := _n_waiting_for_data(ws)):
            found[address] = Idle(WAITING_FOR_DATA, n)
        elif n_tasks < ws.nthreads:
            searching.append(address)
    if searching:
        ready = _Ready(scheduler)
        n_unready = sum(prefix.states["waiting"] for prefix in scheduler.task_prefixes.values())
        for address in searching:
            found[address] = ready.reason(address) or Idle(NO_READY_TASK, n_unready)
    return found


def _n_waiting_for_data(ws: WorkerState) -> int:
    """Return how many tasks wait for data on a worker that executes none, by its last heartbeat."""
    counts = ws.metrics.get("task_counts", {})
    n_running = sum(counts.get(state, 0) for state in ("executing", "long-running", "ready"))
    return 0 if n_running else min(counts.get("waiting", 0), len(ws.processing))


class _Ready:
    """Ready tasks that no thread has."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._n_free = self._n_restricted = 0
        self._n_allowed: dict[str, int] = {}
        for ts in islice(_waiting(scheduler), MOST_TASKS):
            if not (ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions):
                self._n_free += 1
                continue
            self._n_restricted += 1
            for ws in scheduler.valid_workers(ts) or ():
                self._n_allowed[ws.address] = self._n_allowed.get(ws.address, 0) + 1

    def reason(self, address: str) -> Idle | None:
        """Return why a worker has none of them; None if there are none."""
        n_allowed = self._n_allowed.get(address, 0)
        if n := self._n_free + n_allowed:
            return Idle(NOT_WORTH_MOVING, n)
        if n := self._n_restricted - n_allowed:
            return Idle(RESTRICTED, n)
        return None


def _waiting(scheduler: Scheduler) -> Iterator[TaskState]:
    """Yield tasks that no worker may run, and those that wait behind others on a worker."""
    yield from scheduler.unrunnable
    for ws in scheduler.workers.values():
        if len(ws.processing) > ws.nthreads:
            yield from islice(ws.processing, ws.nthreads, None)
