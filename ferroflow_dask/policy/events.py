"""What a policy is told: the closed vocabulary of events.

Whoever drives a policy (the Dask plugin, a simulator) has brought the view up to date with an event
before the policy sees it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ferroflow_dask.policy.state import Key, TaskView, WorkerKey


@dataclass(frozen=True, slots=True)
class GraphArrived:
    """A graph was submitted; none of its tasks has started.

    Parameters
    ----------
    tasks : tuple of TaskView
        Its tasks, in the order that the submitter's priorities give.
    """

    tasks: tuple[TaskView, ...]


@dataclass(frozen=True, slots=True)
class TaskReady:
    """All inputs of a task exist; it waits for a worker."""

    task: TaskView


@dataclass(frozen=True, slots=True)
class TaskFinished:
    """A task ended with a result.

    Parameters
    ----------
    key : Key
    worker : WorkerKey
    seconds : float
        Measured time on the worker's thread [s].
    nbytes : int
        Size of the result [B].
    """

    key: Key
    worker: WorkerKey
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker can be given tasks."""

    worker: WorkerKey


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """A worker is gone, with all that it held."""

    worker: WorkerKey


@dataclass(frozen=True, slots=True)
class WorkerIdle:
    """A worker has a thread without a task."""

    worker: WorkerKey


@dataclass(frozen=True, slots=True)
class StealConfirmed:
    """The victim had not started the task and gave it up."""

    key: Key
    victim: WorkerKey
    thief: WorkerKey


@dataclass(frozen=True, slots=True)
class StealRefused:
    """The victim had started the task, or no longer has it."""

    key: Key
    victim: WorkerKey
    thief: WorkerKey


Event = (
    GraphArrived
    | TaskReady
    | TaskFinished
    | WorkerJoined
    | WorkerLeft
    | WorkerIdle
    | StealConfirmed
    | StealRefused
)
