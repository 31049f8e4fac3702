"""Graphs for which the scheduler's CPU time is measured: what they cost depends on their shape only."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from dask.typing import Key

from ferroflow_dask.virtual import VirtualTask

Graph = dict[Key, VirtualTask]

#: Mean duration of a task [s], and how far others differ from it at most, as a part of it. Tasks of this
#: length are not bundled.
_MEAN_S, _SPREAD = 0.02, 0.5
#: Sizes of results: of numbers, which are sent with the tasks that read them, and of chunks [B].
_SMALL_NBYTES, _CHUNK_NBYTES = 28, 1_000_000
#: Inputs of a task that reduces others.
_SPLIT_EVERY = 4
_CHAIN_LENGTH = 20


class _Maker:
    """Makes tasks of seeded durations."""

    def __init__(self, seed: int, nbytes: int, mean_s: float) -> None:
        self._rng = random.Random(seed)
        self._nbytes = nbytes
        self._mean_s = mean_s
        self.graph: Graph = {}

    def add(self, name: str, place: int, *needed: Key) -> Key:
        key = (name, place)
        duration_s = self._mean_s * self._rng.uniform(1 - _SPREAD, 1 + _SPREAD)
        self.graph[key] = VirtualTask(duration_s, tuple(dict.fromkeys(needed)), self._nbytes)
        return key

    def reduce(self, keys: list[Key], by: int) -> None:
        level = 0
        while len(keys) > 1:
            groups = [keys[i : i + by] for i in range(0, len(keys), by)]
            keys = [self.add(f"reduce-{level}", place, *group) for place, group in enumerate(groups)]
            level += 1


def independent(n_tasks: int, seed: int = 0, mean_s: float = _MEAN_S) -> Graph:
    """Return tasks without inputs."""
    maker = _Maker(seed, _SMALL_NBYTES, mean_s)
    for place in range(n_tasks):
        maker.add("task", place)
    return maker.graph


def tree(n_tasks: int, seed: int = 0, mean_s: float = _MEAN_S) -> Graph:
    """Return a reduction of numbers in pairs."""
    maker = _Maker(seed, _SMALL_NBYTES, mean_s)
    maker.reduce([maker.add("leaf", place) for place in range((n_tasks + 1) // 2)], by=2)
    return maker.graph


def array(n_tasks: int, seed: int = 0, mean_s: float = _MEAN_S) -> Graph:
    """Return `(x + x.T).sum()` of an array in square chunks."""
    maker = _Maker(seed, _CHUNK_NBYTES, mean_s)
    n = max(2, round((n_tasks / (2 + 1 / (_SPLIT_EVERY - 1))) ** 0.5))
    chunks = [maker.add("random", place) for place in range(n * n)]
    sums = [
        maker.add("add", i * n + j, chunks[i * n + j], chunks[j * n + i]) for i in range(n) for j in range(n)
    ]
    maker.reduce(sums, by=_SPLIT_EVERY)
    return maker.graph


def shuffle(n_tasks: int, seed: int = 0, mean_s: float = _MEAN_S) -> Graph:
    """Return a shuffle in one stage: each output takes a split of each input."""
    maker = _Maker(seed, _SMALL_NBYTES, mean_s)
    n = max(2, round((n_tasks + 1) ** 0.5) - 1)
    inputs = [maker.add("input", place) for place in range(n)]
    for output in range(n):
        parts = [maker.add("part", output * n + i, inputs[i]) for i in range(n)]
        maker.add("output", output, *parts)
    return maker.graph


def chains(n_tasks: int, seed: int = 0, mean_s: float = _MEAN_S) -> Graph:
    """Return chains of tasks."""
    maker = _Maker(seed, _SMALL_NBYTES, mean_s)
    n_chains = max(1, n_tasks // _CHAIN_LENGTH)
    ends: list[tuple[Key, ...]] = [()] * n_chains
    for step in range(_CHAIN_LENGTH):
        ends = [(maker.add("step", step * n_chains + i, *ends[i]),) for i in range(n_chains)]
    return maker.graph


def stencil(n_tasks: int, seed: int = 0, mean_s: float = _MEAN_S) -> Graph:
    """Return steps over a line of cells, each of which reads its two neighbours and itself."""
    maker = _Maker(seed, _SMALL_NBYTES, mean_s)
    width = max(1, n_tasks // _CHAIN_LENGTH)
    cells = [maker.add("cell", i) for i in range(width)]
    for step in range(1, _CHAIN_LENGTH):
        before = [cells[max(0, i - 1) : i + 2] for i in range(width)]
        cells = [maker.add("cell", step * width + i, *before[i]) for i in range(width)]
    return maker.graph


#: The graphs that are measured, by name.
GRAPHS: Mapping[str, Callable[..., Graph]] = {
    "independent": independent,
    "tree": tree,
    "array": array,
    "shuffle": shuffle,
    "chains": chains,
}
