"""Samples in virtual time: the rest of a graph and later messages of clients wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from dask.typing import Key

from ferroflow_dask.scheduler.graphs.samples import RunningSample, Samples
from ferroflow_dask.virtual.clock import VirtualTime


class ClientMessages:
    """Handles the messages of clients one after another, as Dask does it for each client.

    Parameters
    ----------
    time : VirtualTime
    """

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._waiting: deque[Callable[[], None]] = deque()
        self._running: RunningSample | None = None

    def handle(self, call: Callable[..., None], *args: Any) -> None:
        """Call a function now; if a sample runs, once the rest of its graph exists."""
        self._waiting.append(partial(call, *args))
        self._handle_waiting()

    def _handle_waiting(self) -> None:
        while self._waiting and self._running is None:
            self._waiting.popleft()()

    def wait(
        self,
        samples: Samples,
        keys: Collection[Key],
        expected_s: Callable[[], float],
        go_on: Callable[[], None],
    ) -> None:
        """Call `go_on` when the plugin would plan the rest; `keys` and `expected_s` as in `Samples.begin`."""
        due = 0.0

        def look() -> None:
            nonlocal due
            if self._running is running and running.is_over():
                self._running = None
                samples.end(running)
                self._waiting.appendleft(go_on)
                self._handle_waiting()
            elif self._running is running and running.deadline != due:
                due = running.deadline
                self._time.at(due, look)

        running = samples.begin(keys, expected_s, self._time, partial(self._time.after, 0.0, look))
        self._running = running
        running.wake()
