"""Array workloads that schedulers are compared on: a change of policy must not make them slower.

Named for, and shaped like, those of coiled/benchmarks (`tests/benchmarks/test_array.py`,
`test_rechunk.py`; anomaly_mean and quadratic_means: dask/distributed issue 2602; basic_sum: its pull request
4864; double_diff: its issue 6597), sized for a machine of a few cores. Numbers are uniform in [0, 1) and each
result is reduced on the cluster, so that gathering it costs next to nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ferroflow_dask.bench.workloads.base import Workload
from ferroflow_dask.bench.workloads.collection import block, of_collection, random_array
from ferroflow_dask.exceptions import UnknownNameError

_array = partial(of_collection, "array")
_XARRAY = ("pandas", "xarray")
#: BLAS takes long for many small products one after another, if it may use all cores.
_WHOLE = {"is_whole": True}


def _squares(seed: int, salt: str, n: int, chunks: int, how_many: int = 1) -> list[Any]:
    """Return (n, n) arrays in `chunks`² blocks."""
    sizes = (n, n), (block(n, chunks), block(n, chunks))
    return [random_array(seed, salt, *sizes, index=i) for i in range(how_many)]


@_array(
    "contraction of two cubes over two axes",
    {"n": 200, "chunks": 4},
    {"n": 60, "chunks": 3},
    local=_WHOLE,
)
def _tensordot(seed: int, salt: str, *, n: int, chunks: int, is_whole: bool = False) -> Any:
    import dask.array as da

    # Cubes whose middle axis is kept: each block of the product sums over blocks along two axes.
    sizes = (n, n, n), (block(n, chunks),) * 3
    a, b = (random_array(seed, salt, *sizes, index=i) for i in range(2))
    if is_whole:
        a, b = a.rechunk(-1), b.rechunk(-1)
    return da.tensordot(a, b, axes=((0, 2), (2, 0))).sum(axis=0)


def _climate(seed: int, salt: str, *, times: int, points: int, chunks: int, index: int) -> Any:
    return random_array(seed, salt, (times, points), (1, block(points, chunks)), index=index)


@_array(
    "u², v² and u·v of two fields, each averaged over time",
    {"times": 25, "points": 200_000, "chunks": 4},
    {"times": 10, "points": 10_000, "chunks": 2},
    needs=_XARRAY,
)
def _quadratic_means(seed: int, salt: str, **sizes: int) -> Any:
    import xarray as xr

    winds = {name: (("time", "x"), _climate(seed, salt, **sizes, index=i)) for i, name in enumerate("uv")}
    data = xr.Dataset(winds)
    means = data**2
    means["uv"] = data.u * data.v
    return means.mean("time")


@_array(
    "squared distance to the mean of its day, averaged over time",
    {"times": 60, "points": 100_000, "chunks": 2, "period": 10},
    {"times": 12, "points": 2_000, "chunks": 2, "period": 3},
    needs=_XARRAY,
)
def _anomaly_mean(seed: int, salt: str, *, period: int, **sizes: int) -> Any:
    import xarray as xr

    day = np.arange(sizes["times"]) % period
    values = _climate(seed, salt, **sizes, index=0)
    # With flox, which may be installed, the graph would be another one.
    with xr.set_options(use_flox=False):
        days = xr.DataArray(values, dims=("time", "x"), coords={"day": ("time", day)}).groupby("day")
        # The mean of the anomalies is 0 whatever was computed, that of their squares is not.
        return ((days - days.mean("time")) ** 2).mean("time")


@_array(
    "difference of two arrays shifted against each other by one row and column",
    {"n": 3000, "chunks": 6},
    {"n": 400, "chunks": 2},
)
def _double_diff(seed: int, salt: str, *, n: int, chunks: int) -> Any:
    a, b = _squares(seed, salt, n, chunks, 2)
    return (a[1:, 1:] - b[:-1, :-1]).sum(axis=0)


@_array(
    "sum of the product of a matrix with its transpose", {"n": 2000, "chunks": 5}, {"n": 400, "chunks": 3}
)
def _dot_product(seed: int, salt: str, *, n: int, chunks: int) -> Any:
    (a,) = _squares(seed, salt, n, chunks)
    return (a @ a.T).sum()


def _smoothed(x: Any) -> Any:
    """Return a quarter of the sum of each value's four neighbours, the array being a torus."""
    return (np.roll(x, 1, 0) + np.roll(x, -1, 0) + np.roll(x, 1, 1) + np.roll(x, -1, 1)) / 4


@_array(
    "mean of four neighbours across the borders of blocks", {"n": 2100, "chunks": 6}, {"n": 300, "chunks": 2}
)
def _map_overlap(seed: int, salt: str, *, n: int, chunks: int) -> Any:
    (x,) = _squares(seed, salt, n, chunks)
    # Squares: the sum of the smoothed values themselves is that of the values.
    return (x.map_overlap(_smoothed, depth=1, boundary="periodic", meta=x._meta) ** 2).sum(axis=1)


@_array(
    "sums of the rows of a wide array, in thin or square blocks",
    {"n": 1024, "chunks": 16, "shape": "thin"},
    {"n": 256, "chunks": 4},
)
def _basic_sum(seed: int, salt: str, *, n: int, chunks: int, shape: str) -> Any:
    # The array is `chunks` times as wide as high, of `chunks`² blocks. Thin ones are groups of whole columns,
    # square ones about as wide as high.
    if shape not in ("thin", "square"):
        raise UnknownNameError.of("shape", shape, ("thin", "square"))
    columns, up = n * chunks, 1 if shape == "thin" else max(1, round(chunks**0.5))
    return random_array(seed, salt, (n, columns), (block(n, up), block(columns, chunks**2 // up))).sum(axis=1)


def _by_position(rows: Any) -> Any:
    """Weight each value with its column, so that a block in a wrong place changes the sum."""
    return rows @ np.arange(rows.shape[1], dtype=float)


@_array(
    "blocks of columns to blocks of rows, by p2p or by tasks",
    {"n": 4000, "chunks": 16, "method": "p2p"},
    {"n": 400, "chunks": 4},
    local={"method": "tasks"},
)
def _rechunk(seed: int, salt: str, *, n: int, chunks: int, method: str) -> Any:
    if method not in ("p2p", "tasks"):
        raise UnknownNameError.of("method", method, ("p2p", "tasks"))
    columns = random_array(seed, salt, (n, n), (n, block(n, chunks)))
    rows = columns.rechunk((block(n, chunks), n), method=method)
    return rows.map_blocks(_by_position, drop_axis=1, meta=np.empty(0))


ARRAYS: tuple[Workload, ...] = (
    *(_tensordot, _quadratic_means, _anomaly_mean, _double_diff),
    *(_dot_product, _map_overlap, _basic_sum, _rechunk),
)
