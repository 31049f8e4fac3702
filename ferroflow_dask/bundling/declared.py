"""Declared sizes of the chunks of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, prod

from dask._task_spec import Alias, GraphNode
from dask.typing import Key


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of an array.

    Parameters
    ----------
    lengths : sequence of sequence of float
        Of the chunks along each axis; NaN if it is unknown.
    itemsize : int
        [B]
    """

    lengths: Sequence[Sequence[float]]
    itemsize: int

    def nbytes(self, indices: Sequence[object]) -> float | None:
        """Return the size of a chunk [B]; None if it is unknown or there is no such chunk."""
        if len(indices) != len(self.lengths):
            return None
        lengths = []
        for along, i in zip(self.lengths, indices, strict=True):
            if not isinstance(i, int) or not 0 <= i < len(along) or isnan(along[i]):
                return None
            lengths.append(along[i])
        return float(self.itemsize * prod(lengths))


def declared_nbytes(tasks: Mapping[Key, GraphNode], chunks: Mapping[str, Chunks]) -> dict[Key, float]:
    """Return the declared sizes of the values of tasks [B]; O(tasks).

    Dask gives a new key to a task that it fuses with others, and an alias of the old key. So the target of an
    alias has its size.

    Parameters
    ----------
    tasks : mapping of Key to GraphNode
    chunks : mapping of str to Chunks
        By the first part of the keys of an array.
    """
    found: dict[Key, float] = {}
    for key, task in tasks.items() if chunks else ():
        if not isinstance(key, tuple) or not isinstance(key[0], str) or key[0] not in chunks:
            continue
        if (nbytes := chunks[key[0]].nbytes(key[1:])) is not None:
            found[key] = nbytes
            if isinstance(task, Alias):
                found.setdefault(task.target, nbytes)
    return found
