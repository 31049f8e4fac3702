"""Scheduler's handlers of messages of our own in the workers' streams, for as long as one may arrive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ferroflow_dask.scheduler.changes import Change, attempt

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler


class WorkerStreamHandler(Change):
    """Stream handlers of messages from workers.

    `undo` asks each worker to close. Messages in flight are handled by `ignore` until the worker has answered
    by its last message. An operation without a handler would close the worker's stream.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    receivers : mapping of str to (callable, callable)
        By operation: what receives a message, and what ignores it after `undo`. They are called with the
        fields of the message, and must not raise.
    close, closed : str
        Operations of the message that asks a worker for its last one, and of the last one.
    senders : callable
        Returns the workers that may send messages by address, with the numbers of their plugins.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        receivers: Mapping[str, tuple[Callable[..., object], Callable[..., object]]],
        close: str,
        closed: str,
        *,
        senders: Callable[[], Mapping[str, int]],
    ) -> None:
        super().__init__(f"Scheduler.stream_handlers[{', '.join(map(repr, receivers))}]")
        self._handlers: dict[str, Callable[..., Any]] = scheduler.stream_handlers
        self._scheduler = scheduler
        self._receive = {operation: receive for operation, (receive, _) in receivers.items()}
        self._ignore = {operation: ignore for operation, (_, ignore) in receivers.items()}
        self._close, self._closed = close, closed
        self._senders = senders
        # Workers that are not asked yet, and workers that have not answered.
        self._unasked: dict[str, int] = {}
        self._pending: set[str] | None = None

    @property
    def is_applied(self) -> bool:
        """Whether messages are received."""
        return all(self._handlers.get(name) is receive for name, receive in self._receive.items())

    def apply(self) -> None:
        """Receive messages."""
        self._pending = None
        self._handlers |= {**self._receive, self._closed: self._worker_closed}

    def undo(self) -> None:
        """Ignore messages from now on, and remove the handlers after the last message of each worker."""
        if self.is_applied:
            workers = self._scheduler.workers
            self._unasked = {one: number for one, number in self._senders().items() if one in workers}
            self._pending = set(self._unasked)
            self._handlers |= self._ignore
        if self._pending is not None:  # also when an earlier call has failed halfway
            self._ask()
            self._remove_if_closed()

    def _ask(self) -> None:
        while self._unasked:
            address, number = self._unasked.popitem()
            if address in self._scheduler.stream_comms:
                self._scheduler.worker_send(address, {"op": self._close, "number": number})

    def _worker_closed(self, worker: str) -> None:
        if self._pending is not None:
            self._pending.discard(worker)
            # An exception would close the worker's stream.
            attempt(self._remove_if_closed, f"{self.name} could not be restored")

    def _remove_if_closed(self) -> None:
        if any(address in self._scheduler.workers for address in self._pending or ()):
            return
        # A later installation may have replaced the handlers.
        for operation, ours in {**self._ignore, self._closed: self._worker_closed}.items():
            if self._handlers.get(operation) == ours:
                del self._handlers[operation]
