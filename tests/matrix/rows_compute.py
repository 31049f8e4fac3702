"""Rows of collections: `compute`, `persist`, `get`, executors, `dask.delayed`, asynchronous clients."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import numpy as np
import pandas as pd
from distributed import Client, futures_of

from matrix.row import row
from matrix.tasks import add, inc, noting_inc, outcomes, runs
from matrix.trial import Trial


def _tree(n: int = 32, folder: str | None = None) -> Any:
    """Return the sum of numbers as a tree of delayed tasks."""
    leaf = dask.delayed(inc) if folder is None else dask.delayed(noting_inc)
    level = [leaf(i) if folder is None else leaf(i, folder) for i in range(n)]
    while len(level) > 1:
        level = [dask.delayed(add)(*level[i : i + 2]) for i in range(0, len(level), 2)]
    return level[0]


def _array() -> Any:
    return (da.arange(64, chunks=8) + 1).cumsum(axis=0)


def _bag() -> Any:
    return db.from_sequence(range(60), npartitions=12).map(inc).filter(_is_even)


def _is_even(x: int) -> bool:
    return x % 2 == 0


def _frame() -> Any:
    import dask.dataframe as dd

    frame = pd.DataFrame({"x": range(60), "y": [i % 3 for i in range(60)]})
    return dd.from_pandas(frame, npartitions=6).assign(z=1)


def plain(value: Any) -> Any:
    """Return data that can be compared."""
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.tolist()
    if isinstance(value, (pd.DataFrame, pd.Series)):
        return type(value).__name__, value.to_csv(), str(value.dtypes)
    if isinstance(value, np.generic):
        return str(value.dtype), value.item()
    if isinstance(value, (list, tuple)):
        return type(value)(plain(one) for one in value)
    return {key: plain(one) for key, one in value.items()} if isinstance(value, dict) else value


@row(
    "compute of a list, a collection, a nested structure",
    "B",
    "arrays, bags, frames and delayed tasks",
    covers=("Client.compute",),
)
def compute_shapes(trial: Trial) -> Any:
    client = trial.client
    found = [client.compute([_array(), _bag(), _tree()]), client.compute(_frame())]
    nested = dask.compute({"a": _array().sum(), "b": [_tree(16), 3]}, (_bag(),))
    return [plain(client.gather(one)) for one in found], plain(nested)


@row("compute(sync=True), optimize_graph=False", "B", "a delayed tree")
def compute_sync(trial: Trial) -> Any:
    client = trial.client
    plain_graph = client.compute(_tree(64), optimize_graph=False)
    return client.compute(_tree(), sync=True), plain_graph.result()


@row("compute(resources=, workers=, retries=, priority=)", "", "one option at a time")
def compute_options(trial: Trial) -> Any:
    client = trial.client
    options: list[dict[str, Any]] = [
        {"workers": trial.workers[:1]},
        {"workers": ["tcp://127.0.0.1:9"], "allow_other_workers": True},
        {"retries": 2},
        {"priority": 3},
    ]
    return [client.compute(_tree(n), **option).result() for n, option in enumerate(options, 20)]


@row(
    "persist",
    "B",
    "an array, then a second graph that reads it",
    covers=("Client.persist", "futures_of", "Client.futures_of"),
)
def persist(trial: Trial) -> Any:
    x = da.from_delayed(dask.delayed(noting_block)(0, trial.folder), (4,), dtype=float)
    parts = [
        da.from_delayed(dask.delayed(noting_block)(i, trial.folder), (4,), dtype=float) for i in range(40)
    ]
    kept = trial.client.persist(da.concatenate([x, *parts]) * 2)
    keys = [key[1:] for key in kept.__dask_keys__()]
    statuses = {future.status for future in trial.client.futures_of(kept)} <= {"pending", "finished"}
    total = float((kept + 1).sum().compute())
    n_futures = len(futures_of(kept))
    return keys, statuses, n_futures, total, runs(trial.folder)


def noting_block(i: int, folder: str) -> Any:
    """Note a run, and return a block."""
    noting_inc(i, folder)
    return np.full(4, float(i))


@row("Client.get", "B", "a raw graph with aliases, data and nested tasks", covers=("Client.get",))
def client_get(trial: Trial) -> Any:
    graph: dict[Any, Any] = {"data": 3, "alias": "data", "nested": (add, (inc, "alias"), [1, 2][0])}
    graph |= {("x", i): (inc, "nested" if i % 2 else ("x", i - 2) if i else "alias") for i in range(30)}
    found = trial.client.get(graph, [("x", i) for i in range(30)])
    return found, trial.client.get(graph, "nested")


@row(
    "get_executor().map, submit",
    "B",
    "a program of `concurrent.futures`",
    covers=("Client.get_executor", "CompatibleExecutor"),
)
def executor(trial: Trial) -> Any:
    with trial.client.get_executor(pure=False) as pool:
        mapped = list(pool.map(inc, range(50)))
        one = pool.submit(inc, 7)
        return mapped, one.result(), one.done()


@dask.delayed(nout=2)
def _two(x: int) -> tuple[int, int]:
    return x, x + 1


@row("dask.delayed(pure=, nout=, traverse=)", "B", "unpacked tuples, nested arguments")
def delayed_options(trial: Trial) -> Any:
    pairs = [_two(i) for i in range(20)]
    sums = [dask.delayed(add, pure=True)(a, b) for a, b in pairs]
    nested = dask.delayed(len, traverse=False)([1, [2, 3]])
    total = dask.delayed(sum)([sums, [nested]][0])
    return trial.client.compute([*sums, nested, total], sync=True)


@row(
    "Client.normalize_collection",
    "B",
    "collections that futures of the same keys exist for; `delayed(future) + …`",
    covers=("Client.normalize_collection", "Future.substitute"),
)
def normalized(trial: Trial) -> Any:
    client = trial.client
    base = client.compute(_tree(20))
    more = [dask.delayed(base) + i for i in range(20)]
    x = client.persist(_array())
    same = client.normalize_collection(x)
    return client.gather(client.compute(more)), plain(same.compute()), len(client.futures_of(same))


def _collections() -> list[Any]:
    x, bag, frame = _array(), _bag(), _frame()
    y = da.ones((24, 24), chunks=(12, 6))
    return [
        x, x.sum(), x[::3], x.reshape((8, 8)).T, x.map_blocks(np.sqrt), x.rechunk(7), (y @ y).sum(axis=0),
        y.mean(), da.concatenate([x, x]), x.map_overlap(_smooth, depth=1, boundary=0), da.where(x > 9, x, 0),
        y.std(axis=1), da.percentile(x, [50]), bag, bag.sum(), bag.frequencies(), bag.topk(3),
        bag.fold(add), bag.to_delayed()[0], bag.map_partitions(list), frame, frame.x.sum(),
        frame.groupby("y").x.mean(), frame[frame.x > 7], frame.set_index("x"), frame.y.value_counts(),
        frame.map_partitions(len),
    ]  # fmt: skip


def _smooth(block: Any) -> Any:
    return block + np.roll(block, 1)


@row("collections: array, bag, frame, xarray", "", "30 first programs: dtypes and divisions")
def collections(trial: Trial) -> Any:
    import xarray as xr

    cube = xr.DataArray(da.ones((12, 8), chunks=(3, 4)), dims=("t", "x"))
    plain_tasks = {"array.rechunk.method": "tasks", "dataframe.shuffle.method": "tasks"}
    with warnings.catch_warnings(), dask.config.set(plain_tasks):
        warnings.simplefilter("ignore")
        found = [plain(_sorted(one.compute())) for one in _collections()]
        found += [plain(one.compute().values) for one in (cube.mean("t"), cube.rolling(t=3).sum().fillna(0))]
    return found, _frame().set_index("x").divisions


def _sorted(value: Any) -> Any:
    """Return frames in an order that does not depend on the arrival of shuffled parts."""
    if isinstance(value, pd.DataFrame):
        return (
            value.reset_index(drop=value.index.name is None)
            .sort_values(list(value.columns))
            .reset_index(drop=True)
        )
    return value.sort_index() if isinstance(value, pd.Series) else value


@row("asynchronous client", "B", "the programs of `map` with `await`", covers=("Client.asynchronous", "sync"))
def asynchronous(trial: Trial) -> Any:
    async def program() -> Any:
        async with Client(trial.scheduler.address, asynchronous=True) as client:
            assert client.asynchronous
            futures = client.map(noting_inc, range(60), folder=trial.folder)
            values = await client.gather(futures)
            total = await client.submit(add, *futures)
            computed = await client.compute(_tree())
            bad = client.map(_invert, range(20))
            errors = [await future.exception() for future in bad]
            return values, total, computed, [type(error).__name__ for error in errors]

    return asyncio.run(program()), runs(trial.folder)


def _invert(x: int) -> float:
    return 1 / (x - 7)


def _new_lock() -> Any:
    import threading

    return threading.Lock()


def _own(lock: Any, i: int) -> tuple[int, bool]:
    return i, lock.acquire(blocking=False)


@row(
    "in-process cluster",
    "B",
    "the programs of `map`, and values that cannot be pickled: identity of shared objects",
    cluster={"n_workers": 1, "threads_per_worker": 2, "processes": False, "protocol": "inproc://"},
)
def in_process(trial: Trial) -> Any:
    client = trial.client
    lock = client.submit(_new_lock, key="lock")
    tried = client.gather(client.map(_own, [lock] * 40, range(40)))
    futures = client.map(noting_inc, range(60), folder=trial.folder)
    return sum(done for _, done in tried), lock.result().locked(), client.gather(futures), runs(trial.folder)


@row("errors of some collections", "B", "ten of 60 partitions fail")
def failing_collection(trial: Trial) -> Any:
    parts = [dask.delayed(_invert)(i % 12) for i in range(60)]
    return outcomes(trial.client.compute(parts))


@row(
    "P2P shuffle",
    "",
    "the tasks of a shuffle find each other",
    covers=("annotation shuffle_original_restrictions",),
)
def shuffle(trial: Trial) -> Any:
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        return plain(_sorted(_frame().shuffle("y").map_partitions(_same_frame).compute()))


def _same_frame(frame: Any) -> Any:
    return frame
