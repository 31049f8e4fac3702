"""Division: the steps that have left a running bundle, and the bundles that they and the others become."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dask._task_spec import GraphNode
from dask.typing import Key

from ferroflow_dask.bundling.bundle import Bundle
from ferroflow_dask.bundling.coarse import longest_first
from ferroflow_dask.bundling.division import components

if TYPE_CHECKING:
    from distributed.scheduler import TaskState


@dataclass(frozen=True, slots=True)
class Division:
    """Steps that have left a bundle.

    Parameters
    ----------
    ts : TaskState
        The task of the bundle.
    bundle : Bundle
        With these steps.
    steps : frozenset of Key
    items : dict of Key to int
        The values of the bundle that other tasks read, with their items.
    stimulus_id : str
    unfinished : frozenset of Key, optional
        Steps of the bundle whose values these read, and which are not computed yet.
    """

    ts: TaskState
    bundle: Bundle
    steps: frozenset[Key]
    items: dict[Key, int]
    stimulus_id: str
    unfinished: frozenset[Key] = frozenset()

    @property
    def wanted(self) -> set[Key]:
        """The steps that have left and whose values other tasks read."""
        return self.items.keys() & self.steps

    def rest(self, read: Mapping[Key, int] | None = None) -> Bundle:
        """Return the bundle without the steps; it exports the values that these read, as some items."""
        exports: list[Key | None] = [None if key in self.steps else key for key in self.bundle.exports]
        delivered = [key for key in self.bundle.delivered if key not in self.steps]
        tasks: dict[Key, GraphNode] = {}
        inside, turns = {task.key for task in self.bundle.tasks}, self.turns
        for task in self.bundle.tasks:
            # A cancelled step may read one that has left.
            if task.key not in self.steps and (task.dependencies & inside) <= tasks.keys():
                tasks[task.key] = task
        for key, item in (read or {}).items():
            exports += [None] * (item + 1 - len(exports))
            exports[item] = key
            delivered += [key] * (key not in delivered)
        return replace(
            self.bundle,
            tasks=tuple(tasks.values()),
            exports=tuple(exports),
            delivered=tuple(delivered),
            turns=tuple(turns[key] for key in tasks if key in turns),
        )

    @property
    def turns(self) -> dict[Key, int]:
        """The place of each step in the order of the graph; empty if it is not known."""
        return dict(zip([task.key for task in self.bundle.tasks], self.bundle.turns, strict=False))

    def priorities(self, specs: Iterable[Key], new: Mapping[Key, Bundle]) -> dict[Key, tuple[float, ...]]:
        """Return the priorities of new tasks, by which they run in the order of the graph."""
        turns, found = self.turns, {}
        for key in specs:
            inside = [task.key for task in new[key].tasks] if key in new else [key]
            turn = min((turns[one] for one in inside if one in turns), default=None)
            if turn is not None:
                found[key] = (*(self.ts.priority or ())[:-1], turn)
        return found

    def dealt(self, tasks: Mapping[Key, GraphNode], n_threads: int) -> list[list[Key]]:
        """Deal tasks out to some threads, those together that read each other.

        Those that wait for a running step are apart from the others: it may wait for these.
        """
        # In their order, by the running steps that they depend on.
        waits: dict[Key, frozenset[Key]] = {}
        for key, task in tasks.items():
            needed = task.dependencies
            waits[key] = (self.unfinished & needed).union(*(waits.get(one, ()) for one in needed))
        groups = []
        for equal in sorted(dict.fromkeys(waits.values()), key=len):  # each after those that it reads
            keys = [key for key, one in waits.items() if one == equal]
            number = {key: i for i, key in enumerate(keys)}
            reads = [[number[one] for one in tasks[key].dependencies if one in number] for key in keys]
            parts = components(reads, 0, range(len(keys)))
            shares = longest_first([float(len(part)) for part in parts], min(n_threads, len(parts)))
            groups += [
                [keys[i] for i in sorted(step for at in share for step in parts[at])] for share in shares
            ]
        return groups
