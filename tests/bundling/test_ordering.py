"""The order of tasks in bundles: any graph's a right one, and Dask's where that is not plain."""

from __future__ import annotations

from typing import Any

import dask.array as da
import pytest
from dask._task_spec import Alias, DataNode, GraphNode, Task, TaskRef, convert_legacy_graph
from dask.base import optimize
from dask.order import order
from hypothesis import given
from hypothesis import strategies as st

from ferroflow_dask.bundling.ordering import in_order


def together(*values: Any) -> tuple[Any, ...]:
    return values


def call(key: str, *needed: str) -> Task:
    return Task(key, together, *map(TaskRef, needed))


def graph(*tasks: GraphNode) -> dict[Any, GraphNode]:
    return {task.key: task for task in tasks}


@st.composite
def graphs(draw: st.DrawFn) -> dict[Any, GraphNode]:
    most = draw(st.integers(0, 3))
    tasks: list[GraphNode] = []
    for i in range(draw(st.integers(1, 20))):
        earlier = [f"t-{j}" for j in range(i)]
        needed = draw(st.lists(st.sampled_from([*earlier, "elsewhere"]), max_size=most, unique=True))
        kinds: list[GraphNode] = [call(f"t-{i}", *needed)]
        if not needed:
            kinds.append(DataNode(f"t-{i}", i))
        elif len(needed) == 1:
            kinds.append(Alias(f"t-{i}", needed[0]))
        tasks.append(draw(st.sampled_from(kinds)))
    return graph(*draw(st.permutations(tasks)))


@given(graphs())
def test_each_task_comes_once_and_after_what_it_reads(tasks: dict[Any, GraphNode]) -> None:
    keys = in_order(tasks)
    position = {key: i for i, key in enumerate(keys)}
    assert position.keys() == tasks.keys()
    assert len(keys) == len(tasks)
    for key, task in tasks.items():
        assert all(position[needed] < position[key] for needed in task.dependencies if needed in position)


def test_chains_stay_together_and_what_is_loose_comes_last() -> None:
    tasks = graph(
        call("loose"),
        *(call(f"{name}-0") for name in "ab"),
        *(call(f"{name}-{i}", f"{name}-{i - 1}") for i in range(1, 5) for name in "ab"),
        call("end", "a-4", "b-4"),
    )
    keys = in_order(tasks)
    a, b = ([f"{name}-{i}" for i in range(5)] for name in "ab")
    assert keys in ([*a, *b, "end", "loose"], [*b, *a, "end", "loose"])


def test_tasks_that_need_each_other_are_an_error() -> None:
    tasks = graph(call("a", "c"), call("b", "a"), call("c", "b"), call("d"), call("e", "d"))
    with pytest.raises(RuntimeError, match="Cycle detected"):
        in_order(tasks)


def test_where_there_are_few_chains_it_is_dasks_order() -> None:
    numbers = da.ones((8, 8), chunks=(1, 1))
    (collection,) = optimize((numbers + numbers.T - numbers.mean(axis=0)).sum())
    tasks = convert_legacy_graph(dict(collection.__dask_graph__()))
    turn = order(dict(tasks))
    assert in_order(tasks) == sorted(tasks, key=turn.__getitem__)
