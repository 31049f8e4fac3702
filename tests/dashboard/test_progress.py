"""What the page and the terminal say of a graph's progress: levels, the critical path, predictions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from recordings import EMPTY
from skewed_batches import KINDS, LOG_NORMAL, Task, other_times, predicted_batches

from ferroflow_dask.dashboard.progress import GraphProgress
from ferroflow_dask.dashboard.recording import WorkerLoad
from ferroflow_dask.dashboard.terminal import view


def followed(*tasks: Task, seconds: Mapping[str, float] | None = None, n_threads: int = 2) -> GraphProgress:
    """Progress of a graph whose tasks were declared to take so long, or a second each."""
    progress = GraphProgress(lambda ts: 1.0 if seconds is None else seconds[ts.key])
    progress.add(tasks, n_threads=n_threads, now_s=10.0)  # type: ignore[arg-type]
    return progress


def path(progress: GraphProgress) -> list[str]:
    """The tasks of the critical path, by level."""
    assert all(level.n_critical <= 1 for level in progress.levels)
    return [level.critical_key for level in progress.levels]


def test_progress_by_level_with_its_critical_path() -> None:
    a = Task("a")
    b, c = Task("b", a), Task("c", a)
    d = Task("d", b, c)
    progress = followed(d, c, b, a, seconds={"a": 1.0, "b": 5.0, "c": 1.0, "d": 1.0, "e": 1.0})
    assert [level.n_tasks for level in progress.levels] == [1, 2, 1]
    assert path(progress) == ["a", "b", "d"]
    assert progress.predicted is not None
    assert progress.predicted.seconds == pytest.approx(7.0)
    progress.done("a", 11.0)
    progress.done("a", 11.0)  # computed again: counted once
    progress.done("c", 12.0)
    assert [(level.n_done, level.n_critical_done) for level in progress.levels] == [(1, 1), (1, 0), (0, 0)]
    assert left_s(progress) == pytest.approx(6.0)
    progress.forget("b", 13.0)
    progress.done("d", 14.0)
    assert progress.ended_at == 14.0
    progress.add([Task("e")], n_threads=1, now_s=20.0)  # type: ignore[list-item]
    assert progress.n_tasks == 1  # what was done before is over
    assert path(progress) == ["e"]


def left_s(progress: GraphProgress, n_threads: int = 2, now_s: float | None = None) -> float:
    left = progress.left(n_threads, now_s)
    assert left is not None
    return left.seconds


@pytest.mark.parametrize("seed", range(5))
def test_of_ways_that_take_the_same_time_one_is_marked_whatever_the_order(seed: int) -> None:
    roots = [Task(f"root-{i}") for i in range(4)]
    middle = [Task(f"middle-{i}", *roots) for i in range(4)]
    ends = [Task(f"end-{i}", *middle) for i in range(4)]
    assert path(followed(*roots, *middle, *ends)) == path(followed(*roots, *middle, *ends))
    assert "" not in path(followed(*roots, *middle, *ends))
    parts = followed(*roots)
    parts.add(middle, 2, 11.0)  # type: ignore[arg-type]
    parts.add(ends, 2, 12.0)  # type: ignore[arg-type]
    assert path(parts) == path(followed(*roots, *middle, *ends))
    # Those that come in another order have one path, too.
    shuffled = list(np.random.default_rng(seed).permutation(np.array([*roots, *middle, *ends])))
    assert "" not in path(followed(*shuffled))


def test_a_way_that_becomes_longer_takes_the_place_of_the_one_that_was_marked() -> None:
    short, long = Task("short"), Task("long")
    seconds = {"short": 1.0, "long": 5.0, "more": 9.0, "other": 2.0}
    progress = followed(short, long, seconds=seconds)
    assert path(progress) == ["long"]
    progress.add([Task("more", short)], 2, 11.0)  # type: ignore[list-item]
    assert path(progress) == ["short", "more"]
    progress.add([Task("other", long)], 2, 12.0)  # type: ignore[list-item]
    assert path(progress) == ["short", "more"]
    progress.done("short", 13.0)
    assert [level.n_critical_done for level in progress.levels] == [1, 0]
    assert left_s(progress) == pytest.approx(9.0)


def test_work_that_comes_in_parts_is_predicted_from_the_first_part_on() -> None:
    progress = GraphProgress(lambda _: 1.0)
    for second in range(10):  # one at a time, on one thread
        progress.done(f"x-{second - 1}", float(second))
        new = ["x-0", "x-1"] if second == 0 else [f"x-{second + 1}"]
        progress.add([Task(key) for key in new], n_threads=1, now_s=float(second))  # type: ignore[misc]
    for second in (10, 11):
        progress.done(f"x-{second - 1}", float(second))
    assert progress.in_words(1).startswith("11 of 11 tasks took 11.00 s; predicted about 11.0 s (")


def test_a_chain_that_is_continued_is_predicted_to_take_its_next_task() -> None:
    progress = GraphProgress(lambda _: 1.0)
    progress.add([Task("never ends")], n_threads=8, now_s=0.0)  # type: ignore[list-item]
    for second in range(10):
        progress.add([Task(f"x-{second}")], n_threads=8, now_s=float(second))  # type: ignore[list-item]
        assert progress.predicted is not None
        assert progress.predicted.seconds == pytest.approx(second + 1)
        progress.done(f"x-{second}", second + 1.0)


# Predictions


def test_nothing_is_predicted_of_what_is_not_known() -> None:
    progress = GraphProgress(lambda _: None)
    progress.add([Task(f"x-{i}") for i in range(4)], n_threads=1, now_s=0.0)  # type: ignore[misc]
    assert progress.in_words(1) == "0 of 4 tasks · time left: not known yet"
    progress.done("x-0", 2.0, 2.0)
    assert left_s(progress, 1) == pytest.approx(6.0)
    assert progress.predicted is not None
    assert progress.predicted.seconds == pytest.approx(8.0)


def test_the_time_left_becomes_less_while_nothing_ends() -> None:
    progress = followed(*(Task(f"x-{i}") for i in range(4)))
    assert [left_s(progress, 2, now_s) for now_s in (10.0, 11.0, 20.0)] == pytest.approx([2.0, 1.0, 0.0])
    assert re.fullmatch(
        r"0 of 4 tasks · time left: about 1\.0 s \(0\.\d–\d\.\d s\)", progress.in_words(2, 11.0)
    )


def test_an_interval_is_wide_while_durations_vary_and_narrow_while_they_do_not() -> None:
    def width(durations: Sequence[float]) -> float:
        progress = GraphProgress(lambda _: None)
        progress.add([Task(f"x-{i}") for i in range(40)], n_threads=2, now_s=0.0)  # type: ignore[misc]
        for i, seconds in enumerate(durations):
            progress.done(f"x-{i}", float(i), seconds)
        left = progress.left(2)
        assert left is not None
        return left.high / left.low

    assert width([0.1] * 20) < width([0.01, 0.19] * 10) < width([0.001] * 19 + [1.9])


@pytest.mark.parametrize("kind", KINDS[:4])
def test_predictions_learn_from_batches_that_are_skewed(kind: str) -> None:
    found = predicted_batches(kind, 5)
    assert np.mean(found.errors) <= 0.15
    assert np.mean(found.covered) >= 0.8


@pytest.mark.parametrize("kind", LOG_NORMAL)
def test_predictions_come_close_to_the_best_one_where_durations_are_random(kind: str) -> None:
    # The best prediction knows the distribution, but not the durations. Of few that vary widely, its error is
    # more than 15 %, too.
    found = predicted_batches(kind, 5)
    assert np.mean(found.errors) <= 1.25 * found.least_error(other_times(kind, 300))
    assert np.mean(found.covered) >= 0.8


def test_what_is_not_followed_is_not_told_to_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ferroflow_dask.dashboard.progress.MOST_TASKS", 2)
    progress = GraphProgress(lambda _: 1.0)
    progress.add([Task(f"x-{i}") for i in range(5)], n_threads=1, now_s=0.0)  # type: ignore[misc]
    beyond = "; 3 more are not followed"
    assert progress.in_words(1).startswith("0 of 2 tasks · time left: about 2.0 s (")
    assert progress.in_words(1).endswith(f" s){beyond}")
    for i in range(2):
        progress.done(f"x-{i}", 3.0)
    assert progress.in_words(1).startswith("2 of 2 tasks took 3.00 s; predicted about 2.0 s (")
    assert progress.in_words(1).endswith(f" s){beyond}")
    assert not progress.is_all_done
    load = WorkerLoad("a", "a", "cpu", 1, 0, 0, 0.0, True)
    table = view(replace(EMPTY, n_ran=2, loads=[load], progress=progress)).renderables[-1]
    assert [str(cell) for cell in table.columns[1].cells] == ["idle"]  # type: ignore[union-attr]


def test_what_is_there_already_takes_no_time() -> None:
    progress = GraphProgress(lambda _: 1.0)
    loaded = Task("load")
    loaded.state = "memory"
    progress.add([loaded, Task("work", loaded)], n_threads=1, now_s=0.0)  # type: ignore[list-item]
    assert (progress.n_tasks, progress.n_done) == (1, 0)  # it does not run
    assert progress.predicted is not None
    assert progress.predicted.seconds == pytest.approx(1.0)
