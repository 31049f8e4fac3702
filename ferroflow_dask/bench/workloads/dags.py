"""The built-in graphs (`graph.generate`) as workloads, each in the ways it can be written for Dask.

A run starts from the `Graph`: lowering it is on the clock, and so is everything after; only constants
that are scattered are there before. Outputs are all values that nothing reads, and the ends of stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import log2
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import futures_of
from numpy.typing import NDArray

from ferroflow_dask.bench.workloads.base import Cluster, Instance, Request, Workload
from ferroflow_dask.bundling.results import Place
from ferroflow_dask.cost import AnalyticCost, estimate
from ferroflow_dask.exceptions import KernelNotFoundError, ResultError, UnknownNameError, UsageError
from ferroflow_dask.graph import FERROFLOW_DOMAIN, TOPOLOGIES, Graph, Op, bounds, generate_graph
from ferroflow_dask.lowering import bind_graph, executed, scatter
from ferroflow_dask.lowering.tasks import host_values, op_type_prefix

if TYPE_CHECKING:
    from distributed import Client, Future

#: Of the largest number of an output. The order of summation makes less of a difference, TF32 more.
_TOLERANCE = 1e-4
_MILLISECOND = 1e-3


# Ways to write a graph


def duration_prefix(op: Op) -> str:
    """Name the tasks of an op after its type and the power of two next to its duration: `slow_4ms`.

    Dask learns one duration for each name, so it tells long ops from short ones only by their names.

    Examples
    --------
    >>> duration_prefix(Op(1, "a", "Slow", ("x",), ("y",), attributes={"duration": 0.2}))
    'slow_256ms'
    """
    duration_ms = float(op.attributes["duration"]) / _MILLISECOND
    return f"{op_type_prefix(op)}_{2.0 ** round(log2(duration_ms)) if duration_ms else 0:g}ms"


@dataclass(frozen=True, slots=True)
class _Lowering:
    is_scattered: bool
    prefix: Callable[[Op], str] = op_type_prefix


#: Of graphs whose ops declare their durations, and of all others. The plain one comes first.
_BY_NAME: Mapping[str, _Lowering] = {
    "root scattered, one name": _Lowering(True),
    "root scattered, name by duration": _Lowering(True, duration_prefix),
    "root a task, one name": _Lowering(False),
    "root a task, name by duration": _Lowering(False, duration_prefix),
}
_BY_PLACE: Mapping[str, _Lowering] = {
    "constants scattered": _Lowering(True),
    "constants as tasks": _Lowering(False),
}


class _NothingKnown:
    """The cost model of a user who declares nothing."""

    def seconds(self, op: Op, graph: Graph) -> float | None:  # noqa: ARG002 - part of the protocol
        return None


# What must come out


def with_checkpoints(graph: Graph) -> Graph:
    """Return a graph that yields the end of each of its stages too.

    Stacked transformer blocks amplify rounding errors twofold each: after some 25 of them two correct
    computations in single precision have no digit in common. So each block is checked by itself. A stage
    ends in a value that several ops read and that all later ops depend on by way of it only.
    """
    order = graph.topological_order
    last_read = {op.id: at for at, op in enumerate(order)}
    readers = Counter[int]()
    for at, op in enumerate(order):
        for before in graph.predecessors[op.id]:
            last_read[before.id] = at
            readers[before.id] += 1
    ends, furthest = [], 0
    for at, op in enumerate(order):
        if furthest <= at and readers[op.id] > 1:
            ends.append(op.outputs[0])
        furthest = max(furthest, last_read[op.id])
    return replace(graph, outputs=(*ends, *graph.outputs)) if ends else graph


def numpy_outputs(graph: Graph, found: Mapping[str, NDArray[Any]] | None = None) -> dict[str, NDArray[Any]]:
    """Compute a built-in graph in this process, written anew from what its operators mean.

    No kernel is called, so that an error in one is found; sleeping ops do not sleep.

    Parameters
    ----------
    graph : Graph
    found : mapping of str to array, optional
        Values that ops read instead of those that are computed here.

    Raises
    ------
    KernelNotFoundError
        An operator that no built-in graph has.
    """
    values: dict[str, NDArray[Any]] = dict(graph.constants)
    outputs = dict.fromkeys(graph.outputs, np.empty(0))
    with np.errstate(all="ignore"):  # of what was found, which may be anything
        for op in graph.topological_order:
            (name,) = op.outputs
            result = _numpy_op(op, *(values[value] for value in op.inputs))
            values[name] = found[name] if found and name in found else result
            if name in outputs:
                outputs[name] = result
    return outputs


def _numpy_op(op: Op, x: NDArray[Any], *more: NDArray[Any]) -> NDArray[Any]:
    match op.domain, op.op_type:
        case (domain, "Slow") if domain == FERROFLOW_DOMAIN:
            return x
        case ("", "Relu"):
            return np.where(x > 0, x, np.float32(0))
        case (domain, "LayerNorm") if domain == FERROFLOW_DOMAIN:
            mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
            normal: NDArray[Any] = (x - mean) / np.sqrt(variance + np.float32(op.attributes["epsilon"]))
            return normal
        case ("", "MatMul"):
            product: NDArray[Any] = x @ more[0]
            return product
        case (domain, "MatMul") if domain == FERROFLOW_DOMAIN:
            by_head = np.split(more[0], op.attributes["heads"], axis=1)
            if op.attributes["trans_b"]:
                rows = np.split(x, op.attributes["heads"], axis=1)
                return np.stack([a @ b.T for a, b in zip(rows, by_head, strict=True)])
            return np.concatenate([a @ b for a, b in zip(x, by_head, strict=True)], axis=1)
    raise KernelNotFoundError(f"op {op.name!r}: no built-in graph has {op.kind}")


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a graph before it runs."""

    outputs: Mapping[str, NDArray[Any]]
    n_ops: int
    t1_s: float | None
    t_inf_s: float | None


#: Outputs of this many graphs are kept, so that repetitions need not compute them again.
@lru_cache(maxsize=32)
def _known(name: str, arguments: tuple[tuple[str, Any], ...], seed: int) -> _Known:
    graph = with_checkpoints(generate_graph(name, seed=seed, **dict(arguments)))
    outputs, n_ops = numpy_outputs(graph), len(graph.live_ops)
    if name not in _SLEEPING:
        return _Known(outputs, n_ops, None, None)
    declared = bounds(graph, estimate(graph, AnalyticCost()))
    return _Known(outputs, n_ops, declared.work, declared.critical_path)


def _check(graph: Graph | None, expected: Mapping[str, NDArray[Any]], found: Sequence[Any]) -> None:
    if len(found) != len(expected):
        raise ResultError(f"there are {len(found)} outputs; the graph has {len(expected)}")
    results = dict(zip(expected, found, strict=True))
    for name, value in expected.items():
        shape, dtype = getattr(results[name], "shape", None), getattr(results[name], "dtype", None)
        if (shape, dtype) != (value.shape, value.dtype):
            raise ResultError(f"output {name!r} is {dtype}{shape}; it must be {value.dtype}{value.shape}")
    for name, value in (expected if graph is None else numpy_outputs(graph, results)).items():
        difference, scale = np.abs(results[name] - value).max(), np.abs(value).max()
        # Not `>`, which is false of NaN.
        if not difference <= _TOLERANCE * scale:
            raise ResultError(
                f"output {name!r} differs by {difference:.3g} from what NumPy gives, "
                f"more than {_TOLERANCE:g} of its largest value, {scale:.3g}"
            )


# Workloads


def _build(name: str, lowerings: Mapping[str, _Lowering], request: Request) -> Instance:
    lowering = lowerings.get(request.lowering or next(iter(lowerings)))
    if lowering is None:
        raise UnknownNameError.of("lowering", request.lowering, lowerings)
    known = _known(name, tuple(sorted(request.arguments.items())), request.seed)
    # Not the graph that `_known` has looked at: it would remember orders that a user's does not.
    plain = generate_graph(name, seed=request.seed, **request.arguments)
    graph = with_checkpoints(plain)
    # Shapes and nominal rates stand in where durations are not declared, as for any user of `bind`.
    declared = None if request.costs == "known" else _NothingKnown()
    ready: list[Graph] = [] if lowering.is_scattered else [graph]
    # Run and places of the collection, which itself would hold the scattered constants after the run.
    submitted: list[tuple[str, Mapping[str, Place]]] = []

    def prepare(cluster: Cluster) -> None:
        ready[:] = [scatter(graph, cluster.client)]

    def submit(client: Client) -> Sequence[Future[Any]]:
        if not ready:
            raise UsageError(f"the constants of {name!r} are not on the cluster; call `prepare` first")
        bound = bind_graph(ready[0], {}, costs=declared, prefix=lowering.prefix)
        submitted[:] = [(bound.run, bound.places)]
        futures = {future.key: future for future in futures_of(client.persist(bound))}
        return [futures[key] for key in bound.__dask_keys__()]

    def collect(client: Client, futures: Sequence[Future[Any]]) -> Sequence[Any]:
        [(_, places)] = submitted
        return list(host_values(client.gather(list(futures)), places).values())

    def count_executed(client: Client) -> int:
        [(run, _)] = submitted
        return executed(client, run).executed_ops

    def restore(_cluster: Cluster) -> None:
        ready.clear()  # and with the graph the futures of its constants

    return Instance(
        submit=submit,
        # What has stages is computed again, from the end of each to that of the next.
        check=partial(_check, None if graph is plain else graph, known.outputs),
        n_ops=known.n_ops,
        t1_s=known.t1_s,
        t_inf_s=known.t_inf_s,
        collect=collect,
        count_executed=count_executed,
        prepare=prepare if lowering.is_scattered else None,
        restore=restore if lowering.is_scattered else None,
    )


#: Graphs whose ops all declare their durations, with small sizes; then all others.
_SLEEPING: Mapping[str, Mapping[str, Any]] = {
    "imbalanced": {"n_heavy": 2, "heavy_ms": 20.0, "n_fast": 20},
    "wide": {"width": 4, "depth": 3},
    "large-wide": {"width": 40},
    "xlarge-wide": {"width": 60, "skew": 0.05},
    "skewed": {"n": 20, "factor": 4.0},
}
_COMPUTING: Mapping[str, Mapping[str, Any]] = {
    "transformer": {"seq_len": 16, "d_model": 32, "n_heads": 4},
    "large-transformer": {"layers": 2, "seq_len": 16, "d_model": 32, "n_heads": 4},
    "xlarge-transformer": {"layers": 4, "seq_len": 16, "d_model": 32, "n_heads": 4},
    "resnet": {"channels": 32},
    "matmul-chain": {"n_ops": 10, "m": 64},
    "matmul-parallel": {"n_branches": 6, "ops_per_branch": 4, "m": 64},
    "uniform": {"n": 8, "dim": 32},
}


def _workload(name: str, small: Mapping[str, Any], lowerings: Mapping[str, _Lowering]) -> Workload:
    return Workload(
        name=name,
        summary=TOPOLOGIES[name].summary,
        build=partial(_build, name, lowerings),
        defaults=TOPOLOGIES[name].defaults,
        small=small,
        lowerings=tuple(lowerings),
        suite="dag",
    )


DAGS: tuple[Workload, ...] = (
    *(_workload(name, small, _BY_NAME) for name, small in _SLEEPING.items()),
    *(_workload(name, small, _BY_PLACE) for name, small in _COMPUTING.items()),
)
