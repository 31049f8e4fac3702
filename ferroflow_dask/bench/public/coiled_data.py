"""Random data sets instead of those that tests of coiled/benchmarks read from a cloud.

Names, dimensions and the number of chunks along each axis of a selection are those of the Zarr store. The
grid is smaller, and so are its chunks, so that a selection fits four workers with 1 GiB each. A table has the
types of the real columns, and fewer rows and files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ferroflow_dask.exceptions import UnknownNameError

_SEED = 0


@dataclass(frozen=True, slots=True)
class Store:
    """Part of a store that a test reads.

    Parameters
    ----------
    variables : tuple of str
        Each has all dimensions.
    start, stop, every : str
        The first dimension, which is time, as pandas takes it.
    dims : mapping of str to int
        Length of each dimension; that of time follows from its range.
    chunks : tuple of int
        In the order of the dimensions.
    """

    variables: tuple[str, ...]
    start: str
    stop: str
    every: str
    dims: Mapping[str, int]
    chunks: tuple[int, ...]


#: By URL.
STORES = {
    # NOAA, National Water Model 2.1: (122,479, 15,360, 18,432) in chunks of (224, 350, 350), by NCAR's
    # rechunk_retro_nwm_v21. The test reads 2 years of 8 × 8 chunks, which are 10 × 10 times smaller here.
    "s3://noaa-nwm-retrospective-2-1-zarr-pds/rtout.zarr": Store(
        variables=("zwattablrt",),
        start="2000-01-01",
        stop="2003-12-31T21:00",
        every="3h",
        dims={"y": 8 * 35, "x": 8 * 35},
        chunks=(224, 35, 35),
    ),
}


@dataclass(frozen=True, slots=True)
class Table:
    """Table of a test.

    Parameters
    ----------
    words, times, numbers : tuple of str
        Columns of strings, of times and of doubles.
    keys : mapping of str to int
        Columns of integers, and the largest integer of each.
    files, rows : int
        One partition for each file, of as many rows.
    """

    words: tuple[str, ...]
    times: tuple[str, ...]
    numbers: tuple[str, ...]
    keys: Mapping[str, int]
    files: int
    rows: int

    def __call__(self, file: int) -> Any:
        """Return a partition as a data frame."""
        import pandas as pd

        rng, n = np.random.default_rng([_SEED, file]), self.rows
        start, seconds = np.datetime64("2019-02-01", "us"), 365 * 24 * 3600
        columns = {name: rng.choice(["HV0002", "HV0003", "HV0004", "HV0005"], n) for name in self.words}
        columns |= {name: start + rng.integers(0, seconds, n).astype("m8[s]") for name in self.times}
        columns |= {name: rng.integers(1, most, n, endpoint=True) for name, most in self.keys.items()}
        return pd.DataFrame(columns | {name: rng.random(n) for name in self.numbers})


#: By URL.
TABLES = {
    # Trips of the New York City Taxi and Limousine Commission, high volume for-hire vehicles; 265 zones.
    "s3://coiled-datasets/uber-lyft-tlc/": Table(
        words=("hvfhs_license_num", "dispatching_base_num", "originating_base_num", "wav_request_flag"),
        times=("request_datetime", "on_scene_datetime", "pickup_datetime", "dropoff_datetime"),
        numbers=("trip_miles", "base_passenger_fare", "tolls", "sales_tax", "tips", "driver_pay"),
        keys={"PULocationID": 265, "DOLocationID": 265, "trip_time": 7200},
        files=40,
        rows=50_000,
    ),
}


def read_parquet(path: str, *_: Any, **__: Any) -> Any:
    """Return a Dask data frame of random rows, the same for each call; for `dask.dataframe.read_parquet`.

    Raises
    ------
    UnknownNameError
        `TABLES` lacks the URL.
    """
    import dask.dataframe as dd

    if path not in TABLES:
        raise UnknownNameError.of("table", path, TABLES)
    table = TABLES[path]
    return dd.from_map(table, range(table.files), meta=table(0).iloc[:0], label="read-parquet")


def get_mapper(url: str, *_: Any, **__: Any) -> str:
    """Return the URL; for `fsspec.get_mapper`, which needs a package for each cloud."""
    return url


def open_zarr(store: str, *_: Any, **__: Any) -> Any:
    """Return a data set of random numbers in [0, 1), the same for each call; for `xarray.open_zarr`.

    Raises
    ------
    UnknownNameError
        `STORES` lacks the URL.
    """
    import dask.array as da
    import pandas as pd
    import xarray as xr

    if store not in STORES:
        raise UnknownNameError.of("Zarr store", store, STORES)
    described = STORES[store]
    times = pd.date_range(described.start, described.stop, freq=described.every)
    shape = (len(times), *described.dims.values())
    rng = da.random.default_rng(_SEED)
    names = ("time", *described.dims)
    arrays = {
        variable: (names, rng.random(shape, chunks=described.chunks)) for variable in described.variables
    }
    return xr.Dataset(arrays, coords={"time": times})
