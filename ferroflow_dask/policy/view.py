"""What a policy sees of a cluster: workers, their queues, and the tasks in them.

The view holds nothing of Dask's, and is kept up to date one change at a time by whoever drives the
policy; a policy only reads it. Every change costs O(log queue), every question a policy asks O(1) for
each item of the answer and O(log P) for each worker that has changed since the last one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from sortedcontainers import SortedKeyList

from ferroflow_dask.policy.pace import Paces

#: Whatever names a task; Dask's keys among others.
Key = Any
WorkerKey = str
#: What fetching costs however little is fetched, in one-way messages: its own, which are under way at the
#: same time whatever is fetched, and the work that it makes for two workers and the scheduler, for each
#: worker that is asked. (Without that work, array and frame workloads lose 5 to 20 % to moving data about.)
_FETCH_MESSAGES = 5
_FETCH_WORK = 8
#: Part of a new transfer in what is known of transfers, and the bounds of that.
_TRANSFER_WEIGHT = 0.1
_LEAST_SLOWNESS, _MOST_SLOWNESS = 1.0, 20.0
#: Part of a lag that is still believed after the next task, and what is no lag but clocks that differ [s].
_LAG_KEPT, _MOST_LAG_S = 0.9, 1.0
#: Where a task stands in the order of execution: the smallest runs first.
Priority = tuple[float, ...]
#: Wait [s], tasks per thread, turn.
Load = tuple[float, float, int]


@dataclass(slots=True, eq=False)
class TaskView:
    """A task as a policy sees it.

    Parameters
    ----------
    key : Key
    cost_s : float
        Expected duration on one thread [s]: of the worker that it was given to, once it was.
    priority : tuple of float
    index : int
        Place of the task in its graph, or a running number.
    rank_s : float or None
        Upward rank [s], where the graph carries costs.
    has_cost : bool
        Whether `cost_s` was declared for this very task, rather than guessed from its like.
    held : mapping of worker to int
        Bytes of the task's inputs on each worker that holds any [B].
    n_held : mapping of worker to int
        How many of the task's inputs each worker holds.
    input_bytes : int
        Bytes of all inputs [B].
    n_inputs : int
        How many there are.
    n_readers : int
        How many tasks read the one of them that most tasks read.
    allowed : collection of workers, or None
        Where the task may run; None means anywhere. It may change with the workers that there are.
    sent : int
        Grows with every task that is given to a worker.
    has_started : bool
        Whether a thread was free for it when it was sent, or has become so.
    is_movable : bool
        False for tasks that must stay where they are: started ones, actors.
    is_guess : bool
        Whether nothing is known that `cost_s` could be taken from.
    costs_s : mapping of str to float
        Expected durations by kind of worker [s], where they differ.
    dependencies : tuple of Key
        Tasks of the same graph whose results it needs; known of a graph that arrives.
    """

    key: Key
    cost_s: float
    priority: Priority
    index: int = 0
    rank_s: float | None = None
    has_cost: bool = False
    held: Mapping[WorkerKey, int] = field(default_factory=dict)
    n_held: Mapping[WorkerKey, int] = field(default_factory=dict)
    input_bytes: int = 0
    n_inputs: int = 0
    n_readers: int = 1
    allowed: Collection[WorkerKey] | None = None
    sent: int = 0
    has_started: bool = False
    is_movable: bool = True
    is_guess: bool = False
    costs_s: Mapping[str, float] = field(default_factory=dict)
    dependencies: tuple[Key, ...] = ()

    def cost_on(self, worker: WorkerView) -> float:
        """Return the expected duration on one thread of a worker of its kind [s], at the usual speed."""
        return self.costs_s.get(worker.kind, self.cost_s) if self.costs_s else self.cost_s

    def missing_bytes(self, worker: WorkerKey) -> int:
        """Return the bytes of inputs that would have to be sent to `worker` [B]."""
        return self.input_bytes - self.held.get(worker, 0)

    def n_peers(self, worker: WorkerKey) -> int:
        """Return from how many others `worker` has to fetch inputs, at least one."""
        n_others = len(self.held) - (worker in self.held)
        return max(1, min(n_others, self.n_inputs - self.n_held.get(worker, 0)))


@dataclass(slots=True, eq=False)
class WorkerView:
    """A worker and the tasks that were given to it and have not ended.

    Parameters
    ----------
    key : WorkerKey
    turn : int
        Grows with every task that the worker is given, so that among equals each has its turn.
    nthreads : int
    kind : str
        What the worker is: "cpu", "gpu".
    speed : float
        How many times as fast as usual it runs tasks; learned.
    is_running : bool
        False while the worker is paused or about to leave: it gets no tasks.
    backlog_s : float
        Expected durations of its tasks [s].
    progress_at : float
        When a task last ended on it, or was sent to it while it had none [s].
    nbytes : int
        Of the results it holds [B]; breaks ties.
    filed : tuple or None
        The load under which the cluster view has it in its order; None while it is in none.
    is_stale : bool
        Whether its load has changed since.
    """

    key: WorkerKey
    turn: int
    nthreads: int
    kind: str = "cpu"
    speed: float = 1.0
    is_running: bool = True
    backlog_s: float = 0.0
    progress_at: float = 0.0
    nbytes: int = 0
    filed: Load | None = None
    is_stale: bool = False
    queue: Any = field(default_factory=lambda: SortedKeyList(key=_queue_order))

    @property
    def n_tasks(self) -> int:
        """Number of tasks, running ones included."""
        return len(self.queue)

    @property
    def has_free_thread(self) -> bool:
        """Whether a task sent now would start at once."""
        return len(self.queue) < self.nthreads

    @property
    def n_waiting(self) -> int:
        """Number of tasks beyond those that the threads can run."""
        return max(0, len(self.queue) - self.nthreads)

    @property
    def wait_s(self) -> float:
        """Time until a task sent now would start [s]."""
        return self.load[0]

    @property
    def group(self) -> tuple[str, float]:
        """What workers that run a task equally fast have in common."""
        return (self.kind, self.speed)

    @property
    def load(self) -> Load:
        """Sort key, least loaded first: wait [s], tasks per thread, turn."""
        if self.filed is not None and not self.is_stale:
            return self.filed
        n, nthreads = len(self.queue), self.nthreads
        wait_s = 0.0 if n < nthreads else self.backlog_s / (nthreads * self.speed)
        return (wait_s, n / nthreads, self.turn)

    def overrun_s(self, now: float) -> float:
        """Return by how much the task at the front has taken longer than expected [s].

        What has run long will probably run on for about as long again, so this is also the best guess
        at the time until the worker's next task starts beyond `wait_s`.
        """
        return max(0.0, now - self.progress_at - self.queue[0].cost_s / self.speed) if self.queue else 0.0

    @property
    def last_waiting(self) -> TaskView:
        """The task that is due last; there must be one."""
        last: TaskView = self.queue[-1]
        return last

    def waiting_from_last(self) -> Iterator[TaskView]:
        """Yield tasks that probably have not started, the one due last first."""
        for position in range(len(self.queue) - 1, self.nthreads - 1, -1):
            yield self.queue[position]


def _queue_order(task: TaskView) -> tuple[bool, Priority, int]:
    # What runs, runs on, whatever comes after it. Priorities are unique within a graph; of equal ones, of
    # two graphs, a worker of Dask's runs the one first that it was sent last.
    return (not task.has_started, task.priority, -task.sent)


class ClusterView:
    """All workers, ordered by load among those that are equally fast.

    Parameters
    ----------
    bandwidth : float
        Between two workers [B/s].
    latency_s : float
        From a decision to its effect on a worker [s].
    """

    def __init__(self, bandwidth: float = 1e8, latency_s: float = 1e-3) -> None:
        self.bandwidth = bandwidth
        self.latency_s = latency_s
        # By how much transfers take longer than the bandwidth says: objects have to be packed and unpacked.
        self._slowness = 1.0
        #: By how much what is known of workers is older than it seems [s]: how late messages are handled.
        self.lag_s = 0.0
        self.workers: dict[WorkerKey, WorkerView] = {}
        self.assigned: dict[Key, tuple[TaskView, WorkerView]] = {}
        # Sorted lists: at thousands of workers, moving their tails costs less than any cleverer order.
        self._by_load: dict[tuple[str, float], list[Load]] = {}
        self._paces = Paces()
        self._crowded: list[Load] = []
        self._idle: dict[WorkerKey, None] = {}
        self._by_turn: dict[int, WorkerView] = {}
        self._next_turn = 0
        # Workers to be filed anew before the next question: there are often several changes between two.
        self._stale: list[WorkerView] = []

    # What a policy asks

    def transfer_s(self, task: TaskView, worker: WorkerKey) -> float:
        """Return the time to bring the task's inputs to `worker` [s]."""
        missing = task.missing_bytes(worker)
        return self._slowness * self._expected_s(task, worker, missing) if missing > 0 else 0.0

    def _expected_s(self, task: TaskView, worker: WorkerKey, nbytes: int) -> float:
        fetch_s = (_FETCH_MESSAGES + _FETCH_WORK * task.n_peers(worker)) * self.latency_s
        return fetch_s + nbytes / self.bandwidth

    def least_loaded(self) -> Iterator[WorkerView]:
        """Yield the least loaded running worker of each kind and speed."""
        self._settle()
        for order in self._by_load.values():
            if order:
                yield self._by_turn[order[0][2]]

    def crowded_from_most_loaded(self) -> Iterator[WorkerView]:
        """Yield workers that have more tasks than threads, the most loaded first."""
        self._settle()
        for load in reversed(self._crowded):
            yield self._by_turn[load[2]]

    @property
    def has_crowded(self) -> bool:
        """Whether any worker has more tasks than threads."""
        self._settle()
        return bool(self._crowded)

    @property
    def n_idle(self) -> int:
        """Number of running workers with a free thread."""
        self._settle()
        return len(self._idle)

    def first_idle(self, limit: int) -> list[WorkerKey]:
        """Return up to `limit` running workers with a free thread, the one that became so first in front."""
        self._settle()
        return list(islice(self._idle, limit))

    @property
    def running(self) -> tuple[WorkerView, ...]:
        """Workers that may be given tasks, in the order in which they joined."""
        return tuple(worker for worker in self.workers.values() if worker.is_running)

    # How it is kept up to date

    def to_end_of_idle(self, key: WorkerKey) -> None:
        """Let the other idle workers come before this one."""
        self._settle()
        if self._idle.pop(key, self) is None:
            self._idle[key] = None

    def add_worker(self, key: WorkerKey, nthreads: int, kind: str = "cpu") -> None:
        """Add a worker with an empty queue."""
        worker = WorkerView(key, self._next_turn, nthreads, kind)
        self.workers[key] = worker
        self._take_turn(worker)
        self._file(worker)

    def remove_worker(self, key: WorkerKey) -> None:
        """Remove a worker and release the tasks in its queue."""
        self._settle()
        worker = self.workers.pop(key)
        self._unfile(worker)
        self._idle.pop(key, None)
        self._paces.forget(key)
        del self._by_turn[worker.turn]
        for task in worker.queue:
            del self.assigned[task.key]

    def set_running(self, key: WorkerKey, is_running: bool) -> None:
        """Note that a worker may, or may no longer, be given tasks."""
        worker = self.workers[key]
        self._unfile(worker)
        worker.is_running = is_running
        self._file(worker)

    def set_kind(self, key: WorkerKey, kind: str) -> None:
        """Note that a worker has become one of another kind."""
        self._settle()
        worker = self.workers[key]
        self._unfile(worker)
        worker.kind = kind
        self._file(worker)

    def set_movable(self, key: Key) -> None:
        """Note that a task in a queue may be moved again."""
        if key in self.assigned:
            self.assigned[key][0].is_movable = True

    def set_nbytes(self, key: WorkerKey, nbytes: int) -> None:
        """Note the bytes of the results that a worker holds [B]."""
        self.workers[key].nbytes = nbytes

    def assign(self, task: TaskView, key: WorkerKey, now: float) -> None:
        """Put a task into a worker's queue, out of any other's."""
        self.release(task.key)
        worker = self.workers[key]
        if not worker.queue:
            worker.progress_at = now
        self._touch(worker)
        self._take_turn(worker)
        task.cost_s = task.cost_on(worker)
        task.sent = worker.turn
        task.has_started = worker.has_free_thread
        worker.queue.add(task)
        worker.backlog_s += task.cost_s
        self.assigned[task.key] = (task, worker)

    def reprice(self, key: Key, cost_s: float) -> None:
        """Correct the expected duration of a task in a queue [s]."""
        entry = self.assigned.get(key)
        if entry is not None:
            task, worker = entry
            self._touch(worker)
            worker.backlog_s += cost_s - task.cost_s
            task.cost_s = cost_s
            task.is_guess = False

    def observe(self, key: Key, seconds: float) -> None:
        """Learn from how long a task that is in a queue has taken [s]."""
        entry = self.assigned.get(key)
        if entry is None or entry[0].is_guess:
            return
        task, worker = entry
        speed = self._paces.record(worker.key, task.cost_s, seconds)
        if speed != worker.speed:
            self._unfile(worker)
            worker.speed = speed
            self._file(worker)

    def observe_transfer(self, key: Key, seconds: float) -> None:
        """Learn from how long a task that is in a queue has waited for its inputs [s]."""
        entry = self.assigned.get(key)
        if entry is None:
            return
        task, worker = entry
        missing = task.missing_bytes(worker.key)
        if missing > 0:
            slowness = seconds / self._expected_s(task, worker.key, missing)
            self._slowness += _TRANSFER_WEIGHT * (slowness - self._slowness)
            self._slowness = min(max(self._slowness, _LEAST_SLOWNESS), _MOST_SLOWNESS)

    def observe_lag(self, seconds: float) -> None:
        """Learn from how long after its end a task was known to have ended [s]."""
        self.lag_s = min(max(seconds, _LAG_KEPT * self.lag_s), _MOST_LAG_S)

    def finish(self, key: Key, now: float) -> None:
        """Take a task that ended out of its worker's queue."""
        entry = self.assigned.get(key)
        if entry is not None:
            entry[1].progress_at = now
            self.release(key)

    def release(self, key: Key) -> None:
        """Take a task out of the queue it is in, if any."""
        entry = self.assigned.pop(key, None)
        if entry is None:
            return
        task, worker = entry
        self._touch(worker)
        worker.queue.remove(task)
        if task.has_started and len(worker.queue) >= worker.nthreads:
            following = worker.queue.pop(worker.nthreads - 1)
            following.has_started = True
            worker.queue.add(following)
        # An empty queue is exactly zero: sums of floats would leave dust that decides ties.
        worker.backlog_s = max(0.0, worker.backlog_s - task.cost_s) if worker.queue else 0.0

    def _take_turn(self, worker: WorkerView) -> None:
        self._by_turn.pop(worker.turn, None)
        worker.turn = self._next_turn
        self._by_turn[worker.turn] = worker
        self._next_turn += 1

    def _touch(self, worker: WorkerView) -> None:
        if not worker.is_stale:
            worker.is_stale = True
            self._stale.append(worker)

    def _settle(self) -> None:
        if self._stale:
            for worker in self._stale:
                self._unfile(worker)
                self._file(worker)
                worker.is_stale = False
            self._stale.clear()

    def _unfile(self, worker: WorkerView) -> None:
        load, worker.filed = worker.filed, None
        assert load is not None
        if worker.is_running:
            _take_out(self._by_load[worker.group], load)
        if load[1] > 1:
            _take_out(self._crowded, load)

    def _file(self, worker: WorkerView) -> None:
        load = worker.filed = worker.load
        if worker.is_running:
            insort(self._by_load.setdefault(worker.group, []), load)
        if load[1] > 1:  # tasks per thread
            insort(self._crowded, load)
        if worker.is_running and load[1] < 1:
            self._idle.setdefault(worker.key)
        else:
            self._idle.pop(worker.key, None)


def _take_out(loads: list[Load], load: Load) -> None:
    del loads[bisect_left(loads, load)]
