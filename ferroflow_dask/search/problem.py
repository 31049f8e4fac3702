"""Problems: what a search knows of a graph: durations of parts, and what they read of each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ferroflow_dask.cost import CostModel
from ferroflow_dask.exceptions import StrategyError
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import SMALL, Op, Source, TensorSpec
from ferroflow_dask.simulation import Machine
from ferroflow_dask.strategy import Configuration, Strategy, signature_of, spaces_of
from ferroflow_dask.strategy.spaces import Part, Region, overlap, parts_of, region_of, shape_of, whole_region
from ferroflow_dask.strategy.strategy import numbered

#: Bytes that one core concatenates or adds in a second: it reads and writes them [B/s].
COPY_BANDWIDTH = 2e9

#: Part of the memory of a worker that weights may occupy. Its session has a second copy of them, and above
#: twice this part, workers spill to disk.
WEIGHTS_SHARE = 0.3

#: Number of parts along each axis that is split, sorted.
Degrees = tuple[tuple[str, int], ...]


class Choice(NamedTuple):
    """Degrees of an operator, and the number of the worker of each part.

    Parameters
    ----------
    degrees : tuple of (str, int)
    workers : tuple of int
    recompute : bool, optional
        Whether the results are not kept: the forward pass runs a second time for the backward pass.
    """

    degrees: Degrees
    workers: tuple[int, ...]
    recompute: bool = False


class Table(NamedTuple):
    """What the parts of one node read of the parts of another one.

    Parameters
    ----------
    reads : list of list of (int, int, int)
        For each part that is read: the part that reads, the number of the region, and its size [B].
    readers : list of list of int
        For each part that is read: the parts that read it, ascending.
    copy_s : list of float
        For each part that reads: time to put together what it reads [s].
    """

    reads: list[list[tuple[int, int, int]]]
    readers: list[list[int]]
    copy_s: list[float]


class Problem:
    """A graph on a machine.

    Nodes are the inputs of the graph, its operators, and its outputs. Inputs are on the first worker. Each
    output is put together on the worker of the first part of its operator.

    Parameters
    ----------
    graph : Graph
        With known shapes; see `with_shapes`.
    machine : Machine
    cost : CostModel
        Asked for operators with the shapes of parts; an unknown cost counts as 0.
    copy_bandwidth : float, optional
        At which a worker puts together what a part reads [B/s].
    """

    #: What must fit the memory of workers.
    held = "weights"

    def __init__(
        self, graph: Graph, machine: Machine, cost: CostModel, copy_bandwidth: float = COPY_BANDWIDTH
    ) -> None:
        self.graph, self.machine, self._cost = graph, machine, cost
        self._copy_bandwidth = copy_bandwidth
        self.ops = graph.live_ops
        self.spaces = spaces_of(graph)
        inputs = [name for name in graph.inputs if any(name in op.operands for op in self.ops)]
        outputs = [name for name in graph.outputs if name in graph.producers]
        self.first, self.n_nodes = len(inputs), len(inputs) + len(self.ops) + len(outputs)
        #: Numbers of the nodes that a search may change.
        self.changeable = range(self.first, self.first + len(self.ops))
        #: Those of them whose choices do not follow from that of another one.
        self.leading: Sequence[int] = self.changeable
        #: Whether `Choice.recompute` may be set.
        self.may_recompute = False
        home = {name: i for i, name in enumerate(inputs)}
        for i, op in zip(self.changeable, self.ops, strict=True):
            home.update(dict.fromkeys(op.outputs, i))
        #: By node and producer, the values that it reads.
        self.values: list[dict[int, list[str]]] = [{} for _ in range(self.n_nodes)]
        reads = [(), *[()] * (self.first - 1)][: self.first]
        operands = [*reads, *(op.operands for op in self.ops), *((name,) for name in outputs)]
        for i, names in enumerate(operands):
            for name in dict.fromkeys(names):
                if name in home:
                    self.values[i].setdefault(home[name], []).append(name)
        self.consumers: list[list[int]] = [[] for _ in range(self.n_nodes)]
        for i, found in enumerate(self.values):
            for producer in found:
                self.consumers[producer].append(i)
        #: Degrees that a search tries, by node; see `candidates`.
        self.degrees: dict[int, list[Degrees]] = {}
        self._parts: dict[tuple[int, Degrees], list[Part]] = {}
        self._base_s: dict[tuple[int, Degrees], list[float]] = {}
        self._regions: dict[object, int] = {}
        self._weights: dict[tuple[int, Degrees], list[dict[tuple[str, Region | None], int]]] = {}
        #: What the weights of each worker may occupy [B]; empty if they fit anyway.
        self.limits = [int(WEIGHTS_SHARE * nbytes) for nbytes in machine.memory_nbytes]
        in_all = sum(graph.spec(name).nbytes or 0 for name in graph.constants)
        if all(in_all <= limit or not limit for limit in self.limits):
            self.limits = []
        self._tables: dict[tuple[int, Degrees, int, Degrees], Table] = {}

    def op(self, node: int) -> Op | None:
        """Return the operator of a node."""
        return self.ops[node - self.first] if node in self.changeable else None

    def with_cost(self, cost: CostModel) -> Problem:
        """Return the problem with another cost model; durations that are known remain."""
        other = copy(self)
        other._cost = cost
        return other

    def with_durations(self, known: Mapping[tuple[int, Degrees], list[float]], machine: Machine) -> Problem:
        """Return the problem with other durations of parts [s], on another machine of as many workers."""
        other = copy(self)
        other._base_s, other.machine = {**self._base_s, **known}, machine
        return other

    def following(self, node: int, choice: Choice) -> dict[int, Choice]:
        """Return the choices of other nodes that follow from that of a changeable node."""
        outputs = (i for i in self.consumers[node] if i not in self.changeable)
        return dict.fromkeys(outputs, Choice((), choice.workers[:1]))

    def parts(self, node: int, degrees: Degrees) -> list[Part]:
        """Return the parts of a node."""
        key = (node, degrees)
        if key not in self._parts:
            op = self.op(node)
            space = self.spaces[op.name] if op is not None else ""
            whole: list[Part] = [{}]
            self._parts[key] = whole if isinstance(space, str) else list(parts_of(space, dict(degrees)))
        return self._parts[key]

    def base_s(self, node: int, degrees: Degrees) -> list[float]:
        """Return the duration of each part of a node on a worker of speed 1 [s]."""
        key = (node, degrees)
        if key not in self._base_s:
            op = self.op(node)
            parts = self.parts(node, degrees)
            self._base_s[key] = [0.0 if op is None else self._seconds(op, part) for part in parts]
        return self._base_s[key]

    def durations_s(self, node: int, choice: Choice) -> list[float]:
        """Return the duration of each part of a node with a choice on a worker of speed 1 [s]."""
        return self.base_s(node, choice.degrees)

    def _seconds(self, op: Op, part: Part) -> float:
        space = self.spaces[op.name]
        specs: dict[str, TensorSpec] = {}
        attributes = dict(op.attributes)
        for i, value in enumerate(op.operands):
            spec = self.graph.spec(value)
            dims = None if isinstance(space, str) or i >= len(space.inputs) else space.inputs[i]
            specs[value] = spec if dims is None else _cut(spec, region_of(dims, part, _shape(spec)))
        for i, value in enumerate(op.outputs):
            spec = self.graph.spec(value)
            is_split = not isinstance(space, str) and i < len(space.outputs)
            specs[value] = spec if not is_split else self._of_result(op, i, part)
        if not isinstance(space, str):
            attributes |= {k: v for k, v in space.change(part).attributes.items() if v is not None}
        known = self._known(op, part, specs)
        names = dict.fromkeys(op.operands)
        sources = tuple(Source(-1 - i, name, specs[name], known.get(name)) for i, name in enumerate(names))
        alone = replace(op, attributes=attributes)
        outputs = tuple(filter(None, op.outputs))
        piece = Graph(op.name, sources, (alone,), outputs, specs, self.graph.opsets)
        return self._cost.seconds(alone, piece) or 0.0

    def _known(self, op: Op, part: Part, specs: dict[str, TensorSpec]) -> dict[str, Any]:
        """Return the shapes, axes and other small constants that a part reads."""
        space = self.spaces[op.name]
        changed = {} if isinstance(space, str) else space.change(part).constants
        known = {}
        for i, name in enumerate(op.inputs):
            value = changed.get(i, self.graph.constants.get(name))
            if isinstance(value, np.ndarray) and value.nbytes <= SMALL and value.shape == specs[name].shape:
                known[name] = value
        return known

    def _of_result(self, op: Op, i: int, part: Part) -> TensorSpec:
        space, spec = self.spaces[op.name], self.graph.spec(op.outputs[i])
        assert not isinstance(space, str)
        return _cut(spec, region_of(space.outputs[i], part, _shape(spec)))

    def table(self, producer: int, made: Degrees, reader: int, read: Degrees) -> Table:
        """Return what the parts of one node read of another one, with these degrees."""
        key = (producer, made, reader, read)
        if key not in self._tables:
            self._tables[key] = self._new_table(producer, made, reader, read)
        return self._tables[key]

    def _new_table(self, producer: int, made: Degrees, reader: int, read: Degrees) -> Table:
        givers, takers = self.parts(producer, made), self.parts(reader, read)
        reads: list[list[tuple[int, int, int]]] = [[] for _ in givers]
        copy_s = [0.0] * len(takers)
        for value in self.values[reader][producer]:
            spec = self.graph.spec(value)
            itemsize = 1 if spec.dtype is None else spec.dtype.itemsize
            yielded = [self._yields(producer, value, part) for part in givers]
            for k, taker in enumerate(takers):
                pieces = 0
                nbytes = 0
                for wanted in self._reads(reader, value, taker):
                    for g, region in enumerate(yielded):
                        shared = _shared(region, wanted)
                        if shared is None:
                            continue
                        size = _size(shared) * itemsize if shared != () or spec.size == 1 else 0
                        size = (spec.nbytes or 0) if region is None else size
                        number = self._regions.setdefault((value, shared), len(self._regions))
                        reads[g].append((k, number, size))
                        pieces, nbytes = pieces + 1, nbytes + size
                copy_s[k] += nbytes / self._copy_bandwidth if pieces > 1 else 0.0
        readers = [sorted({part for part, _, _ in found}) for found in reads]
        return Table(reads, readers, copy_s)

    def _yields(self, node: int, value: str, part: Part) -> Region | None:
        op, spec = self.op(node), self.graph.spec(value)
        if spec.size is None:
            return None
        space = "" if op is None else self.spaces[op.name]
        if op is None or isinstance(space, str) or not part:
            return whole_region(_shape(spec))
        return region_of(space.outputs[op.outputs.index(value)], part, _shape(spec))

    def _reads(self, node: int, value: str, part: Part) -> list[Region | None]:
        """Return the different regions of a value that a part reads."""
        op, spec = self.op(node), self.graph.spec(value)
        if spec.size is None:
            return [None]
        space = "" if op is None else self.spaces[op.name]
        everything = whole_region(_shape(spec))
        if op is None or isinstance(space, str) or not part:
            return [everything]
        found: dict[Region | None, None] = {}
        for i, name in enumerate(op.inputs):
            if name == value:
                dims = space.inputs[i]
                found[everything if dims is None else region_of(dims, part, _shape(spec))] = None
        return list(found)

    def weight_regions(self, node: int, degrees: Degrees) -> list[dict[tuple[str, Region | None], int]]:
        """Return the size of each region of a constant that each part reads [B]."""
        key = (node, degrees)
        if key not in self._weights:
            op, constants = self.op(node), self.graph.constants
            names = [] if op is None else [name for name in op.operands if name in constants]
            found = []
            for part in self.parts(node, degrees):
                regions = [(name, region) for name in names for region in self._reads(node, name, part)]
                found.append({one: self._nbytes(*one) for one in regions})
            self._weights[key] = found
        return self._weights[key]

    def _nbytes(self, name: str, region: Region | None) -> int:
        spec = self.graph.spec(name)
        return (spec if region is None else _cut(spec, region)).nbytes or 0

    def excess_nbytes(self, choices: Sequence[Choice]) -> int:
        """Return the size of weights that do not fit the memory of their workers [B]."""
        if not self.limits:
            return 0
        held: list[dict[tuple[str, Region | None], int]] = [{} for _ in self.limits]
        for node in self.changeable:
            degrees, workers = choices[node][:2]
            for worker, weights in zip(workers, self.weight_regions(node, degrees), strict=True):
                held[worker].update(weights)
        sizes = [sum(of.values()) for of in held]
        return sum(max(0, size - limit) for size, limit in zip(sizes, self.limits, strict=True) if limit)

    def strategy(self, choices: Sequence[Choice]) -> Strategy:
        """Return choices of all nodes as a strategy."""
        workers = numbered(len(self.machine.threads))
        operators = {}
        for i, op in zip(self.changeable, self.ops, strict=True):
            found = choices[i]
            names = tuple(workers[worker] for worker in found.workers)
            operators[op.name] = Configuration(names, dict(found.degrees))
        return Strategy(workers, operators, self.graph.name, signature_of(self.graph))

    def choices(self, strategy: Strategy) -> list[Choice]:
        """Return the choice of each node that a strategy makes."""
        number = {worker: i for i, worker in enumerate(strategy.workers)}
        if len(number) > len(self.machine.threads):
            raise StrategyError(
                f"workers of the strategy must be at most {len(self.machine.threads)}, got {len(number)}"
            )
        found = [Choice((), (0,))] * self.n_nodes
        for i, op in zip(self.changeable, self.ops, strict=True):
            one = strategy.operators[op.name]
            degrees = tuple(sorted((axis, n) for axis, n in one.degrees.items() if n > 1))
            found[i] = Choice(degrees, tuple(number[worker] for worker in one.workers))
        return found


def _shape(spec: TensorSpec) -> tuple[int, ...]:
    return tuple(int(dim or 0) for dim in spec.shape or ())


def _cut(spec: TensorSpec, region: Region) -> TensorSpec:
    return TensorSpec(spec.dtype, shape_of(region))


def _size(region: object) -> int:
    n = 1
    if isinstance(region, tuple):
        for first, stop in region:
            n *= stop - first
    return n


def _shared(left: Region | None, right: Region | None) -> Region | None:
    if left is None or right is None:
        return ()
    return overlap(left, right)
