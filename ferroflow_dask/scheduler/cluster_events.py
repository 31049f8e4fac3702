"""Cluster events: workers and clients that join or leave, and reports of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferroflow_dask.device_reports import DEVICES_TOPIC, kind_of_worker
from ferroflow_dask.policy.events import WorkerJoined, WorkerLeft
from ferroflow_dask.scheduler.remote_worker import TOPIC

if TYPE_CHECKING:
    from ferroflow_dask.scheduler.core import Core
    from ferroflow_dask.scheduler.graphs.graphs import Graphs
    from ferroflow_dask.scheduler.placement import Placement
    from ferroflow_dask.scheduler.steal_protocol import StealProtocol


class ClusterEvents:
    """Follows the workers and clients of a scheduler.

    Parameters
    ----------
    core : Core
    placement : Placement
    steals : StealProtocol
    graphs : Graphs
    """

    def __init__(self, core: Core, placement: Placement, steals: StealProtocol, graphs: Graphs) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._view = core.view
        self._hooks = core.hooks
        self._placement = placement
        self._task_views = placement.task_views
        self._steals = steals
        self._graphs = graphs

    def worker_joined(self, address: str) -> None:
        """Handle a worker that joined."""
        ws = self._scheduler.workers[address]
        self._view.add_worker(address, ws.nthreads, kind_of_worker(ws), ws.host)
        self._core.decisions.named(address, str(ws.name))
        # It may not be ready yet.
        self._view.set_running(address, ws in self._scheduler.running, self._core.clock())
        self._task_views.workers_changed()
        for remote in self._core.remotes.values():
            remote.worker_joined(address)
        for hook in self._hooks.add_worker:
            hook(address)
        self._placement.handle(WorkerJoined(address))
        self._core.passes.ask()

    def worker_left(self, address: str) -> None:
        """Handle a worker that left."""
        if address not in self._view.workers:
            return
        self._view.remove_worker(address)
        self._steals.worker_left(address)
        self._core.pauses.remove_worker(address)
        for remote in self._core.remotes.values():
            remote.left(address)
        for hook in self._hooks.remove_worker:
            hook(address)
        self._graphs.worker_left(address)
        self._task_views.workers_changed()
        self._placement.handle(WorkerLeft(address))

    def client_joined(self, client: str) -> None:
        """Handle a client that connects."""
        for hook in self._hooks.add_client:
            hook(client)

    def client_left(self, client: str) -> None:
        """Handle a client that disconnected."""
        for hook in self._hooks.remove_client:
            hook(client)

    def logged(self, topic: str, msg: Any) -> None:
        """Handle events without a hook: workers' states, their plugins, and their devices."""
        if topic in (DEVICES_TOPIC, TOPIC) and isinstance(msg, dict):
            if topic == TOPIC:
                self._announced(msg)
            else:
                self._device_reported(msg)
            return
        self._graphs.event(topic, msg)
        if not isinstance(msg, dict):
            return
        for hook in self._hooks.log_event:
            hook(topic, msg)
        action = msg.get("action")
        if topic not in self._view.workers:
            return
        if action == "remove-worker":
            self._graphs.deaths.removed(topic)
        if action == "worker-status-change" and msg.get("status") != "running":
            self._graphs.dividing.ask_all_on(topic, "its worker has stopped taking tasks")
        if action in ("worker-status-change", "remove-worker"):
            self._view.set_running(topic, msg.get("status") == "running", self._core.clock())
            self._task_views.workers_changed()
            self._core.passes.ask()

    def _announced(self, msg: dict[str, Any]) -> None:
        remote = self._core.remotes.get(str(msg.get("feature")))
        if remote is not None:
            remote.announced(msg.get("worker"), msg.get("number"))

    def _device_reported(self, msg: dict[str, Any]) -> None:
        kind, seconds, address = msg.get("kind"), msg.get("seconds"), msg.get("worker")
        if isinstance(kind, str) and isinstance(seconds, float) and seconds >= 0:
            self._core.learned.costs.record_on_device(kind, seconds)
        elif isinstance(address, str) and address in self._view.workers:  # a device was attached or detached
            self._view.set_kind(address, kind_of_worker(self._scheduler.workers[address]))
            self._task_views.workers_changed()
