"""Views: an operator with shapes, as the rules of this package read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.strategy.spaces import CONTRACTED, Along, Axis, Change, Dims, Part, Space, no_change

Shape = tuple[int, ...]


class WholeError(Exception):
    """An operator cannot be split; the message says why."""


@dataclass(frozen=True, slots=True)
class View:
    """An operator with the shapes of its inputs and outputs.

    Parameters
    ----------
    op : Op
    opset : int
    inputs : tuple of (Shape or None)
        None for an input that is left out.
    outputs : tuple of Shape
        Without those that are left out at the end.
    weights : tuple of bool
        Whether each input is a constant.
    constants : tuple of (array or None)
        Small constants among the inputs.
    """

    op: Op
    opset: int
    inputs: tuple[Shape | None, ...]
    outputs: tuple[Shape, ...]
    weights: tuple[bool, ...]
    constants: tuple[Any, ...]

    def shape(self, i: int) -> Shape:
        """Return the shape of an input."""
        shape = self.inputs[i] if i < len(self.inputs) else None
        if shape is None:
            raise WholeError(f"input {i} is missing")
        return shape

    def has(self, i: int) -> bool:
        """Return whether an input is given."""
        return i < len(self.inputs) and self.inputs[i] is not None

    def get(self, name: str, default: Any) -> Any:
        """Return an attribute."""
        return self.op.attributes.get(name, default)

    def integers(self, i: int, attribute: str) -> list[int] | None:
        """Return numbers that are an input in newer operator sets and an attribute in older ones."""
        if attribute in self.op.attributes:
            return [int(n) for n in self.op.attributes[attribute]]
        if not self.has(i):
            return None
        if self.constants[i] is None:
            raise WholeError(f"input {i} ({attribute}) is not a constant")
        return [int(n) for n in self.constants[i].reshape(-1)]

    def axis(self, default: int, rank: int) -> int:
        """Return the attribute `axis`, from 0 on."""
        axis = int(self.get("axis", default))
        return axis + rank if axis < 0 else axis

    def one_output(self) -> Shape:
        """Return the shape of the only output."""
        if len(self.outputs) > 1:
            raise WholeError("it has several outputs")
        return self.outputs[0]


def view_of(op: Op, graph: Graph) -> View:
    """Return an operator as rules read it; raises `WholeError` if a shape is unknown or empty."""
    if op.captured:
        raise WholeError("it has a sub-graph")

    def shape(value: str) -> Shape:
        spec = graph.spec(value)
        sizes = tuple(dim for dim in spec.shape or () if isinstance(dim, int))
        if spec.shape is None or len(sizes) < len(spec.shape):
            raise WholeError(f"the shape of {value!r} is not known")
        if 0 in sizes:
            raise WholeError(f"{value!r} is empty")
        return sizes

    outputs = list(op.outputs)
    while outputs and not outputs[-1]:
        outputs.pop()
    if "" in outputs:
        raise WholeError("an output is left out")
    constants = {source.name: source for source in graph.sources if source.name in op.inputs}
    small = tuple(constants[v].array if v in constants and constants[v].is_small else None for v in op.inputs)
    return View(
        op,
        graph.opsets.get(op.domain, 1),
        tuple(shape(value) if value else None for value in op.inputs),
        tuple(map(shape, outputs)),
        tuple(value in constants and not constants[value].is_input for value in op.inputs),
        small,
    )


#: Key of an axis in a rule: the dimension of the first output, or `CONTRACTED`.
Key = int | str
#: How a dimension is read, in a rule: key, scale, extent, offset.
Entry = tuple[Key, int, int, int] | Key | None


def space(
    view: View,
    sizes: Mapping[Key, int],
    inputs: Sequence[Sequence[Entry] | None],
    outputs: Sequence[Sequence[Entry]],
    *,
    change: Callable[[Part], Change] = no_change,
    combine: str = "Add",
) -> Space:
    """Return the space that a rule describes by keys: axes get names, and those of size 1 go."""
    given = (*inputs, *(None for _ in range(len(view.inputs) - len(inputs))))
    cut = {
        key
        for dims, is_weight in zip(given, view.weights, strict=True)
        if is_weight and dims is not None
        for key in map(_key, dims)
    }
    names = {key: name_of(key, key in cut) for key, size in sizes.items() if size > 1}

    def dims(entries: Sequence[Entry]) -> Dims:
        return tuple(_along(entry, names) for entry in entries)

    return Space(
        tuple(Axis(name, sizes[key]) for key, name in names.items()),
        tuple(None if entries is None else dims(entries) for entries in given),
        tuple(map(dims, outputs)),
        change,
        combine,
    )


def name_of(key: Key, is_parameter: bool = False) -> str:
    """Return the name of the axis of a key."""
    if key == CONTRACTED:
        return CONTRACTED
    if key == 0:
        return "sample"
    return f"{'parameter' if is_parameter else 'attribute'}{key}"


def _key(entry: Entry) -> Key | None:
    return entry[0] if isinstance(entry, tuple) else entry


def _along(entry: Entry, names: Mapping[Key, str]) -> Along | None:
    key = _key(entry)
    if key is None or key not in names:
        return None
    return Along(names[key], *entry[1:]) if isinstance(entry, tuple) else Along(names[key])


def interval_of(part: Part, key: Key) -> tuple[int, int] | None:
    """Return the interval of the axis of a key, whatever its kind; None if it is not split."""
    for name in (name_of(key), name_of(key, True)):
        if name in part:
            return part[name]
    return None


def aligned(shape: Shape, result: Shape) -> list[Entry]:
    """Return how an input is read that is broadcast to a result."""
    first = len(result) - len(shape)
    return [None if size == 1 else first + d for d, size in enumerate(shape)]


def every(shape: Shape, *but: int) -> list[Entry]:
    """Return that each dimension is read along its own axis, except for some."""
    return [None if d in but else d for d in range(len(shape))]


def sizes_of(shape: Shape, *but: int) -> dict[Key, int]:
    """Return an axis for each dimension of a result, except for some."""
    return {d: size for d, size in enumerate(shape) if d not in but}
