"""Programs on arrays and frames: the shapes of coiled/benchmarks and of xarray's users, at a laptop's size.

Each function returns a collection. A salt makes its keys new, so no run finds the results of another. A run
takes .2 to 5 s on two cores. Those of TPC-H are the queries of `ferroflow bench public tpch`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pandas as pd

from ferroflow_dask.bench.public.tpch import tables
from ferroflow_dask.bench.public.tpch_queries import QUERIES


def _array(salt: str, shape: tuple[int, ...], chunks: tuple[int, ...], index: int = 0) -> Any:
    return da.random.default_rng([index, *salt.encode()]).random(shape, chunks=chunks)


def _frame(salt: str, days: int, freq: str = "10s") -> Any:
    start = pd.Timestamp("2000-01-01")
    return dask.datasets.timeseries(
        start, start + pd.Timedelta(days=days), freq=freq, partition_freq="1D", seed=sum(salt.encode())
    )


def _dataset(**arrays: Any) -> Any:
    import xarray as xr

    return xr.Dataset({name: (("time", "y", "x"), array) for name, array in arrays.items()})


def quadratic_mean(salt: str) -> Any:
    ds = _dataset(
        u=_array(salt, (1_000, 96, 96), (10, 96, 96)), v=_array(salt, (1_000, 96, 96), (10, 96, 96), 1)
    )
    quad = ds**2
    quad["uv"] = ds.u * ds.v
    return quad.mean("time")


def _monthly(salt: str, method: str) -> Any:
    import xarray as xr

    times = pd.date_range("2001-01-01", periods=24 * 30 * 24, freq="h")
    field = _array(salt, (len(times), 40, 40), (120, 40, 40))
    found = xr.DataArray(field, dims=("time", "y", "x"), coords={"time": times})
    return found.groupby("time.month").mean(method=method)


def anom_mean(salt: str) -> Any:
    import xarray as xr

    days = np.arange(400) % 8
    found = xr.DataArray(
        _array(salt, (400, 36_000), (1, 36_000)), dims=("time", "x"), coords={"day": ("time", days)}
    )
    with xr.set_options(use_flox=False):
        means = found.groupby("day").mean(dim="time")
        return (found.groupby("day") - means).mean(dim="time")


def climatology(salt: str) -> Any:
    import xarray as xr

    times = pd.date_range("2001-01-01", periods=1_460, freq="6h")
    found = xr.DataArray(
        _array(salt, (len(times), 60, 60), (4, 60, 60)), dims=("time", "y", "x"), coords={"time": times}
    )
    return found.groupby("time.dayofyear").mean()


def vorticity(salt: str) -> Any:
    u, v = (_array(salt, (400, 400, 60), (400, 400, 1), i) for i in range(2))
    dx, dy = (_array(salt, (401, 400), (401, 400), i) for i in (2, 3))

    def padded(field: Any) -> Any:
        wide = da.pad(field, [(0, 1), (0, 0), (0, 0)], mode="wrap")
        return wide.rechunk((401, *wide.chunks[1:]))

    return (dx[..., None] * padded(u) - dy[..., None] * padded(v)).sum()


def double_diff(salt: str) -> Any:
    a, b = (_array(salt, (4_000, 4_000), (250, 250), i) for i in range(2))
    return (a[1:, 1:] - b[:-1, :-1]).sum()


def dot_product(salt: str) -> Any:
    a = _array(salt, (2_000, 2_000), (250, 250))
    return (a @ a.T).sum()


def basic_sum(salt: str) -> Any:
    return _array(salt, (4_000, 1_000), (4_000, 2)).sum(axis=1)


def map_overlap(salt: str) -> Any:
    return _array(salt, (2_000, 2_000), (100, 100)).map_overlap(lambda block: block, depth=1)[
        1_000:1_500, :500
    ]


def tiles_to_rows(salt: str) -> Any:
    return _array(salt, (3_000, 3_000), (100, 100)).rechunk((100, 3_000)).sum(axis=1)


def swap_axes(salt: str) -> Any:
    return _array(salt, (900, 120, 120), (5, 120, 120)).rechunk((900, 12, 120)).mean(axis=0)


def standardize(salt: str) -> Any:
    x = _array(salt, (60_000, 40), (1_000, 40))
    return (x - x.mean(axis=0)) / x.std(axis=0)


def qr(salt: str) -> Any:
    return da.linalg.qr(_array(salt, (60_000, 32), (1_500, 32)))[1]


def hist(salt: str) -> Any:
    return da.histogram(_array(salt, (2_000_000,), (10_000,)), bins=50, range=(0, 1))[0]


def timeseries_groupby(salt: str) -> Any:
    return _frame(salt, 120).groupby("name").x.mean()


def timeseries_shuffle(salt: str) -> Any:
    return _frame(salt, 40).shuffle("id").map_partitions(len)


def timeseries_join(salt: str) -> Any:
    left, right = _frame(salt, 20), _frame(salt + "r", 20, "60s")
    return left.merge(right[["id", "x"]].rename(columns={"x": "w"}), on="id").w.mean()


def set_index(salt: str) -> Any:
    return _frame(salt, 40).set_index("id").x.sum()


def timeseries_std(salt: str) -> Any:
    return _frame(salt, 200)[["x", "y"]].std()


def rolling(salt: str) -> Any:
    return _frame(salt, 100).x.rolling(30).mean().max()


def delayed_tree(salt: str) -> Any:
    rest = [dask.delayed(operator.add)(i, len(salt)) for i in range(1_024)]
    while len(rest) > 1:
        rest = [dask.delayed(operator.add)(*pair) for pair in zip(rest[::2], rest[1::2], strict=True)]
    return rest[0]


#: Programs by name: each takes a salt.
COLLECTIONS: Mapping[str, Callable[[str], Any]] = {
    one.__name__: one
    for one in (
        *(
            quadratic_mean,
            anom_mean,
            climatology,
            vorticity,
            double_diff,
            dot_product,
            basic_sum,
            map_overlap,
        ),
        *(tiles_to_rows, swap_axes, standardize, qr, hist, timeseries_groupby, timeseries_shuffle),
        *(timeseries_join, set_index, timeseries_std, rolling, delayed_tree),
    )
} | {f"month_{method}": partial(_monthly, method=method) for method in ("cohorts", "map-reduce")}


def queries(data: Path, scale: float) -> Mapping[str, Callable[[str], Any]]:
    """Return the queries of TPC-H by name, `q01` to `q22`; writes the tables unless they are there."""
    folder = tables(data, scale)

    def read(table: str, *columns: str) -> Any:
        import dask.dataframe as dd

        return dd.read_parquet(folder / table, columns=list(columns))

    return {f"q{n:02}": lambda _, query=query: query(read) for n, query in enumerate(QUERIES, 1)}
