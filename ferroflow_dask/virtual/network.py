"""Wires: streams of messages between scheduler and worker, and transfers between workers."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from ferroflow_dask.topology import Topology
from ferroflow_dask.virtual.clock import VirtualTime


class Network(Protocol):
    """What a virtual cluster asks of its network. Workers are named by numbers."""

    def message_s(self, worker: int) -> float:
        """Return the latency of a message between scheduler and worker, one way [s]."""
        ...

    def client_s(self) -> float:
        """Return the latency of a message between client and scheduler, one way [s]."""
        ...

    def latency_s(self, source: int, destination: int) -> float:
        """Return the latency of a message between two workers, one way [s]."""
        ...

    def send(self, source: int, destination: int, nbytes: int, arrived: Callable[[], Any]) -> None:
        """Transfer bytes, and call `arrived` when they are there."""
        ...


class PlainNetwork:
    """One link for each worker, over which it fetches one thing after the other.

    Parameters
    ----------
    time : VirtualTime
    latency_s : float
        Of a message, one way [s].
    bandwidth : float
        Between two workers of different hosts [B/s].
    host_bandwidth : float
        Between two workers of one host [B/s].
    workers_per_host : int
    """

    def __init__(
        self,
        time: VirtualTime,
        latency_s: float,
        bandwidth: float,
        host_bandwidth: float,
        workers_per_host: int,
    ) -> None:
        self._time = time
        self._latency_s = latency_s
        self._bandwidth, self._host_bandwidth = bandwidth, host_bandwidth
        self._workers_per_host = workers_per_host
        self._free_at: dict[int, float] = {}

    def message_s(self, worker: int) -> float:  # noqa: ARG002 -- all are alike
        """Return the latency of a message between scheduler and worker, one way [s]."""
        return self._latency_s

    def client_s(self) -> float:
        """Return the latency of a message between client and scheduler, one way [s]."""
        return 0.0

    def latency_s(self, source: int, destination: int) -> float:  # noqa: ARG002 -- all are alike
        """Return the latency of a message between two workers, one way [s]."""
        return self._latency_s

    def send(self, source: int, destination: int, nbytes: int, arrived: Callable[[], Any]) -> None:
        """Transfer bytes, and call `arrived` when they are there."""
        is_within_host = source // self._workers_per_host == destination // self._workers_per_host
        busy_s = nbytes / (self._host_bandwidth if is_within_host else self._bandwidth)
        wait_s = max(0.0, self._free_at.get(destination, 0.0) - self._time.now)
        self._free_at[destination] = self._time.now + wait_s + busy_s
        self._time.after(wait_s + busy_s + self._latency_s, arrived)


@dataclass(eq=False, slots=True)
class _Way:
    """The transfers under way from a host to another. They share all their links, so all have one rate.

    Parameters
    ----------
    links : tuple of int
    latency_s : float
        [s]
    rate : float
        Of each transfer [B/s].
    served, since : float
        What each has had since no transfer was there [B], and up to when that is counted [s].
    ends : list
        Heap of transfers: the value of `served` at which each is over, a number that breaks ties, and what to
        call then.
    armed : int
        Changes whenever the next end changes.
    """

    links: tuple[int, ...]
    latency_s: float
    rate: float = 0.0
    served: float = 0.0
    since: float = 0.0
    ends: list[tuple[float, int, Callable[[], Any]]] = field(default_factory=list)
    armed: int = 0

    def settle(self, now: float) -> None:
        """Count up to now."""
        self.served += self.rate * (now - self.since)
        self.since = now


class SharedNetwork:
    """The links of a topology, which transfers share max-min fairly.

    D. Bertsekas and R. Gallager, "Data Networks" (1992), section 6.5.2: all rates grow together; those of the
    transfers on a link stop growing when it is full.

    Transfers between the same two hosts are one entry here. Rates are computed once for all changes of an
    instant. So the time for a change depends on the pairs of hosts, not on the number of transfers.

    Parameters
    ----------
    time : VirtualTime
    topology : Topology
    hosts : list of int, optional
        Number of each worker's host; the topology's if left out.
    """

    def __init__(self, time: VirtualTime, topology: Topology, hosts: list[int] | None = None) -> None:
        self._time = time
        self._topology = topology
        self._host_of = topology.host_of if hosts is None else hosts
        self._scheduler = topology.host_number(topology.scheduler)
        self._client = topology.host_number(topology.client)
        self._ways: dict[tuple[int, int], _Way] = {}
        # Those with transfers, by link.
        self._on: list[dict[_Way, None]] = [{} for _ in topology.bandwidths]
        self._changed: dict[_Way, None] = {}
        self._numbers = count()

    def message_s(self, worker: int) -> float:
        """Return the latency of a message between scheduler and worker, one way [s]."""
        return self._topology.route(self._scheduler, self._host_of[worker]).latency_s

    def client_s(self) -> float:
        """Return the latency of a message between client and scheduler, one way [s]."""
        return self._topology.route(self._client, self._scheduler).latency_s

    def latency_s(self, source: int, destination: int) -> float:
        """Return the latency of a message between two workers, one way [s]."""
        return self._topology.route(self._host_of[source], self._host_of[destination]).latency_s

    def send(self, source: int, destination: int, nbytes: int, arrived: Callable[[], Any]) -> None:
        """Transfer bytes, and call `arrived` when they are there."""
        pair = self._host_of[source], self._host_of[destination]
        route = self._topology.route(*pair)
        if not nbytes:
            self._time.after(2 * route.latency_s, arrived)
            return
        way = self._ways.get(pair)
        if way is None:
            way = self._ways[pair] = _Way(route.links, route.latency_s)
        # The destination asks the source first.
        self._time.after(way.latency_s, self._start, way, float(nbytes), arrived)

    def _start(self, way: _Way, nbytes: float, arrived: Callable[[], Any]) -> None:
        way.settle(self._time.now)
        if not way.ends:
            for link in way.links:
                self._on[link][way] = None
        heapq.heappush(way.ends, (way.served + nbytes, next(self._numbers), arrived))
        self._note(way)

    def _end(self, way: _Way, armed: int) -> None:
        if armed != way.armed:
            return  # its rate or its next end has changed since
        way.settle(self._time.now)
        way.served = max(way.served, way.ends[0][0])  # rounding may leave a part of a byte
        while way.ends and way.ends[0][0] <= way.served:
            *_, arrived = heapq.heappop(way.ends)
            self._time.after(way.latency_s, arrived)
        if not way.ends:
            way.rate = way.served = 0.0
            for link in way.links:
                del self._on[link][way]
        self._note(way)

    def _note(self, way: _Way) -> None:
        """Have rates computed once all changes of this instant are known."""
        if not self._changed:
            self._time.after(0.0, self._share)
        self._changed[way] = None
        way.armed += 1

    def _share(self) -> None:
        """Give each transfer its rate that shares a link, directly or not, with some that have changed."""
        changed, self._changed = self._changed, {}
        together = dict.fromkeys(changed)
        stack = list(together)
        while stack:
            for link in stack.pop().links:
                for other in self._on[link]:
                    if other not in together:
                        together[other] = None
                        stack.append(other)
        now = self._time.now
        for way, rate in self._fair_rates([way for way in together if way.ends]).items():
            if rate == way.rate and way not in changed:
                continue
            way.settle(now)
            way.rate = rate
            way.armed += 1
            self._time.after(max(0.0, way.ends[0][0] - way.served) / rate, self._end, way, way.armed)

    def _fair_rates(self, ways: Sequence[_Way]) -> dict[_Way, float]:
        rates: dict[_Way, float] = {}
        links = dict.fromkeys(link for way in ways for link in way.links)
        left = {link: self._topology.bandwidths[link] for link in links}
        waiting = {link: sum(len(way.ends) for way in self._on[link]) for link in links}
        shares = [(left[link] / waiting[link], link) for link in links]
        heapq.heapify(shares)
        while len(rates) < len(ways):
            rate, full = heapq.heappop(shares)
            # Shares only grow while others stop: an entry may be too small, never too large.
            if waiting[full] and left[full] / waiting[full] > rate:
                heapq.heappush(shares, (left[full] / waiting[full], full))
                continue
            for way in self._on[full]:
                if way in rates:
                    continue
                rates[way] = rate
                for link in way.links:
                    waiting[link] -= len(way.ends)
                    left[link] = max(0.0, left[link] - rate * len(way.ends))
        return rates


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
