"""A task and a worker as a policy sees them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

#: Whatever names a task; Dask's keys among others.
Key = Any
WorkerKey = str
#: Where a task stands in the order of execution: the smallest runs first.
Priority = tuple[float, ...]
#: Wait [s], tasks per thread, turn, and the worker, which no comparison reaches since turns are unique.
Load = tuple[float, float, int, "WorkerView"]
#: Between a device and its host [B/s]: of pageable memory over PCIe, roughly.
_HOST_DEVICE_BANDWIDTH = 1e10


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
        Whether `cost_s` was declared, or learned of tasks of the same kind, rather than of the same name.
    held : mapping of worker to int
        Bytes of the task's inputs on each worker that holds any [B]; an inlined input has none.
    near : mapping of host to int, or None
        Bytes of the task's inputs that some worker of a host holds [B]; None if there is one host only.
    n_held : mapping of worker to int
        How many of the task's inputs each worker holds.
    input_bytes : int
        Bytes of all inputs [B].
    output_bytes : int
        Bytes of its result, where that is known and there are devices it may have to fit on [B].
    n_inputs : int
        How many inputs there are.
    allowed : collection of workers, or None
        Where the task may run; None means anywhere. It may change with the workers that there are.
    sent : int
        Grows with every task that is given to a worker.
    has_started : bool
        Whether a thread was free for it when it was sent, or has become so.
    is_movable : bool
        False for tasks that must stay where they are: started ones, actors.
    is_bundle : bool
        Whether it stands for several tasks, whose values are no results while it runs.
    is_guess : bool
        Whether nothing is known that `cost_s` could be taken from.
    costs_s : mapping of str to float
        Expected durations by kind of worker [s], where they differ.
    dependencies : tuple of Key
        Tasks of the same graph whose results it needs; known of a graph that arrives.
    n_steps : int
        Steps of a bundle that can be divided while it runs; 0 for other tasks.
    started_at : float
        When it started, as far as is known [s].
    """

    key: Key
    cost_s: float
    priority: Priority
    index: int = 0
    rank_s: float | None = None
    has_cost: bool = False
    held: Mapping[WorkerKey, int] = field(default_factory=dict)
    near: Mapping[str, int] | None = None
    n_held: Mapping[WorkerKey, int] = field(default_factory=dict)
    input_bytes: int = 0
    output_bytes: int = 0
    n_inputs: int = 0
    allowed: Collection[WorkerKey] | None = None
    sent: int = 0
    has_started: bool = False
    is_movable: bool = True
    is_bundle: bool = False
    is_guess: bool = False
    costs_s: Mapping[str, float] = field(default_factory=dict)
    dependencies: tuple[Key, ...] = ()
    n_steps: int = 0
    started_at: float = 0.0

    def cost_on(self, worker: WorkerView) -> float:
        """Return the expected duration on one thread of a worker of its kind [s], at the usual speed."""
        return self.costs_s.get(worker.kind, self.cost_s) if self.costs_s else self.cost_s

    def may_run_on(self, worker: WorkerKey) -> bool:
        """Return whether restrictions admit a worker."""
        return self.allowed is None or worker in self.allowed

    def missing_bytes(self, worker: WorkerKey) -> int:
        """Return the bytes of inputs that would have to be sent to `worker` [B]."""
        return self.input_bytes - self.held.get(worker, 0)

    def near_bytes(self, worker: WorkerView) -> int:
        """Return how many of the missing bytes another worker of the same host has [B].

        At least: what is on its way to the worker may come from there, too.
        """
        missing = self.missing_bytes(worker.key)
        if self.near is None:
            return missing
        return max(0, min(missing, self.near.get(worker.host, 0) - self.held.get(worker.key, 0)))

    def n_peers(self, worker: WorkerKey) -> int:
        """Return from how many others `worker` has to fetch inputs, at least one."""
        n_others = len(self.held) - (worker in self.held)
        return max(1, min(n_others, self.n_inputs - self.n_held.get(worker, 0)))


class TaskQueue(list["TaskView"]):
    """The tasks of a worker, in the order in which they are expected to run.

    Two plain lists, kept sorted: moving the tail of a list of thousands takes less time than one call of a
    function. The methods of `list` that change it must not be used.
    """

    def __init__(self) -> None:
        super().__init__()
        # The sort keys of the tasks.
        self._orders: list[tuple[bool, Priority, int]] = []

    def add(self, task: TaskView) -> None:
        """Insert a task; O(log n), and the move of the tail."""
        # What runs, runs on, whatever comes after it. Priorities are unique within a graph; of equal ones, of
        # two graphs, a worker of Dask's runs the one first that it was sent last.
        order = (not task.has_started, task.priority, -task.sent)
        place = bisect_left(self._orders, order)
        self._orders.insert(place, order)
        self.insert(place, task)

    def take_out(self, task: TaskView) -> None:
        """Remove a task, of which nothing may have changed that decides its place."""
        place = bisect_left(self._orders, (not task.has_started, task.priority, -task.sent))
        del self._orders[place], self[place]

    def start(self, place: int, now: float) -> None:
        """Note that the task at a place has started [s]."""
        task = self[place]
        if task.has_started:
            return
        task.started_at = now
        if not place:  # it is the first one, and stays so
            task.has_started = True
            self._orders[0] = (False, *self._orders[0][1:])
        else:
            del self._orders[place], self[place]
            task.has_started = True
            self.add(task)


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
    host : str
        The machine it is on.
    speed : float
        How many times as fast as usual it runs tasks; learned.
    is_running : bool
        False while the worker is paused or about to leave: it gets no tasks, and starts none.
    stopped_at : float
        When it last stopped to start tasks [s].
    backlog_s : float
        Expected durations of its tasks [s].
    progress_at : float
        When a task last ended on it, or was sent to it while it had none [s].
    nbytes : int
        Of the results it holds [B]; breaks ties.
    incoming_nbytes : int
        Of the inputs on their way to it, for the tasks it has [B].
    near_part : float
        The part of these that comes from its own host, as far as is known.
    free_nbytes : float
        Free memory of its device [B]; infinite where it has none.
    due_nbytes : int
        Of the results of the tasks it has, where they are known and there are devices [B].
    is_full : bool
        Whether its device is nearly full.
    is_short_of_memory : bool
        Whether its process is above Dask's target for memory.
    """

    key: WorkerKey
    turn: int
    nthreads: int
    kind: str = "cpu"
    host: str = ""
    speed: float = 1.0
    is_running: bool = True
    stopped_at: float = 0.0
    backlog_s: float = 0.0
    progress_at: float = 0.0
    nbytes: int = 0
    incoming_nbytes: int = 0
    near_part: float = 1.0
    free_nbytes: float = inf
    due_nbytes: int = 0
    is_full: bool = False
    is_short_of_memory: bool = False
    queue: TaskQueue = field(default_factory=TaskQueue)
    #: Tasks that are known to run while it starts none: what had started before is not known.
    known_to_run: set[Key] = field(default_factory=set)
    #: Number of tasks that run or start at once, if there are as many: its threads, or these.
    n_starting: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_starting = self.nthreads

    def expect(self, missing: int, near: int) -> None:
        """Note that so many bytes will be on their way to it, and how many of them from its host [B]."""
        total = self.incoming_nbytes + missing
        if total > 0:
            self.near_part = (self.near_part * self.incoming_nbytes + near) / total
        self.incoming_nbytes = total

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
        """Number of tasks beyond those that the threads can run; if it starts none, some of them may run."""
        return max(0, len(self.queue) - self.n_starting)

    @property
    def wait_s(self) -> float:
        """Time until a task sent now would start [s]."""
        return self.load[0]

    @property
    def load(self) -> Load:
        """Sort key, least loaded first: wait [s], tasks per thread, turn; and the worker itself."""
        n, nthreads = len(self.queue), self.nthreads
        wait_s = 0.0 if n < nthreads else self.backlog_s / (nthreads * self.speed)
        return (wait_s, n / nthreads, self.turn, self)

    def spill_s(self, nbytes: int) -> float:
        """Return the time to make room on its device for so much more than what its tasks need [s]."""
        excess = min(nbytes, nbytes + self.incoming_nbytes + self.due_nbytes - self.free_nbytes)
        return max(0.0, excess) / _HOST_DEVICE_BANDWIDTH

    def overrun_s(self, now: float) -> float:
        """Return by how much the task at the front has taken longer than expected [s].

        What has run long will probably run on for about as long again, so this is also the best guess
        at the time until the worker's next task starts beyond `wait_s`. The same holds for a worker that
        has started no task for long.
        """
        overrun_s = now - self.progress_at - self.queue[0].cost_s / self.speed if self.queue else 0.0
        return max(0.0, overrun_s) if self.is_running else max(overrun_s, now - self.stopped_at)

    @property
    def last_waiting(self) -> TaskView:
        """The task that is due last; there must be one."""
        return self.queue[-1]

    def waiting_from_last(self) -> Iterator[TaskView]:
        """Yield tasks that probably have not started, the one due last first."""
        if not self.is_running:
            yield from (task for task in reversed(self.queue) if task.key not in self.known_to_run)
            return
        for position in range(len(self.queue) - 1, self.nthreads - 1, -1):
            yield self.queue[position]
