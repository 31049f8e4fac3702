"""Queue time: how long the queue keeps threads busy, and which queued tasks are of one graph."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ferroflow_dask.scheduler import queue_time
from ferroflow_dask.scheduler.queue_time import TOKEN, QueueTime


def task(name: str, *dependents: Any, token: str = "a") -> Any:
    """Return a task of a collection; of a function that is submitted if `token` is empty."""
    group = f"{name}-{token * TOKEN}" if token else name
    return SimpleNamespace(
        group=SimpleNamespace(name=group),
        prefix=SimpleNamespace(name=name, duration_average=0.5),
        dependents=list(dependents),
    )


class Queue(list[Any]):
    def peek(self) -> Any:
        return self[0]

    def peekright(self) -> Any:
        return self[-1]


def queue_time_of(queued: Sequence[Any]) -> QueueTime:
    return QueueTime(SimpleNamespace(queued=Queue(queued), total_nthreads=4))  # type: ignore[arg-type]


def test_tasks_of_one_graph_count_by_their_average_duration() -> None:
    total = task("sum")
    reader, roots = task("add", total), [task("load", task("neg", total)) for _ in range(16)]
    assert queue_time_of(roots)(reader) == 2.0
    roots[0].prefix.duration_average = -1  # unknown
    assert queue_time_of(roots)(reader) == 0.0


@pytest.mark.parametrize("place", [0, -1], ids=["the first", "one of the last"])
@pytest.mark.parametrize(
    "other", [task("load", token="b"), task("load", token="")], ids=["token", "no token"]
)
def test_a_queue_with_a_task_of_another_graph_does_not_count(place: int, other: Any) -> None:
    total = task("sum")
    roots = [task("load", total) for _ in range(16)]
    roots[place] = other
    assert queue_time_of(roots)(task("add", total)) == 0.0


def test_a_graph_is_known_by_its_last_group_with_a_token() -> None:
    total = task("sum", task("finalize", token=""))
    assert queue_time_of([task("load", total)] * 4)(task("add", total)) == 0.5
    assert queue_time_of([task("load", total)] * 4)(task("add", task("finalize", token=""), token="b")) == 0.0


def test_functions_that_are_submitted_are_of_no_graph() -> None:
    assert queue_time_of([task("load", token="")] * 4)(task("load", token="")) == 0.0


@pytest.mark.parametrize("name", [0, ("part", 0), 1.5], ids=str)
def test_keys_may_begin_with_anything(name: Any) -> None:
    other = task("load")
    other.group.name = name
    assert queue_time_of([other] * 4)(task("add", task("sum"))) == 0.0
    assert queue_time_of([task("load")] * 4)(other) == 0.0


def test_tasks_that_depend_on_each_other_end_the_search() -> None:
    one, other = task("one"), task("other")
    one.dependents, other.dependents = [other], [one]
    assert queue_time_of([one] * 4)(other) == 0.0


def test_the_end_of_a_graph_is_not_searched_through_thousands_of_groups() -> None:
    tasks = [task("step-0")]
    for i in range(1, 3 * queue_time._MOST_STEPS):
        tasks.append(task(f"step-{i}", tasks[-1]))
    seconds = queue_time_of([tasks[500]] * 4)
    assert seconds(tasks[-1]) == 0.0
    assert len(seconds._ends) == queue_time._MOST_STEPS
    assert seconds(tasks[500]) == 0.5
    assert len(seconds._ends) == queue_time._MOST_STEPS + 501


def test_groups_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_time, "_MOST_GROUPS", 20)
    total = task("sum")
    seconds = queue_time_of([task("load", total)] * 4)
    for i in range(100):
        assert seconds(task(f"add-{i}", total)) == 0.5
    assert len(seconds._ends) <= 21
