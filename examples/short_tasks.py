"""Short tasks on four workers, by Dask and with ferroflow: seconds, the median of some runs.

    python short_tasks.py            # --quick: a tenth of the tasks, once

With ferroflow, collections go through `optimize`, which is part of what is measured.
"""

import argparse
import statistics
import time

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


def tree(n):
    level = [dask.delayed(nothing)(i) for i in range(n)]
    while len(level) > 1:
        level = [dask.delayed(nothing)(*level[i : i + 2]) for i in range(0, len(level), 2)]
    return level[0]


def statistics_of(x):
    return x.mean() + x.sum()


def seconds(repeat, function, *arguments):
    function(*arguments)  # what tasks take is learned, and the cluster is measured
    spent = []
    for _ in range(repeat):
        start = time.perf_counter()
        function(*arguments)
        spent.append(time.perf_counter() - start)
    return statistics.median(spent)


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
    bag = db.from_sequence(range(400 * n), npartitions=40 * n)
    collections = {
        f"a tree of {2 * n_leaves - 1:,} tasks": tree(n_leaves),
        f"a bag of {40 * n} partitions": bag.map(nothing).sum(),
        f"mean and sum of {10 * n} chunks": statistics_of(da.ones((1000 * n, 100), chunks=100)),
    }
    with LocalCluster(n_workers=4, threads_per_worker=1) as cluster, Client(cluster) as client:

        def compute(collection):
            collection.compute()

        def compute_optimized(collection):
            ferroflow_dask.optimize(collection, client).compute()

        runs = {"Dask": compute, "ferroflow": compute_optimized}
        found = {name: [] for name in (*calls, *collections)}
        for scheduler, run in runs.items():
            if scheduler == "ferroflow":
                ferroflow_dask.install(client)
            for name, (function, size) in calls.items():
                found[name].append(seconds(repeat, function, client, size))
            for name, collection in collections.items():
                found[name].append(seconds(repeat, run, collection))
    for name, (stock_s, ours_s) in found.items():
        print(f"{name}: Dask {stock_s:.3f} s, ferroflow {ours_s:.3f} s")
