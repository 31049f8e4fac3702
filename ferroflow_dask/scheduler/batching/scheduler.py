"""Scheduler's end of batching: messages are sent at once, and in batches while the event loop is busy.

Dask waits 5 ms between two batches from the scheduler to a worker and 2 ms on the way back, which for tasks
of a few milliseconds is most of their time; between a client and the scheduler it waits 10 ms and 2 ms.
Batches save work for both ends, so the interval grows back to Dask's own as the sending event loop runs out
of time.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from ferroflow_dask import config
from ferroflow_dask.scheduler.batching.worker import Interval, Load, restore, shorten
from ferroflow_dask.scheduler.changes import CallChange, Change

if TYPE_CHECKING:
    from distributed import Client, Scheduler
    from distributed.batched import BatchedSend

    from ferroflow_dask.scheduler.changes import Guard

#: Topic under which the scheduler tells clients whether messages are sent at once.
TOPIC = "ferroflow-batching"

_of_clients: WeakKeyDictionary[Client, tuple[BatchedSend, Interval]] = WeakKeyDictionary()
#: Clients of this process that follow the scheduler; events for others arrive too late.
_following: WeakSet[Client] = WeakSet()


def follow(client: Client) -> bool:
    """Let a client of this process send at once while the scheduler does.

    Returns whether the scheduler must send it events; False if the client's configuration forbids it.
    """
    is_wanted = config.get_bool("low-latency-messages")
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


class Batching:
    """Shortens the intervals of the scheduler's messages to workers and clients.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    guard : Guard
    followers : collection of str, optional
        Clients that followed an earlier installation.
    """

    def __init__(self, scheduler: Scheduler, guard: Guard, followers: Collection[str] = ()) -> None:
        self._scheduler = scheduler
        self._guard = guard
        self._load = Load()
        #: By address of the worker, or id of the client, at the other end.
        self._intervals: dict[str, tuple[BatchedSend, Interval]] = {}
        self._followers = set(followers)
        self._is_open = False

    def change(self) -> Change:
        """Return the change of all intervals."""
        return CallChange("BatchedSend.interval of workers and clients", self._open, self._close)

    def _open(self) -> None:
        self._is_open = True
        for address in self._scheduler.workers:
            self.worker_joined(address)
        for client in self._scheduler.client_comms:
            self._client_joined(client)
        for client in self._followers & set(self._scheduler.client_comms):
            self.followed_by(client)

    def worker_joined(self, address: str) -> None:
        """Shorten the interval of the messages to a worker."""
        if self._is_open:
            self._shorten(address, self._scheduler.stream_comms[address])

    def client_joins(self, client: str) -> None:
        """Shorten the interval of the messages to a client, whose stream is opened after this call."""
        self._scheduler.loop.add_callback(self._guard(self._client_joined), client)

    def _client_joined(self, client: str) -> None:
        stream = self._scheduler.client_comms.get(client)
        if self._is_open and stream is not None:
            self._shorten(client, stream)

    def _shorten(self, name: str, stream: BatchedSend) -> None:
        self._intervals[name] = stream, shorten(stream, self._load)

    def left(self, name: str) -> None:
        """Forget a worker or a client."""
        self._intervals.pop(name, None)

    def client_left(self, client: str) -> None:
        """Forget a client and its subscription."""
        self.left(client)
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
            self.left(name)
        self._tell_clients()
        for client in list(self._followers):
            self._unsubscribe(client)

    @property
    def followers(self) -> frozenset[str]:
        """Clients that are told whether messages are sent at once, by their ids."""
        return frozenset(self._followers)

    def followed_by(self, client: str) -> None:
        """Tell a client the present state, and every change until `uninstall`."""
        self._scheduler.subscribe_topic(TOPIC, client)
        self._followers.add(client)
        self._tell_clients()

    def _tell_clients(self) -> None:
        self._scheduler.log_event(TOPIC, self._is_open)
