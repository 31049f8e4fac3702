"""What a policy may ask for: the closed vocabulary of instructions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ferroflow_dask.policy.state import Key, WorkerKey

#: Words, or a format string and what it is filled with: every task has a reason, few are ever read.
Reason = str | tuple[str | float, ...]


def in_words(reason: Reason, names: Mapping[str, str] | None = None) -> str:
    """Return a reason as it is read, with workers by their names if these are given by address."""
    if not isinstance(reason, tuple):
        return reason
    return str(reason[0]).format(*(names.get(str(part), part) if names else part for part in reason[1:]))


@dataclass(frozen=True, slots=True)
class AssignTask:
    """Send a ready task to a worker."""

    key: Key
    worker: WorkerKey
    reason: Reason


@dataclass(frozen=True, slots=True)
class StealTask:
    """Ask the victim to give up a task that it has not started, for the thief to run."""

    key: Key
    victim: WorkerKey
    thief: WorkerKey
    reason: Reason


@dataclass(frozen=True, slots=True)
class DeclineSteal:
    """Leave a task, the best to move, where it is; only to be noted."""

    key: Key
    victim: WorkerKey
    thief: WorkerKey
    reason: Reason


@dataclass(frozen=True, slots=True)
class DivideTask:
    """Ask the victim for unstarted steps of a bundle that it runs, for the thief and others to run.

    Parameters
    ----------
    key : Key
    victim, thief : WorkerKey
    share : str
        `free` for all unstarted steps, unless all of them wait for the running one; `half` for half of them.
    reason : Reason
    """

    key: Key
    victim: WorkerKey
    thief: WorkerKey
    share: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class SetPriority:
    """Give a task a place in the order of its graph; the smallest runs first."""

    key: Key
    order: int


Instruction = AssignTask | StealTask | DeclineSteal | DivideTask | SetPriority
