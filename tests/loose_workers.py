"""What plugins of ours know of a worker, without one."""

from __future__ import annotations

from typing import Any


class LooseWorker:
    """A worker's state, and what was sent from it; its own state machine."""

    def __init__(self) -> None:
        self.tasks: dict[Any, Any] = {}
        self.data: dict[Any, Any] = {}
        self.sent: list[dict[str, Any]] = []
        self.stream_handlers: dict[str, Any] = {}
        self.state: Any = self

    def batched_send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def log_event(self, topic: str, message: Any) -> None:
        """Say nothing."""
