"""Tasks of which durations are assumed: they read data and call library functions only."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
from dask._task_spec import Alias, DataNode, List, Task, TaskRef
from dask.utils import key_split
from dask_graphs import Graph, combine

from ferroflow_dask.bundling.assumed import assumed_prefixes, assumed_tasks
from ferroflow_dask.bundling.averages import expected
from ferroflow_dask.bundling.graphs import bundle_graph
from ferroflow_dask.bundling.sample import sample_of
from ferroflow_dask.cluster_profile import ClusterProfile

N_THREADS = 4
FEWER = 8 * N_THREADS


def add(i: int) -> Task:
    return Task(f"add-{i}", operator.add, TaskRef("x"), i)


def twice(value: int) -> int:
    return 2 * value


@pytest.mark.parametrize(
    "task",
    [
        add(0),
        Task("add-0", np.add, TaskRef("x"), TaskRef("y")),
        Task("add-0", pd.concat, List(TaskRef("x"), TaskRef("y"))),
        Task("add-0", partial(np.sum, axis=0), TaskRef("x")),
    ],
)
def test_library_tasks_that_read_data_have_assumed_durations(task: Task) -> None:
    assert assumed_tasks({task.key: task}, {"add"}) == {task.key}
    assert not assumed_tasks({task.key: task}, {"other"})


@pytest.mark.parametrize(
    "task",
    [
        Task("add-0", operator.add, 1, 2),
        Task("add-0", twice, TaskRef("x")),
        Task("add-0", np.apply_along_axis, twice, 0, TaskRef("x")),
        Task("add-0", partial(np.apply_along_axis, twice), 0, TaskRef("x")),
    ],
    ids=["reads nothing", "user's function", "user's function as argument", "user's function in a partial"],
)
def test_other_tasks_have_none(task: Task) -> None:
    assert not assumed_tasks({task.key: task}, {"add"})


def test_a_prefix_is_assumed_if_all_its_tasks_are_and_it_has_few() -> None:
    few: Graph = {f"add-{i}": add(i) for i in range(FEWER - 2)}
    assert assumed_prefixes(few, {"add": FEWER - 2}, FEWER) == {"add"}
    named: Graph = {**few, "add-90": Alias("add-90", "add-0"), "add-91": DataNode("add-91", 1)}
    assert assumed_prefixes(named, {"add": FEWER - 2}, FEWER) == {"add"}
    own: Graph = {**few, "add-90": Task("add-90", combine, TaskRef("x"))}
    assert not assumed_prefixes(own, {"add": FEWER - 1}, FEWER)
    assert not assumed_prefixes(few, {"add": FEWER}, FEWER)


def test_a_graph_of_few_tasks_of_each_library_function_has_no_sample() -> None:
    graph: Graph = {f"x-{i}": DataNode(f"x-{i}", i) for i in range(20)}
    for prefix, function in (("add", operator.add), ("mul", operator.mul), ("sub", operator.sub)):
        graph |= {f"{prefix}-{i}": Task(f"{prefix}-{i}", function, TaskRef(f"x-{i}"), 2) for i in range(20)}
    assert not sample_of(graph, set(), N_THREADS)
    own = {key: Task(key, twice, TaskRef(f"x-{i % 20}")) for i, key in enumerate(graph) if key[0] != "x"}
    assert sample_of({**graph, **own}, set(), N_THREADS) & own.keys()


def test_assumed_durations_follow_the_data() -> None:
    tasks = [Task(f"add-{i}", operator.add, TaskRef("x"), i) for i in range(2)]
    found = expected(tasks, [None] * 2, [[], []], [0.0, 5e8], {}, guess_s=7.0, assumed={0, 1})
    assert not found.unknown
    assert found.costs_s[1] - found.costs_s[0] == pytest.approx(1.0)
    assert found.nbytes == [0.0, 5e8]


def test_a_task_of_unknown_duration_has_its_declared_size() -> None:
    tasks = [Task("load-0", twice, 1), Task("add-0", operator.add, TaskRef("load-0"), 1)]
    found = expected(
        tasks, [None] * 2, [[], [0]], [0.0] * 2, {"load-0": 5e8}, guess_s=7.0, assumed={1}, many={0}
    )
    assert found.unknown == [0]
    assert found.costs_s == [7.0, pytest.approx(1.0, rel=0.01)]
    assert found.nbytes == found.most_nbytes == [5e8, 5e8]


def loads_of(n: int) -> Graph:
    return {f"load-{i}": Task(f"load-{i}", twice, i) for i in range(n)}


def readers_of(read: Iterable[Any], prefix: str, function: Callable[..., Any], *arguments: Any) -> Graph:
    """Return a task that reads each of some others."""
    return {
        f"{prefix}-{i}": Task(f"{prefix}-{i}", function, TaskRef(key), *arguments)
        for i, key in enumerate(read)
    }


def cut(*layers: Graph) -> list[set[str]]:
    """Return the prefixes in each bundle of several tasks, on workers of 1 GB that know nothing."""
    tasks: Graph = {key: task for layer in layers for key, task in layer.items()}
    cluster = ClusterProfile((1,) * N_THREADS, memory_nbytes=10**9)
    found = bundle_graph(tasks, layers[-1].keys(), cluster, {}, "7")
    return [
        {key_split(one.key) for one in bundle.tasks}
        for bundle in found.bundles.values()
        if len(bundle.tasks) > 1
    ]


def test_nothing_is_assumed_of_the_readers_of_many_results_of_unknown_size() -> None:
    def is_bundled(n: int) -> bool:
        reads = readers_of(loads := loads_of(n), "add", operator.add, 1)
        return bool(cut(loads, reads, readers_of(reads, "sub", operator.sub, 1)))

    assert is_bundled(FEWER - 1)
    assert not is_bundled(FEWER)


def test_nothing_is_assumed_behind_the_readers_of_many_results_of_unknown_size() -> None:
    loads = loads_of(64)
    together: Graph = {
        f"concat-{i}": Task(f"concat-{i}", np.concatenate, List(*map(TaskRef, [*loads][8 * i : 8 * i + 8])))
        for i in range(8)
    }
    same: Graph = {f"same-{i}": Alias(f"same-{i}", f"concat-{i}") for i in range(8)}
    found = cut(loads, together, same, readers_of(same, "add", operator.add, 1))
    assert not any("add" in prefixes or "concat" in prefixes for prefixes in found)


def test_data_are_no_results_of_unknown_size() -> None:
    data: Graph = {f"data-{i}": DataNode(f"data-{i}", np.ones(4)) for i in range(FEWER)}
    sums = readers_of(data, "sum", np.sum)
    total: Graph = {"total-0": Task("total-0", np.sum, List(*map(TaskRef, sums)))}
    assert {"data", "sum"} <= set().union(*cut(data, sums, total))
