"""Arriving graphs: the scheduler bundles each graph that a client submits before it creates the tasks.

The handler of `update-graph` deserializes the graph as Dask does, bundles it in a thread, and hands it back
to Dask as an `Arrival`. Dask then compares the result with its tasks and creates new ones in one turn of the
event loop. Other clients may have acted since the bundling, so at the beginning of that turn the arrival is
compared with the tasks again. If anything has changed, the graph runs as it came.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dask._task_spec import GraphNode
from dask.typing import Key
from distributed.protocol.serialize import register_serialization_family
from distributed.utils import offload

from ferroflow_dask.annotations import BUNDLE_ANNOTATION, is_bundling_off
from ferroflow_dask.bundling.bundle import Bundle
from ferroflow_dask.bundling.plan import Plan, Until
from ferroflow_dask.bundling.rewrite import FEWEST, INHERITED, revalidate, rewrite, unchanged
from ferroflow_dask.bundling.snapshot import SentGraph, outside
from ferroflow_dask.scheduler import _distributed_graphs
from ferroflow_dask.scheduler.changes import FAILURES, Change, ItemChange, attempt
from ferroflow_dask.scheduler.graphs.arrival import Arrival, Knowledge, Snapshots, sent_graph
from ferroflow_dask.scheduler.graphs.samples import Samples

if TYPE_CHECKING:
    from ferroflow_dask.scheduler.core import Core
    from ferroflow_dask.scheduler.graphs.bundles import Bundles
    from ferroflow_dask.scheduler.graphs.capable import CapableWorkers
    from ferroflow_dask.scheduler.graphs.observers import Observers

logger = logging.getLogger("ferroflow_dask")

#: Serialization family of arrivals, which never leave the process.
_FAMILY = "ferroflow-arrival"
_HANDLER = "update-graph"
#: Dask would cancel the graph, so this is tried again.
_NOT_COMPARED = "a graph could not be compared with earlier ones"

_arriving: ContextVar[Arrival | None] = ContextVar("ferroflow-arriving", default=None)


def _never_dumped(_: Any, **__: Any) -> Any:
    raise TypeError("an arriving graph never leaves the process")


register_serialization_family(_FAMILY, _never_dumped, lambda header, _: header["arrival"])


class GraphArrivals:
    """Bundles the graphs that arrive.

    Parameters
    ----------
    core : Core
    bundles : Bundles
    knowledge : Knowledge
    observers : Observers
    capable : CapableWorkers
    """

    def __init__(
        self,
        core: Core,
        bundles: Bundles,
        knowledge: Knowledge,
        observers: Observers,
        capable: CapableWorkers,
    ) -> None:
        self._scheduler = core.scheduler
        self._decisions = core.decisions
        self._bundles = bundles
        self._knowledge = knowledge
        self._snapshots = Snapshots(core.scheduler, bundles, knowledge)
        self._is_observed = observers.are_present
        self._announced = capable.announced
        #: Samples of arriving graphs.
        self.samples = Samples(core.scheduler)
        self._is_open = True
        # What clients want of the graphs that arrive; the event is set once Dask has created the tasks.
        self._under_way: dict[asyncio.Event, Collection[Key]] = {}
        self._n_restarts = 0

    def changes(self) -> Iterable[Change]:
        """Return the changes to the scheduler."""
        handlers = self._scheduler.stream_handlers
        self._stock = handlers[_HANDLER]
        yield ItemChange(f"Scheduler.stream_handlers[{_HANDLER!r}]", handlers, _HANDLER, self._arrived)
        yield _distributed_graphs.comparison_change(self._scheduler, self._prepare, self._restore)

    def close(self) -> None:
        """Let graphs run as they come, even if another plugin still calls the handler."""
        self._is_open = False
        self.samples.close()

    def restarted(self) -> None:
        """Create no tasks of the graphs that are arriving: a restart has cancelled them."""
        self._n_restarts += 1

    async def _arrived(self, *, client: str, expr_ser: Any, keys: Collection[Key], **options: Any) -> None:
        # A coroutine function: Dask's stream handling waits for it before the client's next message.
        earlier, has_ended = dict(self._under_way), asyncio.Event()
        self._under_way[has_ended] = keys
        try:
            await self._create(client, expr_ser, keys, earlier, options)
        finally:
            del self._under_way[has_ended]
            has_ended.set()

    async def _create(
        self,
        client: str,
        expr_ser: Any,
        keys: Collection[Key],
        earlier: Mapping[asyncio.Event, Collection[Key]],
        options: dict[str, Any],
    ) -> None:
        """Let Dask create the tasks of a graph, once it has those of earlier graphs that this one reads."""
        arrival, sampled, n_restarts = None, set[Key](), self._n_restarts
        try:
            expr = self._expression(expr_ser, options) if self._is_open else None
            if expr is not None:
                with _distributed_graphs.active_update(self._scheduler):
                    # Two threads that materialize expressions can wait for each other for ever: up to 3.11
                    # Python locks each cached property. Dask's offload pool has one thread for all clients.
                    priorities, declare = options.get("internal_priority"), self._knowledge.declare
                    graph = await offload(sent_graph, expr, keys, priorities, declare)
                    if (options.get("annotations") or {}).get("priority"):
                        graph = replace(graph, is_urgent=True)
                    await self._created(earlier, partial(outside, graph.tasks))
                    await self._announced()
                    submit = partial(self._submit, client=client, options=options)
                    arrival = Arrival(await self._planned(graph, sampled, submit))
                expr_ser = _in_this_process(arrival)
            elif earlier:
                await self._created(earlier, partial(_outside, expr_ser, keys))
        except FAILURES:  # an expression that cannot be materialized is one: Dask reports it
            arrival = None
            logger.info("ferroflow: a graph runs as it came", exc_info=True)
        if self._n_restarts > n_restarts:
            return
        try:
            await self._submit(arrival, expr_ser, keys, client=client, options=options)
        finally:
            sampled -= {*keys}
            if sampled and client in self._scheduler.clients:
                self._scheduler.client_releases_keys(keys=list(sampled), client=client)

    async def _planned(
        self, graph: SentGraph, sampled: set[Key], submit: Callable[..., Awaitable[None]]
    ) -> Plan:
        """Plan a graph. While a plan leaves a rest, create its tasks, wait for them, and plan the rest.

        The keys of these tasks that the client wants until those of the rest exist are added to `sampled`.
        """
        loop = asyncio.get_running_loop()
        while True:
            # Only to materialize it a client has to wait for the large graph of another.
            plan = await loop.run_in_executor(None, self._plan, graph)
            if not self._is_open:  # the plugin was uninstalled meanwhile, and no code splits bundles
                return unchanged(graph)
            if plan.rest is None or plan.until is None:
                return plan
            sampled |= plan.wanted
            arrival = Arrival(plan)
            await submit(arrival, _in_this_process(arrival), {*plan.wanted})
            await self.samples.wait(plan.until.keys, partial(self._expected_s, plan.until))
            graph = plan.rest

    def _plan(self, graph: SentGraph) -> Plan:
        try:
            return rewrite(graph, self._snapshots.for_plan(graph), self._bundles.token())
        except FAILURES:
            logger.warning("ferroflow: a graph could not be bundled and runs as it came", exc_info=True)
            return unchanged(graph)

    def _expected_s(self, until: Until) -> float:
        return until.expected_s(self._knowledge.learned() or {}, self._knowledge.cluster())

    async def _submit(
        self,
        arrival: Arrival | None,
        expr_ser: Any,
        keys: Collection[Key],
        *,
        client: str,
        options: dict[str, Any],
    ) -> None:
        """Call Dask to create the tasks of a plan, or of a graph as it came."""
        if arrival is not None:
            options = options | {"internal_priority": arrival.order}
        token = _arriving.set(arrival)
        try:
            await self._stock(client=client, expr_ser=expr_ser, keys=keys, **options)
        finally:
            _arriving.reset(token)

    @staticmethod
    async def _created(
        earlier: Mapping[asyncio.Event, Collection[Key]], outside: Callable[[], set[Key]]
    ) -> None:
        """Wait for earlier graphs of other clients, if a graph reads their results.

        Dask creates graphs in the order of their arrival, and cancels a graph that reads unknown keys.
        """
        if all(has_ended.is_set() for has_ended in earlier):
            return
        needed = await offload(outside)
        for has_ended, keys in earlier.items():
            if not needed.isdisjoint(keys):
                await has_ended.wait()

    def _expression(self, expr_ser: Any, options: Mapping[str, Any]) -> Any:
        """Return the expression of a graph that may be changed; None for others."""
        if options.get("actors") or isinstance(options.get("user_priority"), dict):
            return None
        # `client.map` and `client.submit` send it; `submit` sends one task, often.
        priorities = options.get("internal_priority")
        if priorities and len(priorities) < FEWEST:
            return None
        annotations = options.get("annotations") or {}
        if any(
            callable(value)
            or (name not in INHERITED and (name != BUNDLE_ANNOTATION or is_bundling_off(value)))
            for name, value in annotations.items()
        ):
            return None
        return None if self._is_observed() else _distributed_graphs.deserialized(expr_ser)

    def _prepare(self, dsk: dict[Key, GraphNode], keys: Collection[Key]) -> None:
        """Note that Dask is about to compare a graph with its tasks."""
        arrival = _arriving.get()
        if arrival is not None and self._is_observed():  # by a plugin that was added meanwhile
            arrival.restore(dsk)
        elif arrival is not None:
            self._settle(arrival, dsk)
        attempt(partial(self._bundles.leave_out, dsk, keys), _NOT_COMPARED)

    def _settle(self, arrival: Arrival, dsk: dict[Key, GraphNode]) -> None:
        """Compare a plan with the scheduler's tasks; let the graph run as it came if they have changed."""
        if arrival.plan.premises is None:
            return
        if revalidate(arrival.plan, self._snapshots.for_check(arrival.plan)):
            self._bundles.carry_out(arrival.plan.sharing)
        else:
            logger.info("ferroflow: tasks have changed while their graph was bundled; it runs as it came")
            arrival.restore(dsk)

    def _restore(self, dsk: dict[Key, GraphNode], keys: Collection[Key]) -> None:
        arrival = _arriving.get()
        if arrival is not None:
            arrival.restore(dsk)
        attempt(partial(self._bundles.leave_out, dsk, keys), _NOT_COMPARED)

    def created(self) -> Mapping[Key, Bundle]:
        """Return the bundles of the graph whose tasks Dask has just created."""
        plan = self.planned()
        if plan is None:
            return {}
        for key, (what, reason) in plan.reasons.items():
            self._decisions.note(key, what, "", reason)
        return plan.bundles

    @staticmethod
    def planned() -> Plan | None:
        """Return the plan of the graph whose tasks Dask has just created; None if it came without one."""
        arrival = _arriving.get()
        return None if arrival is None else arrival.plan


def _outside(expr_ser: Any, keys: Collection[Key]) -> set[Key]:
    """Return what a graph reads that is not in it."""
    return outside(_distributed_graphs.materialized(_distributed_graphs.deserialized(expr_ser), keys))


def _in_this_process(expression: Any) -> Any:
    """Return an object that stands for an expression as Dask takes it from a client."""
    return _distributed_graphs.in_this_process({"serializer": _FAMILY, "arrival": expression})


@contextmanager
def arriving(plan: Plan) -> Iterator[None]:
    """Let `GraphArrivals.planned` return a plan whose tasks were created later than their graph."""
    token = _arriving.set(Arrival(plan))
    try:
        yield
    finally:
        _arriving.reset(token)
