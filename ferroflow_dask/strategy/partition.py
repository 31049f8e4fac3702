"""Partition of graphs: Graph → Graph, with the parts of operators as ordinary ops.

Parts get what they read by `Slice`, `Concat` and `Add` (or what else combines partial results). Slices are
taken where the producer is. Concatenations and sums are made where they are read. A value that another worker
reads is the result of an op of its own, which no op on the same worker reads. So only that value is moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.lifting import unique
from ferroflow_dask.graph.nodes import UNKNOWN, Op, Source, TensorSpec
from ferroflow_dask.strategy.spaces import (
    CONTRACTED,
    Part,
    Region,
    Space,
    overlap,
    parts_of,
    region_of,
    shape_of,
    whole_region,
)
from ferroflow_dask.strategy.strategy import Configuration, Strategy, check_strategy


class _Held(NamedTuple):
    """A value and the worker that has it."""

    name: str
    worker: str


class _Piece(NamedTuple):
    """A region of a value; None for all of one whose shape is not known. Partial results must be combined."""

    region: Region | None
    partials: tuple[_Held, ...]


def partition(graph: Graph, strategy: Strategy, spaces: Mapping[str, Space | str] | None = None) -> Graph:
    """Return a graph that computes the same values in the parts of a strategy.

    Parameters
    ----------
    graph : Graph
        With known shapes; see `with_shapes`.
    strategy : Strategy
    spaces : mapping of str to (Space or str), optional
        `spaces_of` the graph, if known.

    Returns
    -------
    Graph
        Each op names its worker. Constants are cut. It has the inputs and outputs of the graph.

    Raises
    ------
    StrategyError
        The strategy does not fit.
    """
    known = check_strategy(strategy, graph, spaces)
    return Partition(graph, strategy, known).graph()


class Partition:
    """One partition of a graph; see `partition`.

    Attributes
    ----------
    origins : dict of str to str
        For each op of the new graph the operator of the old one that it is a part of, or whose result it
        cuts, joins or sends; empty for inputs of the graph.
    """

    def __init__(self, graph: Graph, strategy: Strategy, spaces: Mapping[str, Space | str]) -> None:
        self._graph, self._strategy, self._spaces = graph, strategy, spaces
        self._old = {source.name: source for source in graph.sources}
        self._sources: dict[str, Source] = {}
        self._ops: list[Op] = []
        self._specs: dict[str, TensorSpec] = {}
        self._names = {*self._old, *graph.producers}
        self._op_names = {op.name for op in graph.ops}
        self._pieces: dict[str, list[_Piece]] = {}
        self._combine: dict[str, str] = {}
        #: Values that were made before, by what they are made of.
        self._made: dict[Any, str] = {}
        self._n_nodes = 0
        self.origins: dict[str, str] = {}

    def graph(self) -> Graph:
        """Write the ops of all parts."""
        for source in self._old.values():
            if source.is_input or source.is_scattered:
                self._keep(source)
                # A scattered constant is on all workers.
                home = "" if source.is_scattered else self._strategy.workers[0]
                self._pieces[source.name] = [_Piece(self._all_of(source.name), (_Held(source.name, home),))]
        for op in self._graph.live_ops:
            self._split(op, self._strategy.operators[op.name])
        for value in self._graph.outputs:
            self._under_its_name(value)
        return Graph(
            self._graph.name,
            tuple(self._sources.values()),
            tuple(self._ops),
            self._graph.outputs,
            self._specs,
            self._graph.opsets,
        )

    def _split(self, op: Op, found: Configuration) -> None:
        space = self._spaces[op.name]
        if isinstance(space, str) or found.n_parts == 1:
            self._whole(op, found.workers[0])
            return
        self._combine.update(dict.fromkeys(op.outputs, space.combine))
        pieces: dict[tuple[str, Region], list[_Held]] = {}
        for i, (part, worker) in enumerate(zip(parts_of(space, found.degrees), found.workers, strict=True)):
            regions = [
                region_of(dims, part, self._shape(value))
                for value, dims in zip(op.outputs, space.outputs, strict=False)
            ]
            is_partial = CONTRACTED in part
            suffix = f"+{part[CONTRACTED][0]}" if is_partial else ""
            names = [
                self._new_name(f"{value}{_brackets(region)}{suffix}")
                for value, region in zip(op.outputs, regions, strict=False)
            ]
            self._part(op, space, part, names, _Where(i, worker))
            for value, name, region in zip(op.outputs, names, regions, strict=False):
                self._specs[name] = TensorSpec(self._graph.spec(value).dtype, shape_of(region))
                pieces.setdefault((value, region), []).append(_Held(name, worker))
        for (value, region), held in pieces.items():
            self._pieces.setdefault(value, []).append(_Piece(region, tuple(held)))

    def _whole(self, op: Op, worker: str) -> None:
        inputs = tuple(self._read(value, None, worker) if value else "" for value in op.inputs)
        for value in op.captured:
            self._under_its_name(value)
        self.origins[op.name] = op.name
        self._add(replace(op, inputs=inputs, worker=worker))
        for value in filter(None, op.outputs):
            self._specs[value] = self._graph.spec(value)
            self._pieces[value] = [_Piece(self._all_of(value), (_Held(value, worker),))]

    def _part(self, op: Op, space: Space, part: Part, names: Sequence[str], where: _Where) -> None:
        change = space.change(part)
        inputs = []
        for i, value in enumerate(op.inputs):
            dims = space.inputs[i]
            if i in change.constants:
                inputs.append(self._constant(change.constants[i]))
            elif i in change.dropped or not value:
                inputs.append("")
            elif dims is None:
                inputs.append(self._read(value, None, where.worker))
            else:
                inputs.append(self._read(value, region_of(dims, part, self._shape(value)), where.worker))
        while inputs and not inputs[-1]:
            inputs.pop()
        attributes = {**op.attributes, **change.attributes}
        attributes = {name: value for name, value in attributes.items() if value is not None}
        name = unique(f"{op.name}[{where.number}]", self._op_names)
        self.origins[name] = op.name
        self._add(
            replace(
                op,
                name=name,
                inputs=tuple(inputs),
                outputs=tuple(names),
                attributes=attributes,
                worker=where.worker,
            )
        )

    def _read(self, value: str, region: Region | None, worker: str) -> str:
        """Return the name of a region of a value on a worker; None for all of it."""
        source = self._old.get(value)
        if source is not None and value not in self._pieces:
            return self._cut(source, region)
        pieces = self._pieces[value]
        if len(pieces) == 1 and region in (None, pieces[0].region):
            return self._combined(value, pieces[0], pieces[0].region, worker)
        wanted = self._all_of(value) if region is None else region
        assert wanted is not None
        key = ("read", value, wanted, worker)
        if key not in self._made:
            found = []
            for piece in pieces:
                assert piece.region is not None
                shared = overlap(piece.region, wanted)
                if shared is not None:
                    found.append((shared, self._combined(value, piece, shared, worker)))
            self._made[key] = self._joined(value, found, 0, worker)[1]
        return self._made[key]

    def _combined(self, value: str, piece: _Piece, region: Region | None, worker: str) -> str:
        """Return the name of a region of a piece on a worker."""
        names = [self._fetched(value, held, piece.region, region, worker) for held in piece.partials]
        combined = names[0]
        for name in names[1:]:
            key = ("combined", combined, name, worker)
            if key not in self._made:
                op_type, spec = self._combine[value], self._specs[name]
                self._made[key] = self._new_op(op_type, (combined, name), worker, value, spec)
            combined = self._made[key]
        return combined

    def _fetched(
        self, value: str, held: _Held, has: Region | None, region: Region | None, worker: str
    ) -> str:
        """Return the name of a region of a held value on a worker."""
        home = held.worker or worker
        if region == has and home == worker:
            return held.name
        key = ("fetched", held.name, region, home, home != worker)
        if key not in self._made:
            spec = self._graph.spec(value)
            if region == has:
                self._made[key] = self._new_op("Identity", (held.name,), home, value, spec, region=region)
            else:
                assert region is not None
                assert has is not None
                self._made[key] = self._slice(value, held.name, has, region, home)
            self._ops[-1] = replace(self._ops[-1], is_send=home != worker)
        return self._made[key]

    def _slice(self, value: str, name: str, has: Region, region: Region, worker: str) -> str:
        cut = [
            (axis, first - start, stop - start)
            for axis, ((start, end), (first, stop)) in enumerate(zip(has, region, strict=True))
            if (first, stop) != (start, end)
        ]
        axes, starts, ends = (list(numbers) for numbers in zip(*cut, strict=True))
        spec = self._graph.spec(value)
        if self._graph.opsets.get("", 1) < 10:
            attributes = {"axes": axes, "starts": starts, "ends": ends}
            return self._new_op("Slice", (name,), worker, value, spec, region=region, attributes=attributes)
        numbers = (self._constant(np.array(n, np.int64)) for n in (starts, ends, axes))
        return self._new_op("Slice", (name, *numbers), worker, value, spec, region=region)

    def _joined(
        self, value: str, found: Sequence[tuple[Region, str]], axis: int, worker: str
    ) -> tuple[Region, str]:
        """Return regions as one, which they fill as a grid does."""
        if len(found) == 1:
            return found[0]
        groups: dict[tuple[int, int], list[tuple[Region, str]]] = {}
        for region, name in found:
            groups.setdefault(region[axis], []).append((region, name))
        joined = [self._joined(value, groups[interval], axis + 1, worker) for interval in sorted(groups)]
        if len(joined) == 1:
            return joined[0]
        first, last = joined[0][0], joined[-1][0]
        region = (*first[:axis], (first[axis][0], last[axis][1]), *first[axis + 1 :])
        names = tuple(name for _, name in joined)
        key = ("joined", names, axis, worker)
        if key not in self._made:
            spec = self._graph.spec(value)
            self._made[key] = self._new_op(
                "Concat", names, worker, value, spec, region=region, attributes={"axis": axis}
            )
        return region, self._made[key]

    def _cut(self, source: Source, region: Region | None) -> str:
        """Return the name of a region of a constant; each is cut once."""
        everything = self._all_of(source.name)
        if region is None or region == everything:
            self._keep(source)
            return source.name
        key = ("cut", source.name, region)
        if key not in self._made:
            name = self._new_name(f"{source.name}{_brackets(region)}")
            value = source.value[tuple(slice(*interval) for interval in region)]
            self._made[key] = self._add_source(name, value)
        return self._made[key]

    def _under_its_name(self, value: str) -> None:
        """See to it that a value has its own name: an output of the graph, or what a sub-graph reads."""
        source = self._old.get(value)
        if source is not None:
            self._keep(source)
        elif value not in self._specs:
            worker = self._pieces[value][0].partials[0].worker
            n_before = len(self._ops)
            name = self._read(value, None, worker)
            if len(self._ops) > n_before and self._ops[-1].outputs == (name,):
                self._ops[-1] = replace(self._ops[-1], outputs=(value,))
                self._specs[value] = self._specs.pop(name)
                self._made.update({key: value for key, made in self._made.items() if made == name})
            else:
                spec = self._graph.spec(value)
                self._new_op("Identity", (name,), worker, value, spec, output=value)

    def _keep(self, source: Source) -> None:
        if source.name not in self._sources:
            self._sources[source.name] = replace(source, id=self._next_id(), declared=None)

    def _constant(self, value: Any) -> str:
        key = ("constant", value.dtype.str, value.shape, value.tobytes())
        if key not in self._made:
            self._made[key] = self._add_source(self._new_name("constant"), value)
        return self._made[key]

    def _add_source(self, name: str, value: Any) -> str:
        self._sources[name] = Source(self._next_id(), name, TensorSpec.of(value.dtype, value.shape), value)
        return name

    def _new_op(
        self,
        op_type: str,
        inputs: tuple[str, ...],
        worker: str,
        value: str,
        spec: TensorSpec = UNKNOWN,
        *,
        region: Region | None = None,
        attributes: Mapping[str, Any] | None = None,
        output: str | None = None,
    ) -> str:
        """Add an op that makes a region of a value, and return the name of its result."""
        where = "" if region is None else _brackets(region)
        name = output or self._new_name(f"{value}{where}@{worker}")
        op_name = unique(f"{op_type.lower()} {value}{where}", self._op_names)
        producer = self._graph.producers.get(value)
        self.origins[op_name] = "" if producer is None else producer.name
        self._specs[name] = spec if region is None else TensorSpec(spec.dtype, shape_of(region))
        self._add(Op(0, op_name, op_type, inputs, (name,), "", attributes or {}, worker=worker))
        return name

    def _add(self, op: Op) -> None:
        self._ops.append(replace(op, id=self._next_id()))

    def _next_id(self) -> int:
        self._n_nodes += 1
        return self._n_nodes - 1

    def _new_name(self, name: str) -> str:
        return unique(name, self._names)

    def _shape(self, value: str) -> tuple[int, ...]:
        return tuple(int(dim or 0) for dim in self._graph.spec(value).shape or ())

    def _all_of(self, value: str) -> Region | None:
        spec = self._graph.spec(value)
        return None if spec.size is None else whole_region(self._shape(value))


class _Where(NamedTuple):
    """Number and worker of a part."""

    number: int
    worker: str


def _brackets(region: Region) -> str:
    return f"[{','.join(f'{first}:{stop}' for first, stop in region)}]"
