"""Collections and futures give with the plugin what they give without it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from operator import add, mul, neg
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import numpy as np
import pytest
from dask import delayed
from distributed import CancelledError, Client, Event, as_completed, wait
from in_charge import in_charge

from ferroflow_dask.policy import events as happened

pd = pytest.importorskip("pandas")
dd = pytest.importorskip("dask.dataframe")
pytest.importorskip("pyarrow")

pytestmark = pytest.mark.cluster

Function = Callable[[Any], Any]

#: Dask's own rules place tasks whose duration nobody has declared; our policy places the others.
PLACED_BY = [
    pytest.param({}, id="without declared costs"),
    pytest.param({"ferroflow_cost": 0.001}, id="with declared costs"),
]


@pytest.fixture
def events(thread_client: Client) -> Iterator[list[happened.Event]]:
    """All events that the policy is told of; it is in charge from the test's start to its end."""
    with in_charge(thread_client) as events:
        yield events


@pytest.fixture
def client(thread_client: Client, events: list[happened.Event]) -> Client:
    """A client of three workers in this process, with the policy in charge."""
    return thread_client


def was_placed(events: list[happened.Event]) -> bool:
    return any(isinstance(event, happened.GraphArrived | happened.TaskReady) for event in events)


# Arrays

X = np.random.default_rng(1).standard_normal((60, 40))


def chunked(x: np.ndarray = X, chunks: tuple[int, int] = (15, 10)) -> Any:
    return da.from_array(x, chunks=chunks)


#: Functions that NumPy's arrays and Dask's take alike.
ARRAY_FUNCTIONS: dict[str, Function] = {
    "quadratic mean": lambda x: np.sqrt((x**2).mean()),
    "reduction along an axis": lambda x: x.std(axis=0),
    "tensordot": lambda x: np.tensordot(x, x, axes=((0,), (0,))),
    "matrix product with the transpose": lambda x: x @ x.T,
    "sum with the transpose": lambda x: x[:40] + x[:40].T,
    "cumulative sum": lambda x: np.cumsum(x, axis=0),
    "concatenation": lambda x: np.concatenate([x, x[::-1]], axis=1),
    "broadcast": lambda x: x - x.mean(axis=1)[:, None],
    "selection by a mask": lambda x: x[x > 0.5],
    "position of the largest": lambda x: np.argmax(x, axis=1),
}


@pytest.mark.parametrize("annotations", PLACED_BY)
@pytest.mark.parametrize("function", ARRAY_FUNCTIONS.values(), ids=ARRAY_FUNCTIONS)
def test_array_functions(
    function: Function, annotations: dict[str, float], client: Client, events: list[happened.Event]
) -> None:
    with dask.annotate(**annotations):
        future = client.compute(function(chunked()), optimize_graph=not annotations)
    np.testing.assert_allclose(future.result(), function(X), rtol=1e-12)
    if annotations:
        assert was_placed(events)


@pytest.mark.parametrize("method", ["tasks", "p2p"])
def test_rechunk(method: str, client: Client) -> None:
    array = chunked().rechunk((60, 5), method=method).rechunk((7, 40), method=method)
    assert any("p2p" in str(key) for key in array.__dask_graph__()) == (method == "p2p")
    np.testing.assert_array_equal(array.compute(), X)


def test_singular_values(client: Client) -> None:
    _, values, _ = da.linalg.svd(chunked(chunks=(15, 40)))
    np.testing.assert_allclose(values.compute(), np.linalg.svd(X, compute_uv=False), rtol=1e-12)


# Data frames


def frame(n: int = 600) -> Any:
    rng = np.random.default_rng(2)
    return pd.DataFrame(
        {"row": np.arange(n), "kind": rng.integers(0, 20, n), "value": rng.standard_normal(n)}
    )


#: One row for each kind but the last two, and some kinds that nothing is of.
NAMES = pd.DataFrame({"kind": np.arange(2, 25), "weight": np.arange(23) / 8})


def assert_same_rows(found: Any, expected: Any) -> None:
    """Assert that two frames or series have the same rows; their order is not promised."""

    def in_order(rows: Any) -> Any:
        rows = rows.reset_index() if rows.index.name else rows.reset_index(drop=True)
        rows = rows.to_frame() if rows.ndim == 1 else rows
        return rows.sort_values(list(rows.columns), ignore_index=True)

    pd.testing.assert_frame_equal(in_order(found), in_order(expected), check_dtype=False)


#: Functions that pandas' frames and Dask's take alike.
FRAME_FUNCTIONS: dict[str, Function] = {
    "group by, several aggregations": lambda df: df.groupby("kind").value.agg(
        ["sum", "mean", "count", "max"]
    ),
    "group by, variance": lambda df: df.groupby("kind").value.var(),
    "count of values": lambda df: df.kind.value_counts(),
    "rows chosen and columns computed": lambda df: df[df.value > 0].assign(square=lambda d: d.value**2),
    "rolling mean": lambda df: df.value.rolling(7, min_periods=1).mean(),
    "cumulative sum": lambda df: df.value.cumsum(),
    "duplicates dropped": lambda df: df[["kind"]].drop_duplicates(),
    "sorted": lambda df: df.sort_values("value"),
    "new index": lambda df: df.set_index("value"),
    "largest": lambda df: df.nlargest(5, "value"),
}


@pytest.mark.parametrize("function", FRAME_FUNCTIONS.values(), ids=FRAME_FUNCTIONS)
def test_frame_functions(function: Function, client: Client) -> None:
    found = function(dd.from_pandas(frame(), npartitions=6)).compute()
    assert_same_rows(found, function(frame()))


def shuffled(df: Any) -> Any:
    return df.shuffle("kind", npartitions=5)


def merged(how: str) -> Function:
    # A small frame would be broadcast; this one goes through the shuffle like a large one.
    return lambda df: df.merge(
        dd.from_pandas(NAMES, npartitions=3), on="kind", how=how, broadcast=False, npartitions=5
    )


SHUFFLES: dict[str, tuple[Function, Callable[[], Any]]] = {
    "shuffle": (shuffled, frame),
    "inner merge": (merged("inner"), lambda: frame().merge(NAMES, on="kind")),
    "outer merge": (merged("outer"), lambda: frame().merge(NAMES, on="kind", how="outer")),
}


@pytest.mark.parametrize("method", ["tasks", "p2p"])
@pytest.mark.parametrize(("function", "expected"), SHUFFLES.values(), ids=SHUFFLES)
def test_shuffles(method: str, function: Function, expected: Callable[[], Any], client: Client) -> None:
    with dask.config.set({"dataframe.shuffle.method": method}):
        rows = function(dd.from_pandas(frame(), npartitions=6)).optimize()
        assert any("p2p" in str(key) for key in rows.__dask_graph__()) == (method == "p2p")
        assert_same_rows(rows.compute(), expected())


def test_after_a_shuffle_each_kind_is_in_one_partition(client: Client) -> None:
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        partitions = client.gather(client.compute(shuffled(dd.from_pandas(frame(), 6)).to_delayed()))
    homes = [set(partition.kind) for partition in partitions]
    assert sum(map(len, homes)) == len(set().union(*homes)) == 20


# Dask reads and writes Parquet by calls that pandas 3.1 deprecates.
@pytest.mark.filterwarnings("ignore:The inplace keyword in DataFrame.(set|reset)_index:DeprecationWarning")
def test_parquet_round_trip(tmp_path: Path, client: Client) -> None:
    dd.from_pandas(frame(), npartitions=4).to_parquet(tmp_path / "frame")
    assert_same_rows(dd.read_parquet(tmp_path / "frame").compute(), frame())


# Bags

NUMBERS = list(range(100))

BAGS: dict[str, tuple[Function, Any]] = {
    "fold by key": (
        lambda bag: bag.foldby(lambda i: i % 3, add).map(tuple),
        [(key, sum(NUMBERS[key::3])) for key in range(3)],
    ),
    "group by key": (
        lambda bag: bag.groupby(lambda i: i % 3).map(lambda item: (item[0], sorted(item[1]))),
        [(key, NUMBERS[key::3]) for key in range(3)],
    ),
    "largest": (lambda bag: bag.topk(3), [99, 98, 97]),
    "product": (
        lambda bag: bag.filter(lambda i: i < 4).product(db.from_sequence("ab", npartitions=2)),
        list(itertools.product(range(4), "ab")),
    ),
}


@pytest.mark.parametrize(("function", "expected"), BAGS.values(), ids=BAGS)
def test_bags(function: Function, expected: Any, client: Client) -> None:
    found = function(db.from_sequence(NUMBERS, npartitions=8)).compute()
    assert sorted(found) == sorted(expected)


# Delayed


@pytest.mark.parametrize("annotations", PLACED_BY)
def test_delayed_tree(annotations: dict[str, float], client: Client, events: list[happened.Event]) -> None:
    with dask.annotate(**annotations):
        level = [delayed(mul)(i, i) for i in range(64)]
        while len(level) > 1:
            level = [delayed(add)(*pair) for pair in zip(level[::2], level[1::2], strict=True)]
        assert client.compute(level[0], optimize_graph=not annotations).result() == sum(
            i * i for i in range(64)
        )
    if annotations:
        assert was_placed(events)


# Futures


@pytest.mark.parametrize("annotations", PLACED_BY)
def test_chains_of_submit_and_map(annotations: dict[str, float], client: Client) -> None:
    with dask.annotate(**annotations):
        futures = client.map(neg, range(30))
        for _ in range(5):
            futures = client.map(add, futures, [1] * 30)
        total = client.submit(sum, futures)
        assert client.gather(futures) == [5 - i for i in range(30)]
    assert total.result() == sum(5 - i for i in range(30))


def test_as_completed_yields_every_future_once_and_takes_more(client: Client) -> None:
    completed = as_completed(client.map(neg, range(10)), with_results=True)
    results = []
    for _, result in completed:
        results.append(result)
        if -10 < result <= 0:
            completed.add(client.submit(add, result, -10))
    assert sorted(results) == sorted(-i for i in range(20))


def test_scattered_data_is_an_input_like_any_other(client: Client) -> None:
    here, everywhere = client.scatter(X), client.scatter(X, broadcast=True)
    products = [client.submit(np.dot, everywhere, 2), client.submit(np.dot, here, 3)]
    for found, factor in zip(client.gather(products), [2, 3], strict=True):
        np.testing.assert_array_equal(found, X * factor)


def test_what_failed_is_skipped_where_asked(client: Client) -> None:
    futures = client.map(lambda i: 12 // i, [0, 1, 2, 0, 3])
    wait(futures)
    assert [future.status == "error" for future in futures] == [True, False, False, True, False]
    assert client.gather(futures, errors="skip") == [12, 6, 4]


def test_cancelled_tasks_are_gone_and_the_others_stay(client: Client) -> None:
    gate = Event("gate")

    def waits(i: int) -> int:
        Event("gate").wait()
        return i

    kept = client.map(waits, range(3), pure=False)
    cancelled = client.map(waits, range(20), pure=False)
    client.cancel(cancelled)
    gate.set()
    assert client.gather(kept) == [0, 1, 2]
    with pytest.raises(CancelledError):
        cancelled[0].result()


def test_tasks_compute_collections_of_their_own(client: Client) -> None:
    def fibonacci(n: int) -> int:
        # More tasks wait than there are threads: while one computes, its thread is free for others.
        return n if n < 2 else sum(dask.compute(delayed(fibonacci)(n - 1), delayed(fibonacci)(n - 2)))

    assert client.submit(fibonacci, 6).result() == 8
