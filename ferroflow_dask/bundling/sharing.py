"""Shared tasks: values that a graph reads from the bundles of other graphs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dask._task_spec import Alias, GraphNode
from dask.typing import Key

from ferroflow_dask.bundling.ordering import needed_by
from ferroflow_dask.bundling.results import VALUE, Place
from ferroflow_dask.bundling.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Sharing:
    """What a graph shares with others, as planned when it was bundled.

    Parameters
    ----------
    tasks : dict of Key to GraphNode
        The needed part of the graph, in which each shared task is an alias of a value of a bundle.
    places : dict of Key to (Key, int or None)
        For each aliased value: the bundle, and the item of its result; None for all of it.
    exports : dict of Key to tuple of Key
        For the bundles in `places`: the tasks whose values they return, added ones included.
    n_again : int
        Number of tasks that run again, since the bundle that holds them was sent without returning their
        values.
    """

    tasks: dict[Key, GraphNode] = field(default_factory=dict)
    places: dict[Key, Place] = field(default_factory=dict)
    exports: dict[Key, tuple[Key | None, ...]] = field(default_factory=dict)
    n_again: int = 0

    def is_possible(self, snapshot: Snapshot) -> bool:
        """Return whether the bundles still return these values, or can."""
        for key, exports in self.exports.items():
            facts = snapshot.bundles.get(key)
            if facts is None or exports[: len(facts.bundle.exports)] != facts.bundle.exports:
                return False
            if exports != facts.bundle.exports and not facts.may_export:
                return False
        return True


def share(graph: dict[Key, GraphNode], wanted: set[Key], snapshot: Snapshot) -> Sharing:
    """Choose the values that a graph reads from bundles."""
    tasks, held = dict(graph), set()
    values: dict[Key, tuple[Key, Key]] = {}
    for key in graph if snapshot.held else ():
        holder = snapshot.held.get(key)
        facts = None if holder is None else snapshot.bundles.get(holder)
        if holder is None or facts is None:
            continue
        is_shared = (key in facts.bundle.exports and not facts.is_gone) or facts.may_export
        if is_shared and "sharing" in snapshot.features:
            values[VALUE, key] = (holder, key)
            tasks[key] = Alias(key, (VALUE, key))
        else:
            held.add(key)
    tasks = needed_by(wanted, tasks)
    read = {needed for task in tasks.values() for needed in task.dependencies}
    values = {value: place for value, place in values.items() if value in read}
    exports: dict[Key, tuple[Key | None, ...]] = {}
    for holder, key in values.values():
        present = exports.setdefault(holder, snapshot.bundles[holder].bundle.exports)
        if key not in present:
            exports[holder] = (*present, key)
    places: dict[Key, Place] = {
        value: replace(snapshot.bundles[holder].bundle, exports=exports[holder]).place(holder, key)
        for value, (holder, key) in values.items()
    }
    return Sharing(tasks, places, exports, len(held & tasks.keys()))
