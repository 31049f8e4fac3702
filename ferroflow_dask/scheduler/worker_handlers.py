"""Stream handlers of workers: added by a worker plugin, and removed by a message in the same stream.

An operation without a handler closes a worker's stream. A worker plugin is removed by a request on another
connection, which may overtake messages in the stream; the last message in the stream itself cannot.

This module is sent to workers by value and must not import this package.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any


class StreamHandlers:
    """Handlers that stay until as many closing messages have arrived as plugins have added them.

    Parameters
    ----------
    handlers : mapping of str to callable
        By operation.
    close : str
        Operation of the closing message.
    closed : callable
        Called after the last closing message.
    """

    def __init__(
        self, handlers: dict[str, Callable[..., object]], close: str, closed: Callable[[], object]
    ) -> None:
        self._handlers = {**handlers, close: self._close}
        self._closed = closed
        self._registry: MutableMapping[str, Any] = {}
        self._n_open = 0

    def add(self, registry: MutableMapping[str, Any]) -> None:
        """Add the handlers to a worker's; several plugins may do so, one after the other."""
        self._registry = registry
        self._n_open += 1
        registry.update(self._handlers)

    def _close(self) -> None:
        self._n_open -= 1
        if not self._n_open:
            for operation in self._handlers:
                self._registry.pop(operation, None)
            self._closed()
