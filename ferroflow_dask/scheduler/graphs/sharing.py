"""Shared tasks: what a graph reads from the bundles of other graphs instead of computing it again."""

from __future__ import annotations

from dataclasses import dataclass, field

from dask._task_spec import GraphNode
from dask.typing import Key

from ferroflow_dask.bundling.results import Place


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
