"""Array workloads that schedulers are compared on: a change of policy must not make them slower.

Named for, and shaped like, those of coiled/benchmarks (`tests/benchmarks/test_array.py`,
`test_rechunk.py`; anomaly_mean and quadratic_means: dask/distributed issue 2602; basic_sum: its pull request
4864; double_diff: its issue 6597), sized for a machine of a few cores. Numbers are uniform in [0, 1) and each
result is reduced on the cluster, so that gathering it costs next to nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ferroflow_dask.bench.workloads.base import Workload
from ferroflow_dask.bench.workloads.collection import (
    Recipe,
    block,
    of_collection,
    random_array,
    random_values,
)
from ferroflow_dask.exceptions import UnknownNameError

_XARRAY = ("pandas", "xarray")


# Products


def _tensordot_sizes(n: int, chunks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    # Cubes whose middle axis is kept: each block of the product sums over blocks along two axes.
    return (n, n, n), (block(n, chunks),) * 3


def _tensordot(seed: int, salt: str, *, n: int, chunks: int) -> Any:
    import dask.array as da

    a, b = (random_array(seed, salt, *_tensordot_sizes(n, chunks), index=i) for i in range(2))
    return da.tensordot(a, b, axes=((0, 2), (2, 0))).sum(axis=0)


def _tensordot_answer(seed: int, *, n: int, chunks: int) -> Any:
    a, b = (random_values(seed, *_tensordot_sizes(n, chunks), index=i) for i in range(2))
    return np.tensordot(a.sum(axis=1), b, axes=((0, 1), (2, 0)))


def _square(n: int, chunks: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (n, n), (block(n, chunks), block(n, chunks))


def _dot_product(seed: int, salt: str, *, n: int, chunks: int) -> Any:
    a = random_array(seed, salt, *_square(n, chunks))
    return (a @ a.T).sum()


def _dot_product_answer(seed: int, *, n: int, chunks: int) -> Any:
    # Σij (a aᵀ)ij = Σk (Σi aik)²
    return (random_values(seed, *_square(n, chunks)).sum(axis=0) ** 2).sum()


# Neighbours


def _double_diff(seed: int, salt: str, *, n: int, chunks: int) -> Any:
    a, b = (random_array(seed, salt, *_square(n, chunks), index=i) for i in range(2))
    return (a[1:, 1:] - b[:-1, :-1]).sum(axis=0)


def _double_diff_answer(seed: int, *, n: int, chunks: int) -> Any:
    a, b = (random_values(seed, *_square(n, chunks), index=i) for i in range(2))
    return (a[1:, 1:] - b[:-1, :-1]).sum(axis=0)


def _smoothed(x: Any) -> Any:
    """Return a quarter of the sum of each value's four neighbours, the array being a torus."""
    return (np.roll(x, 1, 0) + np.roll(x, -1, 0) + np.roll(x, 1, 1) + np.roll(x, -1, 1)) / 4


def _map_overlap(seed: int, salt: str, *, n: int, chunks: int) -> Any:
    x = random_array(seed, salt, *_square(n, chunks))
    # Squares: the sum of the smoothed values themselves is that of the values.
    return (x.map_overlap(_smoothed, depth=1, boundary="periodic", meta=x._meta) ** 2).sum(axis=1)


def _map_overlap_answer(seed: int, *, n: int, chunks: int) -> Any:
    return (_smoothed(random_values(seed, *_square(n, chunks))) ** 2).sum(axis=1)


# Reductions


def _basic_sum_sizes(n: int, chunks: int, shape: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the sizes of an array that is `chunks` times as wide as high, and of its `chunks`² blocks.

    Thin blocks are groups of whole columns; square ones are about as wide as high.
    """
    columns, up = n * chunks, max(1, round(chunks**0.5))
    if shape == "thin":
        return (n, columns), (n, block(columns, chunks**2))
    if shape == "square":
        return (n, columns), (block(n, up), block(columns, chunks**2 // up))
    raise UnknownNameError.of("shape", shape, ("thin", "square"))


def _basic_sum(seed: int, salt: str, *, n: int, chunks: int, shape: str) -> Any:
    return random_array(seed, salt, *_basic_sum_sizes(n, chunks, shape)).sum(axis=1)


def _basic_sum_answer(seed: int, *, n: int, chunks: int, shape: str) -> Any:
    return random_values(seed, *_basic_sum_sizes(n, chunks, shape)).sum(axis=1)


def _climate(times: int, points: int, chunks: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (times, points), (1, block(points, chunks))


def _quadratic_means(seed: int, salt: str, *, times: int, points: int, chunks: int) -> Any:
    import xarray as xr

    sizes = _climate(times, points, chunks)
    winds = {name: (("time", "x"), random_array(seed, salt, *sizes, index=i)) for i, name in enumerate("uv")}
    data = xr.Dataset(winds)
    means = data**2
    means["uv"] = data.u * data.v
    return means.mean("time")


def _quadratic_means_answer(seed: int, *, times: int, points: int, chunks: int) -> Any:
    u, v = (random_values(seed, *_climate(times, points, chunks), index=i) for i in range(2))
    return np.stack([(u**2).mean(axis=0), (v**2).mean(axis=0), (u * v).mean(axis=0)])


def _means(found: Any) -> Any:
    return [found[name].values for name in ("u", "v", "uv")]


def _anomaly_mean(seed: int, salt: str, *, times: int, points: int, chunks: int, period: int) -> Any:
    import xarray as xr

    values = random_array(seed, salt, *_climate(times, points, chunks))
    data = xr.DataArray(values, dims=("time", "x"), coords={"day": ("time", np.arange(times) % period)})
    days = data.groupby("day")
    # The mean of the anomalies is 0 whatever was computed, that of their squares is not.
    return ((days - days.mean("time")) ** 2).mean("time")


def _anomaly_mean_answer(seed: int, *, times: int, points: int, chunks: int, period: int) -> Any:
    values = random_values(seed, *_climate(times, points, chunks))
    for day in range(period):
        values[day::period] -= values[day::period].mean(axis=0)
    return (values**2).mean(axis=0)


def _values(found: Any) -> Any:
    return found.values


# Rechunking


def _by_position(rows: Any) -> Any:
    """Weight each value with its column, so that a block in a wrong place changes the sum."""
    return rows @ np.arange(rows.shape[1], dtype=float)


def _rechunk(seed: int, salt: str, *, n: int, chunks: int, method: str) -> Any:
    if method not in ("p2p", "tasks"):
        raise UnknownNameError.of("method", method, ("p2p", "tasks"))
    columns = random_array(seed, salt, (n, n), (n, block(n, chunks)))
    rows = columns.rechunk((block(n, chunks), n), method=method)
    return rows.map_blocks(_by_position, drop_axis=1, meta=np.empty(0))


def _rechunk_answer(seed: int, *, n: int, chunks: int, **_: str) -> Any:
    return _by_position(random_values(seed, (n, n), (n, block(n, chunks))))


ARRAYS: tuple[Workload, ...] = (
    of_collection(
        "tensordot",
        "contraction of two cubes over two axes",
        Recipe(_tensordot, _tensordot_answer),
        defaults={"n": 200, "chunks": 4},
        small={"n": 60, "chunks": 3},
        family="array",
    ),
    of_collection(
        "quadratic_means",
        "u², v² and u·v of two fields, each averaged over time",
        Recipe(_quadratic_means, _quadratic_means_answer, _means),
        defaults={"times": 25, "points": 200_000, "chunks": 4},
        small={"times": 10, "points": 10_000, "chunks": 2},
        family="array",
        needs=_XARRAY,
    ),
    of_collection(
        "anomaly_mean",
        "squared distance to the mean of its day, averaged over time",
        Recipe(_anomaly_mean, _anomaly_mean_answer, _values),
        defaults={"times": 60, "points": 100_000, "chunks": 2, "period": 10},
        small={"times": 12, "points": 2_000, "chunks": 2, "period": 3},
        family="array",
        needs=_XARRAY,
    ),
    of_collection(
        "double_diff",
        "difference of two arrays shifted against each other by one row and column",
        Recipe(_double_diff, _double_diff_answer),
        defaults={"n": 3000, "chunks": 6},
        small={"n": 400, "chunks": 2},
        family="array",
    ),
    of_collection(
        "dot_product",
        "sum of the product of a matrix with its transpose",
        Recipe(_dot_product, _dot_product_answer),
        defaults={"n": 2000, "chunks": 5},
        small={"n": 400, "chunks": 3},
        family="array",
    ),
    of_collection(
        "map_overlap",
        "mean of four neighbours across the borders of blocks",
        Recipe(_map_overlap, _map_overlap_answer),
        defaults={"n": 2100, "chunks": 6},
        small={"n": 300, "chunks": 2},
        family="array",
    ),
    of_collection(
        "basic_sum",
        "sums of the rows of a wide array, in thin or square blocks",
        Recipe(_basic_sum, _basic_sum_answer),
        defaults={"n": 1024, "chunks": 16, "shape": "thin"},
        small={"n": 256, "chunks": 4},
        family="array",
    ),
    of_collection(
        "rechunk",
        "blocks of columns to blocks of rows, by p2p or by tasks",
        Recipe(_rechunk, _rechunk_answer),
        defaults={"n": 4000, "chunks": 16, "method": "p2p"},
        small={"n": 400, "chunks": 4},
        family="array",
    ),
)
