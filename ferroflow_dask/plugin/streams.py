"""Messages leave at once where there is time for it, and in batches under load.

Dask lets 5 ms pass between two batches from the scheduler to a worker, and 2 ms on the way back, which
for tasks of a few milliseconds is most of their time; and 10 ms between two of a client's, and 2 ms on the
way back to it. Batches save work for whoever sends and receives them, so the pause comes back as the event
loop that sends them runs out of time, up to Dask's own.
"""

from __future__ import annotations

from time import thread_time
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from distributed import WorkerPlugin

from ferroflow_dask import config
from ferroflow_dask.plugin.worker_plugins import OnWorkers

if TYPE_CHECKING:
    from distributed import Client, Scheduler, Worker
    from distributed.batched import BatchedSend

#: How long an event loop is watched before its load is taken anew [s].
_WINDOW_S = 0.01
#: The part of its time from which on a loop is under load.
_BUSY = 0.8

#: What clients are told by, whether messages leave at once.
TOPIC = "ferroflow-streams"


class Load:
    """How much of its time the thread that calls is at work, or waits for a core to be: from 0 to 1."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._worked_s = 0.0
        self._busy = 0.0

    def at(self, now_s: float) -> float:
        """Return the load over the last window."""
        elapsed_s = now_s - self._since_s
        if elapsed_s >= _WINDOW_S or elapsed_s < 0:
            worked_s = _busy_s()
            if elapsed_s < 10 * _WINDOW_S:
                self._busy = (worked_s - self._worked_s) / elapsed_s if elapsed_s > 0 else 1.0
            else:
                self._busy = 0.0  # mostly idle, whatever it did at last
            self._since_s, self._worked_s = now_s, worked_s
        return self._busy


class WorkerLoad(Load):
    """A worker's: full while it has other tasks to run, for then nobody waits for what it has to say.

    Parameters
    ----------
    worker : distributed.Worker
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._ready = worker.state.ready

    def at(self, now_s: float) -> float:
        """Return the load over the last window."""
        return 1.0 if self._ready else super().at(now_s)


def _busy_s() -> float:
    """Return the time that this thread has run or was ready to run [s]."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            ran_ns, waited_ns, _ = file.read().split()
        return (int(ran_ns) + int(waited_ns)) / 1e9
    except (OSError, ValueError):  # not on Linux
        return thread_time()


class Pause:
    """The time between two batches of a stream, taken anew whenever it is added to a time.

    `distributed.batched.BatchedSend` adds its interval to the time of each batch, and does nothing else
    with it.

    Parameters
    ----------
    load : Load
    longest_s : float
        The interval that the stream had [s].
    """

    def __init__(self, load: Load, longest_s: float) -> None:
        self._load = load
        self.longest_s = longest_s

    def __radd__(self, now_s: float) -> float:
        """Return when the next batch may leave [s]."""
        load = self._load.at(now_s)
        return now_s + self.longest_s * min(1.0, max(0.0, (load - _BUSY) / (1 - _BUSY)))


def shorten(stream: BatchedSend, load: Load) -> Pause:
    """Let a stream send at once while `load` is low; return what undoes it by `restore`."""
    pause = Pause(load, getattr(stream.interval, "longest_s", stream.interval))
    stream.interval = pause
    return pause


def restore(stream: BatchedSend, pause: Pause) -> None:
    """Give a stream its interval back, unless somebody else has set another one since."""
    if stream.interval is pause:
        stream.interval = pause.longest_s


_of_clients: WeakKeyDictionary[Client, tuple[BatchedSend, Pause]] = WeakKeyDictionary()
#: Those of this process that do as the scheduler's side does; what is on its way to others comes too late.
_following: WeakSet[Client] = WeakSet()


def follow(client: Client) -> bool:
    """Let a client of this process send at once while the scheduler's side does; it tells of that.

    Returns whether it is to be told; not where the configuration here says that its messages are left alone.
    """
    is_wanted = config.get_bool("low-latency-streams")
    if is_wanted:
        _following.add(client)
        client.subscribe_topic(TOPIC, lambda event: _told(client, is_open=bool(event[1])))
    return is_wanted


def _told(client: Client, is_open: bool) -> None:
    stream = client.scheduler_comm
    if not is_open:
        _restore_client(client)
    elif stream is not None and client in _following:
        _of_clients[client] = stream, shorten(stream, Load())


def unfollow(client: Client) -> None:
    """Put Dask's pauses back, whatever the scheduler's side does."""
    _following.discard(client)
    _restore_client(client)


def _restore_client(client: Client) -> None:
    if client in _of_clients:
        restore(*_of_clients.pop(client))


class WorkerStreams(WorkerPlugin):
    """The workers' end: their messages to the scheduler."""

    def setup(self, worker: Worker) -> None:
        """Shorten the pauses; called by distributed on each worker."""
        self._pause = shorten(worker.batched_stream, WorkerLoad(worker))

    def teardown(self, worker: Worker) -> None:
        """Put Dask's pauses back."""
        restore(worker.batched_stream, self._pause)


class Streams:
    """The scheduler's end, and what keeps that of the workers; nothing changes until it is opened.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._load = Load()
        #: By address of the worker, or name of the client, at the other end.
        self._pauses: dict[str, tuple[BatchedSend, Pause]] = {}
        self._on_workers = OnWorkers(scheduler, WorkerStreams(), "ferroflow-streams")
        self._is_open = False

    def open(self) -> None:
        """Shorten the pauses of all workers and clients, and of those that join from now on."""
        if not self._is_open:
            self._is_open = True
            for address in self._scheduler.workers:
                self.joined(address)
            for client in self._scheduler.client_comms:
                self._client_joined(client)
            self._tell_clients()
            self._on_workers.want(True)

    def joined(self, address: str) -> None:
        """Shorten the pauses of the messages to a worker."""
        if self._is_open:
            self._shorten(address, self._scheduler.stream_comms[address])

    def client_joins(self, client: str) -> None:
        """Shorten the pauses of the messages to a client, which has no stream yet when this is told."""
        self._scheduler.loop.add_callback(self._client_joined, client)

    def _client_joined(self, client: str) -> None:
        stream = self._scheduler.client_comms.get(client)
        if self._is_open and stream is not None:
            self._shorten(client, stream)

    def _shorten(self, name: str, stream: BatchedSend) -> None:
        self._pauses[name] = stream, shorten(stream, self._load)

    def left(self, name: str) -> None:
        """Forget a worker or a client."""
        self._pauses.pop(name, None)

    def client_left(self, client: str) -> None:
        """Forget a client, and that it wanted to be told."""
        self.left(client)
        self._scheduler.unsubscribe_topic(TOPIC, client)

    def close(self) -> None:
        """Leave the streams as they were found."""
        if self._is_open:
            self._is_open = False
            for stream, pause in self._pauses.values():
                restore(stream, pause)
            self._pauses.clear()
            self._tell_clients()
            self._on_workers.want(False)

    def followed_by(self, client: str) -> None:
        """Tell a client how it is now, and of every change: in one stream, so that the last one counts."""
        self._scheduler.subscribe_topic(TOPIC, client)
        self._tell_clients()

    def _tell_clients(self) -> None:
        self._scheduler.log_event(TOPIC, self._is_open)
