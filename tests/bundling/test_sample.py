"""Sample of a graph: which tasks run first so that the others can be bundled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from dask._task_spec import Alias, DataNode, Task, TaskRef
from dask.utils import key_split
from dask_graphs import COLLECTIONS, Graph, combine, graph_of

from ferroflow_dask.bundling.sample import sample_of

#: The sample has 2 tasks of each prefix for each thread; a graph of fewer than 8 for each has none.
N_THREADS = 4


def leaves(prefix: str, n: int) -> Graph:
    return {f"{prefix}-{i}": Task(f"{prefix}-{i}", combine, i) for i in range(n)}


def each(prefix: str, before: Graph) -> Graph:
    """Return one task for each of some others, which reads it."""
    return {f"{prefix}-{i}": Task(f"{prefix}-{i}", combine, i, TaskRef(key)) for i, key in enumerate(before)}


def total(key: str, before: Graph) -> Graph:
    return {key: Task(key, combine, None, *map(TaskRef, before))}


def columns(n: int = 100) -> Graph:
    """Return independent chains of three tasks, and a task that reads all."""
    first = leaves("load", n)
    second = each("clean", first)
    third = each("reduce", second)
    return {**first, **second, **third, **total("total", third)}


def prefixes(keys: set[str]) -> Counter[str]:
    return Counter(map(key_split, keys))


# Whether there is a sample


#: 64 prefixes.
NAMES = [f"{first}{second}" for first in "abcdefgh" for second in "ghijklmn"]
WITHOUT: dict[str, tuple[Graph, set[str]]] = {
    "no tasks": ({}, set()),
    "fewer than eight tasks for each thread": (leaves("load", 8 * N_THREADS - 1), set()),
    "known tasks": (columns(), {"load", "clean", "reduce", "total"}),
    "fewer than eight unknown tasks for each thread": (
        {**columns(), **leaves("new", 8 * N_THREADS - 2)},
        {"load", "clean", "reduce"},
    ),
    "data": ({f"x-{i}": DataNode(f"x-{i}", i) for i in range(100)}, set()),
    "names of other tasks": ({f"x-{i}": Alias(f"x-{i}", "y") for i in range(100)}, set()),
    "tasks of which each has its own prefix": ({name: Task(name, combine, name) for name in NAMES}, set()),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_there_is_no_sample_of(name: str) -> None:
    tasks, known = WITHOUT[name]
    assert sample_of(tasks, known, N_THREADS) == set()


def test_there_is_a_sample_of_eight_unknown_tasks_for_each_thread() -> None:
    assert sample_of(leaves("load", 8 * N_THREADS), set(), N_THREADS)


# What it consists of


@pytest.mark.parametrize("n_threads", [1, 2, 4])
def test_each_unknown_prefix_has_two_tasks_for_each_thread(n_threads: int) -> None:
    found = prefixes(sample_of(columns(), set(), n_threads))
    assert found == dict.fromkeys(("load", "clean", "reduce"), 2 * n_threads)


def test_a_known_prefix_is_only_sampled_for_its_readers() -> None:
    tasks = {**columns(), **leaves("other", 100)}
    assert prefixes(sample_of(tasks, {"clean", "reduce", "total", "other"}, N_THREADS)) == {
        "load": 2 * N_THREADS
    }
    assert prefixes(sample_of(tasks, {"load", "reduce", "total", "other"}, N_THREADS)) == {
        "load": 2 * N_THREADS,
        "clean": 2 * N_THREADS,
    }


def test_a_prefix_of_few_tasks_is_not_sampled() -> None:
    tasks = {**columns(), **leaves("rare", 2 * N_THREADS)}
    assert prefixes(sample_of(tasks, {"load", "clean", "reduce"}, 2)) == {}
    assert "rare" not in prefixes(sample_of(tasks, set(), N_THREADS))


def test_a_prefix_whose_tasks_read_too_many_others_is_not_sampled() -> None:
    first = leaves("load", 100)
    wide = {f"wide-{i}": Task(f"wide-{i}", combine, i, *map(TaskRef, first)) for i in range(50)}
    assert prefixes(sample_of({**first, **wide}, set(), N_THREADS)) == {"load": 2 * N_THREADS}


@pytest.mark.parametrize(("n", "most"), [(30, 8), (60, 12), (1000, 200)])
def test_a_sample_is_at_most_a_fifth_of_the_graph_or_eight_tasks(n: int, most: int) -> None:
    tasks: Graph = {}
    for prefix in "abcdefghij":
        tasks |= leaves(f"{prefix}{prefix}{prefix}", n // 10)
    assert 0 < len(sample_of(tasks, set(), 1)) <= most


def test_later_tasks_come_first_if_there_is_no_room_for_all() -> None:
    tasks: Graph = {}
    for name in NAMES:
        tasks |= leaves(name, 3)
    found = prefixes(sample_of(tasks, set(), 1))
    assert sum(found.values()) == len(tasks) // 5
    assert set(found) == set(list(dict.fromkeys(map(key_split, tasks)))[-len(found) :])


@pytest.mark.parametrize("make", COLLECTIONS.values(), ids=COLLECTIONS)
@pytest.mark.parametrize("n_threads", [1, 2])
def test_a_sample_has_all_that_its_tasks_read(make: Callable[[], object], n_threads: int) -> None:
    tasks, _ = graph_of(make())
    found = sample_of(tasks, set(), n_threads)
    assert found == sample_of(dict(tasks), set(), n_threads)
    assert found <= tasks.keys()
    assert len(found) <= max(8, len(tasks) // 2)
    for key in found:
        assert {one for one in tasks[key].dependencies if one in tasks} <= found


def test_dependencies_outside_the_graph_exist_already() -> None:
    tasks: Graph = {f"read-{i}": Task(f"read-{i}", combine, i, TaskRef("old")) for i in range(40)}
    assert prefixes(sample_of(tasks, set(), N_THREADS)) == {"read": 2 * N_THREADS}


# Exceptions


def test_tasks_that_cannot_run_now_and_their_readers_are_not_sampled() -> None:
    blocked = {f"load-{i}" for i in range(90)}
    found = sample_of(columns(), set(), N_THREADS, not_now=blocked)
    assert prefixes(found) == dict.fromkeys(("load", "clean", "reduce"), 2 * N_THREADS)
    assert {key.partition("-")[2] for key in found} <= {str(i) for i in range(90, 100)}
    assert sample_of(columns(), set(), N_THREADS, not_now=set(leaves("load", 100))) == set()
