"""Rows of data: `gather`, `scatter`, futures as arguments, datasets, metadata, replicas."""

from __future__ import annotations

from typing import Any

import dask
import numpy as np
from distributed import wait

from matrix.row import row
from matrix.tasks import PlannedError, add, error_of, fail_for, inc, noting_inc, runs, wait_until
from matrix.trial import Trial


@row("gather", "B", "a list, a dict, an iterator and nested futures", covers=("Client.gather",))
def gather(trial: Trial) -> Any:
    client = trial.client
    futures = client.map(inc, range(50))
    nested = {"a": futures[:3], "b": (futures[4], {"c": futures[5]}), "d": 7}
    return (
        client.gather(futures),
        client.gather(nested),
        client.gather(futures[9]),
        list(client.gather(iter(futures))),
    )


@row('gather(errors="skip")', "B", "10 of 100 tasks fail")
def gather_skip(trial: Trial) -> Any:
    futures = trial.client.map(
        fail_for, range(100), failing=frozenset(range(5, 100, 10)), folder=trial.folder
    )
    found = trial.client.gather(futures, errors="skip")
    try:
        trial.client.gather(futures)
    except PlannedError as error:
        return found, error_of(error)[1], runs(trial.folder)
    return found


@row("gather(direct=True)", "B", "results on several workers")
def gather_direct(trial: Trial) -> Any:
    return trial.client.gather(trial.client.map(inc, range(60)), direct=True)


@row(
    "scatter, scatter(broadcast=True), hash=False",
    "B",
    "the inputs of 100 tasks: their holders",
    covers=("Client.scatter", "Client.who_has"),
    is_timed=True,  # every two seconds Dask's memory manager reduces replicas that no task waits for
)
def scatter(trial: Trial) -> Any:
    client = trial.client
    (one,) = client.scatter([7], broadcast=True)
    several = client.scatter(list(range(20)), hash=False)
    named = client.scatter({"name": 5})
    futures = client.map(_add_to, several * 5, range(100), other=one)
    holders = len(client.who_has([one])[one.key]), len({future.key for future in several})
    return client.gather(futures), holders, client.gather(named), one.key == client.scatter(7).key


def _add_to(x: int, i: int, other: int) -> int:
    return x + i + other


def _total(values: dict[str, Any]) -> int:
    return sum(sum(one) if isinstance(one, list) else one for one in values.values())


@row("futures as arguments, in lists and dicts", "B", "`map` over futures; `submit` of nested futures")
def futures_as_arguments(trial: Trial) -> Any:
    client = trial.client
    futures = client.map(noting_inc, range(60), folder=trial.folder)
    second = client.map(noting_inc, futures, folder=trial.folder, name="second")
    total = client.submit(_total, {"a": futures[:9], "b": second[3]})
    return client.gather(second), total.result(), runs(trial.folder)


@row("futures as delayed", "B", "`delayed(future) + …`")
def futures_as_delayed(trial: Trial) -> Any:
    futures = trial.client.map(inc, range(40))
    parts = [dask.delayed(add)(dask.delayed(future), 1) for future in futures]
    return trial.client.compute(dask.delayed(sum)(parts), sync=True)


@row(
    "publish_dataset, list, get, unpublish",
    "B",
    "futures of bundles",
    covers=(
        *("Client.publish_dataset", "Client.list_datasets", "Client.get_dataset", "Client.unpublish_dataset"),
    ),
)
def datasets(trial: Trial) -> Any:
    client = trial.client
    futures = client.map(inc, range(40))
    client.publish_dataset(numbers=futures)
    del futures
    listed = list(client.list_datasets())
    values = client.gather(client.get_dataset("numbers"))
    client.unpublish_dataset("numbers")
    return listed, values, client.list_datasets(), client.get_dataset("numbers", default=3)


def _read_dataset(i: int) -> int:
    from distributed import get_client

    client = get_client()
    return int(client.get_dataset("inside")[i].result())


@row("published dataset read inside tasks", "", "40 tasks read a dataset of 40 futures")
def datasets_inside(trial: Trial) -> Any:
    client = trial.client
    client.publish_dataset(inside=client.map(inc, range(40)))
    found = client.gather(client.map(_read_dataset, range(40)))
    client.unpublish_dataset("inside")
    return found


@row("set_metadata, get_metadata", "", "nested names", covers=("Client.set_metadata", "Client.get_metadata"))
def metadata(trial: Trial) -> Any:
    client = trial.client
    futures = client.map(inc, range(40))
    client.set_metadata(["matrix", "x"], 1)
    client.set_metadata("matrix-y", {"a": 2})
    found = (
        client.get_metadata(["matrix", "x"]),
        client.get_metadata("matrix-y"),
        client.get_metadata("no", 3),
    )
    return found, client.gather(futures)


@row(
    "rebalance, replicate, active memory manager",
    "B",
    "results of bundles: holders and `nbytes`",
    covers=("Client.rebalance", "Client.replicate", "Client.amm", "Client.nbytes"),
)
def replicas(trial: Trial) -> Any:
    client = trial.client
    futures = client.map(_block, range(40))
    wait(futures)
    client.replicate(futures[:4], n=len(trial.workers))
    copies = [len(addresses) for addresses in client.who_has(futures[:4]).values()]
    client.rebalance(futures)
    sizes = client.nbytes([future.key for future in futures], summary=False)
    running = client.amm.running()
    client.amm.start()
    client.amm.run_once()
    few = wait_until(lambda: all(len(one) == 1 for one in client.who_has(futures[:4]).values()))
    (client.amm.start if running else client.amm.stop)()
    values = [float(value.sum()) for value in client.gather(futures)]
    return copies, sorted(sizes.values()), few, values


def _block(i: int) -> Any:
    return np.full(1000, float(i))


@row("has_what, nthreads, ncores, scheduler_info", "B", "during and after tasks: wanted keys", covers=(
    *("Client.has_what", "Client.nthreads", "Client.ncores", "Client.scheduler_info", "Client.processing"),
))  # fmt: skip
def cluster_state(trial: Trial) -> Any:
    client = trial.client
    futures = client.map(inc, range(40))
    during = {key for keys in client.processing().values() for key in keys}
    wait(futures)
    keys = {str(future.key) for future in futures}
    held = {str(key) for held in client.has_what().values() for key in held}
    extra = {key for key in held - keys if "bundle-" not in key}
    also = {key for key in during if str(key) not in keys and "bundle-" not in str(key)}
    threads = sorted(client.nthreads().values()), sorted(client.ncores().values())
    info = client.scheduler_info()
    has_inputs = set(client.who_has(futures)) == {future.key for future in futures}
    return keys <= held, extra, also, threads, len(info["workers"]), has_inputs, client.processing() != {}
