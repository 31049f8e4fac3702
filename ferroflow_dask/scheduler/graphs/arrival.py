"""One arriving graph, from its arrival until Dask creates its tasks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from dask._task_spec import GraphNode, cull
from dask.order import order
from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.annotations import BUNDLE_ANNOTATION, is_bundling_off
from ferroflow_dask.bundling import shuffles
from ferroflow_dask.bundling.bundle import Bundle
from ferroflow_dask.bundling.cut import MEMORY_SHARE
from ferroflow_dask.bundling.declared import declared_nbytes
from ferroflow_dask.bundling.graphs import Averages, bundle_graph
from ferroflow_dask.bundling.results import Place
from ferroflow_dask.bundling.sample import sample_of
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.scheduler import _distributed, _distributed_graphs
from ferroflow_dask.scheduler.changes import FAILURES
from ferroflow_dask.scheduler.graphs.samples import Sample
from ferroflow_dask.scheduler.graphs.sharing import Sharing

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

    from ferroflow_dask.scheduler.graphs.bundles import Bundles

logger = logging.getLogger("ferroflow_dask")

#: Smaller graphs run as they come [tasks].
FEWEST = 10
#: Most data of a P2P shuffle that becomes plain tasks [B], and the longest time to send them to a worker [s].
#: Plain tasks send them to each worker, so their costs grow with the data. P2P costs some tenths of a second
#: for no data, and less for each byte. On four workers of two cores both take equally long at 64 to 128 MB.
_MOST_SHUFFLED, _MOST_SHUFFLED_S = 32 * 2**20, 0.25
#: Partitions or chunks of a shuffle that are measured.
_MEASURED = 3
#: Annotations that the tasks of a bundle pass on to it, if all tasks of the graph have the same value.
INHERITED = frozenset({"priority", "span"})


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
    """

    cluster: Callable[[], ClusterProfile]
    learned: Callable[[], Mapping[str, Averages | None] | None]
    has_idle_threads: Callable[[], bool]
    is_fixed: Callable[[TaskState], bool]
    declare: Callable[[Mapping[Key, float]], None]


class Arrival:
    """A graph from its arrival until its tasks are created; stands for its expression.

    `materialize`, `choose_sample` and `prepare` may be called by any thread, in this order. After the second,
    the sample runs.

    Parameters
    ----------
    expr : object
        The expression that the client sent.
    keys : collection of Key
        What the client wants.
    scheduler : distributed.Scheduler
    bundles : Bundles
        The bundles that the scheduler has.
    knowledge : Knowledge
    priorities : mapping of Key to int, optional
        Position of each task in the order of the client; Dask's static order if left out.
    """

    def __init__(
        self,
        expr: Any,
        keys: Collection[Key],
        scheduler: Scheduler,
        bundles: Bundles,
        knowledge: Knowledge,
        *,
        priorities: Mapping[Key, int] | None = None,
    ) -> None:
        self._expr = expr
        self._keys = frozenset(keys)
        self._tasks = scheduler.tasks
        self._is_in_process = _distributed.is_in_process(scheduler)
        self._bundles = bundles
        self._knowledge = knowledge
        self._priorities = priorities
        self._sharing = Sharing()
        self._result: dict[Key, GraphNode] = {}
        self._error: Exception | None = None
        # As the client sent it, and with plain shuffles.
        self._graph: dict[Key, GraphNode] = {}
        self._plain: dict[Key, GraphNode] = {}
        self._is_changed = False
        self._present: dict[Key, bool] = {}
        self._outside: set[Key] = set()
        self._failed: set[Key] = set()
        self._annotations: dict[str, dict[Key, Any]] = {}
        self._declared: dict[Key, float] = {}
        self._turns: dict[Key, float] = {}
        # Number of tasks by prefix, once there is a sample: counted in a thread, read in the event loop.
        self._prefixes: Counter[str] = Counter()
        #: What should run before `prepare`.
        self.sample: Sample | None = None
        #: Position of each task in the order by which Dask prefers them, after `prepare`.
        self.order: dict[Key, float] = {}
        #: The bundles that the graph has become.
        self.bundles: dict[Key, Bundle] = {}
        #: The outputs of shuffles that have become plain tasks, with the sizes of their data [B].
        self.shuffled: dict[Key, float] = {}

    def materialize(self) -> None:
        """Materialize the graph."""
        try:
            self._graph = _distributed_graphs.materialized(self._expr, self._keys)
            by_type = self._expr.__dask_annotations__()
            self._annotations = {name: dict(by_key) for name, by_key in by_type.items()}
        except Exception as error:  # noqa: BLE001 -- raised again when Dask materializes the graph
            self._error = error
        else:
            self._declare()
        self._expr = None

    def _declare(self) -> None:
        """Read the declared sizes of results; without them, those that were learned count."""
        try:
            self._declared = declared_nbytes(self._graph, _distributed_graphs.declared_chunks(self._expr))
            self._knowledge.declare(self._declared)
        except FAILURES:
            logger.warning("ferroflow: the sizes of arrays are unknown", exc_info=True)

    def choose_sample(self) -> None:
        """Choose a sample if too little is known of the graph's tasks."""
        try:
            self.sample = self._sampled()
        except FAILURES:
            logger.warning("ferroflow: a graph runs without a sample", exc_info=True)

    def outside(self) -> set[Key]:
        """Return what the graph reads that is not in it; after `materialize`."""
        return outside(self._graph)

    def _sampled(self) -> Sample | None:
        has_p2p = shuffles.has_p2p(self._graph)
        if len(self._graph) < FEWEST and not has_p2p:
            return None
        if not self._knowledge.has_idle_threads() or self._bundles.hold_some(self._graph):
            return None
        learned = self._knowledge.learned()
        if learned is None:
            return None
        if not has_p2p and all(key_split(key) in learned for key in self._graph):
            return None
        graph, parts, sources = self._graph, set[Key](), list[list[Key]]()
        if has_p2p:
            graph = shuffles.unfused(graph)
            parts, sources = shuffles.parts_and_sources(graph)
        sized = [key for shuffle in sources for key in self._measured(shuffle, learned)]
        missing = {key: task for key, task in graph.items() if key not in self._tasks}
        missing = cull(missing, self._keys & missing.keys())
        not_now = {
            key
            for key, task in missing.items()
            if key in parts or not all(one in missing or self._is_in_memory(one) for one in task.dependencies)
        }
        n_threads = self._knowledge.cluster().n_threads
        keys = sample_of(missing, learned, n_threads, not_now=not_now, sized=sized)
        if not keys:
            return None
        self._graph = graph
        self._prefixes = Counter(map(key_split, graph))
        # Workers drop the results that only tasks of the sample read.
        kept = keys & self._keys
        kept |= {one for key, task in missing.items() if key not in keys for one in task.dependencies & keys}
        return Sample({key: missing[key] for key in keys}, kept, self._annotations)

    def _is_in_memory(self, key: Key) -> bool:
        ts = self._tasks.get(key)
        return ts is not None and bool(ts.who_has)

    def prepare(self) -> None:
        """Bundle the graph if that is possible; raise what Dask raises for a graph that it cannot order."""
        if self._error is None:
            self._result = self._prepared()

    def _prepared(self) -> dict[Key, GraphNode]:
        graph = self._graph
        try:
            graph = self._plain = self._with_plain_shuffles(graph)
            if len(graph) >= FEWEST or self._bundles.hold_some(graph):
                graph = self._bundled(graph)
        except FAILURES:
            logger.warning("ferroflow: a graph could not be bundled and runs as it came", exc_info=True)
            self.bundles, self.shuffled, graph = {}, {}, self._graph
        self._is_changed = bool(self.bundles or self.shuffled)
        self._set_order(graph)
        return dict(graph)

    def _set_order(self, graph: Mapping[Key, GraphNode]) -> None:
        self.order.clear()  # not another one, since Dask has it already
        if not self._priorities:
            self.order.update(self._turns if self.bundles else order(graph))
            return
        self.order.update({key: self._priorities[key] for key in graph if key in self._priorities})
        for key, bundle in self.bundles.items():
            inside = [self._priorities[one.key] for one in bundle.tasks if one.key in self._priorities]
            self.order.setdefault(key, min(inside, default=0))

    def __dask_graph__(self) -> dict[Key, GraphNode]:
        """Return the graph, bundled if that is possible; called by Dask in its offload thread."""
        if self._error is not None:
            raise self._error
        return self._result

    def __dask_annotations__(self) -> dict[str, dict[Key, Any]]:
        """Return the annotations by type and key; called by Dask after `__dask_graph__`."""
        return self._annotations

    def expected_s(self) -> float:
        """Return the expected duration of the graph by what is known now, overheads included [s]."""
        learned, cluster = self._knowledge.learned() or {}, self._knowledge.cluster()
        known = [(one.duration_s, n) for name, n in self._prefixes.items() if (one := learned.get(name))]
        n_known = sum(n for _, n in known)
        mean_s = sum(n * each_s for each_s, n in known) / n_known if n_known else 0.0
        return self._prefixes.total() * max(mean_s / cluster.n_threads, cluster.task_s)

    # Shuffles

    def _with_plain_shuffles(self, graph: dict[Key, GraphNode]) -> dict[Key, GraphNode]:
        if not shuffles.has_p2p(graph) or self._knowledge.learned() is None:
            return graph
        most = self._most_shuffled()
        plain = shuffles.unfused(graph)
        nbytes: dict[Key, float] = {}

        def is_replaced(group: list[shuffles.Shuffle]) -> bool:
            outputs = {task.key for shuffle in group for task in shuffle.unpacks}
            size = sum(self._nbytes(shuffle.sources(plain)) for shuffle in group)
            parts = {task.key for shuffle in group for task in (shuffle.barrier, *shuffle.transfers)}
            if not parts.isdisjoint(self._tasks) or not parts.isdisjoint(self._keys):
                return False  # the scheduler has them as P2P tasks, or the client wants one
            is_plain = not outputs.isdisjoint(self._tasks) or self._bundles.hold_some(outputs)
            if size > most and not is_plain:
                return False
            nbytes.update(dict.fromkeys(outputs, size))
            return True

        found = shuffles.with_plain_tasks(plain, is_replaced)
        if not found.outputs:
            return graph
        self.shuffled = nbytes
        for by_key in self._annotations.values():
            by_key |= {new: by_key[old] for new, old in found.origins.items() if old in by_key}
        return found.tasks

    def _most_shuffled(self) -> float:
        """Return the size up to which a shuffle becomes plain tasks [B]."""
        cluster = self._knowledge.cluster()
        memory = MEMORY_SHARE * (cluster.memory_nbytes or inf)
        return min(_MOST_SHUFFLED, _MOST_SHUFFLED_S * cluster.bandwidth, memory)

    def _measured(self, sources: Sequence[Key], learned: Mapping[str, Averages | None]) -> Iterable[Key]:
        """Return the data of a shuffle from which its size is estimated; none if it is surely large.

        A prefix may stand for data of many sizes, so what was learned does not show that a shuffle is small.
        """
        known = [learned.get(key_split(key)) for key in sources]
        if sum(one.most_nbytes for one in known if one is not None) > self._most_shuffled():
            return ()
        last = len(sources) - 1
        return dict.fromkeys(sources[last * i // (_MEASURED - 1)] for i in range(_MEASURED))

    def _nbytes(self, sources: Sequence[Key]) -> float:
        """Return the size of data by that of those which exist [B]; infinite if none does."""
        found = [ts.nbytes for key in sources if (ts := self._tasks.get(key)) is not None and ts.nbytes >= 0]
        return sum(found) + (len(sources) - len(found)) * max(found) if found else inf

    # Bundles

    def _bundled(self, graph: dict[Key, GraphNode]) -> dict[Key, GraphNode]:
        self._present = self._present_now()
        # Tasks that exist stay as they are: Dask warns of a key with other dependencies than before.
        missing = {key: task for key, task in graph.items() if not self._present.get(key)}
        keys = {key for key in self._keys if key in missing}
        missing = cull(missing, keys)
        # Tasks that exist without a definition get it from this graph.
        wanted = keys | {key for key in self._present if key in missing}
        sharing = self._bundles.share(missing, wanted)
        missing = sharing.tasks
        if not missing:
            return graph
        inherited, alone = _annotated(self._annotations, missing)
        self._outside = outside(graph)
        self._failed = self._failed_now()
        # They fail, and the tasks that share a bundle with one would fail with it.
        alone |= _readers_of(self._failed, missing)
        fixed = self._fixed_now()
        alone |= {key for key, task in missing.items() if not fixed.isdisjoint(task.dependencies)}
        learned = self._knowledge.learned()
        if learned is None:
            return graph
        cluster, read = self._knowledge.cluster(), self._read_nbytes(missing, sharing.places, learned)
        found = bundle_graph(
            *(missing, wanted, cluster, learned),
            alone=alone,
            places=sharing.places,
            shares_objects=self._is_in_process,
            by_key=self._known(missing, learned),
            outside_nbytes=read,
            holders={key: self._holders(key) for key in read if self._is_in_memory(key)},
        )
        if not found.bundles:
            return graph
        self.bundles, self._sharing, self._turns = found.bundles, sharing, found.order
        for name, value in inherited.items():
            self._annotations[name] |= dict.fromkeys(found.bundles, value)
        return found.tasks

    def _known(
        self, graph: Mapping[Key, GraphNode], learned: Mapping[str, Averages | None]
    ) -> dict[Key, Averages]:
        """Return the averages of the tasks whose results have declared sizes."""
        known = ((key, learned.get(key_split(key))) for key in graph if key in self._declared)
        return {key: one.of_size(self._declared[key]) for key, one in known if one is not None}

    def _read_nbytes(
        self,
        graph: Mapping[Key, GraphNode],
        places: Mapping[Key, Place],
        learned: Mapping[str, Averages | None],
    ) -> dict[Key, float]:
        """Return the known or learned sizes of the results that a graph reads, by key of their task [B]."""
        found: dict[Key, float] = {}
        for key in {places.get(key, (key, None))[0] for key in outside(graph)}:
            ts, one = self._tasks.get(key), learned.get(key_split(key))
            if ts is not None and ts.nbytes >= 0:
                found[key] = ts.nbytes
            elif one is not None:
                found[key] = max(one.nbytes, one.most_nbytes)
        return found

    def _holders(self, key: Key) -> list[str]:
        ts = self._tasks.get(key)
        return [ws.address for ws in list(ts.who_has or ())] if ts is not None else []

    def _present_now(self) -> dict[Key, bool]:
        """Return the graph's keys that the scheduler has, and whether it has their definition."""
        tasks = self._tasks
        return {key: tasks[key].run_spec is not None for key in self._plain if key in tasks}

    def _failed_now(self) -> set[Key]:
        """Return the keys of failed tasks that the graph may read; O(tasks that exist already)."""
        tasks = self._tasks
        return {
            key
            for key in (*self._present, *self._outside)
            if key in tasks and tasks[key].exception_blame is not None
        }

    def _fixed_now(self) -> set[Key]:
        """Return the keys of fixed results that the graph may read; O(tasks that exist already)."""
        found = ((key, self._tasks.get(key)) for key in (*self._present, *self._outside))
        return {key for key, ts in found if ts is not None and self._knowledge.is_fixed(ts)}

    def settle(self, dsk: dict[Key, GraphNode]) -> None:
        """Compare with the scheduler's tasks again; let the graph run as it came if they have changed."""
        if self._is_changed:
            is_as_before = self._present_now() == self._present and self._failed_now() == self._failed
            if is_as_before and self._bundles.is_valid(self._sharing):
                self._bundles.carry_out(self._sharing)
            else:
                logger.info("ferroflow: tasks have changed while their graph was bundled; it runs as it came")
                self.restore(dsk)
        self._graph, self._plain = {}, {}

    def restore(self, dsk: dict[Key, GraphNode] | None = None) -> None:
        """Let the graph run as it came."""
        if not self._is_changed:
            return
        self._is_changed = False
        self.bundles, self.shuffled = {}, {}
        dsk = self._result if dsk is None else dsk
        dsk.clear()
        dsk.update(self._graph)
        self._set_order(dsk)


def outside(graph: Mapping[Key, GraphNode]) -> set[Key]:
    """Return the keys that a graph reads and does not have."""
    return {key for task in graph.values() for key in task.dependencies} - graph.keys()


def _readers_of(failed: set[Key], graph: Mapping[Key, GraphNode]) -> set[Key]:
    """Return the tasks that depend on some keys, directly or not."""
    readers: dict[Key, list[Key]] = {}
    for key, task in graph.items() if failed else ():
        for needed in task.dependencies:
            readers.setdefault(needed, []).append(key)
    found: set[Key] = set()
    stack = list(failed)
    while stack:
        new = [key for key in readers.get(stack.pop(), ()) if key not in found]
        found.update(new)
        stack += new
    return found


def _annotated(
    annotations: Mapping[str, Mapping[Key, Any]], graph: Mapping[Key, GraphNode]
) -> tuple[dict[str, Any], set[Key]]:
    """Return the annotations that bundles inherit, and the tasks that stay separate for their own."""
    inherited: dict[str, Any] = {}
    alone: set[Key] = set()
    for name, by_key in annotations.items():
        own = {key: value for key, value in by_key.items() if key in graph and value is not None}
        if name == BUNDLE_ANNOTATION:
            own = {key: value for key, value in own.items() if is_bundling_off(value)}
        elif name in INHERITED and len(own) == len(graph):
            value = next(iter(own.values()))
            if all(other == value for other in own.values()):
                inherited[name] = value
                continue
        alone.update(own)
    return inherited, alone
