"""Spaces: how an operator can be split, and what each part of it reads and yields.

An operator's space has axes. A part of the operator is an interval of each axis. Each dimension of an operand
or a result is read along one axis, or as a whole. Z. Jia, M. Zaharia and A. Aiken ("Beyond Data and Model
Parallelism for Deep Neural Networks", MLSys 2019) name the kinds of axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

#: An interval of positions: the first one, and the one after the last.
Interval = tuple[int, int]
#: An interval of each dimension of a value.
Region = tuple[Interval, ...]
#: An interval of each axis of a space that is split.
Part = Mapping[str, Interval]

#: Axis that is summed up (or combined otherwise): it is in no result.
CONTRACTED = "contracted"


class Axis(NamedTuple):
    """An axis along which an operator can be split.

    Parameters
    ----------
    name : str
        `sample` for dimension 0 of the first result, `attribute` or `parameter` with the number of another
        dimension, or `contracted`. Splits along a parameter axis split weights, too.
    size : int
        Number of positions; no part may be empty.
    """

    name: str
    size: int


class Along(NamedTuple):
    """A dimension that is read along an axis.

    A part that has the interval (first, stop) reads from `first * scale + offset` on, up to the end of
    `extent` positions from `(stop - 1) * scale + offset` on. What lies outside of the dimension is padding.
    """

    axis: str
    scale: int = 1
    extent: int = 1
    offset: int = 0

    def interval(self, part: Part, size: int) -> Interval:
        """Return what a part reads of a dimension of a size."""
        if self.axis not in part:
            return 0, size
        first, stop = self.unclipped(part[self.axis])
        return max(first, 0), min(stop, size)

    def unclipped(self, interval: Interval) -> Interval:
        """Return what an interval of the axis reads, padding included."""
        first, stop = interval
        return first * self.scale + self.offset, (stop - 1) * self.scale + self.offset + self.extent


#: How each dimension of a value is read; None for all of a dimension.
Dims = tuple[Along | None, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """What differs in a part of an operator.

    Parameters
    ----------
    attributes : mapping of str to object
        Attributes with new values; None removes one.
    constants : mapping of int to array
        Inputs by number that are other constants.
    dropped : tuple of int
        Inputs that are left out.
    """

    attributes: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[int, Any] = field(default_factory=dict)
    dropped: tuple[int, ...] = ()


def no_change(_: Part) -> Change:
    """Return that parts are as the whole operator."""
    return Change()


@dataclass(frozen=True, slots=True)
class Space:
    """How an operator can be split.

    Parameters
    ----------
    axes : tuple of Axis
    inputs : tuple of (Dims or None)
        For each input of the operator; None for one that is read as a whole.
    outputs : tuple of Dims
    change : callable
        Returns what differs in a part.
    combine : str
        Operator that makes a result of those of the parts of the contracted axis.
    """

    axes: tuple[Axis, ...]
    inputs: tuple[Dims | None, ...]
    outputs: tuple[Dims, ...]
    change: Callable[[Part], Change] = no_change
    combine: str = "Add"

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis."""
        return dict(self.axes)


def region_of(dims: Dims, part: Part, shape: Sequence[int]) -> Region:
    """Return what a part reads or yields of a value."""
    return tuple(
        (0, size) if along is None else along.interval(part, size)
        for along, size in zip(dims, shape, strict=True)
    )


def whole_region(shape: Sequence[int]) -> Region:
    """Return all of a value."""
    return tuple((0, size) for size in shape)


def shape_of(region: Region) -> tuple[int, ...]:
    """Return the shape of a region."""
    return tuple(stop - first for first, stop in region)


def overlap(left: Region, right: Region) -> Region | None:
    """Return what two regions share; None if it is empty."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return shared if all(first < stop for first, stop in shared) else None


def parts_of(space: Space, degrees: Mapping[str, int]) -> Iterator[Part]:
    """Yield the parts of an operator, the last axis fastest; sizes along an axis differ by one at most."""
    cuts = [
        [(axis.name, (i * axis.size // n, (i + 1) * axis.size // n)) for i in range(n)]
        for axis in space.axes
        if (n := degrees.get(axis.name, 1)) > 1
    ]
    yield from map(dict, product(*cuts))
