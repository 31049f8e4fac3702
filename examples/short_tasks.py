"""Short tasks on four workers: median times [s] of Dask and of ferroflow.

    python short_tasks.py            # --quick: a tenth of the tasks, one run

The first run of each program is not counted: the plugin learns durations in it.
"""

import argparse
import statistics
import time
from functools import partial
from itertools import count

import dask
import dask.array as da
import dask.bag as db
from distributed import Client, LocalCluster

import ferroflow_dask


def nothing(*_):
    return 1


def independent(client, n):
    client.gather(client.map(nothing, range(n), pure=False))


def chain(client, n):
    future = client.submit(nothing, pure=False)
    for _ in range(n - 1):
        future = client.submit(nothing, future, pure=False)
    future.result()


def loop(client, n):
    for _ in range(n):
        client.submit(nothing, pure=False).result()


def tree(n_leaves):
    level = [dask.delayed(nothing)(i) for i in range(n_leaves)]
    while len(level) > 1:
        level = [dask.delayed(nothing)(*level[i : i + 2]) for i in range(0, len(level), 2)]
    return level[0]


def bag(n_partitions, run):
    return db.from_sequence(range(run, run + 10 * n_partitions), npartitions=n_partitions).map(nothing).sum()


def mean_and_sum(n_chunks, run):
    x = da.full((100 * n_chunks, 100), run, chunks=100)
    return x.mean() + x.sum()


#: A new number for each run, because Dask may still hold results under the keys of an earlier run.
runs = count()


def seconds(repeat, prepare, function):
    spent = []
    for _ in range(repeat + 1):
        argument = prepare(next(runs))
        start = time.perf_counter()
        function(argument)
        spent.append(time.perf_counter() - start)
    return statistics.median(spent[1:])  # the first run learns durations


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    is_quick = parser.parse_args().quick
    n, repeat = (1, 1) if is_quick else (10, 5)
    calls = {
        f"{100 * n:,} independent tasks": (independent, 100 * n),
        f"a chain of {30 * n} tasks": (chain, 30 * n),
        f"{10 * n} times submit and result": (loop, 10 * n),
    }
    n_leaves = 64 if is_quick else 512
    collections = {
        f"a tree of {2 * n_leaves - 1:,} tasks": lambda _: tree(n_leaves),
        f"a bag of {40 * n} partitions": lambda run: bag(40 * n, run),
        f"mean and sum of {10 * n} chunks": lambda run: mean_and_sum(10 * n, run),
    }
    with LocalCluster(n_workers=4, threads_per_worker=1) as cluster, Client(cluster) as client:
        found = {name: [] for name in (*calls, *collections)}
        for scheduler in ("Dask", "ferroflow"):
            if scheduler == "ferroflow":
                ferroflow_dask.install(client)
            for name, (function, size) in calls.items():
                found[name].append(seconds(repeat, lambda _, size=size: size, partial(function, client)))
            for name, make in collections.items():
                found[name].append(seconds(repeat, make, lambda one: one.compute()))
    for name, (stock_s, ours_s) in found.items():
        print(f"{name}: Dask {stock_s:.3f} s, ferroflow {ours_s:.3f} s")
