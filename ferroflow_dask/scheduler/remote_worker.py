"""Worker's end of a feature: handlers in a worker's stream, until the scheduler's last message to them.

An operation without a handler closes a worker's stream. A worker plugin is removed by a request on another
connection, which may overtake messages in the stream; the last message in the stream itself cannot.

This module is sent to workers by value and must not import this package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from distributed import WorkerPlugin

if TYPE_CHECKING:
    from distributed import Worker

#: Topic of the announcements of workers.
TOPIC = "ferroflow-ends"
#: How long an end waits for the scheduler's last message after its plugin was removed [s]. There is none if
#: the plugin left the scheduler before the end had announced itself.
_PATIENCE_S = 60.0


def close_of(name: str) -> str:
    """Return the operation of the scheduler's last message to the ends of a feature."""
    return f"ferroflow-{name}-close"


def closed_of(name: str) -> str:
    """Return the operation of the last message of an end, in answer to the scheduler's."""
    return f"ferroflow-{name}-closed"


class WorkerEnd:
    """A worker's end of a feature; each worker has at most one of a name.

    Plugins that use it are numbered. A closing message stands for all plugins up to its number: a plugin that
    was removed before the scheduler knew of it has no message of its own.

    Parameters
    ----------
    worker : distributed.Worker
        In virtual time, an object with the same names.
    """

    name: ClassVar[str]
    #: Whether the end sends messages, so that the scheduler waits for the last one.
    sends: ClassVar[bool] = False
    #: Follows the tasks of the worker, if an end defines it, as the hook of a worker plugin.
    transition: Any = None

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._newest = 0
        self._n_plugins = 0

    def handlers(self) -> dict[str, Callable[..., object]]:
        """Return the handlers of the scheduler's messages, by operation: methods of this object."""
        return {}

    def open(self) -> int:
        """Take messages for one more plugin, and return its number."""
        self._newest += 1
        self._n_plugins += 1
        self.worker.stream_handlers.update(self.handlers() | {close_of(self.name): self._close})
        return self._newest

    def removed(self) -> bool:
        """Handle the removal of a plugin; return whether it was the last one.

        The scheduler's last message may still be on its way.
        """
        self._n_plugins -= 1
        if not self._n_plugins:
            self.worker.loop.call_later(_PATIENCE_S, self._close_late, self._newest)
        return not self._n_plugins

    def closed(self) -> None:
        """Forget everything, after the scheduler's last message."""

    def _close(self, number: int) -> None:
        if number >= self._newest:
            self._remove_handlers()
        if self.sends:  # one answer for each message: the scheduler counts them
            self.worker.batched_send({"op": closed_of(self.name)})

    def _close_late(self, newest: int) -> None:
        if newest == self._newest and not self._n_plugins:
            self._remove_handlers()

    def _remove_handlers(self) -> None:
        for operation in (*self.handlers(), close_of(self.name)):
            # Methods of one object may differ: workers of one process share this class, which each unpickles.
            if getattr(self.worker.stream_handlers.get(operation), "__self__", None) is self:
                del self.worker.stream_handlers[operation]
        self.closed()


class RemotePlugin(WorkerPlugin):
    """Opens the end of a feature on each worker, and announces it.

    Parameters
    ----------
    kind : type of WorkerEnd
    """

    def __init__(self, kind: type[WorkerEnd]) -> None:
        self.kind = kind

    def setup(self, worker: Worker) -> None:
        """Open the end; called by distributed on each worker."""
        # An earlier plugin's end may have tasks of the scheduler, and may still be asked to close. Each
        # unpickling makes classes anew, so its class is another one.
        earlier = getattr(worker.stream_handlers.get(close_of(self.kind.name)), "__self__", None)
        self.end: Any = self.kind(worker) if earlier is None else earlier
        if self.end.transition is not None:
            self.transition = self.end.transition  # type: ignore[method-assign]
        # distributed adds the worker.
        worker.log_event(TOPIC, {"feature": self.kind.name, "number": self.end.open()})

    def teardown(self, worker: Worker) -> None:
        """Tell the end; called by distributed when the plugin is removed."""
        self.end.removed()
