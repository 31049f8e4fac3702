"""Random programs with P2P shuffles: stock P2P on a cluster against the plain tasks in its place.

`python tests/random_shuffles.py 1000` compares so many programs, and prints how many were equal. With
`--held`, they run on a cluster with the plugin. Held parts become plain tasks, P2P shuffles, or both.
"""

from __future__ import annotations

import random
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask._task_spec import cull, execute_graph
from dask.base import collections_to_expr
from dask.core import flatten
from distributed import Client, LocalCluster
from distributed.shuffle._core import P2PBarrierTask

from ferroflow_dask import install
from ferroflow_dask.bundling import small_shuffles
from ferroflow_dask.bundling.plain_shuffles import Choice, with_plain_tasks
from ferroflow_dask.bundling.shuffles import unfused
from ferroflow_dask.scheduler._distributed_graphs import materialized

#: Columns of frames; `k` has few values. Keys are columns by which frames are shuffled and joined.
_NUMBERS = ("i", "f", "n", "k")
_KEYS = ("k", "s", "c", "t", "z", "n", "f", "b", "i")
#: Plain tasks in place of a shuffle: one gathers all pieces, or each output has its own ones.
GATHERED = Choice(0.0, is_plain=True)
DIRECT = Choice(0.0, is_plain=True, is_direct=True)
_JOINS = ("inner", "left", "right", "outer")


def first_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the first two rows, with the sum of a column as another one."""
    return rows.head(2).assign(total=rows.d.sum())


def of_chunk(chunk: Any) -> Any:
    """Return a chunk in the opposite order."""
    return chunk[::-1]


@dataclass
class Program:
    """A collection from random choices, the same for the same seed; `steps` describes it."""

    seed: int
    steps: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.data = np.random.default_rng(self.seed)

    def note(self, step: str) -> None:
        """Note what was chosen."""
        self.steps.append(step)

    def collection(self) -> Any:
        """Return the collection."""
        return self.frame() if self.rng.random() < 0.7 else self.array()

    # Frames

    def rows(self) -> pd.DataFrame:
        """Return a pandas frame with an index of some type."""
        n, data = self.rng.choice((1, 7, 30, 90)), self.data
        times = pd.Timestamp("2024-03-30") + pd.to_timedelta(data.integers(0, 300, n), unit="h")
        words = np.array([None, "a", "bb", "ß", "", "long " * 5], dtype=object)
        columns = {
            "i": np.arange(n, dtype=self.rng.choice(("i8", "i4", "u2"))),
            "f": np.where(data.random(n) < 0.2, np.nan, data.integers(0, 9, n) / 4),
            "s": words[data.integers(self.rng.randint(0, 1), 6, n)],
            "b": data.random(n) < 0.5,
            "c": pd.Categorical.from_codes(data.integers(-1, 3, n), ["x", "y", "w"]),
            "t": times.where(data.random(n) > 0.1),
            "z": times.tz_localize("UTC").tz_convert("Europe/Berlin"),
            "n": pd.array(data.integers(0, 5, n), "Int64"),
            "k": data.integers(0, 6, n),
            "d": pd.to_timedelta(data.integers(0, 9, n), unit="s"),
        }
        rows = pd.DataFrame(columns)
        rows.loc[data.random(n) < 0.2, "n"] = pd.NA
        kind = self.rng.randrange(6)
        if kind == 1:
            rows.index = pd.Index(np.arange(n) * 3, name="index_name")
        elif kind == 2:
            rows.index = pd.date_range("2024-01-01", periods=n, freq="D", name="day")
        elif kind == 3:
            rows.index = pd.Index([f"row {i % 17}" for i in range(n)], name=self.rng.choice((None, "word")))
        elif kind == 4:
            rows.index = pd.Index(data.random(n))
        elif kind == 5:
            rows.index = pd.date_range("2024-01-01", periods=n, freq="h", tz="Europe/Berlin")
        self.note(f"{n} rows, index {kind}")
        if self.rng.random() < 0.15:
            self.note("a name of the columns, attributes")
            rows = rows.rename_axis(columns="field")
            rows.attrs = {"source": "random"}
        return rows

    def source(self) -> Any:
        """Return a Dask frame, some of whose partitions may be empty."""
        rng = self.rng
        n = rng.randint(1, 12)
        f = dd.from_pandas(self.rows(), npartitions=n, sort=False)
        self.note(f"{n} partitions")
        if rng.random() < 0.4:
            least = rng.randint(0, 90)
            f = f[f.i < least] if rng.random() < 0.5 else f[f.i >= least]
            self.note(f"filtered by i and {least}")
        return f

    def key(self) -> Any:
        """Return a column, or two."""
        keys = self.rng.sample(_KEYS, self.rng.choice((1, 1, 1, 2)))
        return keys if len(keys) > 1 else keys[0]

    def frame(self) -> Any:
        """Return a collection from shuffled frames."""
        rng = self.rng
        f = self.source()
        for _ in range(rng.choice((0, 0, 0, 1))):
            f = self.apply(f, _OF_FRAMES)
        f = self.apply(f, _OF_FRAMES + _ENDS_OF_FRAMES * 2)
        kind = rng.randrange(6)
        if kind == 0:
            first, last = sorted(rng.sample(range(f.npartitions + 1), 2))
            self.note(f"partitions {first}:{last}")
            f = f.partitions[first:last]
        elif kind == 1 and f.ndim == 2 and len(f.columns) > 2:
            columns = rng.sample([*f.columns], 2)
            self.note(f"columns {columns}")
            f = f[columns]
        elif kind == 2:
            self.note("lengths")
            f = f.map_partitions(len, meta=(None, "i8"))
        return f

    def apply(self, x: Any, functions: list[Callable[[Program, Any], Any]]) -> Any:
        """Apply a random function."""
        function = self.rng.choice(functions)
        self.note(function.__name__)
        return function(self, x)

    # Arrays

    def array(self) -> Any:
        """Return a rechunked array, or something from one."""
        rng = self.rng
        shape = tuple(rng.randint(1, 14) for _ in range(rng.randint(1, 3)))
        dtype = rng.choice(("f8", "i4", "c16", "O", "?", "M8[s]", "U3", [("a", "i4"), ("b", "f8")]))
        values = self.data.integers(0, 9, shape)
        if isinstance(dtype, list):
            data = np.zeros(shape, dtype=dtype)
            data["a"], data["b"] = values, values / 2
        elif dtype == "O":
            data = np.array([f"{v}" if v % 2 else v for v in values.ravel().tolist()], dtype=object)
            data = data.reshape(shape)
        else:
            data = values.astype(dtype)
        chunks = tuple(map(self.chunks, shape))
        x = da.from_array(data, chunks=chunks)
        self.note(f"array {dtype} {chunks}")
        if rng.random() < 0.5:
            x = x.map_blocks(of_chunk, dtype=x.dtype)
            self.note("map_blocks")
        for _ in range(rng.choice((1, 1, 2))):
            chunks = tuple(map(self.chunks, shape))
            self.note(f"rechunk {chunks}")
            x = x.rechunk(chunks, method="p2p")
        kind = rng.randrange(4)
        if kind == 0:
            part = tuple(slice(rng.randint(0, n // 2), rng.randint(n // 2, n) or 1) for n in shape)
            self.note(f"{part}")
            x = x[part]
        elif kind == 1 and x.dtype.kind in "fic?":
            axis = rng.choice((None, 0))
            self.note(f"sum {axis}")
            x = x.sum(axis=axis)
        elif kind == 2:
            x = x.map_blocks(of_chunk, dtype=x.dtype)
            self.note("map_blocks")
        return x

    def chunks(self, n: int) -> tuple[int, ...]:
        """Return random lengths of the chunks along an axis."""
        cuts = sorted(self.rng.sample(range(1, n), min(n - 1, self.rng.randint(0, 4))))
        edges = [0, *cuts, n]
        if self.rng.random() < 0.05:
            edges.insert(1, edges[1])
        return tuple(np.diff(edges).tolist())


def _shuffled(p: Program, f: Any) -> Any:
    n = p.rng.choice((None, None, 1, 3, 15))
    if p.rng.random() < 0.2:
        p.note(f"by index to {n}")
        return f.shuffle(on_index=True, npartitions=n)
    key = p.key()
    p.note(f"by {key} to {n}")
    return f.shuffle(key, npartitions=n)


def _joined(p: Program, f: Any) -> Any:
    other, how = f if p.rng.random() < 0.15 else p.source(), p.rng.choice(_JOINS)
    left, right = p.rng.sample(("column", "column", "index"), 2)
    options: dict[str, Any] = {"how": how, "indicator": p.rng.random() < 0.2}
    if left == right:
        options["on"] = p.key()
    else:
        key = p.rng.choice(("i", "k", "n", "f"))
        other = other.set_index("i", drop=False, shuffle_method="p2p") if left == "column" else other
        f = f.set_index("i", drop=False, shuffle_method="p2p") if right == "column" else f
        sides = {"left_on": key, "right_index": True}
        options |= sides if left == "column" else {"right_on": key, "left_index": True}
    p.note(f"{options}")
    merged = f.merge(other, shuffle_method="p2p", broadcast=False, **options)
    # Later steps know the names of the left columns.
    return merged.rename(columns={f"{name}_x": name for name in f.columns})


def _joined_by_index(p: Program, f: Any) -> Any:
    how = p.rng.choice(_JOINS)
    p.note(how)
    other = f.assign(k=f.k + 1) if p.rng.random() < 0.5 else p.source()
    other = other[["k", "s"]].rename(columns={"k": "other_k", "s": "other_s"})
    return f.clear_divisions().join(other.clear_divisions(), how=how)


def _indexed(p: Program, f: Any) -> Any:
    key, drop = p.rng.choice(("i", "f", "t", "k", "s", "z", "n")), p.rng.random() < 0.5
    n = p.rng.choice((None, 3, 6))
    p.note(f"by {key} drop {drop} to {n}")
    if p.rng.random() < 0.2:
        p.note("given divisions")
        return f.set_index("k", drop=False, divisions=[0, 2, 3, 5], shuffle_method="p2p")
    return f.set_index(key, drop=False, npartitions=n, shuffle_method="p2p")


def _sorted(p: Program, f: Any) -> Any:
    key, options = p.rng.choice(("i", "f", "k", "t")), {"na_position": p.rng.choice(("first", "last"))}
    options["ascending"] = p.rng.random() < 0.5
    p.note(f"by {key} {options}")
    return f.sort_values(key, shuffle_method="p2p", **options)


def _distinct(p: Program, f: Any) -> Any:
    subset, split_out = p.rng.choice((None, ["k"], ["s", "b"], ["c"], ["n"])), p.rng.randint(2, 4)
    p.note(f"{subset} split_out {split_out}")
    return f.drop_duplicates(subset=subset, split_out=split_out)


def _grouped(p: Program, f: Any) -> Any:
    key, split_out = p.key(), p.rng.randint(2, 4)
    how, column = p.rng.choice(("sum", "mean", "count", "first", "var", "nunique")), p.rng.choice(_NUMBERS)
    options = {"dropna": p.rng.choice((True, False)), "observed": True, "sort": p.rng.choice((None, False))}
    p.note(f"by {key} {column} {how} {options} split_out {split_out}")
    return getattr(f.groupby(key, **options)[column], how)(split_out=split_out)


def _aggregated(p: Program, f: Any) -> Any:
    key, split_out = p.key(), p.rng.randint(2, 4)
    p.note(f"by {key} split_out {split_out}")
    what = {"d": "max", "t": "min"} if {"d", "t"}.isdisjoint([key] if isinstance(key, str) else key) else {}
    return f.groupby(key, observed=True).agg({"b": "sum", **what}, split_out=split_out)


def _applied(p: Program, f: Any) -> Any:
    key = p.key()
    p.note(f"by {key}")
    meta = f._meta.drop(columns=key).assign(total=f._meta.d)
    return f.groupby(key, observed=True).apply(first_rows, meta=meta)


def _transformed(p: Program, f: Any) -> Any:
    key = p.rng.choice(("k", "b", "s"))
    p.note(f"by {key}")
    return f.groupby(key).i.transform("sum", meta=("i", "f8"))


def _counted(p: Program, f: Any) -> Any:
    key = p.rng.choice(("k", "s", "c", "n"))
    p.note(key)
    return f[key].value_counts(split_out=3)


_OF_FRAMES = [_shuffled, _joined, _joined_by_index, _indexed, _sorted, _distinct]
_ENDS_OF_FRAMES = [_grouped, _aggregated, _applied, _transformed, _counted]


# Comparing


def graph_of(collection: Any) -> tuple[dict[Any, Any], list[Any]]:
    """Return the graph that a client sends, and the keys of the partitions or chunks."""
    expr = collections_to_expr(collection).optimize()
    keys = list(flatten(expr.__dask_keys__()))
    return materialized(expr, keys), keys


def n_barriers(graph: dict[Any, Any]) -> int:
    """Return the number of P2P shuffles in a graph."""
    return sum(isinstance(task, P2PBarrierTask) for task in graph.values())


def assert_same(found: Any, expected: Any) -> None:
    """Assert that two partitions are equal, dtypes, index and types of objects included."""
    assert type(found) is type(expected)
    if isinstance(expected, pd.Series):
        pd.testing.assert_series_equal(found, expected, check_exact=True, check_index_type="exact")
        found, expected = found.to_frame("values"), expected.to_frame("values")
    if isinstance(expected, pd.DataFrame):
        options = {"check_index_type": "exact", "check_column_type": "exact"}
        pd.testing.assert_frame_equal(found, expected, check_exact=True, **options)
        assert found.attrs == expected.attrs
        assert [*map(str, found.dtypes)] == [*map(str, expected.dtypes)]
        for i in range(expected.shape[1]):
            assert [*map(type, found.iloc[:, i])] == [*map(type, expected.iloc[:, i])]
    elif isinstance(expected, (np.ndarray, np.generic)) and expected.dtype.kind != "O":
        np.testing.assert_array_equal(found, expected, strict=True)
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tolist() == expected.tolist()
        assert [*map(type, found.ravel())] == [*map(type, expected.ravel())]
    else:
        assert found == expected


@dataclass(frozen=True)
class Outcome:
    """Outcome of a program: its type, and a description if the plain tasks yield something else."""

    type: str
    difference: str = ""


def _made(seed: int) -> Outcome | tuple[Program, dict[str, Any], dict[Any, Any], list[Any]]:
    """Return a program, Dask's settings for it, its graph and its keys; the outcome if it has no shuffle."""
    program = Program(seed)
    settings = {"dataframe.convert-string": program.rng.random() < 0.5, "scheduler": "sync"}
    with dask.config.set(settings):
        try:
            graph, keys = graph_of(program.collection())
        except Exception as error:  # noqa: BLE001 -- Dask refuses some choices
            return Outcome(f"Dask refuses: {_text(error)}")
    return (program, settings, graph, keys) if n_barriers(graph) else Outcome("no P2P")


def run(seed: int, client: Client) -> Outcome:
    """Run a program with P2P, with plain tasks, and with plain tasks for some of its shuffles."""
    made = _made(seed)
    if isinstance(made, Outcome):
        return made
    program, settings, graph, keys = made
    plain = [with_plain_tasks(unfused(graph), lambda _, one=one: one).tasks for one in (GATHERED, DIRECT)]
    if any(map(n_barriers, plain)):
        return Outcome("P2P stays")
    try:
        expected = client.get(graph, keys)
    except Exception as error:  # noqa: BLE001 -- the plain tasks may raise another exception, or none
        return Outcome(f"stock raises: {_text(error)}")
    try:
        for tasks in plain:
            found = execute_graph(cull(tasks, keys), keys=keys)
            for key, one in zip(keys, expected, strict=True):
                assert_same(found[key], one)
        if n_barriers(graph) > 1 and program.rng.random() < 0.5:
            some = with_plain_tasks(
                unfused(graph), lambda _: program.rng.choice((GATHERED, DIRECT, Choice()))
            ).tasks
            for one, other in zip(client.get(cull(some, keys), keys), expected, strict=True):
                assert_same(one, other)
    except Exception as error:  # noqa: BLE001 -- any is a difference
        text = f"program {seed} {program.steps} {settings}: {type(error).__name__}: {error}"
        return Outcome("different", text[:2000])
    return Outcome("equal")


def run_held(seed: int, stock: Client, held: Client) -> Outcome:
    """Run a program on a stock cluster, and on one whose plugin holds the tasks behind its shuffles."""
    made = _made(seed)
    if isinstance(made, Outcome):
        return made
    program, settings, graph, keys = made
    expected, found = _values(stock, graph, keys), _values(held, graph, keys)
    text = f"program {seed} {program.steps} {settings}"
    if isinstance(expected, Exception) or isinstance(found, Exception):
        is_same = type(expected) is type(found)
        return Outcome("both raise") if is_same else Outcome("different", f"{text}: {expected!r}, {found!r}")
    try:
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    except AssertionError as error:
        return Outcome("different", f"{text}: {error}"[:2000])
    return Outcome("equal")


def _values(client: Client, graph: dict[Any, Any], keys: list[Any]) -> Any:
    try:
        return client.get(graph, keys)
    except Exception as error:  # noqa: BLE001 -- it is compared
        return error


#: Limits by which the shuffles of all programs, of none, and of about half of them become plain tasks [B].
_LIMITS = (2**25, 1, 300, inf)


def limit_shuffles(patch: pytest.MonkeyPatch, most_nbytes: float) -> None:
    """Make larger shuffles P2P, and others such that one task gathers the pieces [B]; direct if infinite."""
    patch.setattr(small_shuffles, "_is_direct", lambda *_: most_nbytes == inf)
    patch.setattr(small_shuffles, "_MOST_GATHERED", most_nbytes)
    patch.setattr(small_shuffles, "_DIRECT_SHARE", 0)


def compare_held(
    seeds: range, stock: Client, held: Client, report: Callable[[str], object] = lambda _: None
) -> tuple[list[str], Counter[str]]:
    """Run programs on both clusters; the limit of the second one changes with the seed."""
    differences, counts = list[str](), Counter[str]()
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            limit_shuffles(patch, _LIMITS[seed % len(_LIMITS)])
            warnings.simplefilter("ignore")
            outcome = run_held(seed, stock, held)
        counts[outcome.type] += 1
        if outcome.difference:
            differences.append(outcome.difference)
            report(outcome.difference)
    return differences, counts


def _text(error: Exception) -> str:
    text = re.sub(r"[0-9a-f]{32}", "…", f"{type(error).__name__}: {error}")
    return text[:80].replace("\n", " ")


@contextmanager
def cluster() -> Iterator[Client]:
    """Start a stock cluster in this process."""
    with (
        dask.config.set({"dataframe.shuffle.method": "p2p", "array.rechunk.method": "p2p"}),
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as workers,
        Client(workers) as client,
    ):
        yield client


def compare(
    seeds: range, client: Client, report: Callable[[str], object] = lambda _: None
) -> tuple[list[str], Counter[str]]:
    """Run programs; return a line for each difference, and how many programs had each outcome."""
    differences, counts = [], Counter[str]()
    for seed in seeds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = run(seed, client)
        counts[outcome.type] += 1
        if outcome.difference:
            differences.append(outcome.difference)
            report(outcome.difference)
    return differences, counts


if __name__ == "__main__":
    started = time.perf_counter()
    given = [int(text) for text in sys.argv[1:] if text != "--held"]
    programs = range(*given[1:], sum(given))
    with cluster() as one, cluster() as other:
        if "--held" in sys.argv:
            install(other)
            _, counted = compare_held(programs, one, other, lambda text: print(text, flush=True))
        else:
            _, counted = compare(programs, one, lambda text: print(text, flush=True))
    for name, count in counted.most_common():
        print(count, name)
    print(f"{time.perf_counter() - started:.0f} s")
