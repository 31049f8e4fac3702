"""One arriving graph: snapshots of the scheduler for its plan, and the plan as an expression for Dask."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from dask._task_spec import GraphNode
from dask.typing import Key

from ferroflow_dask.bundling.averages import Averages
from ferroflow_dask.bundling.declared import declared_nbytes
from ferroflow_dask.bundling.plan import Plan
from ferroflow_dask.bundling.repeats import Measured
from ferroflow_dask.bundling.rewrite import keys_read, unchanged
from ferroflow_dask.bundling.snapshot import FEATURES, SentGraph, Snapshot, TaskFacts
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.scheduler import _distributed, _distributed_graphs
from ferroflow_dask.scheduler.changes import FAILURES

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

    from ferroflow_dask.scheduler.graphs.bundles import Bundles

logger = logging.getLogger("ferroflow_dask")


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What graphs are bundled by; the functions may be called by any thread.

    Parameters
    ----------
    cluster : callable
        Returns the cluster for which graphs are cut.
    learned : callable
        Returns what was learned of each task prefix, None for those that are never bundled. Returns None if
        the workers cannot run bundles.
    has_idle_threads : callable
        Returns whether a sample would start at once.
    is_fixed : callable
        Returns whether the result of a task stays on its worker, so that its readers run there.
    declare : callable
        Notes the declared sizes of results [B].
    on : set of str
        Names of the features that are on.
    repeats : callable
        Returns the measured durations of graphs by shape and cut.
    shuffled : mapping of str to float
        Sizes of the data of shuffles by their identifiers [B]; it changes.
    """

    cluster: Callable[[], ClusterProfile]
    learned: Callable[[], Mapping[str, Averages | None] | None]
    has_idle_threads: Callable[[], bool]
    is_fixed: Callable[[TaskState], bool]
    declare: Callable[[Mapping[Key, float]], None]
    on: Set[str]
    repeats: Callable[[], Mapping[int, Measured]]
    shuffled: Mapping[str, float]


class Snapshots:
    """Takes snapshots of a scheduler; may be used by any thread.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    bundles : Bundles
        The bundles that the scheduler has.
    knowledge : Knowledge
    """

    def __init__(self, scheduler: Scheduler, bundles: Bundles, knowledge: Knowledge) -> None:
        self._tasks = scheduler.tasks
        self._scheduler = scheduler
        self._bundles = bundles
        self._knowledge = knowledge

    def for_plan(self, graph: SentGraph) -> Snapshot:
        """Return all that a plan of a graph depends on."""
        learned = self._knowledge.learned()
        features = FEATURES & self._knowledge.on if learned is not None else frozenset[str]()
        found = self._of(keys_read(graph), {} if learned is None else learned, features)
        return replace(found, repeats=self._knowledge.repeats(), shuffled=self._knowledge.shuffled)

    def for_check(self, plan: Plan) -> Snapshot:
        """Return the facts that a plan relies on."""
        return self._of(() if plan.premises is None else plan.premises.keys_read(), {}, FEATURES)

    def _of(
        self, keys: Collection[Key], learned: Mapping[str, Averages | None], features: frozenset[str]
    ) -> Snapshot:
        held, bundles = self._bundles.facts(keys)
        state_of, all_keys = self._tasks.get, chain(keys, bundles)
        return Snapshot(
            self._knowledge.cluster(),
            learned,
            {key: self._facts(ts) for key in all_keys if (ts := state_of(key)) is not None},
            held,
            bundles,
            has_idle_threads=self._knowledge.has_idle_threads(),
            shares_objects=_distributed.is_in_process(self._scheduler),
            features=features,
        )

    def _facts(self, ts: TaskState) -> TaskFacts:
        return TaskFacts(
            is_defined=ts.run_spec is not None,
            nbytes=ts.nbytes,
            holders=[ws.address for ws in list(ts.who_has or ())],
            has_failed=ts.exception_blame is not None,
            is_fixed=self._knowledge.is_fixed(ts),
        )


#: Of bundles with equal priorities, those of the earlier graph come first: each graph adds one step more to
#: the places of its bundles, after so many graphs none again. All steps are less than a millionth of a place.
_STEP, _N_STEPS = 2.0**-30, 1024
_n_arrived = count()


class Arrival:
    """The plan of a graph until its tasks are created; stands for the expression that the client sent.

    Parameters
    ----------
    plan : Plan
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        # Of tasks with equal priorities, a worker of Dask's starts the one first that it was sent last. Among
        # bundles that would put all of a later graph first, where single tasks alternate.
        later = _STEP * (next(_n_arrived) % _N_STEPS)
        #: Position of each task in the order by which Dask prefers them.
        self.order = {key: place + later * (key in plan.bundles) for key, place in plan.order.items()}

    def __dask_graph__(self) -> dict[Key, GraphNode]:
        """Return the tasks; called by Dask in its offload thread."""
        return dict(self.plan.tasks)

    def __dask_annotations__(self) -> dict[str, dict[Key, Any]]:
        """Return the annotations by type and key; called by Dask after `__dask_graph__`."""
        return {name: dict(by_key) for name, by_key in self.plan.annotations.items()}

    def restore(self, dsk: dict[Key, GraphNode]) -> None:
        """Restore the graph as it came, if it was changed."""
        if self.plan.premises is None:
            return
        self.plan = unchanged(self.plan.graph)
        dsk.clear()
        dsk.update(self.plan.tasks)
        self.order.clear()  # not another one, since Dask has it already
        self.order.update(self.plan.order)


def sent_graph(
    expr: Any,
    keys: Collection[Key],
    priorities: Mapping[Key, int] | None,
    declare: Callable[[Mapping[Key, float]], None],
) -> SentGraph:
    """Materialize a graph; `declare` as in `Knowledge`."""
    tasks = _distributed_graphs.materialized(expr, keys)
    annotations = {name: dict(by_key) for name, by_key in expr.__dask_annotations__().items()}
    declared: dict[Key, float] = {}
    try:
        declared = declared_nbytes(tasks, _distributed_graphs.declared_chunks(expr))
        declare(declared)
    except FAILURES:  # those that were learned count
        logger.warning("ferroflow: the sizes of arrays are unknown", exc_info=True)
    is_urgent = any(annotations.get("priority", {}).values())
    return SentGraph(tasks, frozenset(keys), annotations, priorities, declared, is_urgent=is_urgent)
