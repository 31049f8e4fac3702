"""distributed's state machine of a worker, made repeatable.

The worker's part of `upstream`: names of distributed that are not public, listed in `REQUIRED`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import dask
from dask.typing import Key
from distributed import worker_state_machine as machine

#: Names that must be there, by the class that has them.
REQUIRED: dict[type, tuple[str, ...]] = {
    machine.TaskState: ("__hash__", "__post_init__"),
    machine.WorkerState: (
        "_ensure_task_exists",
        "_gather_dep_done_common",
        "_select_workers_for_gather",
        "actors",
        "data",
        "data_needed",
        "handle_stimulus",
        "in_flight_workers",
        "missing_dep_flight",
        "plugins",
        "rng",
        "task_counter",
        "validate_state",
    ),
}
#: What the scheduler may send to a worker, as `Worker.__init__` maps it.
_EVENTS: dict[str, type[machine.StateMachineEvent]] = {
    "acquire-replicas": machine.AcquireReplicasEvent,
    "cancel-compute": machine.CancelComputeEvent,
    "compute-task": machine.ComputeTaskEvent,
    "free-keys": machine.FreeKeysEvent,
    "refresh-who-has": machine.RefreshWhoHasEvent,
    "remove-replicas": machine.RemoveReplicasEvent,
    "remove-worker": machine.RemoveWorkerEvent,
    "steal-request": machine.StealRequestEvent,
}


def stable_hash(name: object) -> int:
    """Return a hash that is the same in every process, unlike Python's own of strings."""
    return zlib.crc32(repr(name).encode())


class _MachineTask(machine.TaskState):
    """A worker's task whose hash is the same in every run; upstream's is its place in memory."""

    __slots__ = ("_hash",)

    def __post_init__(self) -> None:
        self._hash = stable_hash(self.key)
        super().__post_init__()

    def __hash__(self) -> int:
        return self._hash


class _Machine(machine.WorkerState):
    """A worker's state machine that goes through its sets in the same order in every run."""

    def handle_stimulus(self, *stims: machine.StateMachineEvent) -> list[machine.Instruction]:
        for event in stims:
            if isinstance(event, machine.ComputeTaskEvent):
                self._know(event.key)
            elif isinstance(event, machine.UpdateDataEvent):
                for key in event.data:
                    self._know(key)
        return super().handle_stimulus(*stims)

    def _ensure_task_exists(
        self, key: Key, *, priority: tuple[int, ...], stimulus_id: str
    ) -> machine.TaskState:
        self._know(key)
        return super()._ensure_task_exists(key, priority=priority, stimulus_id=stimulus_id)

    def _select_workers_for_gather(self) -> Iterator[Any]:
        for address in sorted(self.data_needed):  # as they come they have the order of a set
            self.data_needed[address] = self.data_needed.pop(address)
        return super()._select_workers_for_gather()

    def _gather_dep_done_common(self, ev: machine.GatherDepDoneEvent) -> Iterator[machine.TaskState]:
        # A set of keys, whose order decides which of the tasks that had waited for several starts first.
        fetched: Any = dict.fromkeys(sorted(self.in_flight_workers[ev.worker], key=repr))
        self.in_flight_workers[ev.worker] = fetched
        yield from super()._gather_dep_done_common(ev)

    def _know(self, key: Key) -> None:
        if key not in self.tasks:
            self.tasks[key] = task = _MachineTask(key)
            self.task_counter.new_task(task)


def new_machine(
    address: str, nthreads: int, resources: Mapping[str, float], validate: bool, seed: int
) -> machine.WorkerState:
    """Return the state machine of a worker, with the limits that distributed's configuration gives it."""
    state = _Machine(
        address=address,
        nthreads=nthreads,
        resources=resources,
        validate=validate,
        transfer_incoming_count_limit=dask.config.get("distributed.worker.connections.outgoing"),
        transfer_message_bytes_limit=dask.utils.parse_bytes(
            dask.config.get("distributed.worker.transfer.message-bytes-limit")
        ),
    )
    state.rng.seed(seed)
    return state


def event_of(message: Mapping[str, Any]) -> machine.StateMachineEvent:
    """Return what a message from the scheduler is to the worker's state machine."""
    fields = unpacked(message)
    return _EVENTS[fields.pop("op")](**fields)


def unpacked(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as it arrives."""
    fields = dict(message)
    if "run_spec" in fields:
        fields["run_spec"] = fields["run_spec"].data  # it leaves wrapped for pickling
    return fields
