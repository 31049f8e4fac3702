"""Inputs of `rewrite`: a graph as a client sent it, and a snapshot of the scheduler.

Both are data, so that plans are made and tested without a scheduler.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from dask._task_spec import GraphNode
from dask.typing import Key

from ferroflow_dask.bundling.averages import Averages
from ferroflow_dask.bundling.bundle import Bundle
from ferroflow_dask.bundling.repeats import Measured
from ferroflow_dask.cluster_profile import ClusterProfile

#: Features that change graphs.
FEATURES = frozenset({"bundles", "plain_shuffles", "samples", "sharing", "stages"})


@dataclass(frozen=True, slots=True)
class SentGraph:
    """A graph that a client sent.

    Parameters
    ----------
    tasks : mapping of Key to GraphNode
    wanted : frozenset of Key
        The keys that the client wants.
    annotations : mapping of str to mapping of Key to object, optional
        Annotations by type and key.
    priorities : mapping of Key to int, optional
        Position of each task in the order of the client; Dask's static order if left out.
    declared_nbytes : mapping of Key to float, optional
        Declared sizes of results [B].
    averages : mapping of Key to Averages, optional
        Of tasks of which more is known than of their prefix.
    sampled : frozenset of Key, optional
        The tasks that ran in a sample; then there is no other one.
    is_urgent : bool, optional
        Whether it has a priority: then nothing is tried.
    is_late : bool, optional
        Whether it was held until its inputs existed: there is no sample of it.
    """

    tasks: Mapping[Key, GraphNode]
    wanted: frozenset[Key]
    annotations: Mapping[str, Mapping[Key, Any]] = field(default_factory=dict)
    priorities: Mapping[Key, int] | None = None
    declared_nbytes: Mapping[Key, float] = field(default_factory=dict)
    averages: Mapping[Key, Averages] = field(default_factory=dict)
    sampled: frozenset[Key] = frozenset()
    is_urgent: bool = False
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """A task that the scheduler has.

    Parameters
    ----------
    is_defined : bool, optional
        Whether the scheduler has its definition, not only its key.
    nbytes : float, optional
        Size of its result [B]; below 0 if it is unknown.
    holders : collection of str, optional
        Addresses of the workers that hold the result.
    has_failed : bool, optional
        Whether it or a task that it depends on has failed.
    is_fixed : bool, optional
        Whether its result stays on its worker, so that its readers run there.
    """

    is_defined: bool = True
    nbytes: float = -1
    holders: Collection[str] = ()
    has_failed: bool = False
    is_fixed: bool = False


@dataclass(frozen=True, slots=True)
class BundleFacts:
    """A bundle that the scheduler has.

    Parameters
    ----------
    bundle : Bundle
    is_gone : bool, optional
        Whether it has run and its result was dropped: all of it would run again.
    may_export : bool, optional
        Whether it can still return more values.
    """

    bundle: Bundle
    is_gone: bool = False
    may_export: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of a scheduler as far as it concerns a graph; its facts may be of different moments.

    Parameters
    ----------
    cluster : ClusterProfile
    learned : mapping of str to Averages or None, optional
        By task prefix; None for one that is never bundled.
    tasks : mapping of Key to TaskFacts, optional
        The tasks that the scheduler has, of those in `rewrite.keys_read`.
    held : mapping of Key to Key, optional
        For each of these keys that is in a bundle: the latest bundle that holds it.
    bundles : mapping of Key to BundleFacts, optional
        The bundles in `held`.
    has_idle_threads : bool, optional
        Whether a sample would start at once.
    shares_objects : bool, optional
        See `Bundle`.
    features : frozenset of str, optional
        The features in `FEATURES` that are on.
    repeats : mapping of int to mapping of str to Mean, optional
        Measured durations of graphs by shape and cut.
    shuffled : mapping of str to float, optional
        Sizes of the data of earlier shuffles by their identifiers [B].
    """

    cluster: ClusterProfile
    learned: Mapping[str, Averages | None] = field(default_factory=dict)
    tasks: Mapping[Key, TaskFacts] = field(default_factory=dict)
    held: Mapping[Key, Key] = field(default_factory=dict)
    bundles: Mapping[Key, BundleFacts] = field(default_factory=dict)
    has_idle_threads: bool = False
    shares_objects: bool = False
    features: frozenset[str] = FEATURES
    repeats: Mapping[int, Measured] = field(default_factory=dict)
    shuffled: Mapping[str, float] = field(default_factory=dict)

    def holds_some(self, keys: Collection[Key]) -> bool:
        """Return whether a bundle holds some of the tasks."""
        return any(key in self.held for key in keys)

    def is_in_memory(self, key: Key) -> bool:
        """Return whether a worker holds the result of a task."""
        return key in self.tasks and bool(self.tasks[key].holders)


def outside(graph: Mapping[Key, GraphNode]) -> set[Key]:
    """Return the keys that a graph reads and does not have."""
    return {key for task in graph.values() for key in task.dependencies} - graph.keys()
