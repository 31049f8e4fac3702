"""Geospatial shapes: four analyses of weather and water data, on random fields.

After the geospatial workloads of coiled/benchmarks (BSD-3), which come from Pangeo's discussions, from
dcherian/dask-demo (zonal average) and from WeatherBench 2 (climatology). Deviations: a field is made by
seeded tasks, one for each block, instead of being read. A result is reduced on the cluster instead of being
written. Blocks are small, so that tasks and messages are most of the cost. All years have equally many days.
Answers are computed by NumPy.
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

Fields = Callable[..., Any]


def _lazy(salt: str, shape: tuple[int, ...], chunks: tuple[int, ...], index: int = 0) -> Any:
    return random_array(_SEED, salt, shape, chunks, index=index)


def _whole(*arguments: Any, **options: Any) -> Any:
    return _lazy("the answer", *arguments, **options).compute(scheduler="threads")


# Zonal average: the mean of a raster over the cells of each zone, for each time


def _zones(side: int, zones: int) -> Any:
    """Return the zone of each cell: neighbouring cells have the same more often than not."""
    corners = np.random.default_rng(_SEED).integers(0, zones, (side // 2, side // 2))
    return corners.repeat(2, axis=0).repeat(2, axis=1)


def _raster(field: Fields, times: int, side: int) -> Any:
    return field((times, side, side), (1, _SIDE, _SIDE))


def _zonal_average(salt: str, *, times: int, side: int, zones: int) -> Any:
    import flox.xarray
    import xarray as xr

    raster = xr.DataArray(_raster(partial(_lazy, salt), times, side), dims=("time", "y", "x"))
    places = xr.DataArray(_zones(side, zones), dims=("y", "x"), name="zone").chunk(_SIDE)
    return flox.xarray.xarray_reduce(raster, places, func="mean", expected_groups=(np.arange(zones),))


def _zonal_average_answer(*, times: int, side: int, zones: int) -> Any:
    cells = _raster(_whole, times, side).reshape(times, -1)
    is_in = _zones(side, zones).reshape(-1, 1) == np.arange(zones)
    return cells @ is_in / is_in.sum(axis=0)


# Climatology: means by hour and day of the year, over years and neighbouring days


def _climate(field: Fields, years: int, days: int, side: int) -> Any:
    return field((years * days * _SIX_HOURLY, side, side), (1, side, side))


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
    series = _climate(partial(_lazy, salt), years, days, side).rechunk((-1, _SIDE, _SIDE))
    chunks = (days * _SIX_HOURLY, *series.chunks[1:])
    means = series.map_blocks(_smoothed_means, days, window, chunks=chunks, meta=series._meta)
    return means.rechunk((1, side, side)).map_blocks(_by_cell, drop_axis=(1, 2), meta=np.empty(0))


def _climatology_answer(*, years: int, days: int, window: int, side: int) -> Any:
    return _by_cell(_smoothed_means(_climate(_whole, years, days, side), days, window))


# Rechunking: from maps, one for each time, to time series


def _maps(field: Fields, times: int, side: int) -> Any:
    return field((times, side, side), (1, side, side))


def _by_time(series: Any) -> Any:
    """Sum over time, weighted by position."""
    return np.tensordot(np.arange(len(series), dtype=float), series, 1)


def _rechunking(salt: str, *, times: int, side: int) -> Any:
    series = _maps(partial(_lazy, salt), times, side).rechunk((-1, _SIDE, _SIDE))
    return series.map_blocks(_by_time, drop_axis=0, meta=np.empty((0, 0)))


def _rechunking_answer(*, times: int, side: int) -> Any:
    return _by_time(_maps(_whole, times, side))


# Atmospheric circulation: zonal means of winds and of the products of their deviations, by day


def _winds(field: Fields, times: int, side: int) -> dict[str, Any]:
    shape = (times, _LEVELS, side, side)
    return {name: field(shape, (1, *shape[1:]), index=i) for i, name in enumerate(_WINDS)}


def _fluxes(winds: Any, mean: Callable[[Any], Any]) -> dict[str, Any]:
    eddies = {name: winds[name] - mean(winds[name]) for name in _WINDS}
    return {one + other: eddies[one] * eddies[other] for one, other in ("UV", "VT", "UW")}


def _circulation(salt: str, *, days: int, steps: int, side: int) -> Any:
    import pandas as pd
    import xarray as xr

    dims = ("time", "level", "latitude", "longitude")
    arrays = _winds(partial(_lazy, salt), days * steps, side)
    times = pd.date_range("2020-01-01", periods=days * steps, freq=f"{24 // steps}h")
    winds = xr.Dataset({name: (dims, array) for name, array in arrays.items()}, {"time": times})
    fluxes = _fluxes(winds, lambda wind: wind.mean("longitude"))
    return winds.assign(fluxes).mean("longitude").resample(time="D").mean()


def _circulation_answer(*, days: int, steps: int, side: int) -> Any:
    winds = _winds(_whole, days * steps, side)
    winds |= _fluxes(winds, lambda wind: wind.mean(axis=-1, keepdims=True))
    shape = (days, steps, _LEVELS, side)
    return {name: wind.mean(axis=-1).reshape(shape).mean(axis=1) for name, wind in winds.items()}


# Programs

#: For each: builds the collection; returns its answer; sizes of the quick and the full form; what it needs.
_SHAPES: Sequence[tuple[Any, ...]] = (
    (
        _zonal_average,
        _zonal_average_answer,
        {"times": 10, "side": 32, "zones": 20},
        {"times": 1_200, "side": 64, "zones": 20},
        ("flox", "xarray"),
    ),
    (
        _climatology,
        _climatology_answer,
        {"years": 2, "days": 20, "window": 7, "side": 16},
        {"years": 64, "days": 365, "window": 61, "side": 16},
        (),
    ),
    (_rechunking, _rechunking_answer, {"times": 200, "side": 16}, {"times": 96_000, "side": 16}, ()),
    (
        _circulation,
        _circulation_answer,
        {"days": 2, "steps": 4, "side": 16},
        {"days": 60, "steps": 24, "side": 16},
        ("pandas", "xarray"),
    ),
)


def _run(build: Callable[..., Any], sizes: Mapping[str, int], client: Client, clock: Clock) -> Any:
    salt = uuid.uuid4().hex  # no run finds the results of another
    # Dask chooses how to rechunk by the current client, as users have it.
    with client.as_current(), clock:
        found = build(salt, **sizes).compute()
    if hasattr(found, "data_vars"):
        return {name: array.to_numpy() for name, array in found.data_vars.items()}
    return np.asarray(found)


def programs(is_full: bool) -> Sequence[Program]:
    """Return the programs: hundreds of tasks each, or about 100,000 in the full form."""
    return [
        Program(
            suite="shapes",
            name=build.__name__.lstrip("_"),
            source="after coiled/benchmarks, geospatial (BSD-3)",
            run=partial(_run, build, sizes),
            sizes=sizes,
            expected=partial(answer, **sizes),
            skipped=f"needs {', '.join(lacking)}" if lacking else "",
        )
        for build, answer, quick, full, packages in _SHAPES
        for sizes in (full if is_full else quick,)
        for lacking in ([name for name in packages if not find_spec(name)],)
    ]
