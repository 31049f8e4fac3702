"""distributed's scheduler, freed of event loop and comms.

Every name of distributed that is not public and that the virtual cluster touches is touched here, or in
`upstream_worker`. `REQUIRED` lists them for the contract test (tests/virtual/test_upstream.py).
`VirtualScheduler.join` and `VirtualScheduler.leave` say over again what `Scheduler.add_worker` and
`Scheduler.remove_worker` do between their awaits; the same test compares them with the originals.
"""

from __future__ import annotations

import math
import operator
import pickle
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import dask
from dask._task_spec import GraphNode, Task, TaskRef
from dask.typing import Key
from distributed.broker import Broker
from distributed.collections import HeapSet
from distributed.comm.addressing import get_address_host
from distributed.core import Status
from distributed.scheduler import KilledWorker, Scheduler, SchedulerState, TaskState, WorkerState
from distributed.stealing import WorkStealing
from sortedcontainers import SortedDict

from ferroflow_dask.virtual.clock import Periodic, VirtualLoop, VirtualTime
from ferroflow_dask.virtual.network import Stream
from ferroflow_dask.virtual.upstream_worker import stable_hash

#: Names that must be there, by the class that has them.
REQUIRED: dict[type, tuple[str, ...]] = {
    Scheduler: (
        "_create_taskstate_from_graph",
        "_refresh_no_workers_since",
        "_reschedule",
        "add_keys",
        "add_resources",
        "bulk_schedule_unrunnable_after_adding_worker",
        "check_idle_saturated",
        "client_releases_keys",
        "coerce_address",
        "handle_long_running",
        "handle_request_refresh_who_has",
        "handle_task_erred",
        "handle_task_finished",
        "handle_worker_status_change",
        "log_worker_event",
        "new_task",
        "release_worker_data",
        "remove_replica",
        "remove_resources",
        "stimulus_queue_slots_maybe_opened",
        "transition",
        "transitions",
        "validate_state",
        "worker_send",
    ),
    TaskState: ("_hash", "actor", "suspicious", "who_has"),
    WorkerState: ("_hash", "actors", "clean", "has_what", "occupancy", "processing", "used_resources"),
    WorkStealing: ("_callback_time", "_in_flight_event", "balance"),
}


class VirtualScheduler(Scheduler):
    """A `Scheduler` that is no server: its state and its decisions, nothing else.

    Parameters
    ----------
    loop : VirtualLoop
    validate : bool
        Whether each change of state is checked.
    seed : int
        Salt of the hashes, which decide the order of sets and so how Dask breaks ties.
    """

    def __init__(self, loop: VirtualLoop, validate: bool, seed: int) -> None:
        # Not Scheduler.__init__, which opens ports: only the part that holds the state.
        SchedulerState.__init__(
            self,
            aliases={},
            clients={},
            workers=SortedDict(),
            host_info={},
            resources={},
            tasks={},
            unrunnable={},
            queued=HeapSet(key=operator.attrgetter("priority")),
            validate=validate,
        )
        state: Any = self  # the types of what follows are those of comms
        self._seed = seed
        state.status = Status.running
        state.loop = loop
        state.stream_comms = {}
        state.client_comms = {}
        state.periodic_callbacks = {}
        state._broker = Broker(dask.config.get("distributed.admin.low-level-log-length"), self)
        state.digests = None
        self.allowed_failures = dask.config.get("distributed.scheduler.allowed-failures")
        self.generation = 0
        state._last_time = -math.inf  # no graph came before
        self._no_workers_since = None
        self._workers_added_total = self._workers_removed_total = 0
        self.stream_handlers = {
            "add-keys": self.add_keys,
            "log-event": self.log_worker_event,
            "long-running": self.handle_long_running,
            "release-worker-data": self.release_worker_data,
            "request-refresh-who-has": self.handle_request_refresh_who_has,
            "reschedule": self._reschedule,
            "task-erred": self.handle_task_erred,
            "task-finished": self.handle_task_finished,
            "worker-status-change": self.handle_worker_status_change,
        }

    def __repr__(self) -> str:
        return f"<VirtualScheduler, {len(self.workers)} workers, {len(self.tasks)} tasks>"

    def new_task(self, key: Key, spec: Any, *args: Any, **kwargs: Any) -> TaskState:
        """Create a task whose hash is the same in every run."""
        if spec is not None and type(spec._dependencies) is not _InOrder:  # of a bundle
            spec._dependencies = _InOrder(spec.dependencies)
        ts = super().new_task(key, spec, *args, **kwargs)
        ts._hash = stable_hash((self._seed, key))
        return ts

    def join(
        self,
        address: str,
        name: int,
        nthreads: int,
        resources: Mapping[str, float],
        stream: Stream,
        *,
        memory_limit: int = 0,
    ) -> None:
        """Add a worker, which is not running yet; `Scheduler.add_worker` without the handshake."""
        stimulus_id = f"worker-connect-{name}"
        self.log_event(address, {"action": "add-worker"})
        self.log_event("all", {"action": "add-worker", "worker": address})
        ws = WorkerState(
            address=address,
            status=Status.init,
            pid=0,
            name=name,
            nthreads=nthreads,
            memory_limit=memory_limit,
            local_directory="",
            nanny="",
            server_id=address,
            scheduler=self,
        )
        ws._hash = stable_hash((self._seed, address))
        self.workers[address] = ws
        self._workers_added_total += 1
        host = self.host_info.setdefault(get_address_host(address), {"addresses": set(), "nthreads": 0})
        host["addresses"].add(address)
        host["nthreads"] += nthreads
        self.total_nthreads += nthreads
        self.aliases[name] = address
        if resources:
            self.add_resources(worker=address, resources=dict(resources))
        self.check_idle_saturated(ws)
        streams: dict[str, Any] = self.stream_comms
        streams[address] = stream
        for plugin in list(self.plugins.values()):
            plugin.add_worker(scheduler=self, worker=address)
        self.handle_worker_status_change(Status.running, ws, stimulus_id)

    def leave(self, address: str) -> None:
        """Remove a worker that died; `Scheduler.remove_worker` without the awaits."""
        stimulus_id = f"worker-lost-{address}"
        ws = self.workers[address]
        self.remove_resources(address)
        host = self.host_info[get_address_host(address)]
        host["addresses"].remove(address)
        host["nthreads"] -= ws.nthreads
        if not host["addresses"]:
            del self.host_info[get_address_host(address)]
        self.total_nthreads -= ws.nthreads
        del self.stream_comms[address]
        del self.aliases[ws.name]
        self.idle.pop(address, None)
        self.idle_task_count.discard(ws)
        self.saturated.discard(ws)
        del self.workers[address]
        self._workers_removed_total += 1
        ws.status = Status.closed
        self.running.discard(ws)
        processing = {ts.key for ts in ws.processing}
        recommendations = self._give_back_tasks(ws, stimulus_id)
        lost = self._give_back_data(ws, recommendations)
        event = {
            "action": "remove-worker",
            "processing-tasks": processing,
            "lost-computed-tasks": lost,
            "lost-scattered-tasks": set(),
            "stimulus_id": stimulus_id,
            "expected": False,
        }
        self.log_event(address, dict(event))
        self.log_event("all", {**event, "worker": address})
        self.transitions(recommendations, stimulus_id=stimulus_id)
        self._refresh_no_workers_since()
        for plugin in list(self.plugins.values()):
            plugin.remove_worker(scheduler=self, worker=address, stimulus_id=stimulus_id)
        for other in self.workers:
            message = {"op": "remove-worker", "worker": address, "stimulus_id": stimulus_id}
            self.worker_send(other, message)

    def _give_back_tasks(self, ws: WorkerState, stimulus_id: str) -> dict[Key, Any]:
        recommendations: dict[Key, Any] = {}
        for ts in list(ws.processing):
            recommendations[ts.key] = "released"
            ts.suspicious += 1
            ts.prefix.suspicious += 1
            if ts.suspicious > self.allowed_failures:
                del recommendations[ts.key]
                killed = KilledWorker(ts.key, ws.clean(), self.allowed_failures)
                details = {"exception": pickle.dumps(killed), "cause": ts.key, "worker": ws.address}
                recommendations.update(self.transition(ts.key, "erred", stimulus_id, **details))
        return recommendations

    def _give_back_data(self, ws: WorkerState, recommendations: dict[Key, Any]) -> set[Key]:
        lost = set()
        for ts in list(ws.has_what):
            self.remove_replica(ts, ws)
            if ts in ws.actors:
                recommendations[ts.key] = "erred"
            elif not ts.who_has:
                lost.add(ts.key)
                recommendations[ts.key] = "released"
        return lost

    def submit(
        self,
        *,
        specs: Mapping[Key, GraphNode],
        keys: Sequence[Key],
        order: Mapping[Key, float],
        client: str,
        annotations: Mapping[str, Mapping[Key, Any]],
        now: float,
        **options: Any,
    ) -> None:
        """Take a graph as `Scheduler.update_graph` does once it has unpacked and ordered it.

        `annotations` are by name and key; `now` [s] decides the generation; `options` are `fifo_timeout`,
        `user_priority`, `actors` and `global_annotations`.
        """
        arguments: dict[str, Any] = {
            "start": now,
            "dsk": dict(specs),
            "keys": list(keys),  # distributed passes a set, whose order no run repeats
            "ordered": dict(order),
            "client": client,
            "annotations_by_type": dict(annotations),
            "stimulus_id": f"update-graph-{now}",
            "submitting_task": None,
            "span_metadata": {"collections": []},
            **options,
        }
        self._create_taskstate_from_graph(**arguments)


def spec_of(key: Key, dependencies: Sequence[Key]) -> Task:
    """Return a task that does nothing, whose dependencies come in the same order in every run."""
    spec = Task(key, _nothing, *map(TaskRef, dependencies))
    spec._dependencies = _InOrder(dependencies)
    return spec


class _InOrder(frozenset[Key]):
    """A set of keys that is gone through in the same order in every run."""

    def __iter__(self) -> Iterator[Key]:
        return iter(sorted(super().__iter__(), key=repr))


def _nothing(*inputs: Any) -> None:
    """Stand for a task's function, which no virtual worker calls."""


def start_stealing(extension: WorkStealing, time: VirtualTime) -> None:
    """Let an extension act by the clock; `WorkStealing.start` on another clock."""
    scheduler: Any = extension.scheduler
    balance = partial(scheduler.loop.run, extension.balance)
    scheduler.periodic_callbacks["stealing"] = Periodic(time, balance, extension._callback_time * 1e3)
    extension._in_flight_event.set()


def stealing_interval_s(extension: WorkStealing | None) -> float:
    """Return the time between two rounds of stealing by the clock [s]; 0 without an extension."""
    return extension._callback_time if extension is not None else 0.0
