"""Stream handlers of workers: added by a worker plugin, and removed by a message in the same stream.

An operation without a handler closes a worker's stream. A worker plugin is removed by a request on another
connection, which may overtake messages in the stream; the last message in the stream itself cannot.

This module is sent to workers by value and must not import this package.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any


class StreamHandlers:
    """Handlers that stay until the closing message for the last plugin that added them has arrived.

    Plugins are numbered. A closing message stands for all plugins up to its number: if a plugin was removed
    before the scheduler knew of it, it has no message of its own.

    Parameters
    ----------
    handlers : mapping of str to callable
        By operation.
    close : str
        Operation of the closing message.
    closed : callable
        Called after that message.
    """

    def __init__(
        self, handlers: dict[str, Callable[..., object]], close: str, closed: Callable[[], object]
    ) -> None:
        self._handlers = {**handlers, close: self._close}
        self._closed = closed
        self._registry: MutableMapping[str, Any] = {}
        self._newest = 0

    def add(self, registry: MutableMapping[str, Any]) -> int:
        """Add the handlers to a worker's, and return the number of the plugin that does so."""
        self._registry = registry
        self._newest += 1
        registry.update(self._handlers)
        return self._newest

    def _close(self, number: int) -> None:
        if number >= self._newest:
            for operation in self._handlers:
                self._registry.pop(operation, None)
            self._closed()
