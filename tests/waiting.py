"""Waiting: for conditions that no event announces, and in tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from distributed import Event

_POLL_S = 0.005


def soon(condition: Callable[[], object], within_s: float) -> bool:
    """Return whether a condition becomes true in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(10 * _POLL_S)
    return True


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition; the time limit of the test ends the wait."""
    while not condition():
        time.sleep(_POLL_S)


async def comes(condition: Callable[[], object]) -> None:
    """Wait for a condition on the event loop."""
    while not condition():
        await asyncio.sleep(_POLL_S)


def pause(i: int, seconds: float = 0.01) -> int:
    """Take some time, as a task."""
    time.sleep(seconds)
    return i


def wait_for(i: int, event: Event) -> int:
    """Wait until an event is set, as a task."""
    event.wait()
    return i
