"""Repeated graphs: after a few runs measured durations choose the cut, and now and then another is tried."""

from __future__ import annotations

from typing import Any

import pytest

from ferroflow_dask.bundling.cut import best_cut
from ferroflow_dask.bundling.predict import Work
from ferroflow_dask.bundling.repeats import Mean, Measured, Repeats, fastest, shape_of, tries
from ferroflow_dask.cluster_profile import ClusterProfile

CLUSTER = ClusterProfile((1,) * 4)
#: Four levels of 40 pieces, each of which reads two neighbours of the level before.
WORK = Work(
    [[] if i < 40 else sorted({i - 40, 40 * (i // 40 - 1) + (i + 1) % 40}) for i in range(160)],
    [3e-4] * 160,
    [1000 for _ in range(160)].__getitem__,
)


def cut_of(measured: Measured | None, *, may_try: bool = True, most: int = 1000) -> str:
    def fits(cut: Any) -> bool:
        return max(map(len, cut)) <= most

    cut, prediction = best_cut(WORK, CLUSTER, False, fits, measured, may_try=may_try)
    assert len(cut) == prediction.n_tasks
    assert sorted(i for pieces in cut for i in pieces) == list(range(160))
    return prediction.cut


PREDICTED, OTHER = cut_of(None), "siblings"


def test_measured_durations_count_after_three_runs() -> None:
    other = {OTHER: Mean(1, 0.1), PREDICTED: Mean(1, 0.9)}
    assert PREDICTED != OTHER
    assert cut_of(other) == PREDICTED
    assert cut_of({**other, PREDICTED: Mean(3, 0.9)}) == OTHER
    assert cut_of({**other, OTHER: Mean(3, 0.9), PREDICTED: Mean(1, 0.8)}) == PREDICTED


@pytest.mark.parametrize(("n", "is_tried"), [(3, True), (4, False), (10, False), (11, True), (12, False)])
def test_one_run_in_eight_tries_the_most_promising_cut_that_was_never_measured(
    n: int, is_tried: bool
) -> None:
    measured = {PREDICTED: Mean(n, 0.5)}
    assert (cut_of(measured) != PREDICTED) == is_tried
    assert cut_of(measured, may_try=False) == PREDICTED


def test_cuts_that_are_predicted_to_take_far_longer_are_never_tried() -> None:
    measured = {PREDICTED: Mean(3, 0.5)}
    tried = []
    while (found := cut_of(measured)) != PREDICTED:
        tried.append(found)
        measured |= {PREDICTED: Mean(3 + 8 * len(tried) - len(tried), 0.5), found: Mean(1, 0.6)}
    assert tried
    assert "single tasks" not in tried  # 160 times a task's overhead


def test_a_cut_that_does_not_fit_any_more_is_not_chosen() -> None:
    assert cut_of({"one bundle": Mean(4, 0.1), PREDICTED: Mean(1, 0.5)}) == "one bundle"
    assert cut_of({"one bundle": Mean(4, 0.1), PREDICTED: Mean(1, 0.5)}, most=100) != "one bundle"
    assert cut_of({"a name of an earlier version": Mean(4, 0.1)}) == PREDICTED


def test_graphs_of_other_tasks_edges_sizes_or_results_have_other_shapes() -> None:
    same = shape_of(["a", "b", "b"], [[], [0], [0]], [8.0, 0.1, 0.2], 2, [1])
    assert same == shape_of(["b", "a", "b"], [[], [], [0, 1]], [0.2, 8.0, 0.1], 2, [1])
    others = {
        shape_of(["a", "b", "c"], [[], [0], [0]], [8.0, 0.1, 0.2], 2, [1]),
        shape_of(["a", "b", "b"], [[], [0], [0]], [9.0, 0.1, 0.2], 2, [1]),
        shape_of(["a", "b", "b"], [[], [0], [0, 1]], [8.0, 0.1, 0.2], 2, [1]),
        shape_of(["a", "b", "b"], [[], [0], [0]], [8.0, 0.1, 0.2], 1, [1]),
        shape_of(["a", "b", "b"], [[], [0], [0]], [8.0, 0.1, 0.2], 2, [1, 1]),
    }
    assert len(others | {same}) == 6


def test_means_follow_later_runs_and_old_shapes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    repeats = Repeats()
    for seconds in (1.0, 2.0):
        repeats.record(1, "levels", seconds)
    before = repeats.known()
    assert before == {1: {"levels": Mean(2, 1.5)}}
    for _ in range(30):
        repeats.record(1, "levels", 5.0)
    repeats.record(1, "single tasks", 9.0)
    assert before == {1: {"levels": Mean(2, 1.5)}}
    found = repeats.known()[1]
    assert found["levels"].mean_s == pytest.approx(5, rel=0.01)
    assert found["single tasks"] == (1, 9)
    monkeypatch.setattr("ferroflow_dask.bundling.repeats._KEPT", 2)
    for shape in (2, 1, 3):
        repeats.record(shape, "levels", 1.0)
    assert repeats.known().keys() == {1, 3}


def test_a_run_that_tries_a_cut_counts_though_it_could_not_be_measured() -> None:
    repeats = Repeats()
    repeats.started(1, "levels")
    assert 1 not in repeats  # nothing is known of the graph
    for _ in range(3):
        repeats.record(1, PREDICTED, 0.5)
    assert tries(repeats.known()[1])
    repeats.started(1, PREDICTED)
    assert tries(repeats.known()[1])
    repeats.started(1, OTHER)
    assert not tries(repeats.known()[1])
    assert fastest(repeats.known()[1]) == PREDICTED
    repeats.record(1, OTHER, 0.4)  # it was, after all
    assert repeats.known()[1][OTHER] == (1, 0.4)


def test_too_few_runs_choose_nothing() -> None:
    assert fastest({}) is None
    assert fastest({"levels": Mean(2, 0.1)}) is None
    assert fastest({"levels": Mean(2, 0.2), "single tasks": Mean(1, 0.1)}) == "single tasks"
    assert not tries({})
