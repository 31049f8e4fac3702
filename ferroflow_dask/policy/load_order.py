"""Workers in the order of their loads, by kind, speed and host."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from ferroflow_dask.policy.state import Load, TaskView, WorkerKey, WorkerView


class LoadOrder:
    """All workers, ordered by load among those that are equally fast."""

    def __init__(self) -> None:
        self.workers: dict[WorkerKey, WorkerView] = {}
        # Sorted lists: at thousands of workers, moving their tails costs less than any cleverer order.
        self._by_load: dict[tuple[str, float, bool], list[Load]] = {}
        # The same by host, once there are several.
        self._by_host: dict[str, dict[tuple[str, float, bool], list[Load]]] = {}
        self._has_hosts = False
        self._crowded: list[Load] = []
        self._idle: OrderedDict[WorkerKey, None] = OrderedDict()
        self._next_turn = 0
        #: Number of running workers with a free thread, and of workers with more tasks than threads.
        self.n_idle = self.n_crowded = 0
        # Workers to be filed anew before the next question: there are often several changes between two.
        self._stale: list[WorkerView] = []
        # The last question of `least_loaded_for`, which is asked twice for each task, and its answer.
        self._asked: TaskView | None = None
        self._answer: list[WorkerView] = []

    def least_loaded(self) -> Iterator[WorkerView]:
        """Yield the least loaded running worker of each kind and speed, of those with a full device too."""
        self._settle()
        for order in self._by_load.values():
            if order:
                yield order[0][3]

    def least_loaded_for(self, task: TaskView) -> list[WorkerView]:
        """Return the least loaded workers, as above, after those of the host with most of the inputs.

        Such a host is told apart once there have been several.
        """
        if self._stale:
            self._settle()
        elif task is self._asked:
            return self._answer
        beside: dict[tuple[str, float, bool], list[Load]] = {}
        if task.near and self._by_host:
            beside = self._by_host.get(max(task.near, key=task.near.__getitem__), beside)
        orders = (*beside.values(), *self._by_load.values())
        self._asked, self._answer = task, [order[0][3] for order in orders if order]
        return self._answer

    def crowded_from_most_loaded(self) -> Iterator[WorkerView]:
        """Yield workers that have more tasks than threads, the most loaded first."""
        self._settle()
        for load in reversed(self._crowded):
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
        if not self._has_hosts and next(iter(self.workers.values()), worker).host != worker.host:
            self._settle()
            for other in self.workers.values():
                self._unfile(other)
            self._has_hosts = True
            for other in self.workers.values():
                self._file(other)
        self.workers[worker.key] = worker
        self._next_turn += 1
        self._file(worker)

    def _leave(self, key: WorkerKey) -> WorkerView:
        self._settle()
        worker = self.workers.pop(key)
        self.n_crowded -= worker.n_waiting > 0
        self._unfile(worker)
        self._idle.pop(key, None)
        return worker

    def _touch(self, worker: WorkerView) -> None:
        if not worker.is_stale:
            worker.is_stale = True
            self._stale.append(worker)

    def _settle(self) -> None:
        for worker in self._stale:
            before, worker.is_stale = worker.filed, False
            load = worker.filed = worker.load_now()
            assert before is not None
            if worker.is_running:
                _replace(self._by_load[worker.group], before, load)
                if self._has_hosts:
                    _replace(self._by_host[worker.host][worker.group], before, load)
            if before[1] > 1:  # tasks per thread
                del self._crowded[bisect_left(self._crowded, before)]
            if load[1] > 1:
                insort(self._crowded, load)
        self._stale.clear()
        self._asked = None

    def _unfile(self, worker: WorkerView) -> None:
        load, worker.filed = worker.filed, None
        assert load is not None
        self._asked = None
        if worker.is_running:
            self.n_idle -= worker.has_free_thread
            _take_out(self._by_load[worker.group], load)
            if self._has_hosts:
                orders = self._by_host[worker.host]
                _take_out(orders[worker.group], load)
                if not orders[worker.group]:
                    del orders[worker.group]
                if not orders:
                    del self._by_host[worker.host]
        if load[1] > 1:
            _take_out(self._crowded, load)

    def _file(self, worker: WorkerView) -> None:
        load = worker.filed = worker.load_now()
        self._asked = None
        if worker.is_running:
            self.n_idle += worker.has_free_thread
            insort(self._by_load.setdefault(worker.group, []), load)
            if self._has_hosts:
                insort(self._by_host.setdefault(worker.host, {}).setdefault(worker.group, []), load)
        if load[1] > 1:  # tasks per thread
            insort(self._crowded, load)
        self._note_idle(worker, load)

    def _note_idle(self, worker: WorkerView, load: Load) -> None:
        if worker.is_running and load[1] < 1:
            if worker.key not in self._idle:
                self._idle[worker.key] = None
                self._idle.move_to_end(worker.key, last=False)
        else:
            self._idle.pop(worker.key, None)


def _replace(loads: list[Load], before: Load, load: Load) -> None:
    del loads[bisect_left(loads, before)]
    insort(loads, load)


def _take_out(loads: list[Load], load: Load) -> None:
    del loads[bisect_left(loads, load)]
