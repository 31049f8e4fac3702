"""Private names of distributed for graphs: materialize, compare with the scheduler's tasks, replace a task.

`_distributed.REQUIRED` lists the names, so that they are checked when the plugin is installed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from dask._expr import Expr, HLGExpr, LLGExpr
from dask._task_spec import GraphNode, convert_legacy_graph, cull
from dask.typing import Key
from distributed.diagnostics.progress import MultiProgress, Progress
from distributed.metrics import time
from distributed.protocol.serialize import Serialized, ToPickle, deserialize
from distributed.scheduler import Transition

from ferroflow_dask.bundling.declared import Chunks
from ferroflow_dask.scheduler.changes import FAILURES, Change, ItemChange

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

logger = logging.getLogger("ferroflow_dask")

#: Operation by which clients ask for a task to run it locally.
RUN_SPEC = "get_runspec"


def deserialized(expr: Any) -> Any:
    """Return the expression that a client sent."""
    return deserialize(expr.header, expr.frames)


@contextmanager
def active_update(scheduler: Scheduler) -> Iterator[None]:
    """Let the scheduler know that a graph is about to arrive, so that it is not idle."""
    scheduler._active_graph_updates += 1
    try:
        yield
    finally:
        scheduler._active_graph_updates -= 1


def in_this_process(header: dict[str, Any]) -> Serialized:
    """Return a serialized object that consists of a header."""
    return Serialized(header, [])


def materialized(expr: Any, keys: Collection[Key]) -> dict[Key, GraphNode]:
    """Return the graph of an expression, as `Scheduler.update_graph` makes it."""
    tasks: dict[Key, GraphNode] = convert_legacy_graph(expr.__dask_graph__())
    for key, task in tasks.items():
        if task.key != key:  # data of a collection under the key of another
            tasks[key] = task.substitute({}, key=key)
    # Other expressions remove the tasks that the keys do not need.
    return cull(tasks, {*keys}) if isinstance(expr, LLGExpr) else tasks


def declared_chunks(expr: Any) -> dict[str, Chunks]:
    """Return the chunks of the arrays of an expression, by the first part of their keys.

    Optimized graphs lack those of fused layers, so this reads the graphs that the client sent.
    """
    parts = [part for part in expr.walk() if isinstance(part, HLGExpr)] if isinstance(expr, Expr) else []
    layers = {name: layer for part in parts for name, layer in getattr(part.hlg, "layers", {}).items()}
    declared = {name: layer.collection_annotations or {} for name, layer in layers.items()}
    return {
        name: Chunks(array["chunks"], array["dtype"].itemsize)
        for name, array in declared.items()
        if array.get("chunk_type") == "numpy.ndarray" and not array["dtype"].hasobject
    }


def comparison_change(
    scheduler: Scheduler,
    prepare: Callable[[dict[Key, GraphNode], Collection[Key]], None],
    restore: Callable[[dict[Key, GraphNode], Collection[Key]], None],
) -> Change:
    """Return the change that calls a function just before a graph is compared with the scheduler's tasks.

    Dask creates the tasks in the same turn of the event loop.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    prepare : callable
        Takes the graph, which it may change, and the keys that the client wants.
    restore : callable
        Takes the same and restores the graph that the client sent, after `prepare` has failed.
    """
    stock = scheduler._find_lost_dependencies

    def find_lost_dependencies(dsk: dict[Key, GraphNode], keys: set[Key]) -> set[Key]:
        try:
            prepare(dsk, keys)
        except FAILURES:
            logger.warning("ferroflow: a graph could not be bundled and runs as it came", exc_info=True)
            restore(dsk, keys)
        lost: set[Key] = stock(dsk, keys)
        return lost

    name = "_find_lost_dependencies"
    return ItemChange(f"Scheduler.{name}", vars(scheduler), name, find_lost_dependencies)


def run_spec_change(scheduler: Scheduler, original: Callable[[Key], GraphNode | None]) -> Change:
    """Return the change that sends clients a task as its graph has it, to run it locally.

    `original` returns None for a task that the scheduler has as it came.
    """
    stock = scheduler.handlers[RUN_SPEC]

    def get_runspec(*args: Any, key: Any = None, **options: Any) -> Any:
        found = original(tuple(key) if isinstance(key, list) else key)
        return stock(*args, key=key, **options) if found is None else ToPickle(found)

    return ItemChange(f"Scheduler.handlers[{RUN_SPEC!r}]", scheduler.handlers, RUN_SPEC, get_runspec)


class Delivery(NamedTuple):
    """What a worker reports of a value that it has stored: as in the message of a finished task."""

    nbytes: int
    type: bytes
    typename: str
    start_s: float
    stop_s: float
    thread: int | None


def _finished_message(delivery: Delivery, worker: str) -> dict[str, Any]:
    """Return what Dask tells plugins of a finished task."""
    return {
        "status": "OK",
        "worker": worker,
        "thread": delivery.thread,
        "nbytes": delivery.nbytes,
        "type": delivery.type,
        "typename": delivery.typename,
        "startstops": [{"action": "compute", "start": delivery.start_s, "stop": delivery.stop_s}],
    }


def complete_waiting(
    scheduler: Scheduler,
    ws: WorkerState,
    delivered: Mapping[TaskState, Delivery],
    own: object,
    stimulus_id: str,
) -> None:
    """Complete tasks that wait for a task of a worker which has stored their values already.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    ws : distributed.scheduler.WorkerState
    delivered : mapping of TaskState to Delivery
    own : object
        The scheduler plugin whose hook `transition` is not called.
    stimulus_id : str
    """
    client_msgs: dict[Any, Any] = {}
    recommendations: dict[Key, Any] = {}
    plugins = [plugin for plugin in scheduler.plugins.values() if plugin is not own]
    details = {ts: _finished_message(delivery, ws.address) for ts, delivery in delivered.items()}
    # From here on nothing can fail halfway.
    for ts, delivery in delivered.items():
        sources = list(ts.waiting_on or ())
        ts.waiting_on = set()
        ts.group.add_duration(action="compute", start=delivery.start_s, stop=delivery.stop_s)
        ts.set_nbytes(delivery.nbytes)
        found: dict[Key, Any] = {}
        reports: dict[Any, Any] = {}
        scheduler._add_to_memory(ts, ws, found, reports, type=delivery.type, typename=delivery.typename)
        for source in sources:  # still runs; Dask releases it when it ends
            found.pop(source.key, None)
        recommendations |= found
        for client, messages in reports.items():
            client_msgs.setdefault(client, []).extend(messages)
        scheduler.transition_log.append(Transition(ts.key, "waiting", "memory", found, stimulus_id, time()))
        for plugin in plugins:
            # Progress bars and the task stream follow tasks from `processing` to `memory`.
            try:
                plugin.transition(ts.key, "processing", "memory", stimulus_id=stimulus_id, **details[ts])
            except FAILURES:
                logger.info("Plugin failed with exception", exc_info=True)
    worker_msgs: dict[Any, Any] = {}
    scheduler._transitions(recommendations, client_msgs, worker_msgs, stimulus_id)
    scheduler.send_all(client_msgs, worker_msgs)


def replace_task(
    scheduler: Scheduler,
    ts: TaskState,
    specs: Mapping[Key, GraphNode],
    readers: Mapping[Key, GraphNode],
    stimulus_id: str,
    *,
    keeps: bool = False,
    failed: Failed | None = None,
    priorities: Mapping[Key, tuple[float, ...]] | None = None,
) -> None:
    """Replace a task that has not ended, or a part of it, by several others, which then run.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    ts : TaskState
        If it is not one of `specs`, and not kept, it is forgotten.
    specs : mapping of Key to GraphNode
        The other tasks, each after those that it depends on. Keys that the scheduler has already stay as they
        are, except that of `ts`.
    readers : mapping of Key to GraphNode
        New definitions of the dependents of `ts`, which do not depend on it, unless `keeps`.
    stimulus_id : str
    keeps : bool, optional
        Whether `ts` goes on: it yields fewer values than before, or Dask is about to release it.
    failed : Failed, optional
        A task of `specs` or `readers` that has failed on a worker.
    priorities : mapping of Key to tuple of float, optional
        Of tasks of `specs` or `readers` that have others than `ts`.
    """
    priorities = priorities or {}
    client_msgs: dict[Any, Any] = {}
    worker_msgs: dict[Any, Any] = {}
    if ts.state != "released" and not keeps:
        # The recommendations are computed anew below, for the tasks as they are then.
        _, client_msgs, worker_msgs = scheduler._transition(ts.key, "released", stimulus_id)
    computation = next((one for one in reversed(scheduler.computations) if ts.group in one.groups), None)
    inputs = {dts for one in (ts, *map(scheduler.tasks.__getitem__, readers)) for dts in one.dependencies}
    created = []
    for key, spec in specs.items():
        if key not in scheduler.tasks:
            new = scheduler.new_task(key, spec, "released", computation=computation)
            new.priority = priorities.get(key, ts.priority)
            new.annotations = dict(ts.annotations or {})
            created.append(new)
    recommendations: dict[Key, Any] = {}
    if ts.key in specs:
        _redefine(scheduler, ts, specs[ts.key])
        if (ts.waiters or ts.who_wants) and not keeps:
            recommendations[ts.key] = "waiting"
    for new in created:
        _depend(scheduler, new, specs[new.key])
    for key, spec in readers.items():
        reader = scheduler.tasks[key]
        _redefine(scheduler, reader, spec)
        if reader.state == "waiting":
            reader.priority = priorities.get(key, reader.priority)
            found = _wait_for_inputs(reader)
            recommendations |= found if failed is None else {}  # the readers fail, too
    if ts.key not in specs and not keeps:
        _complete_progress(scheduler, ts.key, stimulus_id)
        _drop_dependencies(ts)
    if ts.key not in specs and not (keeps and ts.dependents):
        recommendations[ts.key] = "forgotten"
    # The reader of a new task may exist already, for another graph.
    recommendations |= {new.key: "forgotten" for new in created if not new.dependents}
    for one in (*created, ts):
        blamed = next((dts for dts in one.dependencies if dts.exception_blame), None)
        if blamed is not None:  # another graph has computed it, and failed
            one.exception_blame = blamed.exception_blame
            recommendations[one.key] = "erred"
    spans = scheduler.extensions.get("spans")
    if spans is not None and created:
        spans.observe_tasks(created, code=(), span_metadata={"collections": []})
    if failed is not None:
        if ts.key in specs:  # it depends on the failed task, as the last one of a chain
            recommendations.pop(ts.key, None)
        recommendations |= _fail(scheduler, failed, stimulus_id, client_msgs)
    scheduler._transitions(recommendations, client_msgs, worker_msgs, stimulus_id)
    inputs.update(*(new.dependencies for new in created))
    scheduler._transitions(_unneeded(inputs - {ts}), client_msgs, worker_msgs, stimulus_id)
    scheduler.send_all(client_msgs, worker_msgs)
    scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus_id)


def _unneeded(inputs: Iterable[TaskState]) -> dict[Key, Any]:
    """Return recommendations for the tasks that no other task or client needs now."""
    found: dict[Key, Any] = {}
    for ts in inputs:
        if ts.state == "memory" and not ts.waiters and not ts.who_wants:
            found[ts.key] = "released"
        elif ts.state == "released" and not ts.dependents and not ts.who_wants:
            found[ts.key] = "forgotten"  # it was there for a retry of a task that has failed
    return found


class Failed(NamedTuple):
    """A task that has failed within another one: its key, the worker, and the message of its error."""

    key: Key
    worker: str
    error: Mapping[str, Any]


def _fail(
    scheduler: Scheduler, failed: Failed, stimulus_id: str, client_msgs: dict[Any, Any]
) -> dict[Key, Any]:
    """Make a task fail that no worker has as a task; return the recommendations for others."""
    ts = scheduler.tasks[failed.key]
    start = ts.state
    ts.waiting_on = set()
    names = ("exception", "traceback", "exception_text", "traceback_text")
    details = {name: failed.error[name] for name in names}
    run = {"status": "error", **{name: failed.error.get(name) for name in ("thread", "startstops")}}
    for dts in ts.dependents:
        if dts.state == "waiting":
            ts.waiters = {*(ts.waiters or ()), dts}
    message = {"worker": failed.worker, "cause": ts.key, **details}
    found, messages, _ = scheduler._propagate_erred(ts, **message)
    for client, reports in messages.items():
        client_msgs.setdefault(client, []).extend(reports)
    # As for dependents that are not computed in `_transition_released_erred`.
    for dts in ts.dependents:
        if dts.state == "released":
            dts.exception_blame = ts
            found[dts.key] = "erred"
    scheduler.transition_log.append(Transition(ts.key, start, "erred", found, stimulus_id, time()))
    for plugin in list(scheduler.plugins.values()):
        try:
            plugin.transition(
                ts.key,
                "processing",
                "erred",
                stimulus_id=stimulus_id,
                worker=failed.worker,
                cause=ts.key,
                **details,
                **run,
            )
        except FAILURES:
            logger.info("Plugin failed with exception", exc_info=True)
    return dict(found)


def _complete_progress(scheduler: Scheduler, key: Key, stimulus_id: str) -> None:
    """Let Dask's progress bars take a task for completed, as they end with an error if one is forgotten."""
    for plugin in [one for one in scheduler.plugins.values() if isinstance(one, Progress)]:
        try:
            plugin.transition(key, "processing", "memory", stimulus_id=stimulus_id)
            # It looks for forgotten tasks among all of its keys, also completed ones.
            if isinstance(plugin, MultiProgress) and plugin.func is not None:
                plugin.all_keys.get(plugin.func(key), set()).discard(key)
        except FAILURES:
            logger.info("Plugin failed with exception", exc_info=True)


def _depend(scheduler: Scheduler, ts: TaskState, spec: GraphNode) -> None:
    for key in sorted(spec.dependencies, key=repr):  # in virtual time, each run is the same
        ts.add_dependency(scheduler.tasks[key])


def _drop_dependencies(ts: TaskState) -> None:
    for dts in ts.dependencies:
        dts.dependents.discard(ts)
        if dts.waiters:
            dts.waiters.discard(ts)
    ts.dependencies.clear()


def _redefine(scheduler: Scheduler, ts: TaskState, spec: GraphNode) -> None:
    _drop_dependencies(ts)
    ts.run_spec = spec
    _depend(scheduler, ts, spec)


def _wait_for_inputs(ts: TaskState) -> dict[Key, Any]:
    """Let a waiting task wait for the inputs that it has now; return recommendations."""
    recommendations: dict[Key, Any] = {}
    ts.waiting_on = {dts for dts in ts.dependencies if not dts.who_has}
    for dts in ts.dependencies:
        if dts.state == "released":
            recommendations[dts.key] = "waiting"  # which adds its waiters
        else:
            dts.waiters = {*(dts.waiters or ()), ts}
        if dts.exception_blame:
            ts.exception_blame = dts.exception_blame
            return {ts.key: "erred"}
    return recommendations if ts.waiting_on else {ts.key: "processing"}
