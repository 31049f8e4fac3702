"""Programs that people write first, on four workers: times without a cluster, of Dask and of ferroflow.

    python first_programs.py            # --quick: one run of each
    python first_programs.py "svd" "word count"

The first run of each program is not counted: the plugin learns durations in it. Each run has new data.
"""

import argparse
import json
import operator
import statistics
import time
from itertools import count

import dask
import dask.array as da
import dask.bag as db
import numpy as np
import pandas as pd
from dask import delayed
from dask.datasets import timeseries
from distributed import Client, LocalCluster
from distributed.diagnostics.plugin import SchedulerPlugin

import ferroflow_dask

#: A new number for each run, because Dask may still hold results under the keys of an earlier run.
new = count(1)
WORDS = ("the quick brown fox jumps over the lazy dog and runs away from the big bad wolf " * 200).split()


def array(n=2000, m=200, chunks=(100, 100)):
    return da.random.default_rng(next(new)).random((n, m), chunks=chunks)


def frame():
    return timeseries("2000-01-01", "2000-01-04", freq="30s", partition_freq="2h", seed=next(new))


def scaled(x, k):
    return x * k


def score(a, b, c):
    x = np.arange(2000.0)
    return float((np.sin(x * a) + b * np.cos(x * c)).sum())


def image(i):
    return np.full((64, 64), i, float)


def blur(a):
    return (a + np.roll(a, 1, 0) + np.roll(a, 1, 1)) / 3


def edges(a):
    return np.abs(np.diff(a, axis=0)).sum()


def tree(n):
    level = [n + i for i in range(256)]
    add = delayed(operator.add)
    while len(level) > 1:
        level = [add(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def filtered(n):
    images = [delayed(image)(i + n) for i in range(200)]
    return delayed(sum)([delayed(edges)(delayed(blur)(delayed(blur)(one))) for one in images])


def grid(n):
    options = [(a + n * 1e-9, b, c) for a in range(6) for b in range(6) for c in range(6)]
    return delayed(max)([delayed(score)(*one) for one in options])


def nested(n):
    groups = [[delayed(scaled)(i + n, 3) for i in range(j, j + 20)] for j in range(0, 400, 20)]
    return delayed(sum)([delayed(sum)(group) for group in groups])


def words(n):
    lines = [" ".join(WORDS[i : i + 50]) for i in range(0, 2000, 2)]
    counted = db.from_sequence([*lines, str(n)], npartitions=40).map(str.split).flatten().frequencies()
    return counted.topk(5, key=1)


def records(n):
    lines = [json.dumps({"a": i, "b": i % 7 + n}) for i in range(2000)]
    return db.from_sequence(lines, npartitions=40).map(json.loads).pluck("b").fold(operator.add, initial=0)


def joined(f):
    return f.merge(pd.DataFrame({"name": ["Alice", "Bob"], "k": [1, 2]}), on="name").k.sum()


def circle(n):
    points = da.random.default_rng(n).random((1_000_000, 2), chunks=(20_000, 2))
    return 4 * ((points**2).sum(axis=1) < 1).mean()


PROGRAMS = {
    "array mean": lambda: array().mean(),
    "array std": lambda: array().std(axis=0),
    "array statistics": lambda: (lambda x: x.mean() + x.std() + x.max() - x.min())(array()),
    "standardize": lambda: (lambda x: ((x - x.mean(axis=0)) / x.std(axis=0)).sum())(array()),
    "transpose": lambda: (lambda x: (x + x.T).sum())(array(1000, 1000, (125, 125))),
    "matrix product": lambda: (lambda x: x.dot(x.T).sum())(array(800)),
    "map_blocks": lambda: array().map_blocks(np.sqrt).sum(),
    "map_overlap": lambda: array(chunks=(100, 200)).map_overlap(blur, depth=1, boundary="reflect").mean(),
    "cumulative sum": lambda: array(4000, 50, (100, 50)).cumsum(axis=0)[-1].sum(),
    "histogram": lambda: da.histogram(array(), bins=20, range=(0, 1))[0],
    "svd": lambda: da.linalg.svd(array(2000, 20, (100, 20)))[1],
    "slices": lambda: array()[::3, ::2].sum(axis=1).max(),
    "where": lambda: (lambda x: da.where(x > 0.5, x, 0).sum())(array()),
    "column mean": lambda: frame().x.mean(),
    "filtered rows": lambda: (lambda f: f[f.x > 0].y.sum())(frame()),
    "new column": lambda: (lambda f: f.assign(z=f.x + f.y).z.max())(frame()),
    "rolling": lambda: frame().x.rolling(10).mean().sum(),
    "resample": lambda: frame().x.resample("6h").mean(),
    "value counts": lambda: frame().name.value_counts(),
    "describe": lambda: frame().describe(),
    "group-by": lambda: frame().groupby("name").x.sum(split_out=1),
    "small join": lambda: joined(frame()),
    "word count": lambda: words(next(new)),
    "bag sum": lambda: db.range(20_000, npartitions=50).map(operator.add, next(new)).sum(),
    "json records": lambda: records(next(new)),
    "grid search": lambda: grid(next(new)),
    "tree": lambda: tree(next(new)),
    "image filters": lambda: filtered(next(new)),
    "nested sums": lambda: nested(next(new)),
    "many small tasks": lambda: (lambda n: delayed(len)([delayed(scaled)(i + n, 2) for i in range(1000)]))(
        next(new)
    ),
    "Monte Carlo": lambda: circle(next(new)),
}


class Counter(SchedulerPlugin):
    """Counts the tasks that finish; a bundle is one task."""

    ferroflow_bundles = True
    n = 0

    def transition(self, key, start, finish, *args, **kwargs):
        self.n += (start, finish) == ("processing", "memory")


async def schedule_with(dask_scheduler, way):
    if way == "Dask":
        await ferroflow_dask.uninstall(dask_scheduler)
    else:
        await ferroflow_dask.install(dask_scheduler)


def measure(program, way, client, counter):
    on_cluster = way in ("Dask", "ferroflow")
    if on_cluster:
        client.run_on_scheduler(schedule_with, way=way)
        time.sleep(0.1)  # workers announce themselves
    collection, n = program(), counter.n
    start = time.perf_counter()
    collection.compute(**({} if on_cluster else {"scheduler": way}))
    return time.perf_counter() - start, counter.n - n


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("programs", nargs="*", default=[*PROGRAMS])
    arguments = parser.parse_args()
    speed_ups = []
    with (
        dask.config.set({"dataframe.convert-string": False}),
        LocalCluster(n_workers=4, threads_per_worker=1) as cluster,
        Client(cluster) as client,
    ):
        counter = Counter()
        cluster.scheduler.add_plugin(counter)
        print("program            sync  threads    Dask  ferroflow [s]   tasks of both")
        for name in arguments.programs:
            runs = {way: [] for way in ("sync", "threads", "Dask", "ferroflow")}
            for _ in range(2 if arguments.quick else 4):
                for way, found in runs.items():
                    found.append(measure(PROGRAMS[name], way, client, counter))
            s = {way: statistics.median(one for one, _ in found[1:]) for way, found in runs.items()}
            n = {way: found[-1][1] for way, found in runs.items()}
            times = f"{s['sync']:7.3f} {s['threads']:7.3f} {s['Dask']:7.3f} {s['ferroflow']:7.3f}"
            print(f"{name:16} {times}         {n['Dask']:5} {n['ferroflow']:5}", flush=True)
            speed_ups.append(s["Dask"] / s["ferroflow"])
    print(f"Dask ÷ ferroflow, geometric mean: {statistics.geometric_mean(speed_ups):.2f}")
