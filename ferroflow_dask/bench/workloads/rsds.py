"""The RSDS suite: ten Dask programs of Böhm and Beránek.

S. Böhm, J. Beránek: "Runtime vs Scheduler: Analyzing Dask's Overheads", WORKS'20, arXiv 2010.11105. Sizes
have the paper's meaning and names close to its own; defaults are for a machine of a few cores, where the
paper had 24 to 168 workers. Deviations: random inputs are made by tasks from a seed instead of being read or
downloaded (texts, people, air temperatures); vectorizer and wordbag are written with dask.bag instead of
scikit-learn and Wordbatch; xarray averages the squares of
anomalies instead of adding anomalies up, so that no two errors cancel.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
from dask.base import annotate
from dask.delayed import delayed

from ferroflow_dask.annotations import COST_ANNOTATION
from ferroflow_dask.bench.workloads import texts
from ferroflow_dask.bench.workloads.base import Instance, Request, Workload
from ferroflow_dask.bench.workloads.collection import (
    Recipe,
    block,
    instance,
    of_collection,
    random_array,
    random_values,
    share,
    token,
)

# merge, merge_slow, tree: many small tasks


def _numbers(seed: int, n: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, 1_000_000, n)]


def _ten_times(x: int) -> int:
    return 10 * x


def _merge(seed: int, salt: str, *, n: int) -> Any:
    ten_times, name = delayed(_ten_times), f"ten_times-{token(salt)}"
    values = [ten_times(x, dask_key_name=(name, i)) for i, x in enumerate(_numbers(seed, n))]
    return delayed(sum)(values, dask_key_name=f"merge-{token(salt)}")


def _merge_answer(seed: int, *, n: int) -> int:
    return 10 * sum(_numbers(seed, n))


def _after(seconds: float, x: int) -> int:
    time.sleep(seconds)
    return x


def _merge_slow(seed: int, salt: str, *, n: int, seconds: float, **annotations: float) -> Any:
    after, name = delayed(_after), f"after-{token(salt)}"
    with annotate(**annotations):
        values = [after(seconds, x, dask_key_name=(name, i)) for i, x in enumerate(_numbers(seed, n))]
    return delayed(sum)(values, dask_key_name=f"merge-{token(salt)}")


def _merge_slow_declared(seed: int, salt: str, *, n: int, seconds: float) -> Any:
    # The merging task takes next to no time.
    return _merge_slow(seed, salt, n=n, seconds=seconds, **{COST_ANNOTATION: seconds})


def _merge_slow_answer(seed: int, *, n: int, **_: float) -> int:
    return sum(_numbers(seed, n))


def _build_merge_slow(request: Request) -> Instance:
    n, seconds = request.arguments["n"], request.arguments["seconds"]
    collect = _merge_slow_declared if request.costs == "known" else _merge_slow
    built = instance("merge_slow", Recipe(collect, _merge_slow_answer), request)
    return replace(built, t1_s=n * seconds, t_inf_s=seconds)


def _add(x: int, y: int) -> int:
    return x + y


def _tree(seed: int, salt: str, *, height: int) -> Any:
    add, name = delayed(_add), f"add-{token(salt)}"
    level: list[Any] = _numbers(seed, 2**height)
    for depth in range(height):
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [add(x, y, dask_key_name=(name, depth, i)) for i, (x, y) in enumerate(pairs)]
    return level[0]


def _tree_answer(seed: int, *, height: int) -> int:
    return sum(_numbers(seed, 2**height))


# xarray, numpy: arrays

#: Six-hourly temperatures of two years on a grid of 25 × 53, like the tutorial's data that the paper reads.
_AIR = (2920, 25, 53)


def _xarray(seed: int, salt: str, *, n: int) -> Any:
    import pandas as pd
    import xarray as xr

    times = pd.date_range("2013-01-01", periods=_AIR[0], freq="6h")
    values = random_array(seed, salt, _AIR, (-1, n, n))
    air = xr.DataArray(values, dims=("time", "lat", "lon"), coords={"time": times})
    return ((air - air.groupby("time.month").mean("time")) ** 2).mean("time")


def _xarray_answer(seed: int, *, n: int) -> Any:
    import pandas as pd

    months = pd.date_range("2013-01-01", periods=_AIR[0], freq="6h").month
    air = random_values(seed, _AIR, (-1, n, n))
    means = np.stack([air[months == month].mean(axis=0) for month in range(1, 13)])
    # mean (x − m)² = mean x² − 2 m mean x + m²
    return (air**2).mean(axis=0) - 2 * means * air.mean(axis=0) + means**2


def _by_month(found: Any) -> Any:
    return found.transpose("month", "lat", "lon").values


def _numpy(seed: int, salt: str, *, n: int, p: int) -> Any:
    x = random_array(seed, salt, (n, n), (block(n, p), block(n, p)))
    return (x + x.T)[::2, n // 2 :].mean(axis=1).sum()


def _numpy_answer(seed: int, *, n: int, p: int) -> Any:
    x = random_values(seed, (n, n), (block(n, p), block(n, p)))
    return (x + x.T)[::2, n // 2 :].mean(axis=1).sum()


# bag, vectorizer, wordbag: Python objects


def _ages_and_lengths(seed: int, partition: int, n: int) -> Any:
    """Return the ages of `n` people and how long their names are."""
    return np.random.default_rng([seed, partition]).integers([18, 3], [80, 12], (n, 2)).T


def _people(seed: int, partition: int, n: int) -> list[dict[str, Any]]:
    ages, lengths = _ages_and_lengths(seed, partition, n).tolist()
    return [{"age": age, "name": "x" * length} for age, length in zip(ages, lengths, strict=True)]


def _is_over_30(person: dict[str, Any]) -> bool:
    return bool(person["age"] > 30)


def _is_first_older(pair: tuple[dict[str, Any], dict[str, Any]]) -> bool:
    return bool(pair[0]["age"] > pair[1]["age"])


def _name_length(person: dict[str, Any]) -> int:
    return len(person["name"])


def _bag(seed: int, salt: str, *, n: int, p: int) -> Any:
    people = texts.bag_of(_people, seed, salt, n=n, partitions=p).filter(_is_over_30)
    return people.product(people).filter(_is_first_older).pluck(1).map(_name_length).sum()


def _bag_answer(seed: int, *, n: int, p: int) -> int:
    people = [_ages_and_lengths(seed, partition, share(n, p, partition)) for partition in range(p)]
    ages, lengths = np.concatenate(people, axis=1)
    # Each one of the younger counts once for every older person, whatever the order of the pairs.
    by_age = np.bincount(ages, minlength=81)
    n_older = np.cumsum(by_age[::-1])[::-1][ages + 1]
    return int((lengths * n_older)[ages > 30].sum())


def _count_bag(*, p: int, **_: int) -> int:
    """Count partitions made, partitions filtered, and pairs of partitions worked off.

    Which of them Dask fuses depends on the order of sets of their names: there are a few tasks more or less.
    """
    return 2 * p + p**2


# groupby, join: frames


def _timeseries(seed: int, salt: str, dtypes: dict[str, type], *, days: int, seconds: int, hours: int) -> Any:
    from dask.dataframe import demo

    # There is no column called "key", so that this option changes the names of the tasks and nothing else.
    options = {"key_salt": salt, "id_lam": 100}
    start, end = np.datetime64("2020-01-01"), np.datetime64("2020-01-01") + np.timedelta64(days, "D")
    return demo.make_timeseries(str(start), str(end), dtypes, f"{seconds}s", f"{hours}h", seed, **options)


_GROUPED: dict[str, type] = {"id": int, "name": str, "x": float, "y": float}
_JOINED: dict[str, type] = {"value": float, "name": str, "id": int}


def _groupby(seed: int, salt: str, **sizes: int) -> Any:
    df = _timeseries(seed, salt, _GROUPED, **sizes)
    by_name = df.groupby("name").x.mean().sum()
    return by_name + df[(df.x > 0) | (df.y < 0)].x.resample("2s").mean().sum()


def _groupby_answer(seed: int, **sizes: int) -> Any:
    df = _timeseries(seed, "", _GROUPED, **sizes).compute(scheduler="synchronous")
    chosen = df[(df.x > 0) | (df.y < 0)].x
    return df.x.groupby(df.name).mean().sum() + chosen.groupby(chosen.index.floor("2s")).mean().sum()


def _join(seed: int, salt: str, **sizes: int) -> Any:
    df = _timeseries(seed, salt, _JOINED, **sizes)
    # Named, since without a default client Dask would choose a shuffle on one machine's disk.
    both = df.merge(df, on="id", how="inner", shuffle_method="p2p")
    return (both.value_x + both.value_y).sum()


def _join_answer(seed: int, **sizes: int) -> Any:
    df = _timeseries(seed, "", _JOINED, **sizes).compute(scheduler="synchronous")
    by_id = df.value.groupby(df.id)
    # In the pairs of an id each of its rows is on either side as often as the id occurs.
    return 2 * (by_id.sum() * by_id.count()).sum()


def _of(name: str, summary: str, recipe: Recipe, defaults: dict[str, Any], **options: Any) -> Workload:
    return of_collection(name, summary, recipe, defaults=defaults, family="rsds", **options)


_FRAME = ("pandas", "pyarrow")

RSDS: tuple[Workload, ...] = (
    _of("merge", "trivial tasks into one", Recipe(_merge, _merge_answer), {"n": 1000}, small={"n": 100}),
    Workload(
        "merge_slow",
        "sleeping tasks into one",
        _build_merge_slow,
        {"n": 100, "seconds": 0.05},
        {"n": 40, "seconds": 0.01},
        family="rsds",
    ),
    _of(
        "tree",
        "binary reduction of 2^height numbers",
        Recipe(_tree, _tree_answer),
        {"height": 10},
        small={"height": 6},
    ),
    _of(
        "xarray",
        "squared distances to the mean of each month, averaged over time, in blocks of n × n",
        Recipe(_xarray, _xarray_answer, _by_month),
        {"n": 13},
        small={"n": 25},
        needs=("pandas", "xarray"),
    ),
    _of(
        "bag",
        "product of n filtered people with themselves, filtered and summed, in p partitions",
        Recipe(_bag, _bag_answer, count=_count_bag),
        {"n": 1600, "p": 16},
        small={"n": 200, "p": 4},
    ),
    _of(
        "numpy",
        "an n × n array plus its transpose, a part of it summed, in p × p blocks",
        Recipe(_numpy, _numpy_answer),
        {"n": 4000, "p": 16},
        small={"n": 400, "p": 4},
    ),
    _of(
        "groupby",
        "means by name and by two seconds of a time series of so many days",
        Recipe(_groupby, _groupby_answer),
        {"days": 2, "seconds": 1, "hours": 1},
        small={"days": 1, "seconds": 60, "hours": 4},
        needs=_FRAME,
    ),
    _of(
        "join",
        "a time series joined with itself on an id of a hundred values",
        Recipe(_join, _join_answer),
        {"days": 1, "seconds": 10, "hours": 2},
        small={"days": 1, "seconds": 120, "hours": 6},
        needs=_FRAME,
    ),
    _of(
        "vectorizer",
        "words and pairs of words of n texts hashed into features, in p partitions",
        Recipe(texts.vectorizer, texts.vectorizer_answer),
        {"n": 20_000, "p": 40, "features": 4096},
        small={"n": 400, "p": 4, "features": 256},
    ),
    _of(
        "wordbag",
        "the most frequent words of n texts, in p partitions",
        Recipe(texts.wordbag, texts.wordbag_answer),
        {"n": 20_000, "p": 40, "top": 20},
        small={"n": 400, "p": 4},
    ),
)
