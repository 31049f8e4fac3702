"""Bundle: the tasks that one task runs, and how it is split into them again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dask._task_spec import Alias, GraphNode
from dask.typing import Key

from ferroflow_dask.bundling.results import VALUE, Place


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """The tasks that one task runs.

    Parameters
    ----------
    tasks : tuple of GraphNode
        As they were given, in an order in which they can run.
    exports : tuple of Key or None
        The tasks whose values the bundle returns; None for one that has left it. A chain that runs under the
        key of its last task returns the value of that task, any other bundle returns `Results`.
    places : mapping of Key to (Key, int or None)
        For each value that the tasks read from outside: the task that yields it, and the item of that task's
        result; None for all of it.
    delivered : tuple of Key, optional
        The exports that tasks of the same keys stand for: clients want them.
    is_early : bool, optional
        Whether the first values are delivered at once: some bundles of a graph start before all others.
    shares_objects : bool, optional
        Whether the tasks share objects when they run by themselves, too, as in a cluster in one process.
    turns : tuple of int, optional
        For each task: its position in the order of the graph.
    size_classes : mapping of Key to int, optional
        For each task: the class of the data that it handles (`averages.size_class`).
    """

    tasks: tuple[GraphNode, ...]
    exports: tuple[Key | None, ...]
    places: Mapping[Key, Place]
    delivered: tuple[Key, ...] = ()
    is_early: bool = False
    shares_objects: bool = False
    turns: tuple[int, ...] = ()
    size_classes: Mapping[Key, int] = field(default_factory=dict)

    @classmethod
    def of_value(cls, key: Key, place: Place) -> Bundle:
        """Return the bundle that only gives a value of another one a key of its own.

        Parameters
        ----------
        key : Key
        place : tuple of Key and (int or None)
            The task that yields the value, and the item of its result.
        """
        return cls((Alias(key, (VALUE, key)),), (key,), {(VALUE, key): place})

    def returns_results(self, name: Key) -> bool:
        """Return whether the bundle returns `Results` if it runs under a key."""
        return name not in [task.key for task in self.tasks]

    def place(self, name: Key, key: Key) -> Place:
        """Return where the value of a task is if the bundle runs under the key `name`."""
        return name, self.exports.index(key) if self.returns_results(name) else None

    def is_plain(self, name: Key) -> bool:
        """Return whether the bundle is one task that runs as it was given, under its own key."""
        return (
            len(self.tasks) == 1
            and self.tasks[0].key == name
            and all(place == (key, None) for key, place in self.places.items())
        )

    def reading(self, moved: Mapping[Place, Place]) -> Bundle:
        """Return the bundle that reads some values from other places."""
        places = {key: moved.get(place, place) for key, place in self.places.items()}
        return self if places == self.places else replace(self, places=places)
