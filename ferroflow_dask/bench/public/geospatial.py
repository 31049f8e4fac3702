"""Geospatial shapes: four analyses of weather and water data, on random fields.

After the geospatial workloads of coiled/benchmarks (BSD-3), which come from Pangeo's discussions, from
dcherian/dask-demo (zonal average) and from WeatherBench 2 (climatology). Deviations: a field is made by
seeded tasks, one for each block, instead of being read. A result is reduced on the cluster instead of being
written. Blocks are small, so that tasks and messages are most of the cost. All years have equally many days.
Answers are those of the same program in this process.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from ferroflow_dask.bench.public.base import Clock, Program
from ferroflow_dask.bench.workloads.collection import random_array

if TYPE_CHECKING:
    from distributed import Client

_SEED = 0
#: Steps of a day in climatologies.
_SIX_HOURLY = 4
#: Side of the square blocks of zonal averages and of those that have all times.
_SIDE = 8
_LEVELS = 2
_WINDS = ("U", "V", "W", "T")


def _field(salt: str, shape: tuple[int, ...], chunks: tuple[int, ...], index: int = 0) -> Any:
    return random_array(_SEED, salt, shape, chunks, index=index)


# Zonal average: the mean of a raster over the cells of each zone, for each time


def _zones(side: int, zones: int) -> Any:
    """Return the zone of each cell: neighbouring cells have the same more often than not."""
    corners = np.random.default_rng(_SEED).integers(0, zones, (side // 2, side // 2))
    return corners.repeat(2, axis=0).repeat(2, axis=1)


def _zonal_average(salt: str, *, times: int, side: int, zones: int) -> Any:
    import flox.xarray
    import xarray as xr

    cells = _field(salt, (times, side, side), (1, _SIDE, _SIDE))
    raster = xr.DataArray(cells, dims=("time", "y", "x"))
    places = xr.DataArray(_zones(side, zones), dims=("y", "x"), name="zone").chunk(_SIDE)
    return flox.xarray.xarray_reduce(raster, places, func="mean", expected_groups=(np.arange(zones),))


# Climatology: means by hour and day of the year, over years and neighbouring days


def _smoothed_means(series: Any, days: int, window: int) -> Any:
    """Average (time, y, x) to (day · hour, y, x), with weights that fall linearly on both sides of a day."""
    half = window // 2
    means = series.reshape(-1, days, _SIX_HOURLY, *series.shape[1:]).mean(axis=0)
    weights = 1 - np.abs(np.arange(-half, half + 1)) / half
    shifted = (w * np.roll(means, i - half, axis=0) for i, w in enumerate(weights / weights.sum()))
    return sum(shifted).reshape(-1, *series.shape[1:])


def _by_cell(days: Any) -> Any:
    """Sum each day's cells, weighted by position so that a block in a wrong place changes the sum."""
    return (days * np.arange(days[0].size).reshape(days[0].shape)).sum(axis=(1, 2))


def _climatology(salt: str, *, years: int, days: int, window: int, side: int) -> Any:
    maps = _field(salt, (years * days * _SIX_HOURLY, side, side), (1, side, side))
    series = maps.rechunk((-1, _SIDE, _SIDE))
    chunks = (days * _SIX_HOURLY, *series.chunks[1:])
    means = series.map_blocks(_smoothed_means, days, window, chunks=chunks, meta=series._meta)
    return means.rechunk((1, side, side)).map_blocks(_by_cell, drop_axis=(1, 2), meta=np.empty(0))


# Rechunking: from maps, one for each time, to time series


def _by_time(series: Any) -> Any:
    """Sum over time, weighted by position."""
    return np.tensordot(np.arange(len(series), dtype=float), series, 1)


def _rechunking(salt: str, *, times: int, side: int) -> Any:
    series = _field(salt, (times, side, side), (1, side, side)).rechunk((-1, _SIDE, _SIDE))
    return series.map_blocks(_by_time, drop_axis=0, meta=np.empty((0, 0)))


# Atmospheric circulation: zonal means of winds and of the products of their deviations, by day


def _circulation(salt: str, *, days: int, steps: int, side: int) -> Any:
    import pandas as pd
    import xarray as xr

    dims = ("time", "level", "latitude", "longitude")
    shape = (days * steps, _LEVELS, side, side)
    arrays = {name: _field(salt, shape, (1, *shape[1:]), index=i) for i, name in enumerate(_WINDS)}
    times = pd.date_range("2020-01-01", periods=days * steps, freq=f"{24 // steps}h")
    winds = xr.Dataset({name: (dims, array) for name, array in arrays.items()}, {"time": times})
    eddies = winds - winds.mean("longitude")
    fluxes = {one + other: eddies[one] * eddies[other] for one, other in ("UV", "VT", "UW")}
    return winds.assign(fluxes).mean("longitude").resample(time="D").mean()


# Programs

#: For each: builds the collection; sizes of the quick and the full form; what it needs.
_SHAPES: Sequence[tuple[Any, ...]] = (
    (
        _zonal_average,
        {"times": 10, "side": 32, "zones": 20},
        {"times": 1_200, "side": 64, "zones": 20},
        ("flox", "xarray"),
    ),
    (
        _climatology,
        {"years": 2, "days": 20, "window": 7, "side": 16},
        {"years": 64, "days": 365, "window": 61, "side": 16},
        (),
    ),
    (_rechunking, {"times": 200, "side": 16}, {"times": 96_000, "side": 16}, ()),
    (
        _circulation,
        {"days": 2, "steps": 4, "side": 16},
        {"days": 60, "steps": 24, "side": 16},
        ("pandas", "xarray"),
    ),
)


def _run(build: Callable[..., Any], sizes: Mapping[str, int], client: Client, clock: Clock) -> Any:
    salt = uuid.uuid4().hex  # no run finds the results of another
    # Dask chooses how to rechunk by the current client, as users have it.
    with client.as_current(), clock:
        return build(salt, **sizes).compute()


def _expected(build: Callable[..., Any], sizes: Mapping[str, int]) -> Any:
    return build("the answer", **sizes).compute(scheduler="threads")


def programs(is_full: bool) -> Sequence[Program]:
    """Return the programs: hundreds of tasks each, or about 100,000 in the full form."""
    return [
        Program(
            suite="shapes",
            name=build.__name__.lstrip("_"),
            source="after coiled/benchmarks, geospatial (BSD-3)",
            run=partial(_run, build, sizes),
            sizes=sizes,
            expected=partial(_expected, build, sizes),
            skipped=f"needs {', '.join(lacking)}" if lacking else "",
        )
        for build, quick, full, packages in _SHAPES
        for sizes in (full if is_full else quick,)
        for lacking in ([name for name in packages if not find_spec(name)],)
    ]
