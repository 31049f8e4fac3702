"""Random Dask programs: run on a stock cluster and on ours, which bundles whatever it may.

`python tests/random_programs.py 2000` compares so many programs and prints the share of tasks in bundles.
"""

from __future__ import annotations

import operator
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import numpy as np
import pandas as pd
from assume_short import assume_short
from dask.base import tokenize
from dask.utils import key_split
from distributed import Client, LocalCluster, futures_of, wait
from waiting import until

import ferroflow_dask
from ferroflow_dask.scheduler import extension_on

_SETTINGS = {
    "distributed.scheduler.validate": True,
    "distributed.worker.validate": True,
    "dataframe.convert-string": False,
}


class PlannedError(Exception):
    """An exception that a program raises on purpose."""


# What programs call: functions of this module, so that tasks of both clusters have the same keys


def combine(*values: Any, scale: int = 1) -> int:
    """Return a number that depends on all values and their order."""
    total = 0
    for value in values:
        inner = value if isinstance(value, (int, np.integer)) else combine(*_flat(value))
        total = (31 * total + int(inner)) % 1_000_003
    return (total + 1) * scale % 1_000_003


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [one for pair in sorted(value.items()) for one in (len(pair[0]), pair[1])]
    return list(value)


def fail(name: int, *values: Any) -> int:
    """Raise an exception that names its task."""
    raise PlannedError(name, *(combine(value) for value in values))


def combine_or_fail(number: int, failing: int) -> int:
    """Return a number, or raise an exception for one of them."""
    return fail(number) if number == failing else combine(number)


def split(value: int, n: int) -> list[int]:
    """Return several numbers."""
    return [combine(value, i) for i in range(n)]


def of_block(block: np.ndarray[Any, Any], add: float) -> np.ndarray[Any, Any]:
    """Return a block of the same shape."""
    return np.cumsum(block, axis=-1) + add


def of_rows(rows: pd.DataFrame, add: int) -> pd.DataFrame:
    """Return rows with one more column."""
    return rows.assign(more=rows.x + add)


# Programs


@dataclass
class Program:
    """Random choices, the same for the same seed, and the client that runs them."""

    seed: int
    client: Client
    held: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.n_keys = 0
        self.has_failing = False

    def key(self, name: str) -> str:
        """Return a new key, the same on both clusters."""
        self.n_keys += 1
        return f"{name}-{tokenize(self.seed, self.n_keys)}"

    def array(self) -> Any:
        """Return a Dask array."""
        rng = self.rng
        n, chunk = rng.randint(8, 40), rng.randint(3, 9)
        kind = rng.randrange(3)
        if kind == 0:
            x = da.from_array(np.arange(n * 6.0).reshape(n, 6), chunks=(chunk, rng.randint(2, 6)))
        elif kind == 1:
            x = da.random.default_rng(self.seed).random((n, 6), chunks=(chunk, 3))
        else:
            x = da.ones((n, 6), chunks=(chunk, 6)) * rng.randint(1, 5)
        for _ in range(rng.randint(1, 5)):
            x = rng.choice(_OF_ARRAYS)(x, rng)
        return rng.choice([lambda y: y, lambda y: y.sum(), lambda y: y.mean(axis=0), lambda y: y.std()])(x)

    def bag(self) -> Any:
        """Return a Dask bag, or an item of one."""
        rng = self.rng
        b = db.from_sequence(range(rng.randint(10, 60)), npartitions=rng.randint(3, 12))
        for _ in range(rng.randint(1, 4)):
            b = rng.choice(_OF_BAGS)(b, rng)
        ends = [lambda c: c, lambda c: c.fold(operator.add), lambda c: c.frequencies(), lambda c: c.count()]
        return rng.choice(ends)(b)

    def frame(self) -> Any:
        """Return a Dask data frame, or a reduction of one."""
        import dask.dataframe as dd

        rng = self.rng
        n = rng.randint(20, 80)
        rows = pd.DataFrame({"name": [i % 5 for i in range(n)], "x": range(n), "y": np.arange(n) % 7})
        f = dd.from_pandas(rows, npartitions=rng.randint(3, 9))
        for _ in range(rng.randint(1, 3)):
            f = rng.choice(_OF_FRAMES)(f, rng)
        return rng.choice(_ENDS_OF_FRAMES)(f, rng)

    def delayed(self) -> Any:
        """Return delayed values of a random graph, some of which may raise an exception."""
        rng = self.rng
        fails = rng.random() < 0.35
        nodes: list[Any] = [rng.randint(0, 99) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.3:
            self.held.append(self.client.submit(combine, rng.randint(0, 99), key=self.key("submitted")))
            nodes.append(self.held[-1])
        if rng.random() < 0.2:
            self.held.append(self.client.scatter(rng.randint(0, 99), hash=True))
            nodes.append(self.held[-1])
        if not fails and rng.random() < 0.2:  # of two errors, either may come first
            self.held += self.mapped()
            nodes += self.held[-3:]
        for _ in range(rng.randint(8, 50)):
            inputs = [rng.choice(nodes[-8:]) for _ in range(rng.randint(1, 4))]
            with dask.annotate(**self.annotations()):
                nodes.append(self.call(inputs, fails))
        outputs = [node for node in nodes if hasattr(node, "dask")]
        return [outputs[-1], *rng.sample(outputs, min(len(outputs), rng.randint(0, 4)))]

    def mapped(self) -> list[Any]:
        """Map a function over numbers, one of which may raise an exception; return the futures."""
        numbers = range(self.rng.randint(5, 60))
        failing = self.rng.choice((-1, -1, self.rng.choice(numbers)))
        names = [self.key("mapped") for _ in numbers]
        futures: list[Any] = self.client.map(combine_or_fail, numbers, failing=failing, key=names)
        return futures

    def annotations(self) -> dict[str, Any]:
        """Return annotations of some tasks."""
        if self.rng.random() < 0.9:
            return {}
        return self.rng.choice(
            [{"priority": 3}, {"retries": 1}, {"ferroflow_bundle": False}, {"ferroflow_cost": 0.01}]
        )

    def call(self, inputs: list[Any], fails: bool) -> Any:
        """Return a delayed call."""
        rng, f = self.rng, dask.delayed(combine)
        kind = rng.randrange(12)
        if fails and kind == 0 and not self.has_failing:
            self.has_failing = True  # with two of them, the one that fails first is chance
            return dask.delayed(fail)(rng.randint(0, 99), *inputs, dask_key_name=self.key("fail"))
        if kind == 1:
            return f({"a": inputs[0], "b": list(inputs)}, dask_key_name=self.key("nested"))
        if kind == 2:
            return f(*inputs, scale=rng.randint(1, 5), dask_key_name=self.key("keyword"))
        if kind == 3:
            parts = dask.delayed(split, nout=3)(inputs[0], 3, dask_key_name=self.key("split"))
            return parts[rng.randrange(3)]
        return f(*inputs, dask_key_name=self.key(rng.choice(("inc", "add", "double"))))

    def collections(self) -> list[Any]:
        """Return the collections of a program."""
        made: list[Any] = []
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            one = self.rng.choice((self.array, self.bag, self.frame, self.delayed, self.delayed))()
            made += one if isinstance(one, list) else [one]
        return made


def _sliced(x: Any, rng: random.Random) -> Any:
    return x[rng.randint(0, 2) :: rng.randint(1, 2)] if x.shape[0] > 6 else x


def _overlapped(x: Any, rng: random.Random) -> Any:
    x = x.rechunk({0: max(4, x.shape[0] // 4)})
    return x.map_overlap(partial(of_block, add=1), depth={0: 1, 1: 0}, boundary="nearest", dtype=float)


_OF_ARRAYS: list[Callable[[Any, random.Random], Any]] = [
    lambda x, rng: x + rng.randint(1, 9),
    lambda x, rng: da.sin(x) * 2,
    _sliced,
    lambda x, rng: x.rechunk((rng.randint(2, 9), rng.randint(2, 6)), method="tasks"),
    lambda x, rng: x.map_blocks(of_block, add=rng.randint(1, 5), dtype=float),
    _overlapped,
    lambda x, rng: x - x.mean(axis=0),
    lambda x, rng: da.concatenate([x, x * 2]),
    lambda x, rng: x.cumsum(axis=0),
    lambda x, rng: da.where(x > x.mean(), x, -x),
    lambda x, rng: x.dot(da.ones((x.shape[1], 6), chunks=3)),
]
_OF_BAGS: list[Callable[[Any, random.Random], Any]] = [
    lambda b, rng: b.map(operator.add, rng.randint(1, 9)),
    lambda b, rng: b.filter(partial(operator.ne, rng.randint(1, 9))),
    lambda b, rng: b.map_partitions(sorted),
    lambda b, rng: b.repartition(npartitions=rng.randint(2, 8)),
    lambda b, rng: b.groupby(partial(operator.and_, 3), shuffle="tasks").starmap(combine),
]
_OF_FRAMES: list[Callable[[Any, random.Random], Any]] = [
    lambda f, rng: f.assign(x=f.x + rng.randint(1, 9)),
    lambda f, rng: f[f.x % rng.randint(2, 5) == 0],
    lambda f, rng: f.map_partitions(of_rows, add=rng.randint(1, 5))[["name", "x", "y"]],
    lambda f, rng: f.repartition(npartitions=rng.randint(2, 6)),
    lambda f, rng: f.shuffle("name", shuffle_method=rng.choice(("tasks", "tasks", "p2p"))),
]
_ENDS_OF_FRAMES: list[Callable[[Any, random.Random], Any]] = [
    lambda f, rng: f,
    lambda f, rng: f.groupby("name").x.mean(),
    lambda f, rng: f.x.sum(),
    lambda f, rng: f.merge(f.groupby("name").y.sum().to_frame("z"), left_on="name", right_index=True).z.sum(),
    lambda f, rng: f.x.rolling(2).sum() if f.known_divisions else f.x.max(),
    lambda f, rng: f.describe(),
]


# Running


@dataclass(frozen=True)
class Outcome:
    """Outcome of a program: a value or an exception for each collection, and the keys that it left."""

    results: tuple[Any, ...]
    wanted: frozenset[tuple[tuple[str, str], int]]

    def differs_from(self, other: Outcome) -> list[Any]:
        """Return what differs, each with what is expected."""
        pairs = zip(self.results, other.results, strict=True)
        wanted = [sorted(self.wanted - other.wanted), sorted(other.wanted - self.wanted)]
        return [(one, expected) for one, expected in pairs if one != expected] + wanted


def run(seed: int, client: Client, other: Client) -> Outcome:
    """Run a program through a client; some of it also through another client of the same cluster."""
    program = Program(seed, client)
    made = program.collections()
    way = program.rng.randrange(5)
    if way == 0 and all(hasattr(one, "persist") for one in made):
        persisted = list(client.persist(made))
        program.held += persisted
        futures = client.compute(persisted)
    elif way == 1:
        futures = [client.compute(one) for one in made]
    elif way == 2:
        futures = client.compute(made)
        # The messages of two clients come in any order.
        until(lambda: all(one.key in client.cluster.scheduler.tasks for one in program.held))
        program.held += other.compute(made)
    else:
        futures = client.compute(made)
    if program.rng.random() < 0.3:
        futures += program.mapped()
        if program.rng.random() < 0.3:
            client.cancel(futures.pop())
    scheduler = client.cluster.scheduler
    try:
        wait([*futures, *futures_of(program.held)], timeout=20)
    except TimeoutError as error:
        states = [(str(ts.key)[:60], ts.state) for ts in scheduler.tasks.values() if ts.state != "memory"]
        raise RuntimeError(f"program {seed} hangs: {states[:40]}") from error
    # Some keys have other tokens each time that a collection is built.
    wanted = Counter((key_split(ts.key), ts.state) for ts in list(scheduler.tasks.values()) if ts.who_wants)
    return Outcome(tuple(_result(one, scheduler) for one in futures), frozenset(wanted.items()))


def _result(future: Any, scheduler: Any) -> Any:
    if future.status == "error":
        error = future.exception()
        blame = scheduler.tasks[future.key].exception_blame
        return type(error).__name__, repr(error.args), str(blame.key if blame else None)
    return _plain(future.result())


def _plain(value: Any) -> Any:
    if isinstance(value, (pd.DataFrame, pd.Series)):
        # Partitions of a shuffle have their rows in any order.
        return sorted(str(row) for row in _rounded(value).reset_index().itertuples(index=False))
    if isinstance(value, np.ndarray):
        return np.round(value, 9).tolist()
    if isinstance(value, list):
        return sorted(map(repr, value))
    return round(float(value), 9) if isinstance(value, (int, float, np.number)) else repr(value)


def _rounded(value: Any) -> Any:
    numeric = isinstance(value, pd.DataFrame) or pd.api.types.is_numeric_dtype(value)
    return value.round(6) if numeric else value


def settle(client: Client) -> list[str]:
    """Wait until a cluster has forgotten a program; return the keys that it still has after that."""
    scheduler = client.cluster.scheduler
    for _ in range(2_000):
        extension = extension_on(scheduler)
        kept = [str(key) for keys in extension.parts.kept().values() for key in keys] if extension else []
        if not scheduler.tasks and not kept:
            return []
        time.sleep(0.01)
    return [*map(str, scheduler.tasks), *kept]


@contextmanager
def cluster(with_ferroflow: bool) -> Iterator[tuple[Client, Client]]:
    """Start a cluster in this process with two clients."""
    with (
        dask.config.set(_SETTINGS),
        LocalCluster(n_workers=3, threads_per_worker=1, processes=False, dashboard_address=None) as workers,
        Client(workers) as client,
        Client(workers, set_as_default=False) as other,
    ):
        if with_ferroflow:
            assume_short()
            ferroflow_dask.install(client)
        yield client, other


def compare(seeds: range, report: Callable[[str], object] = lambda _: None) -> tuple[list[str], Counter[str]]:
    """Run programs on both clusters; return a line for each difference, and counts of bundles."""
    wrong = []
    with cluster(False) as stock, cluster(True) as ours:
        for seed in seeds:
            n_wrong = len(wrong)
            expected, found = run(seed, *stock), run(seed, *ours)
            if found != expected:
                wrong.append(f"program {seed}: {found.differs_from(expected)}"[:1000])
            del expected, found
            wrong += [f"program {seed} left {left[:5]}" for left in map(settle, (stock[0], ours[0])) if left]
            for one in wrong[n_wrong:]:
                report(one)
            extension = extension_on(ours[0].cluster.scheduler)
            if extension is None or extension.error is not None:
                wrong.append(f"program {seed}: the plugin has failed")
                break
        counts = Counter(extension.graphs.bundles.counts) if extension else Counter()
    return wrong, counts


if __name__ == "__main__":
    started = time.perf_counter()
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    differences, counted = compare(range(first, first + int(sys.argv[1])), report=print)
    print(f"{len(differences)} differences, {dict(counted)}, {time.perf_counter() - started:.0f} s")
