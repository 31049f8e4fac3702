"""Collections in fewer tasks that Dask optimizes once more when it computes them."""

from __future__ import annotations

from typing import Any

import dask.bag as db
from test_optimize import FOUR, All

from ferroflow_dask.lowering.foreign import Learned, optimize_for


class Except(All):
    """What all tasks are like but those of a name, of which nothing is known."""

    def __init__(self, seconds: float, new: str) -> None:
        super().__init__(seconds)
        self.new = new

    def get(self, name: Any, default: Any = None) -> Learned:
        return default if self.new in name else self.learned


def double(x: int) -> int:
    return 2 * x


def triple(x: int) -> int:
    return 3 * x


def parse_anew(x: int) -> int:
    return x + 1


def test_what_a_bundle_reads_twice_is_no_iterator() -> None:
    # Dask's bags would fuse what is new with the only bundle that reads it, and drop its `reify`.
    read = db.from_sequence(range(20), npartitions=4).map(parse_anew)
    pairs = db.zip(read.map(double), read.map(triple))
    expected = [(2 * (x + 1), 3 * (x + 1)) for x in range(20)]
    optimized = optimize_for(pairs, FOUR, Except(1e-5, "parse_anew"))
    tasks = dict(optimized.__dask_graph__())
    assert len(tasks) == 3 * 4  # data, what is new, and a bundle
    assert optimized.compute(scheduler="sync") == expected
