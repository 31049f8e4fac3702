"""Graphs of sleeping tasks by which simulations are held against reality."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from dask.typing import Key

from ferroflow_dask.virtual import VirtualTask

#: Duration [s], dependencies and result size [B] of each task, by number.
Sleep = tuple[float, tuple[int, ...], int]
Sleeps = Sequence[Sleep]


def _wide(n: int, seconds: float) -> Callable[[], Sleeps]:
    return lambda: [(seconds, (), 8)] * n


def _imbalanced() -> Sleeps:
    return [(0.2, (), 8)] * 4 + [(0.002, (), 8)] * 200


def _lognormal() -> Sleeps:
    durations = np.random.default_rng(0).lognormal(np.log(0.01), 1.0, 150)
    return [(min(float(one), 0.2), (), 8) for one in durations]


def _chains() -> Sleeps:
    return [(0.01, (i - 12,) if i >= 12 else (), 8) for i in range(180)]


def _tree() -> Sleeps:
    sleeps: list[Sleep] = [(0.02, (), 8)] * 64
    first = 0
    for n in (32, 16, 8, 4, 2, 1):
        before = first
        first = len(sleeps)
        sleeps += [(0.01, (before + 2 * i, before + 2 * i + 1), 8) for i in range(n)]
    return sleeps


def _stencil() -> Sleeps:
    width = 12
    sleeps: list[Sleep] = [(0.01, (), 1000)] * width
    for step in range(10):
        near = [range(max(0, i - 1), min(width, i + 2)) for i in range(width)]
        sleeps += [(0.01, tuple(step * width + j for j in one), 1000) for one in near]
    return sleeps


def _fork_join() -> Sleeps:
    sleeps: list[Sleep] = [(0.005, (), 8)]
    for _ in range(6):
        root = len(sleeps) - 1
        sleeps += [(0.02, (root,), 8)] * 16
        sleeps.append((0.005, tuple(range(root + 1, root + 17)), 8))
    return sleeps


def _shuffle() -> Sleeps:
    n = 10
    sleeps: list[Sleep] = [(0.02, (), 100_000)] * n
    sleeps += [(0.005, (i,), 10_000) for i in range(n) for _ in range(n)]
    sleeps += [(0.02, tuple(n + i * n + j for i in range(n)), 8) for j in range(n)]
    return sleeps


def _data() -> Sleeps:
    sleeps: list[Sleep] = [(0.02, (), 2_000_000)] * 24
    sleeps += [(0.02, (i, (i + 7) % 24), 8) for i in range(24)]
    return sleeps


#: By name; each takes some tenths of a second on four workers.
SLEEPS: Mapping[str, Callable[[], Sleeps]] = {
    "wide-2ms": _wide(400, 0.002),
    "wide-10ms": _wide(200, 0.01),
    "wide-50ms": _wide(60, 0.05),
    "skewed": lambda: [(0.01, (), 8)] * 96 + [(0.1, (), 8)] * 12,
    "imbalanced": _imbalanced,
    "lognormal": _lognormal,
    "chains": _chains,
    "tree": _tree,
    "stencil": _stencil,
    "fork-join": _fork_join,
    "shuffle": _shuffle,
    "data": _data,
}


def virtual_graph(sleeps: Sleeps, name: str, overshoot_s: float = 0.0) -> dict[Key, VirtualTask]:
    """Return the graph for a simulation; each task sleeps a little longer than it asks for."""
    keys: list[Key] = [(name, i) for i in range(len(sleeps))]
    tasks: dict[Key, Any] = {}
    for key, (seconds, needed, nbytes) in zip(keys, sleeps, strict=True):
        dependencies = tuple(keys[i] for i in needed)
        tasks[key] = VirtualTask(seconds + overshoot_s, dependencies, nbytes, core_share=0.0)
    return tasks
