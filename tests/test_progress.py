"""What the page and the terminal say of a graph's progress: levels, the critical path, predictions."""

from __future__ import annotations

from collections import Counter

import pytest

from ferroflow_dask.dashboard.progress import GraphProgress
from ferroflow_dask.dashboard.recorder import Recording, WorkerLoad
from ferroflow_dask.dashboard.terminal import view


class Task:
    """What progress needs of a scheduler's task."""

    def __init__(self, key: str, *dependencies: Task) -> None:
        self.key, self.dependencies, self.dependents, self.state = key, dependencies, [], "waiting"
        for other in dependencies:
            other.dependents.append(self)


def test_progress_by_level_with_its_critical_path() -> None:
    seconds = {"a": 1.0, "b": 5.0, "c": 1.0, "d": 1.0, "e": 1.0}
    progress = GraphProgress(lambda ts: seconds[ts.key])
    a = Task("a")
    b, c = Task("b", a), Task("c", a)
    d = Task("d", b, c)
    progress.add([d, c, b, a], n_threads=2, now_s=10.0)  # type: ignore[list-item]
    assert [level.n_tasks for level in progress.levels] == [1, 2, 1]
    assert [level.n_critical for level in progress.levels] == [1, 1, 1]
    assert progress.predicted_s == progress.critical_s == 7.0
    progress.done("a", 11.0)
    progress.done("a", 11.0)  # computed again: counted once
    progress.done("c", 12.0)
    assert [(level.n_done, level.n_critical_done) for level in progress.levels] == [(1, 1), (1, 0), (0, 0)]
    assert progress.remaining_s(2) == pytest.approx(6.0)
    progress.forget("b", 13.0)
    progress.done("d", 14.0)
    assert progress.ended_at == 14.0
    progress.add([Task("e")], n_threads=1, now_s=20.0)  # type: ignore[list-item]
    assert progress.n_tasks == 1  # what was done before is over

    assert [level.critical_key for level in progress.levels] == ["e"]


def test_the_critical_path_counts_by_seconds() -> None:
    seconds = {"a": 1.0, "b": 9.0}
    progress = GraphProgress(lambda ts: seconds[ts.key])
    a = Task("a")
    progress.add([a, Task("b", a)], n_threads=8, now_s=0.0)  # type: ignore[list-item]
    progress.done("a", 1.0)
    assert [level.critical_s for level in progress.levels] == [1.0, 9.0]
    assert progress.remaining_s(8) == pytest.approx(9.0)


def test_work_that_comes_in_parts_is_predicted_from_the_first_part_on() -> None:
    progress = GraphProgress(lambda _: 1.0)
    for second in range(10):  # one at a time, on one thread
        progress.done(f"x-{second - 1}", float(second))
        new = ["x-0", "x-1"] if second == 0 else [f"x-{second + 1}"]
        progress.add([Task(key) for key in new], n_threads=1, now_s=float(second))  # type: ignore[misc]
    for second in (10, 11):
        progress.done(f"x-{second - 1}", float(second))
    assert progress.in_words(1) == "11 of 11 tasks in 11.00 s (predicted 11.00 s)"


def test_a_chain_that_is_continued_is_predicted_to_take_its_next_task() -> None:
    progress = GraphProgress(lambda _: 1.0)
    progress.add([Task("never ends")], n_threads=8, now_s=0.0)  # type: ignore[list-item]
    for second in range(10):
        progress.add([Task(f"x-{second}")], n_threads=8, now_s=float(second))  # type: ignore[list-item]
        assert progress.predicted_s == second + 1
        progress.done(f"x-{second}", second + 1.0)


def test_what_is_not_followed_is_not_told_to_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ferroflow_dask.dashboard.progress.MOST_TASKS", 2)
    progress = GraphProgress(lambda _: 1.0)
    progress.add([Task(f"x-{i}") for i in range(5)], n_threads=1, now_s=0.0)  # type: ignore[misc]
    beyond = "; 3 more are not followed"
    assert progress.in_words(1) == f"0 of 2 tasks · done in 2.0 s (predicted 2.00 s in all){beyond}"
    for i in range(2):
        progress.done(f"x-{i}", 3.0)
    assert progress.in_words(1) == f"2 of 2 tasks in 3.00 s (predicted 2.00 s){beyond}"
    assert not progress.is_all_done
    shown = Recording(
        [],
        2,
        [],
        [WorkerLoad("a", "a", "cpu", 1, 0, 0, 0.0, True)],
        Counter(),
        progress,
        1,
        {},
        frozenset(),
        None,
    )
    table = view(shown).renderables[-1]
    assert [str(cell) for cell in table.columns[1].cells] == ["idle"]  # type: ignore[union-attr]


def test_what_is_there_already_takes_no_time() -> None:
    progress = GraphProgress(lambda _: 1.0)
    loaded = Task("load")
    loaded.state = "memory"
    progress.add([loaded, Task("work", loaded)], n_threads=1, now_s=0.0)  # type: ignore[list-item]
    assert (progress.n_done, progress.predicted_s) == (1, 1.0)
