"""Wires: streams of messages between scheduler and worker, and what a transfer between workers takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ferroflow_dask.virtual.clock import VirtualTime


@dataclass(frozen=True)
class Network:
    """One link for each worker, over which it fetches one thing after the other.

    Parameters
    ----------
    latency_s : float
        Of a message, one way [s].
    bandwidth : float
        Between two workers of different hosts [B/s].
    host_bandwidth : float
        Between two workers of one host [B/s].
    """

    latency_s: float
    bandwidth: float
    host_bandwidth: float

    def busy_s(self, nbytes: int, is_within_host: bool) -> float:
        """Return for how long so many bytes keep a link busy [s]."""
        return nbytes / (self.host_bandwidth if is_within_host else self.bandwidth)


class Stream:
    """One direction between the scheduler and a worker; stands where `BatchedSend` stood.

    Parameters
    ----------
    time : VirtualTime
    latency_s : float
        From leaving to arriving [s].
    interval : float
        Messages leave together, at most once in so long; 0 sends each at once [s]. As in `BatchedSend`, the
        attribute may be exchanged for any object that can be added to a time.
    deliver : callable
        Takes each message, a dictionary, in the order in which they were sent.
    """

    def __init__(
        self,
        time: VirtualTime,
        latency_s: float,
        interval: float,
        deliver: Callable[[dict[str, Any]], None],
    ) -> None:
        self._time = time
        self._latency_s = latency_s
        self.interval = interval
        self._deliver = deliver
        self._leaves = -math.inf

    def send(self, *messages: Mapping[str, Any]) -> None:
        """Send messages."""
        if self._time.now > self._leaves:  # else a batch is still waiting to leave
            self._leaves = max(self._time.now, self._leaves + self.interval)
        for message in messages:
            self._time.at(self._leaves + self._latency_s, self._deliver, dict(message))
