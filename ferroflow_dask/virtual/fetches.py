"""Transfers between virtual workers: what their state machines fetch of each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.worker_state_machine import (
    GatherDep,
    GatherDepNetworkFailureEvent,
    GatherDepSuccessEvent,
    StateMachineEvent,
)

from ferroflow_dask.virtual.record import Transfer

if TYPE_CHECKING:
    from ferroflow_dask.virtual.worker import Surroundings, VirtualWorker

#: Smaller transfers are not measured [B] (`Worker._update_metrics_received_data`).
_LEAST_MEASURED_NBYTES = 1_000_000


class Fetches:
    """What a worker fetches of its peers, and what it sends to them.

    Parameters
    ----------
    worker : VirtualWorker
    around : Surroundings
    handle : callable
        Hands an event to the worker's state machine.
    """

    def __init__(
        self, worker: VirtualWorker, around: Surroundings, handle: Callable[[StateMachineEvent], None]
    ) -> None:
        self._worker = worker
        self._around = around
        self._handle = handle
        self._network = around.fabric.network
        self._sending: dict[_Fetch, None] = {}
        #: As in `Worker.bandwidth_workers`; no heartbeat takes them away.
        self.bandwidths: dict[str, tuple[float, int]] = {}

    def begin(self, instruction: GatherDep) -> None:
        """Fetch what the state machine asks for."""
        fetch_s = self._around.fabric.runtime.fetch_s
        self._worker.process.run(fetch_s, self._worker.if_alive, self._ask, instruction)

    def worker_died(self) -> None:
        """Break all transfers to peers; each fails one latency later."""
        for fetch in self._sending:
            fetch.is_broken = True
            latency_s = self._network.latency_s(self._worker.name, fetch.by.name)
            self._around.time.after(latency_s, fetch.by.fetches._failed, fetch.instruction)

    def _ask(self, instruction: GatherDep) -> None:
        worker, peer = self._worker, self._around.peers[instruction.worker]
        if not peer.is_alive:
            latency_s = self._network.latency_s(worker.name, peer.name)
            self._around.time.after(latency_s, worker.if_alive, self._failed, instruction)
            return
        keys = sorted(instruction.to_gather, key=repr)  # a set, whose order no run repeats
        # Of an actor the peer sends a handle.
        stores = (peer.state.data, peer.state.actors)
        data = {key: store[key] for key in keys for store in stores if key in store}
        nbytes = sum(peer.state.tasks[key].nbytes or 0 for key in data)
        fetch = _Fetch(worker, instruction, data, nbytes, self._around.time.now)
        peer.fetches._sending[fetch] = None
        arrived = partial(worker.if_alive, self._arrived, fetch, peer)
        send = partial(self._network.send, peer.name, worker.name, nbytes, arrived)
        if peer.memory is None:
            send()
        else:
            peer.memory.changed()  # it may have read some of them
            peer.process.run(0.0, peer.if_alive, send)

    def _arrived(self, fetch: _Fetch, peer: VirtualWorker) -> None:
        if fetch.is_broken:
            return
        del peer.fetches._sending[fetch]
        now, instruction = self._around.time.now, fetch.instruction
        transfer = Transfer(tuple(fetch.data), peer.name, self._worker.name, fetch.nbytes, fetch.start, now)
        self._around.record.transfers.append(transfer)
        self._measure(transfer, instruction.worker)
        self._handle(
            GatherDepSuccessEvent(
                worker=instruction.worker,
                total_nbytes=instruction.total_nbytes,
                data=fetch.data,
                stimulus_id=f"gather-dep-success-{now}",
            )
        )

    def _measure(self, transfer: Transfer, source: str) -> None:
        """Record the bandwidth of a transfer, as `Worker._update_metrics_received_data` does."""
        span: Any = {"action": "transfer", "start": transfer.start, "stop": transfer.stop, "source": source}
        # One of the tasks that need the data reports the transfer: the first by name, so that runs repeat.
        tasks: Mapping[Key, Any] = self._worker.state.tasks
        needing = {ts.key: ts for key in transfer.keys for ts in tasks[key].dependents}
        if needing:
            needing[min(needing, key=repr)].startstops.append(span)
        if transfer.nbytes > _LEAST_MEASURED_NBYTES:
            seconds = transfer.stop - transfer.start
            total, n = self.bandwidths.get(source, (0.0, 0))
            self.bandwidths[source] = total + transfer.nbytes / seconds, n + 1

    def _failed(self, instruction: GatherDep) -> None:
        if self._worker.is_alive:
            failure = GatherDepNetworkFailureEvent(
                worker=instruction.worker,
                total_nbytes=instruction.total_nbytes,
                stimulus_id=f"gather-dep-network-failure-{self._around.time.now}",
            )
            self._handle(failure)


@dataclass(eq=False)
class _Fetch:
    """A transfer under way, as the one who sends knows it."""

    by: VirtualWorker
    instruction: GatherDep
    data: dict[Key, object]
    nbytes: int
    start: float
    is_broken: bool = False
