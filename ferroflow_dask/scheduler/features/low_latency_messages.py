"""Low-latency messages: they are sent at once, and in batches while the event loop is busy.

Dask waits 5 ms between two batches from the scheduler to a worker and 2 ms on the way back, which for tasks
of a few milliseconds is most of their time; between a client and the scheduler it waits 10 ms and 2 ms.
Batches save work for both ends, so the interval grows back to Dask's own as the sending event loop runs out
of time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from ferroflow_dask import config
from ferroflow_dask.scheduler.changes import CallChange, Change
from ferroflow_dask.scheduler.core import Core
from ferroflow_dask.scheduler.features.base import Feature
from ferroflow_dask.scheduler.features.low_latency_worker import (
    Interval,
    Load,
    WorkerBatching,
    restore,
    shorten,
)

if TYPE_CHECKING:
    from distributed import Client
    from distributed.batched import BatchedSend

#: Topic under which the scheduler tells clients whether messages are sent at once.
TOPIC = "ferroflow-batching"

_of_clients: WeakKeyDictionary[Client, tuple[BatchedSend, Interval]] = WeakKeyDictionary()
#: Clients of this process that follow the scheduler; events for others arrive too late.
_following: WeakSet[Client] = WeakSet()


def follow(client: Client) -> bool:
    """Let a client of this process send at once while the scheduler does.

    Returns whether the scheduler must send it events; False if the client's configuration forbids it.
    """
    is_wanted = config.is_on("low_latency_messages")
    if is_wanted:
        _following.add(client)
        client.subscribe_topic(TOPIC, lambda event: _changed(client, is_open=bool(event[1])))
    return is_wanted


def _changed(client: Client, is_open: bool) -> None:
    stream = client.scheduler_comm
    if not is_open:
        _restore_client(client)
    elif stream is not None and client in _following:
        _of_clients[client] = stream, shorten(stream, Load())


def unfollow(client: Client) -> None:
    """Restore Dask's interval of a client's messages, and ignore the scheduler's events from now on."""
    _following.discard(client)
    _restore_client(client)


def _restore_client(client: Client) -> None:
    if client in _of_clients:
        restore(*_of_clients.pop(client))


class LowLatencyMessages(Feature):
    """Shortens the intervals of the scheduler's messages to workers and clients, and of theirs to it."""

    name = "low_latency_messages"
    summary = "Messages are sent at once while the sending event loop has time"
    reason = "a call and its result take 8 ms, without it 11 ms: `tests/scheduler/test_batching.py`"
    parts = ("scheduler/features/low_latency_worker",)

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._scheduler = core.scheduler
        self._load = Load()
        #: By address of the worker, or id of the client, at the other end.
        self._intervals: dict[str, tuple[BatchedSend, Interval]] = {}
        self._followers: set[str] = set()
        self._is_open = False

    def state(self) -> frozenset[str]:
        """Return the ids of the clients that are told whether messages are sent at once."""
        return frozenset(self._followers)

    def inherit(self, state: frozenset[str]) -> None:
        """Tell the clients that followed the installation before."""
        self._followers = set(state)

    def changes(self) -> Iterable[Change]:
        """Shorten all intervals, here and on workers."""
        yield CallChange("BatchedSend.interval of workers and clients", self._open, self._close)
        yield self.core.put_on_workers(WorkerBatching(), "ferroflow-batching")

    def _open(self) -> None:
        self._is_open = True
        for address in self._scheduler.workers:
            self.add_worker(address)
        for client in self._scheduler.client_comms:
            self._client_joined(client)
        for client in self._followers & set(self._scheduler.client_comms):
            self.followed_by(client)

    def add_worker(self, address: str) -> None:
        """Shorten the interval of the messages to a worker."""
        if self._is_open:
            self._shorten(address, self._scheduler.stream_comms[address])

    def add_client(self, client: str) -> None:
        """Shorten the interval of the messages to a client, whose stream is opened after this call."""
        self._scheduler.loop.add_callback(self.core.guard(self._client_joined), client)

    def _client_joined(self, client: str) -> None:
        stream = self._scheduler.client_comms.get(client)
        if self._is_open and stream is not None:
            self._shorten(client, stream)

    def _shorten(self, name: str, stream: BatchedSend) -> None:
        self._intervals[name] = stream, shorten(stream, self._load)

    def remove_worker(self, address: str) -> None:
        """Forget a worker."""
        self._intervals.pop(address, None)

    def remove_client(self, client: str) -> None:
        """Forget a client and its subscription."""
        self._intervals.pop(client, None)
        self._unsubscribe(client)

    def _unsubscribe(self, client: str) -> None:
        if client in self._followers:
            self._scheduler.unsubscribe_topic(TOPIC, client)
            self._followers.discard(client)

    def _close(self) -> None:
        """Restore all intervals, tell the clients, and end their subscriptions."""
        self._is_open = False
        for name, (stream, interval) in list(self._intervals.items()):
            restore(stream, interval)
            del self._intervals[name]
        self._tell_clients()
        for client in list(self._followers):
            self._unsubscribe(client)

    def followed_by(self, client: str) -> None:
        """Tell a client the present state, and every change until `uninstall`."""
        self._scheduler.subscribe_topic(TOPIC, client)
        self._followers.add(client)
        self._tell_clients()

    def _tell_clients(self) -> None:
        self._scheduler.log_event(TOPIC, self._is_open)
