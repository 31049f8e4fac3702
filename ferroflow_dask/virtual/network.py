"""Wires: streams of messages between scheduler and worker, and transfers between workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
class _Flow:
    """A transfer under way."""

    links: tuple[int, ...]
    left: float
    arrived: Callable[[], Any]
    latency_s: float
    rate: float = 0.0
    since: float = 0.0
    armed: int = 0


class SharedNetwork:
    """The links of a topology, which transfers share max-min fairly.

    D. Bertsekas and R. Gallager, "Data Networks" (1992), section 6.5.2: all rates grow together; those of the
    transfers on a link stop growing when it is full.

    Parameters
    ----------
    time : VirtualTime
    topology : Topology
    """

    def __init__(self, time: VirtualTime, topology: Topology) -> None:
        self._time = time
        self._topology = topology
        self._host_of = topology.host_of
        self._scheduler = topology.host_number(topology.scheduler)
        self._client = topology.host_number(topology.client)
        self._flows: list[dict[_Flow, None]] = [{} for _ in topology.bandwidths]

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
        route = self._topology.route(self._host_of[source], self._host_of[destination])
        if not nbytes:
            self._time.after(2 * route.latency_s, arrived)
            return
        # The destination asks the source first.
        flow = _Flow(route.links, float(nbytes), arrived, route.latency_s)
        self._time.after(route.latency_s, self._start, flow)

    def _start(self, flow: _Flow) -> None:
        flow.since = self._time.now
        for link in flow.links:
            self._flows[link][flow] = None
        self._share([flow])

    def _end(self, flow: _Flow, armed: int) -> None:
        if armed != flow.armed:
            return  # its rate has changed since
        for link in flow.links:
            del self._flows[link][flow]
        self._time.after(flow.latency_s, flow.arrived)
        self._share([other for link in flow.links for other in self._flows[link]])

    def _share(self, changed: Sequence[_Flow]) -> None:
        """Give each transfer its rate that shares a link, directly or not, with some that have changed."""
        together = dict.fromkeys(changed)
        stack = list(together)
        while stack:
            for link in stack.pop().links:
                for other in self._flows[link]:
                    if other not in together:
                        together[other] = None
                        stack.append(other)
        for flow, rate in self._fair_rates(together).items():
            if rate == flow.rate:
                continue
            now = self._time.now
            flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
            flow.since, flow.rate = now, rate
            flow.armed += 1
            self._time.after(flow.left / rate, self._end, flow, flow.armed)

    def _fair_rates(self, flows: Mapping[_Flow, None]) -> dict[_Flow, float]:
        rates: dict[_Flow, float] = {}
        links = dict.fromkeys(link for flow in flows for link in flow.links)
        left = {link: self._topology.bandwidths[link] for link in links}
        open_flows = {link: dict(self._flows[link]) for link in links}
        while len(rates) < len(flows):
            shares = ((left[link] / len(open_flows[link]), link) for link in links if open_flows[link])
            rate, full = min(shares)
            for flow in list(open_flows[full]):
                rates[flow] = rate
                for link in flow.links:
                    del open_flows[link][flow]
                    left[link] = max(0.0, left[link] - rate)
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
