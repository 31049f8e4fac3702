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
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from operator import add
from typing import Any

import numpy as np
from dask.base import annotate
from dask.delayed import delayed

from ferroflow_dask.annotations import COST_ANNOTATION
from ferroflow_dask.bench.workloads.base import Instance, Request, Workload
from ferroflow_dask.bench.workloads.collection import (
    Recipe,
    block,
    instance,
    of_collection,
    random_array,
    share,
    token,
)
from ferroflow_dask.bench.workloads.frames import LOCAL, NEEDS, P2P

_rsds = partial(of_collection, "rsds")

# merge, merge_slow, tree: many small tasks


def _numbers(seed: int, n: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, 1_000_000, n)]


def _ten_times(x: int) -> int:
    return 10 * x


@_rsds("trivial tasks into one", {"n": 1000}, {"n": 100})
def _merge(seed: int, salt: str, *, n: int) -> Any:
    ten_times, name = delayed(_ten_times), f"ten_times-{token(salt)}"
    values = [ten_times(x, dask_key_name=(name, i)) for i, x in enumerate(_numbers(seed, n))]
    return delayed(sum)(values, dask_key_name=f"merge-{token(salt)}")


def _after(seconds: float, x: int) -> int:
    time.sleep(seconds)
    return x


def _merge_slow(seed: int, salt: str, *, n: int, seconds: float, **annotations: float) -> Any:
    after, name = delayed(_after), f"after-{token(salt)}"
    with annotate(**annotations):
        values = [after(seconds, x, dask_key_name=(name, i)) for i, x in enumerate(_numbers(seed, n))]
    return delayed(sum)(values, dask_key_name=f"merge-{token(salt)}")


def _build_merge_slow(request: Request) -> Instance:
    n, seconds = request.arguments["n"], request.arguments["seconds"]
    # The merging task takes next to no time.
    declared = {COST_ANNOTATION: seconds} if request.costs == "known" else {}
    built = instance(Recipe(_merge_slow, local={"seconds": 0.0}), request, **declared)
    return replace(built, t1_s=n * seconds, t_inf_s=seconds)


def _add(x: int, y: int) -> int:
    return x + y


@_rsds("binary reduction of 2^height numbers", {"height": 10}, {"height": 6})
def _tree(seed: int, salt: str, *, height: int) -> Any:
    add, name = delayed(_add), f"add-{token(salt)}"
    level: list[Any] = _numbers(seed, 2**height)
    for depth in range(height):
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [add(x, y, dask_key_name=(name, depth, i)) for i, (x, y) in enumerate(pairs)]
    return level[0]


# xarray, numpy: arrays

#: Six-hourly temperatures of two years on a grid of 25 × 53, like the tutorial's data that the paper reads.
_AIR = (2920, 25, 53)


@_rsds(
    "squared distances to the mean of each month, averaged over time, in blocks of n × n",
    {"n": 13},
    {"n": 25},
    needs=("pandas", "xarray"),
)
def _xarray(seed: int, salt: str, *, n: int) -> Any:
    import pandas as pd
    import xarray as xr

    times = pd.date_range("2013-01-01", periods=_AIR[0], freq="6h")
    values = random_array(seed, salt, _AIR, (-1, n, n))
    air = xr.DataArray(values, dims=("time", "lat", "lon"), coords={"time": times})
    # With flox, which may be installed, the graph would be another one.
    with xr.set_options(use_flox=False):
        return ((air - air.groupby("time.month").mean("time")) ** 2).mean("time")


@_rsds(
    "an n × n array plus its transpose, a part of it summed, in p × p blocks",
    {"n": 4000, "p": 16},
    {"n": 400, "p": 4},
)
def _numpy(seed: int, salt: str, *, n: int, p: int) -> Any:
    x = random_array(seed, salt, (n, n), (block(n, p), block(n, p)))
    return (x + x.T)[::2, n // 2 :].mean(axis=1).sum()


# bag, vectorizer, wordbag: Python objects


def _bag_of(
    make: Callable[[int, int, int], Iterable[Any]], seed: int, salt: str, *, n: int, partitions: int
) -> Any:
    """Return a bag of `n` items; `make` takes the seed, a partition's number and how many items it has."""
    import dask.bag as db

    name = f"{make.__name__.strip('_')}-{token(salt)}"
    parts = [
        delayed(make)(seed, i, share(n, partitions, i), dask_key_name=(name, i)) for i in range(partitions)
    ]
    return db.from_delayed(parts)


def _people(seed: int, partition: int, n: int) -> list[dict[str, Any]]:
    numbers = np.random.default_rng([seed, partition]).integers([18, 3], [80, 12], (n, 2)).tolist()
    return [{"age": age, "name": "x" * length} for age, length in numbers]


def _is_over_30(person: dict[str, Any]) -> bool:
    return bool(person["age"] > 30)


def _is_first_older(pair: tuple[dict[str, Any], dict[str, Any]]) -> bool:
    return bool(pair[0]["age"] > pair[1]["age"])


def _name_length(person: dict[str, Any]) -> int:
    return len(person["name"])


def _count_bag(*, p: int, **_: int) -> int:
    """Count partitions made, partitions filtered, and pairs of partitions worked off.

    Which of them Dask fuses depends on the order of sets of their names: there are a few tasks more or less.
    """
    return 2 * p + p**2


@_rsds(
    "product of n filtered people with themselves, filtered and summed, in p partitions",
    {"n": 1600, "p": 16},
    {"n": 200, "p": 4},
    count=_count_bag,
)
def _bag(seed: int, salt: str, *, n: int, p: int) -> Any:
    people = _bag_of(_people, seed, salt, n=n, partitions=p).filter(_is_over_30)
    return people.product(people).filter(_is_first_older).pluck(1).map(_name_length).sum()


#: Words that texts are made of, words of a text, and the exponent of Zipf's law: English is near 1, and above
#: it the law has a mean.
_N_VOCABULARY, _N_WORDS, _ZIPF_EXPONENT = 5_000, 12, 1.2


def _texts(seed: int, partition: int, n: int) -> list[str]:
    words = np.random.default_rng([seed, partition]).zipf(_ZIPF_EXPONENT, (n, _N_WORDS)) % _N_VOCABULARY
    return [" ".join(f"word{i}" for i in text) for text in words.tolist()]


def _hashed(texts: Iterable[str], features: int) -> list[Any]:
    """Return the sum of the texts' feature vectors of length 1.

    A text's features count its words and pairs of neighbouring words by their hash, as in scikit-learn's
    HashingVectorizer without signs (Weinberger et al.: "Feature Hashing for Large Scale Multitask Learning",
    2009).
    """
    total = np.zeros(features)
    for text in texts:
        words = text.split()
        grams = words + [f"{one} {other}" for one, other in pairwise(words)]
        counts = np.zeros(features)
        for gram in grams:
            counts[zlib.crc32(gram.encode()) % features] += 1
        total += counts / np.linalg.norm(counts)
    return [total]


@_rsds(
    "words and pairs of words of n texts hashed into features, in p partitions",
    {"n": 20_000, "p": 40, "features": 4096},
    {"n": 400, "p": 4, "features": 256},
)
def _vectorizer(seed: int, salt: str, *, n: int, p: int, features: int) -> Any:
    return _bag_of(_texts, seed, salt, n=n, partitions=p).map_partitions(_hashed, features).fold(add)


def _by_count(item: tuple[str, int]) -> tuple[int, str]:
    # Words break ties, so that there is one answer.
    return item[1], item[0]


@_rsds(
    "the most frequent words of n texts, in p partitions",
    {"n": 20_000, "p": 40, "top": 20},
    {"n": 400, "p": 4},
)
def _wordbag(seed: int, salt: str, *, n: int, p: int, top: int) -> Any:
    words = _bag_of(_texts, seed, salt, n=n, partitions=p).map(str.split).flatten()
    return words.frequencies().topk(top, key=_by_count)


# groupby, join: frames


def _timeseries(seed: int, salt: str, dtypes: dict[str, type], *, days: int, seconds: int, hours: int) -> Any:
    from dask.dataframe import demo

    # There is no column called "key", so that this option changes the names of the tasks and nothing else.
    options = {"key_salt": salt, "id_lam": 100}
    start, end = np.datetime64("2020-01-01"), np.datetime64("2020-01-01") + np.timedelta64(days, "D")
    return demo.make_timeseries(str(start), str(end), dtypes, f"{seconds}s", f"{hours}h", seed, **options)


@_rsds(
    "means by name and by two seconds of a time series of so many days",
    {"days": 2, "seconds": 1, "hours": 1},
    {"days": 1, "seconds": 60, "hours": 4},
    needs=NEEDS,
)
def _groupby(seed: int, salt: str, **sizes: int) -> Any:
    df = _timeseries(seed, salt, {"id": int, "name": str, "x": float, "y": float}, **sizes)
    by_name = df.groupby("name").x.mean().sum()
    return by_name + df[(df.x > 0) | (df.y < 0)].x.resample("2s").mean().sum()


@_rsds(
    "a time series joined with itself on an id of a hundred values",
    {"days": 1, "seconds": 10, "hours": 2},
    {"days": 1, "seconds": 120, "hours": 6},
    needs=NEEDS,
    local=LOCAL,
)
def _join(seed: int, salt: str, method: str = P2P, **sizes: int) -> Any:
    df = _timeseries(seed, salt, {"value": float, "name": str, "id": int}, **sizes)
    both = df.merge(df, on="id", how="inner", shuffle_method=method)
    return (both.value_x + both.value_y).sum()


RSDS: tuple[Workload, ...] = (
    _merge,
    Workload(
        "merge_slow",
        "sleeping tasks into one",
        _build_merge_slow,
        {"n": 100, "seconds": 0.05},
        {"n": 40, "seconds": 0.01},
        suite="rsds",
    ),
    *(_tree, _xarray, _bag, _numpy, _groupby, _join, _vectorizer, _wordbag),
)
