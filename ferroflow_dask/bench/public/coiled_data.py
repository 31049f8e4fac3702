"""Random data sets instead of those that tests of coiled/benchmarks read from a cloud.

Names, dimensions and the number of chunks along each axis of a selection are those of the Zarr store. The
grid is smaller, and so are its chunks, so that a selection fits four workers with 1 GiB each. A table has the
types of the real columns, and fewer rows and files.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ferroflow_dask.exceptions import UnknownNameError

_SEED = 0


# NOAA, National Water Model 2.1: (122,479, 15,360, 18,432) in chunks of (224, 350, 350), by NCAR's
# rechunk_retro_nwm_v21. The test reads 2 years of 8 × 8 chunks, which are 10 × 10 times smaller here.
WATER = "s3://noaa-nwm-retrospective-2-1-zarr-pds/rtout.zarr"
_CHUNKS, _N_CHUNKS = (224, 35, 35), 8

# Trips of the New York City Taxi and Limousine Commission, high volume for-hire vehicles; 265 zones.
TRIPS = "s3://coiled-datasets/uber-lyft-tlc/"
_WORDS = ("hvfhs_license_num", "dispatching_base_num", "originating_base_num", "wav_request_flag")
_TIMES = ("request_datetime", "on_scene_datetime", "pickup_datetime", "dropoff_datetime")
_NUMBERS = ("trip_miles", "base_passenger_fare", "tolls", "sales_tax", "tips", "driver_pay")
#: Columns of integers, and the largest integer of each.
_KEYS = {"PULocationID": 265, "DOLocationID": 265, "trip_time": 7200}
#: One partition for each file.
_FILES, _ROWS = 40, 50_000


def _trips(file: int) -> Any:
    """Return a partition as a data frame."""
    import pandas as pd

    rng, n = np.random.default_rng([_SEED, file]), _ROWS
    start, seconds = np.datetime64("2019-02-01", "us"), 365 * 24 * 3600
    columns = {name: rng.choice(["HV0002", "HV0003", "HV0004", "HV0005"], n) for name in _WORDS}
    columns |= {name: start + rng.integers(0, seconds, n).astype("m8[s]") for name in _TIMES}
    columns |= {name: rng.integers(1, most, n, endpoint=True) for name, most in _KEYS.items()}
    return pd.DataFrame(columns | {name: rng.random(n) for name in _NUMBERS})


def read_parquet(path: str, *_: Any, **__: Any) -> Any:
    """Return a Dask data frame of random rows, the same for each call; for `dask.dataframe.read_parquet`.

    Raises
    ------
    UnknownNameError
        There is no table of this URL.
    """
    import dask.dataframe as dd

    if path != TRIPS:
        raise UnknownNameError.of("table", path, [TRIPS])
    return dd.from_map(_trips, range(_FILES), meta=_trips(0).iloc[:0], label="read-parquet")


def get_mapper(url: str, *_: Any, **__: Any) -> str:
    """Return the URL; for `fsspec.get_mapper`, which needs a package for each cloud."""
    return url


def open_zarr(store: str, *_: Any, **__: Any) -> Any:
    """Return a data set of random numbers in [0, 1), the same for each call; for `xarray.open_zarr`.

    Raises
    ------
    UnknownNameError
        There is no store of this URL.
    """
    import dask.array as da
    import pandas as pd
    import xarray as xr

    if store != WATER:
        raise UnknownNameError.of("Zarr store", store, [WATER])
    times = pd.date_range("2000-01-01", "2003-12-31T21:00", freq="3h")
    shape = (len(times), *(_N_CHUNKS * length for length in _CHUNKS[1:]))
    table = da.random.default_rng(_SEED).random(shape, chunks=_CHUNKS)
    return xr.Dataset({"zwattablrt": (("time", "y", "x"), table)}, coords={"time": times})
