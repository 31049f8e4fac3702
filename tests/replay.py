"""Record what a policy was told and what it said, and tell another one the same."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from ferroflow_dask.policy import ClusterView, Policy, TaskView
from ferroflow_dask.policy.events import Event, GraphArrived, TaskReady
from ferroflow_dask.policy.instructions import Instruction, SetPriority

_CHANGES = (
    *("add_worker", "remove_worker", "set_running", "set_kind", "set_movable", "set_started", "set_nbytes"),
    *("set_incoming", "to_end_of_idle", "assign", "reprice", "observe", "finish", "release"),
)


@dataclass(frozen=True)
class Snapshot:
    """A task as it was when the policy or the view was told of it."""

    identity: int
    values: dict[str, Any]
    allowed: int | None


class Recording:
    """What happened, in its order: changes of the view, events, and each instruction that followed."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []
        self.latency_s = 0.0
        self._kept: list[object] = []  # so that no identity is used twice
        self._allowed: dict[int, Collection[str]] = {}

    @property
    def instructions(self) -> list[Instruction]:
        return [entry[1] for entry in self.entries if entry[0] == "instruction"]

    def snapshot(self, task: TaskView) -> Snapshot:
        self._kept.append(task)
        values = {field.name: getattr(task, field.name) for field in fields(task)}
        allowed = values.pop("allowed")
        if allowed is not None:
            self._allowed[id(allowed)] = allowed
        values |= {name: dict(values[name]) for name in ("held",)}
        return Snapshot(id(task), values, None if allowed is None else id(allowed))

    def note_allowed(self) -> None:
        now = {identity: list(allowed) for identity, allowed in self._allowed.items()}
        self.entries.append(("allowed", now))

    def frozen(self, event: Event) -> Any:
        if isinstance(event, TaskReady):
            return (event, [self.snapshot(event.task)])
        if isinstance(event, GraphArrived):
            return (event, [self.snapshot(task) for task in event.tasks])
        return (event, [])


def recording_view(recording: Recording) -> type[ClusterView]:
    """Return a class of views that note in a recording what is changed in them."""

    class RecordingView(ClusterView):
        is_inner = False

        def __init__(self, latency_s: float) -> None:
            super().__init__(latency_s=latency_s)
            recording.latency_s = latency_s

    def noting(name: str) -> Any:
        change = getattr(ClusterView, name)

        def noted(self: Any, *args: Any) -> Any:
            if self.is_inner:  # a change that another one makes
                return change(self, *args)
            told = [recording.snapshot(arg) if isinstance(arg, TaskView) else arg for arg in args]
            recording.entries.append(("change", name, told))
            self.is_inner = True
            try:
                return change(self, *args)
            finally:
                self.is_inner = False

        return noted

    for name in _CHANGES:
        setattr(RecordingView, name, noting(name))
    return RecordingView


class RecordedPolicy(Policy):
    """Hands events on to a policy, and notes them and its instructions."""

    def __init__(self, policy: Policy, recording: Recording) -> None:
        self._policy, self._recording = policy, recording
        self.places_queued = policy.places_queued  # type: ignore[misc] -- of one instance

    def handle(self, event: Event, view: ClusterView, now: float) -> Iterator[Instruction]:
        entries = self._recording.entries
        told = self._recording.frozen(event)
        self._recording.note_allowed()
        entries.append(("event", told, (view.host_bandwidth, view.bandwidth), now))
        for instruction in self._policy.handle(event, view, now):
            entries.append(("instruction", copy.deepcopy(instruction)))
            yield instruction
        entries.append(("end",))


def replay(recording: Recording, policy: Policy) -> list[Instruction]:
    """Tell a fresh policy, over a fresh view, the same story; return what it says to it."""
    view = ClusterView(latency_s=recording.latency_s)
    tasks: dict[int, TaskView] = {}
    allowed: dict[int, list[str]] = {}

    def task_of(snapshot: Snapshot) -> TaskView:
        task = tasks.setdefault(snapshot.identity, TaskView(None, 0.0, ()))
        for name, value in snapshot.values.items():
            setattr(task, name, value)
        task.allowed = None if snapshot.allowed is None else allowed.setdefault(snapshot.allowed, [])
        return task

    said: list[Instruction] = []
    answer: Iterator[Instruction] = iter(())
    by_key: dict[Any, TaskView] = {}
    for kind, *what in recording.entries:
        match kind:
            case "change":
                name, args = what
                told = [task_of(arg) if isinstance(arg, Snapshot) else arg for arg in args]
                getattr(view, name)(*told)
            case "allowed":
                for identity, addresses in what[0].items():
                    allowed.setdefault(identity, [])[:] = addresses
            case "event":
                (event, snapshots), (view.host_bandwidth, view.bandwidth), now = what
                views = tuple(task_of(snapshot) for snapshot in snapshots)
                by_key = {task.key: task for task in views}
                if isinstance(event, TaskReady):
                    event = replace(event, task=views[0])
                elif isinstance(event, GraphArrived):
                    event = replace(event, tasks=views)
                answer = policy.handle(event, view, now)
            case "instruction":
                instruction = next(answer, None)
                if instruction is not None:
                    said.append(instruction)
                if isinstance(instruction, SetPriority):
                    task = by_key[instruction.key]
                    task.priority = (*task.priority[:-1], instruction.order)
            case "end":
                said += answer
    return said
