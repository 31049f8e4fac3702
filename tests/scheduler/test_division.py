"""Steps that have left a bundle are dealt out: those that wait for a running step stop no other."""

from __future__ import annotations

from typing import Any, cast

import pytest
from dask._task_spec import GraphNode, Task, TaskRef

from ferroflow_dask.bundling.bundle import Bundle
from ferroflow_dask.scheduler.graphs.division import Division


def graph(**reads: str) -> dict[Any, GraphNode]:
    """Return tasks; each value names the tasks that one reads, in one letter each."""
    return {key: Task(key, max, *map(TaskRef, needed)) for key, needed in reads.items()}


def dealt(n_threads: int, unfinished: str = "", **reads: str) -> list[str]:
    tasks = graph(**reads)
    bundle = Bundle(tuple(tasks.values()), (), {})
    division = Division(cast("Any", None), bundle, frozenset(tasks), {}, "a test", frozenset(unfinished))
    return ["".join(map(str, group)) for group in division.dealt(tasks, n_threads)]


@pytest.mark.parametrize(
    ("unfinished", "reads", "expected"),
    [
        pytest.param("", {"a": "", "b": "", "c": ""}, ["abc"], id="all are free"),
        pytest.param("r", {"a": "r", "b": "", "c": ""}, ["bc", "a"], id="one waits"),
        pytest.param("r", {"a": "", "b": "ar", "c": "b"}, ["a", "bc"], id="one that waits reads a free one"),
        pytest.param("rs", {"a": "r", "b": "s", "c": "ab"}, ["a", "b", "c"], id="two running ones"),
        pytest.param("r", {"a": "q", "b": "q"}, ["ab"], id="a finished value is no reason"),
    ],
)
def test_on_one_thread(unfinished: str, reads: dict[str, str], expected: list[str]) -> None:
    assert dealt(1, unfinished, **reads) == expected


def test_on_several_threads() -> None:
    assert sorted(dealt(2, a="", b="", c="", d="")) == ["ac", "bd"]
    assert sorted(dealt(2, a="", b="a", c="", d="c")) == ["ab", "cd"]
    assert sorted(dealt(5, "r", a="", b="", c="r", d="r")) == ["a", "b", "c", "d"]


def test_groups_come_after_those_that_they_read() -> None:
    reads = {"a": "", "b": "ar", "c": "a", "d": "bs", "e": "dc"}
    groups = dealt(3, "rs", **reads)
    assert sorted("".join(groups)) == sorted(reads)
    before: set[str] = set()
    for group in groups:
        needed = {key for one in group for key in reads[one]} & reads.keys()
        assert needed <= before | set(group)
        before |= set(group)
