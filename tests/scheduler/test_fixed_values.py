"""Values that cannot be sent to another worker: their readers run where they are."""

from __future__ import annotations

import asyncio
import io
import pickle
import socket
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import dask
import dask.bag
import pytest
from bundled import take_all_for_short
from cluster_tests import runs_on
from dask.utils import typename
from distributed import Event
from distributed.core import Status
from one_loop import Cluster, on_cluster
from waiting import comes, wait_for

from ferroflow_dask.scheduler.fixed_values import TYPES

FOUR = (None,) * 4
#: What tasks have opened. A bundle that would return an iterator is split, and its tasks run again: nothing
#: reads, and closes, the files of the first time.
_OPENED = list[Any]()


class Stream:
    """A value that cannot be read from a message; a worker takes the error for one of the network."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _fail, ()


def _fail() -> None:
    raise FileNotFoundError("only on the worker that has it")


@pytest.fixture
def _all_is_closed() -> Iterator[None]:
    yield
    while _OPENED:
        _OPENED.pop().close()


def connection(i: int) -> sqlite3.Connection:
    _OPENED.append(opened := sqlite3.connect(":memory:", check_same_thread=False))
    return opened


def lock(i: int) -> Any:
    return threading.Lock()


def generator(i: int) -> Iterator[int]:
    yield i


def file(i: int) -> Any:
    _OPENED.append(opened := tempfile.TemporaryFile())  # noqa: SIM115 - the test closes it
    return opened


def locks(i: int) -> list[Any]:
    return [threading.Lock()]


def numbers(i: int) -> list[int]:
    return [i]


def stream(i: int) -> Stream:
    return Stream()


def name_of(value: object, i: Any = 0) -> tuple[Any, str]:
    if callable(close := getattr(value, "close", None)):
        close()
    return i, type(value).__name__


async def _coroutine() -> None: ...


async def _async_generator() -> Any:
    yield None


INSTANCES: dict[str, Callable[[], Any]] = {
    "_thread.lock": threading.Lock,
    "_thread.RLock": threading.RLock,
    "_thread._local": threading.local,
    "threading.Condition": threading.Condition,
    "threading.Event": threading.Event,
    "socket.socket": socket.socket,
    "sqlite3.Connection": lambda: connection(0),
    "sqlite3.Cursor": lambda: connection(0).cursor(),
    "module": lambda: sys,
    "generator": lambda: generator(0),
    "async_generator": _async_generator,
    "coroutine": _coroutine,
    "_io.FileIO": partial(io.FileIO, "/dev/null"),
    "_io.TextIOWrapper": partial(open, "/dev/null"),
    "_io.BufferedReader": partial(open, "/dev/null", "rb"),
    "_io.BufferedWriter": partial(open, "/dev/null", "wb"),
    "_io.BufferedRandom": tempfile.TemporaryFile,
}


@pytest.mark.parametrize("name", sorted(TYPES))
def test_pickle_refuses_the_types_that_are_known_to_be_fixed(name: str) -> None:
    value = INSTANCES[name]()
    try:
        assert typename(type(value)) == name
        with pytest.raises((TypeError, pickle.PicklingError)):
            pickle.dumps(value)
    finally:
        if callable(close := getattr(value, "close", None)):
            close()


@contextmanager
def failures(cluster: Cluster) -> Iterator[list[Any]]:
    """Yield the keys of values that workers fail to fetch."""
    handlers, keys = cluster.scheduler.stream_handlers, list[Any]()
    stock = handlers["task-erred"]

    def handle(**message: Any) -> None:
        keys.append(message["key"])
        stock(**message)

    handlers["task-erred"] = handle
    try:
        yield keys
    finally:
        handlers["task-erred"] = stock


async def mapped(cluster: Cluster, make: Callable[[int], Any], n: int) -> list[Any]:
    values = cluster.client.map(make, range(n), pure=False)
    return await cluster.client.gather(cluster.client.map(name_of, values, range(n), pure=False))


async def delayed(cluster: Cluster, make: Callable[[int], Any], n: int) -> list[Any]:
    values = (dask.delayed(make, pure=False)(i) for i in range(n))
    return await cluster.client.gather(
        cluster.client.compute([dask.delayed(name_of)(value, i) for i, value in enumerate(values)])
    )


async def in_bag(cluster: Cluster, make: Callable[[int], Any], n: int) -> list[Any]:
    indices = dask.bag.from_sequence(range(n), npartitions=n)
    values = cluster.client.persist(indices.map(make))
    return await cluster.client.compute(values.map(name_of, indices))


@pytest.mark.usefixtures("_all_is_closed")
@pytest.mark.cluster
@pytest.mark.parametrize("program", [mapped, delayed, in_bag])
@pytest.mark.parametrize("make", [connection, lock, generator, file, locks])
@pytest.mark.parametrize("all_short", [False, True], ids=["as learned", "all tasks taken to be short"])
def test_readers_of_fixed_values_end(
    program: Any, make: Callable[[int], Any], all_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(cluster: Cluster) -> None:
        for n in (16, 40):
            result = await program(cluster, make, n)
            assert [i for i, _ in result] == list(range(n))
            assert len({name for _, name in result}) == 1

    if all_short:
        take_all_for_short(monkeypatch)
    on_cluster(test, resources=FOUR)


@pytest.mark.usefixtures("_all_is_closed")
@pytest.mark.cluster
@runs_on(on_cluster, resources=FOUR)
async def test_values_of_known_types_are_never_fetched(cluster: Cluster) -> None:
    with failures(cluster) as failed:
        for make in (connection, lock, generator, file):
            await mapped(cluster, make, 40)
    assert failed == []
    assert cluster.stealing.parts.fixed.prefixes == {}


async def busy_holder(cluster: Cluster, make: Callable[[int], Any]) -> tuple[Any, Any, Any]:
    """Return a value on the first worker, which is busy from then on, its gate and what waits for it."""
    first = cluster.workers[0].address
    value = cluster.client.submit(make, 0, workers=[first], pure=False)
    await value._state.wait()
    gate = await Event()
    blocked = cluster.client.submit(wait_for, 0, gate, workers=[first], pure=False)
    await cluster.processing(blocked)
    return value, gate, blocked


@pytest.mark.cluster
@pytest.mark.parametrize(
    "make", [locks, stream], ids=["the value cannot be pickled", "reading it raises OSError"]
)
def test_after_a_transfer_has_failed_the_prefix_is_fixed(make: Callable[[int], Any]) -> None:
    async def test(cluster: Cluster) -> None:
        first = cluster.workers[0].address
        value, gate, blocked = await busy_holder(cluster, make)
        # A known duration sends readers to the idle worker.
        with dask.annotate(ferroflow_cost=0.5):
            reader = cluster.client.submit(name_of, value, pure=False)
        ts = await cluster.processing(reader)
        await comes(lambda: ts.processing_on is not None and ts.processing_on.address == first)
        assert cluster.stealing.parts.fixed.prefixes == {
            make.__name__: cluster.scheduler.tasks[value.key].type
        }
        with failures(cluster) as failed, dask.annotate(ferroflow_cost=0.5):
            other = cluster.client.submit(name_of, value, 1, pure=False)
            assert (await cluster.processing(other)).processing_on.address == first
            cluster.stealing.balance()
            await gate.set()
            results = await cluster.client.gather([blocked, reader, other])
        assert [result[0] for result in results[1:]] == [0, 1]
        assert failed == []
        assert cluster.stealing.steals["asked"] == 0

    on_cluster(test)


@pytest.mark.cluster
@runs_on(on_cluster)
async def test_a_prefix_is_fixed_until_a_value_of_it_is_fetched(cluster: Cluster) -> None:
    first, second = (worker.address for worker in cluster.workers)
    handlers = cluster.scheduler.stream_handlers
    stock = handlers["add-keys"]
    values = [cluster.client.submit(numbers, i, workers=[first], pure=False) for i in range(2)]
    await cluster.client.gather(values)
    handlers["task-erred"](
        key=values[0].key,
        worker=second,
        run_id=-1,
        exception_text="RuntimeError()",
        stimulus_id="gather-dep-failed-1",
    )
    fixed = cluster.stealing.parts.fixed
    assert all(fixed.is_fixed(cluster.scheduler.tasks[value.key]) for value in values)
    assert handlers["add-keys"] != stock
    # No worker has all inputs of this reader.
    there = cluster.client.submit(numbers, 2, workers=[second], pure=False)
    assert await cluster.client.submit(name_of, values[1], there, pure=False) == ([2], "list")
    assert fixed.prefixes == {}
    assert handlers["add-keys"] == stock


@pytest.mark.cluster
@runs_on(on_cluster)
async def test_a_reader_that_may_not_run_with_the_value_waits_as_under_dask(cluster: Cluster) -> None:
    first, second = (worker.address for worker in cluster.workers)
    value = cluster.client.submit(locks, 0, workers=[first], pure=False)
    with failures(cluster) as failed:
        reader = cluster.client.submit(name_of, value, workers=[second], pure=False)
        await comes(lambda: failed)
        await cluster.client.submit(name_of, 0, workers=[second], pure=False)  # a round trip
        assert cluster.scheduler.tasks[reader.key].processing_on.address == second
    assert failed == [value.key]


@pytest.mark.cluster
@runs_on(on_cluster)
async def test_a_reader_waits_while_the_only_worker_with_the_value_is_paused(cluster: Cluster) -> None:
    first = cluster.workers[0]
    value = cluster.client.submit(lock, 0, workers=[first.address], pure=False)
    await value._state.wait()
    first.memory_manager.memory_pause_fraction = False  # otherwise Dask resumes the worker
    first.status = Status.paused
    await comes(lambda: len(cluster.scheduler.running) == 1)
    reader = cluster.client.submit(name_of, value, pure=False)
    await comes(lambda: (ts := cluster.scheduler.tasks.get(reader.key)) and ts.state == "no-worker")
    first.status = Status.running
    assert await reader == (0, "lock")


@pytest.mark.cluster
def test_workers_of_one_process_share_all_values() -> None:
    async def test() -> None:
        from distributed import Client, LocalCluster

        async with (
            LocalCluster(n_workers=2, processes=False, asynchronous=True, dashboard_address=":0") as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            from ferroflow_dask import install

            await install(client)
            assert cluster.scheduler.extensions["stealing"].parts.fixed.types == frozenset()

    asyncio.run(test())
