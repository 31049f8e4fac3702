"""Write a graph as Dask tasks: keys, dependencies, annotations.

Here are the tasks of ops; `sources` has those of inputs and constants, `batches` those of models on chunks,
and the package `bundling` rewrites the tasks of others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dask._task_spec import GraphNode, Task, TaskRef
from dask.base import get_annotations
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.typing import Key

from ferroflow_dask.annotations import (
    BUNDLE_PREFIX,
    COST_ANNOTATION,
    CPU,
    GPU,
    KIND_ANNOTATION,
    RANK_ANNOTATION,
)
from ferroflow_dask.bundling.results import Place, by_place
from ferroflow_dask.clients import is_address
from ferroflow_dask.cost import kind_name
from ferroflow_dask.devices import host_value
from ferroflow_dask.graph.analysis import is_large_product
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels import SESSIONS, has_subgraph, make_plan
from ferroflow_dask.lowering.execution import ExecuteBundle, ExecuteOp
from ferroflow_dask.lowering.sources import SourceReferences
from ferroflow_dask.lowering.whole import is_for_session, part, whole
from ferroflow_dask.ranks import ranks_of

K = TypeVar("K", bound=Hashable)


def host_values(results: Sequence[Any], places: Mapping[K, Place]) -> dict[K, Any]:
    """Return the wanted values on the host; see `by_place`."""
    return {name: host_value(value) for name, value in by_place(results, places).items()}


def op_type_prefix(op: Op) -> str:
    """Name the tasks of an op after its type: `matmul`, `slow`, …."""
    return op.op_type.lower()


class PerKey(dict[Hashable, Any]):
    """An annotation that has its own value for each key, as Dask calls one."""

    def __call__(self, key: Hashable) -> Any:
        """Return the value for `key`; None leaves the task without the annotation."""
        return self.get(key)


@dataclass(frozen=True, slots=True)
class GpuCosts:
    """What ops cost on workers with GPUs, and which of them must run there.

    Parameters
    ----------
    costs : mapping of int to float
        Expected duration by op id [s].
    matmul_threshold : int, optional
        Elements of the result from which on matrix products run on GPUs, and all else does not, whatever
        it costs.
    """

    costs: Mapping[int, float]
    matmul_threshold: int | None = None

    def beside(self, on_cpu: float | None, ops: Sequence[Op], graph: Graph) -> dict[str, float | None]:
        """Return what ops that are one task cost on each kind of worker that they may run on [s].

        None where it is not known.
        """
        on_gpu = sum(self.costs[op.id] for op in ops) if all(op.id in self.costs for op in ops) else None
        found = {CPU: on_cpu, GPU: on_gpu}
        if self.matmul_threshold is not None:
            is_large = any(is_large_product(graph, op, self.matmul_threshold) for op in ops)
            found.pop(CPU if is_large else GPU)
        return found


@dataclass(frozen=True, slots=True)
class LoweredGraph:
    """A graph as Dask tasks.

    Parameters
    ----------
    dsk : HighLevelGraph
    places : mapping of str to (key, int or None)
        For each output the key of the task that yields it, and which item of its result it is; None for
        all of it.
    n_tasks : int
        One per bundle, and one per source that is not on the cluster yet or has to be checked there; none
        for those that travel in bundles.
    """

    dsk: HighLevelGraph
    places: Mapping[str, Place]
    n_tasks: int


def lower(
    graph: Graph,
    inputs: Mapping[str, Any],
    run: str,
    *,
    providers: tuple[str, ...],
    costs: Mapping[int, float],
    prefix: Callable[[Op], str] = op_type_prefix,
    bundles: Sequence[Sequence[Op]] | None = None,
    guesses: Mapping[int, float] | None = None,
    gpu: GpuCosts | None = None,
    is_whole: bool = False,
) -> LoweredGraph:
    """Write a graph whose inputs have values as Dask tasks.

    Parameters
    ----------
    graph : Graph
    inputs : mapping of str to array
        A value for each of `graph.inputs`.
    run : str
        Makes the keys unique, so that equal ops of two runs are never merged.
    providers : tuple of str
        Kernel providers in the order in which they are asked.
    costs : mapping of int to float
        Expected duration by op id [s]; tasks of ops left out are annotated with none.
    guesses : mapping of int to float, optional
        What orders tasks where costs do not [s]; `costs` if left out.
    gpu : GpuCosts, optional
        What ops cost on workers with GPUs, if there are any.
    prefix : callable, optional
        Names the tasks of single ops. Dask learns durations by this name.
    bundles : sequence of sequence of Op, optional
        The ops of each task; one for each if left out.
    is_whole : bool, optional
        Whether all ops, which are the only bundle then, run as one piece.
    """
    groups = [(op,) for op in graph.live_ops] if bundles is None else bundles
    sources = SourceReferences(graph, inputs, run, embeds=bundles is not None)
    wanted = exported(graph, groups)
    places: dict[str, Place] = {}
    keys: list[Key] = []
    # Where costs are guessed, tasks of one name are one group to Dask, which hands them out by rank.
    are_alike = bundles is not None and any(op.id not in costs for op in graph.live_ops)
    for i, ops in enumerate(groups):
        first = ops[0]
        name = prefix(first) if len(ops) == 1 and not are_alike else BUNDLE_PREFIX
        key: Key = (f"{name}-{run}", _backwards(i, len(groups)))
        keys.append(key)
        values = first.outputs if len(ops) == 1 and not is_whole else _exports(ops, wanted)
        for item, value in enumerate(values):
            places[value] = (key, item if len(values) > 1 else None)

    def place_of(value: str) -> tuple[Any, int | None]:
        key, item = places.get(value, (None, None))
        return (sources.argument(value), None) if key is None else (TaskRef(key), item)

    # Ops that name their workers are in bundles that stay the same: their sessions are kept.
    n_sessions = 0
    if bundles is not None and SESSIONS in providers and any(op.worker for op in graph.live_ops):
        n_sessions = sum(map(is_for_session, groups))
    context = _Context(run, graph, providers, place_of, is_whole, n_sessions)
    tasks: dict[Key, GraphNode] = {}
    for key, ops in zip(keys, groups, strict=True):
        function, operands = _call(ops, _exports(ops, wanted), context)
        tasks[key] = Task(key, function, *operands)
    outputs = {name: places.get(name) or (sources[name].key, None) for name in graph.outputs}
    annotations = _annotations(graph, keys, groups, costs, gpu=gpu, are_alike=are_alike)
    pins: dict[Hashable, list[str]] = {
        key: [ops[0].worker] for key, ops in zip(keys, groups, strict=True) if is_address(ops[0].worker)
    }
    if pins:
        annotations["workers"] = PerKey(pins)
        # Other workers wait for what a worker sends: that comes before its own work.
        sends = {key for key, ops in zip(keys, groups, strict=True) if all(op.is_send for op in ops)}
        annotations["priority"] = PerKey(dict.fromkeys(sends, 1))
    if guesses or costs:
        ranks = _ranks(graph, groups, guesses or costs)
        annotations[RANK_ANNOTATION] = PerKey(zip(keys, ranks, strict=True))
    # What inputs are computed from comes along.
    given = HighLevelGraph.merge(*(value.__dask_graph__() for value in sources.collections))
    layers = {
        **given.layers,
        f"sources-{run}": MaterializedLayer(sources.nodes),
        # A layer that is given annotations does not look for those of the context.
        f"ops-{run}": MaterializedLayer(tasks, annotations={**get_annotations(), **annotations}),
    }
    last = {layer for value in sources.collections for layer in value.__dask_layers__()}
    dependencies = {**given.dependencies, f"sources-{run}": last, f"ops-{run}": {f"sources-{run}", *last}}
    n_given = sum(map(len, given.layers.values()))
    return LoweredGraph(
        HighLevelGraph(layers, dependencies), outputs, len(tasks) + len(sources.nodes) + n_given
    )


def _backwards(i: int, n: int) -> int:
    # Of tasks that are equal to it, Dask starts with the last by the written key; so it starts with the
    # first, as the graph's author has written them. All have as many digits.
    return int(10 ** len(str(n))) + n - i


def exported(graph: Graph, groups: Sequence[Sequence[Op]]) -> set[str]:
    """Return the values of bundles that other bundles read, or that are outputs of the graph."""
    read: set[str] = set(graph.outputs)
    if len(groups) == 1:
        return read
    group_of = {op.id: i for i, ops in enumerate(groups) for op in ops}
    for op, edges in zip(graph.live_ops, graph.live_edges, strict=True):
        own = group_of[op.id]
        if any(group_of[graph.live_ops[j].id] != own for j in edges):
            made = [value for value in op.operands if value in graph.producers]
            read.update(value for value in made if group_of[graph.producers[value].id] != own)
    return read


def _exports(ops: Sequence[Op], wanted: Collection[str]) -> list[str]:
    return [value for op in ops for value in op.outputs if value and value in wanted]


@dataclass(frozen=True, slots=True)
class _Context:
    """What the tasks of a run have in common."""

    run: str
    graph: Graph
    providers: tuple[str, ...]
    place_of: Callable[[str], tuple[Any, int | None]]
    is_whole: bool
    n_sessions: int


def _call(
    ops: Sequence[Op], exports: Sequence[str], context: _Context
) -> tuple[Callable[..., Any], list[Any]]:
    """Return the function of a task, and its arguments: small arrays, and references to others."""
    if context.is_whole:
        call = whole(context.graph, context.run, context.providers, tuple(exports))
        return call, [context.place_of(value)[0] for value in (*call.inputs, *call.weights)]
    if context.n_sessions and is_for_session(ops):
        return _in_session(ops, exports, context)
    return _one(ops[0], context) if len(ops) == 1 else _several(ops, exports, context)


def _in_session(
    ops: Sequence[Op], exports: Sequence[str], context: _Context
) -> tuple[Callable[..., Any], list[Any]]:
    values, n_parts = tuple(exports), context.n_sessions
    call = part(context.graph, ops, context.run, providers=context.providers, wanted=values, n_parts=n_parts)
    places = [context.place_of(value) for value in (*call.inputs, *call.weights)]
    return replace(call, items=tuple(item for _, item in places)), [result for result, _ in places]


def _one(op: Op, context: _Context) -> tuple[Callable[..., Any], list[Any]]:
    places = [context.place_of(value) for value in op.operands]
    items = tuple(item for _, item in places)
    call = ExecuteOp(context.run, op, _opsets_of(op, context.graph), context.providers, items)
    return call, [reference for reference, _ in places]


def _several(
    ops: Sequence[Op], exports: Sequence[str], context: _Context
) -> tuple[Callable[..., Any], list[Any]]:
    made = {value for op in ops for value in op.outputs}
    arguments = list(dict.fromkeys(value for op in ops for value in op.operands if value not in made))
    places = [context.place_of(value) for value in arguments]
    # Several arguments may be items of one result, which comes once.
    given = {_identity(result): result for result, _ in places}
    number = {identity: i for i, identity in enumerate(given)}
    items = tuple((number[_identity(result)], item) for result, item in places)
    plan = make_plan(context.graph, ops, arguments, exports)
    return ExecuteBundle(context.run, plan, context.providers, items), list(given.values())


def _identity(argument: Any) -> Hashable:
    return argument.key if isinstance(argument, TaskRef) else id(argument)


def _annotations(
    graph: Graph,
    keys: Sequence[Hashable],
    groups: Sequence[Sequence[Op]],
    costs: Mapping[int, float],
    *,
    gpu: GpuCosts | None,
    are_alike: bool,
) -> dict[str, PerKey]:
    kinds = {
        key: kind_name(ops[0], graph)
        for key, ops in zip(keys, groups, strict=True)
        if len(ops) == 1 and not are_alike
    }
    annotations = {KIND_ANNOTATION: PerKey(kinds)} if kinds else {}
    if not costs and gpu is None:
        return annotations
    known = {
        key: sum(costs[op.id] for op in ops)
        for key, ops in zip(keys, groups, strict=True)
        if all(op.id in costs for op in ops)
    }
    if gpu is None:
        return {COST_ANNOTATION: PerKey(known), **annotations}
    beside = {key: gpu.beside(known.get(key), ops, graph) for key, ops in zip(keys, groups, strict=True)}
    return {COST_ANNOTATION: PerKey(beside), **annotations}


def _ranks(graph: Graph, groups: Sequence[Sequence[Op]], costs: Mapping[int, float]) -> list[float]:
    """Return the upward rank of each bundle [s]; see `graph.upward_ranks`."""
    if len(groups) == 1:
        return [sum(costs.get(op.id, 0.0) for op in groups[0])]
    group_of = {op.id: i for i, ops in enumerate(groups) for op in ops}
    before: list[set[int]] = [set() for _ in groups]
    for op, edges in zip(graph.live_ops, graph.live_edges, strict=True):
        own = group_of[op.id]
        before[own].update(group_of[graph.live_ops[j].id] for j in edges)
    for i, earlier in enumerate(before):
        earlier.discard(i)
    return ranks_of([sum([costs.get(op.id, 0.0) for op in ops]) for ops in groups], before)


def _opsets_of(op: Op, graph: Graph) -> dict[str, int]:
    # A sub-graph may use any domain of the model; a plain op needs its own version only.
    if has_subgraph(op):
        return dict(graph.opsets)
    return {op.domain: graph.opsets[op.domain]} if op.domain in graph.opsets else {}
