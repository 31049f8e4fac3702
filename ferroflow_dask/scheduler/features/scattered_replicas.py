"""Replicas of scattered values: what `scatter` has copied to all workers stays there.

Dask's active memory manager keeps one replica of a value that no task waits for, and drops the others every
two seconds. For weights, each call of a model would fetch them again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from distributed.active_memory_manager import ReduceReplicas

from ferroflow_dask.annotations import is_scattered_key
from ferroflow_dask.scheduler.changes import CallChange, Change
from ferroflow_dask.scheduler.features.base import Feature

if TYPE_CHECKING:
    from distributed.active_memory_manager import ActiveMemoryManagerExtension, SuggestionGenerator
    from distributed.scheduler import Scheduler


class KeepPlaced(ReduceReplicas):
    """Dask's policy `ReduceReplicas` for all keys but scattered ones."""

    def run(self) -> SuggestionGenerator:
        """Suggest which replicas to drop; called by the active memory manager."""
        for suggestion in super().run():
            if not is_scattered_key(suggestion.ts.key):
                yield suggestion


class ScatteredReplicas(Feature):
    """Exempts scattered values from Dask's reduction of replicas."""

    name = "scattered_replicas"
    summary = "What `scatter` has copied to all workers stays there"
    reason = "weights are sent once: `tests/scheduler/test_collection.py`"

    def changes(self) -> Iterable[Change]:
        """Exchange the policy of the active memory manager."""
        scheduler = self.core.scheduler
        yield CallChange(
            "active memory manager's ReduceReplicas",
            lambda: _exchange(scheduler, ReduceReplicas, KeepPlaced),
            lambda: _exchange(scheduler, KeepPlaced, ReduceReplicas),
        )


def _exchange(scheduler: Scheduler, old: type[ReduceReplicas], new: type[ReduceReplicas]) -> None:
    manager: ActiveMemoryManagerExtension | None = scheduler.extensions.get("amm")
    if manager is None:
        return
    for policy in list(manager.policies):
        if type(policy) is old:  # not a subclass of another package
            manager.policies.remove(policy)
            manager.add_policy(new())
