"""What a policy sees of a cluster: workers, their queues, and the tasks in them.

The view holds nothing of Dask's, and is kept up to date one change at a time by whoever drives the
policy; a policy only reads it. Every change costs O(log queue), every question a policy asks O(1) for
each item of the answer and O(log P) for each worker that has changed since the last one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from itertools import islice
from math import inf

from ferroflow_dask.policy.estimators import Paces
from ferroflow_dask.policy.load_order import LoadOrder
from ferroflow_dask.policy.state import Key, Priority, TaskView, WorkerKey, WorkerView

#: What fetching costs however little is fetched, in one-way messages: its own, which are under way at the
#: same time whatever is fetched, and the work that it makes for two workers and the scheduler, for each
#: worker that is asked. (Without that work, array and frame workloads lose 5 to 20 % to moving data about.)
_FETCH_MESSAGES = 5
_FETCH_WORK = 8
#: What a steal takes, in one-way messages: request, answer, task.
_STEAL_MESSAGES = 3
#: A device with less than this part of its memory free is nearly full.
_FULL_SHARE = 1 / 16


class ClusterView(LoadOrder):
    """All workers, and the tasks in their queues.

    Parameters
    ----------
    bandwidth : float
        Between two workers, of different hosts where there are several [B/s].
    latency_s : float
        From a decision to its effect on a worker [s].
    """

    def __init__(self, bandwidth: float = 1e8, latency_s: float = 1e-3) -> None:
        super().__init__()
        self.bandwidth = bandwidth
        #: Between two workers of one host [B/s].
        self.host_bandwidth = bandwidth
        self.latency_s = latency_s
        #: Whether a worker has another kind than "cpu".
        self.has_devices = False
        self._paces = Paces()
        # Workers of another speed than usual, the one that was updated longest ago first.
        self._unusual: OrderedDict[WorkerKey, None] = OrderedDict()
        self.assigned: dict[Key, tuple[TaskView, WorkerView]] = {}
        #: Bundles in queues that can be divided, and whether a half may be asked for.
        self.divisible: dict[Key, bool] = {}
        #: Bundles for whose steps workers have been asked, and have not answered.
        self.dividing: Collection[Key] = ()
        #: While a task is placed, how long the queued tasks of its graph keep all threads busy [s].
        self.queue_s = 0.0
        #: When a task, or a step of a bundle, last ended [s].
        self.last_end_at = 0.0

    # What a policy asks

    def transfer_s(self, task: TaskView, worker: WorkerKey) -> float:
        """Return the time to bring the task's inputs to `worker` [s].

        What is on its way there already comes first; that counts as far as it takes longer than the tasks
        that are there. Where they, or the result, go over the free memory of the worker's device, others
        have to be spilled before.
        """
        missing = max(0, task.missing_bytes(worker))
        if not (missing or task.output_bytes):
            return 0.0
        there = self.workers[worker]
        spill_s = there.spill_s(missing + task.output_bytes)
        if not missing:
            return spill_s
        incoming_s = self._sent_s(there.incoming_nbytes, there.near_part * there.incoming_nbytes)
        return spill_s + max(0.0, incoming_s - there.load[0]) + self._fetch_s(task, there, missing)

    def _fetch_s(self, task: TaskView, worker: WorkerView, missing: int) -> float:
        fetch_s = (_FETCH_MESSAGES + _FETCH_WORK * task.n_peers(worker.key)) * self.latency_s
        return fetch_s + self._sent_s(missing, task.near_bytes(worker))

    def _sent_s(self, nbytes: int, near: float) -> float:
        # What is on a worker's own host it fetches from there.
        return near / self.host_bandwidth + (nbytes - near) / self.bandwidth

    @property
    def steal_s(self) -> float:
        """Time from a steal request until the task can start at the thief [s]."""
        return _STEAL_MESSAGES * self.latency_s

    # How it is kept up to date

    def add_worker(self, key: WorkerKey, nthreads: int, kind: str = "cpu", host: str = "") -> None:
        """Add a worker with an empty queue."""
        self._join(WorkerView(key, self._next_turn, nthreads, kind, host))
        self._note_kinds()

    def remove_worker(self, key: WorkerKey) -> None:
        """Remove a worker and release the tasks in its queue."""
        self._paces.forget(key)
        self._unusual.pop(key, None)
        for task in self._leave(key).queue:
            del self.assigned[task.key]
            self.divisible.pop(task.key, None)
        self._note_kinds()

    def _note_kinds(self) -> None:
        self.has_devices = any(worker.kind != "cpu" for worker in self.workers.values())

    def set_running(self, key: WorkerKey, is_running: bool, now: float) -> None:
        """Set whether a worker gets tasks, and starts the tasks in its queue."""
        worker = self.workers[key]
        if is_running is worker.is_running:
            return
        worker.is_running = is_running
        worker.known_to_run.clear()
        self._set_n_starting(worker, worker.nthreads if is_running else 0)
        if not is_running:
            worker.stopped_at = now
        else:
            if not (worker.queue and worker.queue[0].has_started):
                worker.progress_at = now
            for place in range(min(worker.nthreads, len(worker.queue))):
                worker.queue.start(place, now)
        self._file(worker)
        self._count_idle(worker, is_running)

    def _set_n_starting(self, worker: WorkerView, n: int) -> None:
        self.n_crowded -= worker.n_waiting > 0
        worker.n_starting = n
        self.n_crowded += worker.n_waiting > 0

    def set_kind(self, key: WorkerKey, kind: str) -> None:
        """Note that a worker has become one of another kind."""
        worker = self.workers[key]
        worker.kind = kind
        worker.free_nbytes, worker.is_full = inf, False  # of the device that it had
        self._file(worker)
        self._note_kinds()

    def set_started(self, key: Key) -> None:
        """Note that a task in a queue has started, whatever was expected to run there instead."""
        if key not in self.assigned:
            return
        task, worker = self.assigned[key]
        self._touch(worker)
        if not worker.is_running:
            worker.known_to_run.add(key)
            self._set_n_starting(worker, len(worker.known_to_run))
        if task.has_started:
            return
        started = [other for other in islice(worker.queue, worker.nthreads) if other.has_started]
        changed = [task]
        if len(started) == worker.nthreads:  # it has the thread of the one that was sent last
            changed.append(max(started, key=lambda other: other.sent))
        for one in changed:
            worker.queue.take_out(one)
            one.has_started = one is task
            worker.queue.add(one)

    def set_priority(self, task: TaskView, priority: Priority) -> None:
        """Note where a task stands in the order of execution from now on, whether or not it is in a queue."""
        entry = self.assigned.get(task.key)
        queue = entry[1].queue if entry is not None and entry[0] is task else None
        if queue is not None:
            queue.take_out(task)
        task.priority = priority
        if queue is not None:
            queue.add(task)

    def set_movable(self, key: Key) -> None:
        """Note that a task in a queue may be moved again."""
        if key in self.assigned:
            self.assigned[key][0].is_movable = True

    def set_nbytes(self, key: WorkerKey, nbytes: int) -> None:
        """Note the bytes of the results that a worker holds [B]."""
        self.workers[key].nbytes = nbytes

    def set_incoming(self, key: WorkerKey, nbytes: int) -> None:
        """Note the bytes of the inputs that are on their way to a worker [B].

        Until they are noted again, what tasks lack that are assigned to it adds up.
        """
        self.workers[key].incoming_nbytes = nbytes

    def set_device_memory(self, key: WorkerKey, free_nbytes: int, total_nbytes: int) -> None:
        """Note how much of the memory of a worker's device is free, and how much there is [B]."""
        worker = self.workers[key]
        worker.free_nbytes = free_nbytes
        is_full = free_nbytes < _FULL_SHARE * total_nbytes
        if is_full != worker.is_full:
            worker.is_full = is_full
            self._file(worker)

    def set_short_of_memory(self, key: WorkerKey, is_short: bool) -> None:
        """Note whether the process of a worker is above Dask's target for memory."""
        worker = self.workers[key]
        if is_short != worker.is_short_of_memory:
            worker.is_short_of_memory = is_short
            self._file(worker)

    def assign(self, task: TaskView, key: WorkerKey, now: float) -> None:
        """Put a task into a worker's queue, out of any other's."""
        if task.key in self.assigned:
            self.release(task.key)
        worker = self.workers[key]
        n_before = len(worker.queue)
        if not n_before:
            worker.progress_at = now
        self._all.changed[worker] = None
        if self._hosts:
            self._hosts[worker.host].changed[worker] = None
        worker.turn = self._next_turn
        self._next_turn += 1
        if task.costs_s:
            task.cost_s = task.cost_on(worker)
        task.sent = worker.turn
        task.has_started = n_before < worker.n_starting
        task.started_at = now
        if task.n_steps > 1:
            self.divisible[task.key] = True
        if task.input_bytes:
            missing = task.missing_bytes(key)
            if missing > 0:
                worker.expect(missing, task.near_bytes(worker))
        worker.queue.add(task)
        if n_before >= worker.n_starting:
            self._crowded.changed[worker] = None
            self.n_crowded += n_before == worker.n_starting
        elif n_before == worker.nthreads - 1 and worker.is_running:
            self.n_idle -= 1
            self._idle.pop(key, None)
        worker.backlog_s += task.cost_s
        worker.due_nbytes += task.output_bytes
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
        """Learn a worker's speed from the duration of one of its tasks [s] and the task's cost."""
        entry = self.assigned.get(key)
        if entry is None or entry[0].is_guess:
            return
        task, worker = entry
        self._paces.record(worker.key, task.cost_s, seconds)
        speed = self._paces.speed(worker.key)
        if speed != worker.speed:
            self._set_speed(worker, speed)
        # The median of all workers may have moved. A worker that is thought slow may get no tasks, and would
        # stay slow for ever; one of them at a time keeps this O(log P).
        if self._unusual:
            unusual = next(iter(self._unusual))
            self._unusual.move_to_end(unusual)
            speed, worker = self._paces.speed(unusual), self.workers[unusual]
            if speed != worker.speed:
                self._set_speed(worker, speed)

    def _set_speed(self, worker: WorkerView, speed: float) -> None:
        worker.speed = speed
        self._file(worker)
        if speed == 1:
            del self._unusual[worker.key]
        else:
            self._unusual[worker.key] = None

    def finish(self, key: Key, now: float) -> None:
        """Take a task that ended out of its worker's queue."""
        self.last_end_at = now
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
        if task.n_steps:
            self.divisible.pop(key, None)
        self._all.changed[worker] = None
        if self._hosts:
            self._hosts[worker.host].changed[worker] = None
        queue = worker.queue
        queue.take_out(task)
        n_left = len(queue)
        if task.output_bytes:
            worker.due_nbytes -= task.output_bytes
        if not worker.is_running:
            self._crowded.changed[worker] = None
            self.n_crowded -= n_left == worker.n_starting and key not in worker.known_to_run
            worker.known_to_run.discard(key)
            worker.n_starting = len(worker.known_to_run)
        elif n_left >= worker.nthreads:
            self._crowded.changed[worker] = None
            self.n_crowded -= n_left == worker.nthreads
            if task.has_started:
                queue.start(worker.nthreads - 1, worker.progress_at)
        elif n_left == worker.nthreads - 1:
            self.n_idle += 1
            self._idle[worker.key] = None
            self._idle.move_to_end(worker.key, last=False)
        # An empty queue is exactly zero: sums of floats would leave dust that decides ties.
        worker.backlog_s = max(0.0, worker.backlog_s - task.cost_s) if queue else 0.0
