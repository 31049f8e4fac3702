"""What `place` has copied to all workers stays there.

Of what no task waits for at the moment, Dask's active memory manager keeps one copy, every two seconds. Right
for results, it would have each call of a model fetch all weights anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed.active_memory_manager import ReduceReplicas

from ferroflow_dask.annotations import is_placed_key

if TYPE_CHECKING:
    from distributed.active_memory_manager import ActiveMemoryManagerExtension, SuggestionGenerator
    from distributed.scheduler import Scheduler


class KeepPlaced(ReduceReplicas):
    """Dask's policy for all but what was placed."""

    def run(self) -> SuggestionGenerator:
        """Suggest which copies to drop; called by the active memory manager."""
        for suggestion in super().run():
            if not is_placed_key(suggestion.ts.key):
                yield suggestion


def keep_placed(scheduler: Scheduler) -> None:
    """Let placed values have as many copies as were made of them."""
    _exchange(scheduler, ReduceReplicas, KeepPlaced)


def restore_replicas(scheduler: Scheduler) -> None:
    """Leave the active memory manager as it was."""
    _exchange(scheduler, KeepPlaced, ReduceReplicas)


def _exchange(scheduler: Scheduler, old: type[ReduceReplicas], new: type[ReduceReplicas]) -> None:
    manager: ActiveMemoryManagerExtension | None = scheduler.extensions.get("amm")
    if manager is None:
        return
    for policy in list(manager.policies):
        if type(policy) is old:  # not one that somebody has made of it
            manager.policies.remove(policy)
            manager.add_policy(new())
