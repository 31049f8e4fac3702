"""Plan: the tasks to create for an arriving graph, the facts behind them, and the rest after a sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from dask._task_spec import GraphNode
from dask.typing import Key

from ferroflow_dask.bundling.averages import Averages
from ferroflow_dask.bundling.bundle import Bundle
from ferroflow_dask.bundling.predict import Prediction
from ferroflow_dask.bundling.sharing import Sharing
from ferroflow_dask.bundling.snapshot import SentGraph, Snapshot, TaskFacts, outside
from ferroflow_dask.bundling.stages import Held
from ferroflow_dask.cluster_profile import ClusterProfile


@dataclass(frozen=True, slots=True)
class Premises:
    """Facts that a plan relies on.

    Parameters
    ----------
    keys : collection of Key
        Those of the graph, with plain shuffles.
    outside : collection of Key
        What the graph reads and does not have.
    defined : mapping of Key to bool
        The tasks of `keys` that the scheduler has, and whether it has their definition.
    failed : frozenset of Key
        The tasks of `keys` and `outside` that have failed.
    sharing : Sharing
        The values that bundles of other graphs have to return.
    """

    keys: Collection[Key]
    outside: Collection[Key]
    defined: Mapping[Key, bool]
    failed: frozenset[Key]
    sharing: Sharing = field(default_factory=Sharing)

    @classmethod
    def of(cls, graph: Mapping[Key, GraphNode], snapshot: Snapshot) -> Premises:
        """Return the premises of a plan that shares nothing."""
        read = outside(graph)
        return cls(graph.keys(), read, *known_of(graph.keys(), read, snapshot.tasks))

    def keys_read(self) -> Collection[Key]:
        """Return the keys of which `revalidate` needs facts; some come several times."""
        return (*self.keys, *self.outside, *self.sharing.exports)


def known_of(
    keys: Collection[Key], outside: Collection[Key], tasks: Mapping[Key, TaskFacts]
) -> tuple[dict[Key, bool], frozenset[Key]]:
    """Return which of the keys are defined, and which tasks have failed; O(tasks that exist)."""
    defined = {key: facts.is_defined for key, facts in tasks.items() if key in keys}
    failed = (key for key, facts in tasks.items() if facts.has_failed and (key in defined or key in outside))
    return defined, frozenset(failed)


@dataclass(frozen=True, slots=True)
class Until:
    """What must have happened before the rest of a graph is planned.

    Parameters
    ----------
    keys : frozenset of Key
        The tasks that must have ended. The first of them that does limits the wait for the others.
    prefixes : mapping of str to int
        Number of tasks of the whole graph by prefix. The expected duration limits the wait.
    """

    keys: frozenset[Key]
    prefixes: Counter[str]

    def expected_s(self, learned: Mapping[str, Averages | None], cluster: ClusterProfile) -> float:
        """Return the expected duration of the graph by the present averages, overheads included [s]."""
        known = [(one.duration_s, n) for name, n in self.prefixes.items() if (one := learned.get(name))]
        n_known = sum(n for _, n in known)
        mean_s = sum(n * each_s for each_s, n in known) / n_known if n_known else 0.0
        return self.prefixes.total() * max(mean_s / cluster.n_threads, cluster.added_s)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with a graph.

    Parameters
    ----------
    graph : SentGraph
        As it came.
    tasks : mapping of Key to GraphNode
        The tasks to create now.
    wanted : frozenset of Key
        Those of them whose results the client or the rest of the graph needs.
    order : mapping of Key to float
        Position of each task in the order by which Dask prefers them.
    annotations : mapping of str to mapping of Key to object
        Annotations by type and key.
    bundles : mapping of Key to Bundle, optional
        For each task that differs from the graph: the tasks that it runs.
    shuffled : mapping of Key to float, optional
        The outputs of shuffles that have become plain tasks, with the sizes of their data [B].
    kept_shuffles : mapping of Key to (str, list of Key), optional
        For the barriers of P2P shuffles that stay: the identifier of the shuffle, and the keys of its data.
    reasons : mapping of Key to (str, str), optional
        For explanations of tasks: the decision and its reason.
    measured : mapping of str to float, optional
        Sizes of the data of shuffles that exist, by their identifiers [B].
    held : tuple of Held, optional
        The parts of the graph that are planned when the sizes of their shuffles are known.
    premises : Premises, optional
        None if the tasks are those of the graph.
    rest : SentGraph, optional
        What must be planned when `until` is fulfilled.
    until : Until, optional
    prediction : Prediction, optional
        From `compute` to the last result, if durations are known.
    """

    graph: SentGraph
    tasks: Mapping[Key, GraphNode]
    wanted: frozenset[Key]
    order: Mapping[Key, float]
    annotations: Mapping[str, Mapping[Key, Any]]
    bundles: Mapping[Key, Bundle] = field(default_factory=dict)
    shuffled: Mapping[Key, float] = field(default_factory=dict)
    kept_shuffles: Mapping[Key, tuple[str, list[Key]]] = field(default_factory=dict)
    reasons: Mapping[Key, tuple[str, str]] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    held: tuple[Held, ...] = ()
    premises: Premises | None = None
    rest: SentGraph | None = None
    until: Until | None = None
    prediction: Prediction | None = field(default=None, compare=False)

    @property
    def sharing(self) -> Sharing:
        """What the graph reads from the bundles of other graphs."""
        return self.premises.sharing if self.premises is not None else Sharing()
