"""Workers in the order of their loads, by kind, speed and host."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from ferroflow_dask.policy.state import Load, TaskView, WorkerKey, WorkerView

#: What workers that run a task equally well have in common: kind, speed, whether device or memory is full.
Group = tuple[str, float, bool]


class _Order:
    """Workers of each group in the order of their loads, as of the last `settle`.

    Workers that have changed are filed anew by the next question: there are often several changes between
    two, and some questions are rare. Sorted lists: at thousands of workers, moving their tails costs less
    than any cleverer order.
    """

    __slots__ = ("changed", "filed", "loads")

    def __init__(self) -> None:
        self.loads: dict[Group, list[Load]] = {}
        self.filed: dict[WorkerView, tuple[list[Load], Load]] = {}
        #: Workers whose loads have changed; a set that keeps its order.
        self.changed: dict[WorkerView, None] = {}

    def settle(self) -> None:
        """File the workers that have changed."""
        for worker in self.changed:
            before = self.filed.get(worker)
            if before is not None:
                loads, load = before
                del loads[bisect_left(loads, load)]
                load = worker.load
                insort(loads, load)
                self.filed[worker] = loads, load
        self.changed.clear()

    def put(self, worker: WorkerView, group: Group | None) -> None:
        """Move a worker to a group, or to none."""
        before = self.filed.pop(worker, None)
        if before is not None:
            loads, load = before
            del loads[bisect_left(loads, load)]
        if group is None:
            self.changed.pop(worker, None)
            return
        load = worker.load
        loads = self.loads.setdefault(group, [])
        insort(loads, load)
        self.filed[worker] = loads, load


#: Workers with more tasks than threads are in one order, whatever they are.
_CROWDED: Group = ("", 1.0, False)


class LoadOrder:
    """All workers, ordered by load among those that are equally fast."""

    def __init__(self) -> None:
        self.workers: dict[WorkerKey, WorkerView] = {}
        self._all, self._crowded = _Order(), _Order()
        # By host, once there are several.
        self._hosts: dict[str, _Order] = {}
        self._idle: OrderedDict[WorkerKey, None] = OrderedDict()
        self._next_turn = 0
        #: Number of running workers with a free thread, and of workers with more tasks than threads.
        self.n_idle = self.n_crowded = 0
        #: Threads of all workers.
        self.n_threads = 0
        # The last question of `least_loaded_for`, which is asked twice for each task, and its answer.
        self._asked: TaskView | None = None
        self._answer: list[WorkerView] = []

    def least_loaded(self) -> Iterator[WorkerView]:
        """Yield the least loaded running worker of each kind and speed, of those with a full device too."""
        if self._all.changed:
            self._asked = None
            self._all.settle()
        for order in self._all.loads.values():
            if order:
                yield order[0][3]

    def least_loaded_for(self, task: TaskView) -> list[WorkerView]:
        """Return the least loaded workers, as above, after those of the host with most of the inputs.

        Such a host is told apart once there have been several.
        """
        everywhere = self._all
        if everywhere.changed:
            everywhere.settle()
        elif task is self._asked:
            return self._answer
        orders = [*everywhere.loads.values()]
        if task.near and self._hosts:
            beside = self._hosts.get(max(task.near, key=task.near.__getitem__))
            if beside is not None:
                beside.settle()
                orders[:0] = beside.loads.values()
        self._asked, self._answer = task, [order[0][3] for order in orders if order]
        return self._answer

    def crowded_from_most_loaded(self) -> Iterator[WorkerView]:
        """Yield workers that have more tasks than threads, the most loaded first."""
        order = self._crowded
        for worker in list(order.changed):
            order.put(worker, _CROWDED if worker.n_waiting else None)
        order.changed.clear()
        for load in reversed(order.loads.get(_CROWDED, ())):
            yield load[3]

    def first_idle(self, limit: int) -> list[WorkerKey]:
        """Return up to `limit` running workers with a free thread, the one that became so last in front.

        It may find what those that have looked before may not take.
        """
        return list(islice(self._idle, limit))

    @property
    def running(self) -> tuple[WorkerView, ...]:
        """Workers that may be given tasks, in the order in which they joined."""
        return tuple(worker for worker in self.workers.values() if worker.is_running)

    def to_end_of_idle(self, key: WorkerKey) -> None:
        """Let the other idle workers come before this one."""
        if key in self._idle:
            self._idle.move_to_end(key)

    def _join(self, worker: WorkerView) -> None:
        self.n_threads += worker.nthreads
        if not self._hosts and next(iter(self.workers.values()), worker).host != worker.host:
            for other in self.workers.values():
                self._hosts.setdefault(other.host, _Order())
                self._file(other)
        if self._hosts:
            self._hosts.setdefault(worker.host, _Order())
        self.workers[worker.key] = worker
        self._next_turn += 1
        self._file(worker)
        self._count_idle(worker, worker.is_running)

    def _leave(self, key: WorkerKey) -> WorkerView:
        worker = self.workers.pop(key)
        self.n_threads -= worker.nthreads
        self._count_idle(worker, False)
        self.n_crowded -= worker.n_waiting > 0
        worker.is_running = False
        self._file(worker)
        self._crowded.put(worker, None)
        if self._hosts and not any(other.host == worker.host for other in self.workers.values()):
            del self._hosts[worker.host]
        return worker

    def _file(self, worker: WorkerView) -> None:
        """File a worker among those that are as fast, after a change of what it is."""
        self._asked = None
        is_full = worker.is_full or worker.is_short_of_memory
        group = (worker.kind, worker.speed, is_full) if worker.is_running else None
        self._all.put(worker, group)
        if self._hosts:
            self._hosts[worker.host].put(worker, group)
        self._crowded.changed[worker] = None

    def _touch(self, worker: WorkerView) -> None:
        """Note that a worker's load has changed or is about to."""
        self._all.changed[worker] = self._crowded.changed[worker] = None
        if self._hosts:
            self._hosts[worker.host].changed[worker] = None

    def _count_idle(self, worker: WorkerView, is_running: bool) -> None:
        """Note whether a worker runs tasks, if it has a free thread."""
        if not worker.has_free_thread or is_running is (worker.key in self._idle):
            return
        if is_running:
            self.n_idle += 1
            self._idle[worker.key] = None
            self._idle.move_to_end(worker.key, last=False)
        else:
            self.n_idle -= 1
            del self._idle[worker.key]
