"""Data frame workloads in which every partition meets every other: merge, shuffle and set_index, by P2P.

After those of coiled/benchmarks (`tests/benchmarks/test_join.py`, `test_dataframe.py`), sized for a machine
of a few cores. Results are reduced on the cluster to a number or to a row a partition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ferroflow_dask.bench.workloads.base import Workload
from ferroflow_dask.bench.workloads.collection import Recipe, of_collection, share

#: dask.dataframe needs pyarrow, and so does P2P for its messages.
NEEDS = ("pandas", "pyarrow")

#: Named, since without a default client Dask would choose a shuffle on one machine's disk.
_METHOD = "p2p"


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Makes partitions of a random frame: `id`, of `n_ids` values, and `value`, uniform in [0, 1).

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
    n_ids: int
    seed: int
    index: int
    salt: str

    def __call__(self, partition: int) -> Any:
        """Return a partition."""
        import pandas as pd

        rng = np.random.default_rng([self.seed, self.index, partition])
        n = share(self.n, self.partitions, partition)
        return pd.DataFrame({"id": rng.integers(0, self.n_ids, n), "value": rng.random(n)})


def _frame(seed: int, salt: str, n: int, partitions: int, index: int = 0) -> Any:
    """Return a Dask frame of `n` rows; an id occurs twice on average."""
    import dask.dataframe as dd

    rows = RandomRows(n, partitions, max(1, n // 2), seed, index, salt)
    return dd.from_map(rows, range(partitions), meta=rows(0).iloc[:0], label="rows")


def _rows(seed: int, n: int, partitions: int, index: int = 0) -> Any:
    """Return the same rows in a frame of pandas."""
    import pandas as pd

    rows = RandomRows(n, partitions, max(1, n // 2), seed, index, "")
    return pd.concat([rows(partition) for partition in range(partitions)], ignore_index=True)


def _each(frame: Any, summary: Callable[[Any], Any], *columns: str) -> Any:
    """Return a Dask frame with one row of numbers for each partition."""
    import pandas as pd

    return frame.map_partitions(summary, meta=pd.DataFrame(dict.fromkeys(columns, pd.Series(dtype=float))))


# Merge


def _merge(seed: int, salt: str, *, n: int, partitions: int) -> Any:
    left, right = (_frame(seed, salt, n, partitions, index) for index in range(2))
    # Broadcasting a frame as small as ours would be cheaper; it is not what is measured.
    both = left.merge(right, on="id", shuffle_method=_METHOD, broadcast=False, npartitions=partitions)
    return (both.value_x * both.value_y).sum()


def _merge_answer(seed: int, *, n: int, partitions: int) -> Any:
    left, right = (_rows(seed, n, partitions, index).groupby("id").value.sum() for index in range(2))
    # Σ over pairs of equal id of x·y = Σ over ids of Σx · Σy
    return (left * right).sum()


# Shuffle


def _homes(partition: Any) -> Any:
    import pandas as pd

    numbers = {"rows": len(partition), "ids": partition.id.nunique(), "total": partition.value.sum()}
    return pd.DataFrame([numbers], dtype=float)


def _shuffle(seed: int, salt: str, *, n: int, partitions: int) -> Any:
    frame = _frame(seed, salt, n, partitions).shuffle("id", npartitions=partitions, shuffle_method=_METHOD)
    return _each(frame, _homes, "rows", "ids", "total")


def _shuffle_answer(seed: int, *, n: int, partitions: int) -> Any:
    return _homes(_rows(seed, n, partitions)).to_numpy()[0]


def _over_partitions(found: Any) -> Any:
    # An id whose rows came to two partitions is counted twice.
    return found[["rows", "ids", "total"]].to_numpy().sum(axis=0)


# Set index


def _borders(partitions: int) -> Any:
    # Values are uniform. Without divisions Dask would compute quantiles first, while it optimises.
    return np.linspace(0, 1, partitions + 1)


def _order(partition: Any) -> Any:
    import pandas as pd

    numbers = {
        "rows": len(partition),
        "sorted": partition.index.is_monotonic_increasing,
        "total": (partition.id * partition.index).sum(),
    }
    return pd.DataFrame([numbers], dtype=float)


def _set_index(seed: int, salt: str, *, n: int, partitions: int) -> Any:
    divisions = _borders(partitions).tolist()
    frame = _frame(seed, salt, n, partitions).set_index("value", divisions=divisions, shuffle_method=_METHOD)
    return _each(frame, _order, "rows", "sorted", "total")


def _set_index_answer(seed: int, *, n: int, partitions: int) -> Any:
    rows, borders = _rows(seed, n, partitions), _borders(partitions)
    counts, _ = np.histogram(rows.value, borders)
    totals, _ = np.histogram(rows.value, borders, weights=rows.id * rows.value)
    return np.stack([counts, np.ones(partitions), totals], axis=1)


def _by_partition(found: Any) -> Any:
    return found[["rows", "sorted", "total"]].to_numpy()


def _of(name: str, summary: str, recipe: Recipe) -> Workload:
    return of_collection(
        name,
        summary,
        recipe,
        defaults={"n": 400_000, "partitions": 16},
        small={"n": 4_000, "partitions": 4},
        family="frame",
        needs=NEEDS,
    )


FRAMES: tuple[Workload, ...] = (
    _of("dataframe_merge", "inner join of two frames by P2P", Recipe(_merge, _merge_answer)),
    _of(
        "dataframe_shuffle",
        "rows of an id to one partition by P2P",
        Recipe(_shuffle, _shuffle_answer, _over_partitions),
    ),
    _of(
        "dataframe_set_index",
        "rows sorted by a value by P2P",
        Recipe(_set_index, _set_index_answer, _by_partition),
    ),
)
