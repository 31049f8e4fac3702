"""Arriving graphs: the scheduler bundles each graph that a client submits before it creates the tasks.

The handler of `update-graph` deserializes the graph as Dask does, bundles it in a thread, and hands it back
to Dask as an `Arrival`. Dask then compares the result with its tasks and creates new ones in one turn of the
event loop. Other clients may have acted since the bundling, so at the beginning of that turn the arrival is
compared with the tasks again. If anything has changed, the graph runs as it came.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from dask._task_spec import GraphNode, cull
from dask.order import order
from dask.typing import Key
from distributed.protocol.serialize import register_serialization_family

from ferroflow_dask.annotations import BUNDLE_ANNOTATION
from ferroflow_dask.bundling.bundle import Bundle
from ferroflow_dask.bundling.graphs import Averages, BundledGraph, bundle_graph
from ferroflow_dask.bundling.results import Place
from ferroflow_dask.scheduler import _distributed_graphs
from ferroflow_dask.scheduler.changes import FAILURES, Change, ItemChange
from ferroflow_dask.scheduler.graphs.sharing import Sharing

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

    from ferroflow_dask.scheduler.graphs.bundles import Bundles
    from ferroflow_dask.scheduler.graphs.overheads import Overheads

logger = logging.getLogger("ferroflow_dask")

#: Smaller graphs run as they come [tasks].
_FEWEST = 10
#: Annotations that the tasks of a bundle pass on to it, if all tasks of the graph have the same value.
_INHERITED = frozenset({"priority", "span"})
#: Serialization family of arrivals, which never leave the process.
_FAMILY = "ferroflow-arrival"
_HANDLER = "update-graph"

_arriving: ContextVar[Arrival | None] = ContextVar("ferroflow-arriving", default=None)


def _never_dumped(_: Any, **__: Any) -> Any:
    raise TypeError("an arriving graph never leaves the process")


register_serialization_family(_FAMILY, _never_dumped, lambda header, _: header["arrival"])


class Arrival:
    """A graph from its arrival until its tasks are created; stands for its expression.

    Parameters
    ----------
    expr : object
        The expression that the client sent.
    keys : collection of Key
        What the client wants.
    scheduler : distributed.Scheduler
    bundles : Bundles
        The bundles that the scheduler has.
    bundle : callable
        Bundles a graph, given its wanted keys, its separate tasks and the places of values of other graphs.
    """

    def __init__(
        self,
        expr: Any,
        keys: Collection[Key],
        scheduler: Scheduler,
        bundles: Bundles,
        bundle: Callable[..., BundledGraph],
    ) -> None:
        self._expr = expr
        self._keys = frozenset(keys)
        self._tasks = scheduler.tasks
        self._bundles = bundles
        self._bundle = bundle
        self._sharing = Sharing()
        self._result: dict[Key, GraphNode] = {}
        self._error: Exception | None = None
        self._graph: dict[Key, GraphNode] = {}
        self._present: dict[Key, bool] = {}
        self._outside: set[Key] = set()
        self._failed: set[Key] = set()
        self._annotations: dict[str, dict[Key, Any]] = {}
        #: Position of each task in Dask's static order, after `prepare`.
        self.order: dict[Key, int] = {}
        #: The bundles that the graph has become.
        self.bundles: dict[Key, Bundle] = {}

    def prepare(self) -> None:
        """Materialize the graph and bundle it if that is possible; may be called by any thread."""
        try:
            self._result = self._materialized()
        except Exception as error:  # noqa: BLE001 -- raised again when Dask materializes the graph
            self._error = error

    def _materialized(self) -> dict[Key, GraphNode]:
        graph = _distributed_graphs.materialized(self._expr, self._keys)
        self._graph = graph
        self._annotations = {name: dict(by_key) for name, by_key in self._expr.__dask_annotations__().items()}
        self._expr = None
        is_small = len(graph) < _FEWEST or len(graph) == len(self._keys)
        if not is_small or self._bundles.hold_some(graph):
            try:
                graph = self._bundled(graph)
            except FAILURES:
                logger.warning("ferroflow: a graph could not be bundled and runs as it came", exc_info=True)
                self.bundles = {}
        self.order.update(order(graph))
        return dict(graph)

    def __dask_graph__(self) -> dict[Key, GraphNode]:
        """Return the graph, bundled if that is possible; called by Dask in its offload thread."""
        if self._error is not None:
            raise self._error
        return self._result

    def __dask_annotations__(self) -> dict[str, dict[Key, Any]]:
        """Return the annotations by type and key; called by Dask after `__dask_graph__`."""
        return self._annotations

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
        read = {key for task in graph.values() for key in task.dependencies}
        self._outside = read - graph.keys()
        self._failed = self._failed_now()
        # They fail, and the tasks that share a bundle with one would fail with it.
        alone |= _readers_of(self._failed, missing)
        found = self._bundle(missing, wanted, alone, sharing.places)
        if not found.bundles:
            return graph
        self.bundles, self._sharing = found.bundles, sharing
        for name, value in inherited.items():
            self._annotations[name] |= dict.fromkeys(found.bundles, value)
        return found.tasks

    def _present_now(self) -> dict[Key, bool]:
        """Return the graph's keys that the scheduler has, and whether it has their definition."""
        tasks = self._tasks
        return {key: tasks[key].run_spec is not None for key in self._graph if key in tasks}

    def _failed_now(self) -> set[Key]:
        """Return the keys of failed tasks that the graph may read; O(tasks that exist already)."""
        tasks = self._tasks
        return {
            key
            for key in (*self._present, *self._outside)
            if key in tasks and tasks[key].exception_blame is not None
        }

    def settle(self, dsk: dict[Key, GraphNode]) -> None:
        """Compare with the scheduler's tasks again; let the graph run as it came if they have changed."""
        if self.bundles:
            is_as_before = self._present_now() == self._present and self._failed_now() == self._failed
            if is_as_before and self._bundles.is_valid(self._sharing):
                self._bundles.carry_out(self._sharing)
            else:
                logger.info("ferroflow: tasks have changed while their graph was bundled; it runs as it came")
                self.restore(dsk)
        self._graph = {}

    def restore(self, dsk: dict[Key, GraphNode] | None = None) -> None:
        """Let the graph run as it came."""
        if not self.bundles:
            return
        self.bundles = {}
        dsk = self._result if dsk is None else dsk
        dsk.clear()
        dsk.update(self._graph)
        self.order.clear()
        self.order.update(order(dsk))


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
            own = {key: value for key, value in own.items() if value is False}
        elif name in _INHERITED and len(own) == len(graph):
            value = next(iter(own.values()))
            if all(other == value for other in own.values()):
                inherited[name] = value
                continue
        alone.update(own)
    return inherited, alone


class GraphArrivals:
    """Bundles the graphs that arrive.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    bundles : Bundles
    overheads : Overheads
        The cluster for which graphs are cut.
    learned : callable
        Returns what was learned of the task prefixes that may be bundled.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        bundles: Bundles,
        overheads: Overheads,
        learned: Callable[[], Mapping[str, Averages]],
    ) -> None:
        self._scheduler = scheduler
        self._stock = scheduler.stream_handlers[_HANDLER]
        self._bundles = bundles
        self._overheads = overheads
        self._learned = learned
        self._is_open = True

    def changes(self) -> Iterable[Change]:
        """Return the changes to the scheduler."""
        handlers = self._scheduler.stream_handlers
        yield ItemChange(f"Scheduler.stream_handlers[{_HANDLER!r}]", handlers, _HANDLER, self._arrived)
        yield _distributed_graphs.comparison_change(self._scheduler, self._prepare, self._restore)

    def close(self) -> None:
        """Let graphs run as they come, even if another plugin still calls the handler."""
        self._is_open = False

    async def _arrived(self, *, expr_ser: Any, keys: Collection[Key], **options: Any) -> None:
        # A coroutine function: Dask's stream handling waits for it before the client's next message.
        arrival = None
        try:
            arrival = self._arrival_of(expr_ser, keys, options) if self._is_open else None
            if arrival is not None:
                # Dask's offload pool has one thread for all clients, which must not wait for a large graph.
                with _distributed_graphs.active_update(self._scheduler):
                    await asyncio.get_running_loop().run_in_executor(None, arrival.prepare)
                if not self._is_open:  # the plugin was uninstalled meanwhile, and no code splits bundles
                    arrival.restore()
                header = {"serializer": _FAMILY, "arrival": arrival}
                expr_ser = _distributed_graphs.in_this_process(header)
                options["internal_priority"] = arrival.order
        except FAILURES:  # an expression that cannot be deserialized is one: Dask reports it
            arrival = None
            logger.info("ferroflow: a graph runs as it came", exc_info=True)
        token = _arriving.set(arrival)
        try:
            await self._stock(expr_ser=expr_ser, keys=keys, **options)
        finally:
            _arriving.reset(token)

    def _arrival_of(self, expr_ser: Any, keys: Collection[Key], options: Mapping[str, Any]) -> Arrival | None:
        # `client.map` and `client.submit` give each task a priority, and a client wants all of them.
        if (
            options.get("internal_priority")
            or options.get("actors")
            or isinstance(options.get("user_priority"), dict)
        ):
            return None
        annotations = options.get("annotations") or {}
        if any(
            callable(value) or (name not in _INHERITED and (name != BUNDLE_ANNOTATION or value is False))
            for name, value in annotations.items()
        ):
            return None
        expr = _distributed_graphs.deserialized(expr_ser)
        return Arrival(expr, keys, self._scheduler, self._bundles, self._bundled)

    def _bundled(
        self,
        graph: dict[Key, GraphNode],
        wanted: Collection[Key],
        alone: Collection[Key],
        places: Mapping[Key, Place],
    ) -> BundledGraph:
        cluster, learned = self._overheads.profile(), self._learned()
        return bundle_graph(graph, wanted, cluster, learned, alone=alone, places=places)

    def _prepare(self, dsk: dict[Key, GraphNode], keys: Collection[Key]) -> None:
        """Note that Dask is about to compare a graph with its tasks."""
        arrival = _arriving.get()
        if arrival is not None:
            arrival.settle(dsk)
        # A task that was rewritten has other dependencies than the graph says.
        rewritten = self._bundles.rewritten(dsk)
        if rewritten:
            for key in rewritten:
                del dsk[key]
            for key in dsk.keys() - cull(dsk, {*keys}).keys():
                del dsk[key]

    @staticmethod
    def _restore(dsk: dict[Key, GraphNode]) -> None:
        arrival = _arriving.get()
        if arrival is not None:
            arrival.restore(dsk)

    def created(self) -> dict[Key, Bundle]:
        """Return the bundles of the graph whose tasks Dask has just created."""
        arrival = _arriving.get()
        return {} if arrival is None else arrival.bundles
