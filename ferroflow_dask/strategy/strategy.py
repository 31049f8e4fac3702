"""Strategies: how each operator of a graph is split, and which worker computes each part."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ferroflow_dask.exceptions import StrategyError, UnknownNameError
from ferroflow_dask.graph.inference import inferred
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import Op, TensorSpec
from ferroflow_dask.strategy.spaces import Space
from ferroflow_dask.strategy.table import space_of


@dataclass(frozen=True, slots=True)
class Configuration:
    """How one operator is split.

    Parameters
    ----------
    workers : tuple of str
        Worker of each part. The part of the last axis varies fastest.
    degrees : mapping of str to int, optional
        Number of parts along axes; axes that are left out are not split.
    """

    workers: tuple[str, ...]
    degrees: Mapping[str, int] = field(default_factory=dict)

    @property
    def n_parts(self) -> int:
        """Number of parts."""
        return math.prod(self.degrees.values())


@dataclass(frozen=True, slots=True)
class Strategy:
    """A configuration for each operator of a graph.

    Parameters
    ----------
    workers : tuple of str
        Names or addresses of workers, or numbers.
    operators : mapping of str to Configuration
        By the names of operators.
    model : str, optional
        Name of the graph.
    signature : str, optional
        `signature_of` the graph; only that graph is accepted then.
    """

    workers: tuple[str, ...]
    operators: Mapping[str, Configuration]
    model: str = ""
    signature: str = ""

    def on(self, cluster: Mapping[str, str]) -> Strategy:
        """Return the strategy with the addresses of workers in place of their names.

        Parameters
        ----------
        cluster : mapping of str to str
            Address of each worker by its name. A strategy for workers 0, 1, … takes any workers, in order.

        Raises
        ------
        StrategyError
            The cluster lacks a worker.
        """
        known = {**cluster, **{address: address for address in cluster.values()}}
        if not set(self.workers) <= known.keys() and set(self.workers) == set(numbered(len(self.workers))):
            known = dict(zip(numbered(len(cluster)), cluster.values(), strict=True))
        for worker in self.workers:
            if worker not in known:
                raise StrategyError(
                    f"worker {worker!r} of the strategy must be one of the cluster's {len(cluster)} workers: "
                    f"{', '.join(sorted(cluster)) or 'none'}"
                )
        operators = {
            name: replace(found, workers=tuple(known[worker] for worker in found.workers))
            for name, found in self.operators.items()
        }
        return replace(self, workers=tuple(known[worker] for worker in self.workers), operators=operators)


def numbered(n: int) -> tuple[str, ...]:
    """Return the names of workers that have only numbers."""
    return tuple(map(str, range(n)))


def signature_of(graph: Graph) -> str:
    """Return a hash of the operators that a run of a graph executes: names, types, operands, results."""
    digest = hashlib.sha256()
    for op in graph.live_ops:
        digest.update(repr((op.name, op.kind, op.inputs, op.outputs)).encode())
    return digest.hexdigest()[:16]


def whole_on(graph: Graph, workers: Sequence[str] = ("0",)) -> Strategy:
    """Return the strategy that computes everything on the first worker."""
    operators = {op.name: Configuration((workers[0],)) for op in graph.live_ops}
    return Strategy(tuple(workers), operators, graph.name, signature_of(graph))


def with_shapes(graph: Graph, inputs: Mapping[str, TensorSpec]) -> Graph:
    """Return a graph with the shapes that follow from those of its inputs; itself if all are known."""
    specs = {name: spec for name, spec in inputs.items() if name in graph.inputs and spec.shape is not None}
    values = [value for op in graph.live_ops for value in op.outputs if value]
    if all(graph.spec(value).size is not None for value in (*graph.inputs, *values)):
        return graph
    sources = tuple(
        replace(source, spec=specs[source.name]) if source.name in specs else source
        for source in graph.sources
    )
    bare = replace(graph, sources=sources, specs={})
    # ONNX infers nothing from a constant that is an output.
    outputs = tuple(name for name in graph.outputs if name in graph.producers)
    found = inferred(replace(bare, outputs=outputs), specs)
    return replace(
        bare,
        specs={
            **graph.specs,
            **{value: spec for value, spec in found.items() if spec.size is not None and value in values},
        },
    )


def spaces_of(graph: Graph) -> dict[str, Space | str]:
    """Return by operator how it can be split, or why it stays whole."""
    return {op.name: space_of(op, graph) for op in graph.live_ops}


def check_strategy(
    strategy: Strategy, graph: Graph, spaces: Mapping[str, Space | str] | None = None
) -> dict[str, Space | str]:
    """Return how the operators of a graph can be split, if a strategy fits that.

    Parameters
    ----------
    strategy : Strategy
    graph : Graph
        With known shapes; see `with_shapes`.
    spaces : mapping of str to (Space or str), optional
        `spaces_of` the graph, if known.

    Raises
    ------
    StrategyError
        It is of another model, or an operator, a degree or a worker does not fit.
    """
    if strategy.signature and strategy.signature != signature_of(graph):
        raise StrategyError(
            f"the strategy is of another model or version of it: {strategy.model!r}, not {graph.name!r}"
        )
    if not strategy.workers:
        raise StrategyError("workers of a strategy must be a list of at least one, got none")
    names = [op.name for op in graph.live_ops]
    for name in strategy.operators.keys() - set(names):
        error = UnknownNameError.of("operator", name, _few(name, names))
        raise StrategyError(f"{error} (model {graph.name!r})")
    missing = [name for name in names if name not in strategy.operators]
    if missing:
        raise StrategyError(f"the strategy must have all {len(names)} operators, it lacks {missing[0]!r}")
    known = spaces_of(graph) if spaces is None else dict(spaces)
    for op in graph.live_ops:
        _check_operator(op, strategy.operators[op.name], known[op.name], strategy.workers)
    return known


def _few(name: str, names: Sequence[str]) -> Iterable[str]:
    """Return the names to choose from in an error."""
    from difflib import get_close_matches

    return get_close_matches(name, names, n=5, cutoff=0.3) or names[:5]


def _check_operator(op: Op, found: Configuration, space: Space | str, workers: Sequence[str]) -> None:
    label = f"operator {op.name!r} ({op.kind})"
    for axis, degree in found.degrees.items():
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
            raise StrategyError(f"{label}: the degree of {axis!r} must be a number from 1 on, got {degree!r}")
    split = {axis: degree for axis, degree in found.degrees.items() if degree > 1}
    if split and isinstance(space, str):
        raise StrategyError(f"{label} cannot be split: {space}; leave out {min(split)!r}")
    sizes = {} if isinstance(space, str) else space.sizes
    for axis, degree in split.items():
        if axis not in sizes:
            known = ", ".join(f"{name} (up to {size})" for name, size in sizes.items()) or "no axis"
            raise StrategyError(f"{label} cannot be split along {axis!r}; it has {known}")
        if degree > sizes[axis]:
            raise StrategyError(f"{label}: the degree of {axis!r} must be 1 to {sizes[axis]}, got {degree}")
    if len(found.workers) != found.n_parts:
        raise StrategyError(
            f"{label} must have a worker for each of {found.n_parts} parts, got {len(found.workers)}"
        )
    for worker in found.workers:
        if worker not in workers:
            raise StrategyError(
                f"{label}: unknown worker {worker!r}; the strategy has {', '.join(map(str, workers))}"
            )
