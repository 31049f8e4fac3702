"""Data frame workloads in which every partition meets every other: merge, shuffle and set_index, by P2P.

After those of coiled/benchmarks (`tests/benchmarks/test_join.py`, `test_dataframe.py`), sized for a machine
of a few cores. Results are reduced on the cluster to a number or to a row a partition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ferroflow_dask.bench.workloads.base import Workload
from ferroflow_dask.bench.workloads.collection import of_collection, share

#: dask.dataframe needs pyarrow, and so does P2P for its messages.
NEEDS = ("pandas", "pyarrow")

#: Named, since without a default client Dask would choose a shuffle on one machine's disk.
P2P = "p2p"
#: Without a cluster there is no P2P.
LOCAL = {"method": "tasks"}

_frame = partial(
    of_collection,
    "frame",
    defaults={"n": 400_000, "partitions": 16},
    small={"n": 4_000, "partitions": 4},
    needs=NEEDS,
    local=LOCAL,
)


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Makes partitions of a random frame: `id`, which occurs twice on average, and `value` in [0, 1).

    Parameters
    ----------
    n, partitions : int
        Rows and partitions of the whole.
    index : int
        Tells apart the frames of one instance.
    salt : str
        Part of the keys that Dask makes, of which an object's fields are all it knows.
    """

    n: int
    partitions: int
    seed: int
    index: int
    salt: str

    def __call__(self, partition: int) -> Any:
        """Return a partition."""
        import pandas as pd

        rng = np.random.default_rng([self.seed, self.index, partition])
        n = share(self.n, self.partitions, partition)
        return pd.DataFrame({"id": rng.integers(0, max(1, self.n // 2), n), "value": rng.random(n)})


def _rows(seed: int, salt: str, n: int, partitions: int, index: int = 0) -> Any:
    import dask.dataframe as dd

    rows = RandomRows(n, partitions, seed, index, salt)
    return dd.from_map(rows, range(partitions), meta=rows(0).iloc[:0], label="rows")


def _each(frame: Any, summary: Callable[[Any], Any], *columns: str) -> Any:
    """Return a Dask frame with one row of numbers for each partition."""
    import pandas as pd

    return frame.map_partitions(summary, meta=pd.DataFrame(dict.fromkeys(columns, pd.Series(dtype=float))))


@_frame("inner join of two frames by P2P")
def _dataframe_merge(seed: int, salt: str, *, n: int, partitions: int, method: str = P2P) -> Any:
    left, right = (_rows(seed, salt, n, partitions, index) for index in range(2))
    # Broadcasting a frame as small as ours would be cheaper; it is not what is measured.
    both = left.merge(right, on="id", shuffle_method=method, broadcast=False, npartitions=partitions)
    return (both.value_x * both.value_y).sum()


def _homes(partition: Any) -> Any:
    import pandas as pd

    numbers = {"rows": len(partition), "ids": partition.id.nunique(), "total": partition.value.sum()}
    return pd.DataFrame([numbers], dtype=float)


@_frame("rows of an id to one partition by P2P")
def _dataframe_shuffle(seed: int, salt: str, *, n: int, partitions: int, method: str = P2P) -> Any:
    frame = _rows(seed, salt, n, partitions).shuffle("id", npartitions=partitions, shuffle_method=method)
    return _each(frame, _homes, "rows", "ids", "total")


def _order(partition: Any) -> Any:
    import pandas as pd

    numbers = {
        "rows": len(partition),
        "sorted": partition.index.is_monotonic_increasing,
        "total": (partition.id * partition.index).sum(),
    }
    return pd.DataFrame([numbers], dtype=float)


@_frame("rows sorted by a value by P2P")
def _dataframe_set_index(seed: int, salt: str, *, n: int, partitions: int, method: str = P2P) -> Any:
    # Values are uniform. Without divisions Dask would compute quantiles first, while it optimises.
    divisions = np.linspace(0, 1, partitions + 1).tolist()
    frame = _rows(seed, salt, n, partitions).set_index("value", divisions=divisions, shuffle_method=method)
    return _each(frame, _order, "rows", "sorted", "total")


FRAMES: tuple[Workload, ...] = (_dataframe_merge, _dataframe_shuffle, _dataframe_set_index)
