"""What is learned of how long tasks take, where something else holds up one of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ferroflow_dask.annotations import KIND_ANNOTATION
from ferroflow_dask.policy.estimators import Paces
from ferroflow_dask.scheduler.cost_model import CostModel, learned_in_this_process
from ferroflow_dask.virtual import VirtualCluster


def task(name: str = "f", kind: str | None = None, group: str | None = None, average_s: float = -1.0) -> Any:
    annotations = {} if kind is None else {KIND_ANNOTATION: kind}
    return SimpleNamespace(
        prefix=SimpleNamespace(name=name, duration_average=average_s),
        group=SimpleNamespace(name=name if group is None else group),
        annotations=annotations,
        run_spec=None,
    )


def learned(
    *seconds: float,
    kind: str | None = None,
    group: str | None = None,
    nbytes: int = 8,
    into: CostModel | None = None,
) -> CostModel:
    costs = CostModel() if into is None else into
    for each_s in seconds:
        costs.record(task(kind=kind, group=group), each_s, nbytes)
    return costs


def test_one_that_was_held_up_does_not_make_its_kind_long() -> None:
    costs = learned(*[0.001] * 5, 0.2, kind="k")
    assert costs.of_kind(task(kind="k")) == pytest.approx(0.001 * 1.9)
    assert costs.usual(task(kind="k")) == costs.of_kind(task(kind="k"))


def test_what_has_become_longer_is_learned() -> None:
    assert learned(*[0.001] * 5, *[0.2] * 20, kind="k").of_kind(task(kind="k")) == pytest.approx(
        0.2, rel=0.05
    )
    assert learned(0.0, *[0.2] * 30, kind="k").of_kind(task(kind="k")) == pytest.approx(0.2, rel=0.05)
    assert learned(*[0.2] * 5, *[0.001] * 20, kind="k").of_kind(task(kind="k")) == pytest.approx(
        0.001, rel=0.2
    )


def test_of_a_name_the_mean_tells_of_long_ones_and_what_is_usual_does_not() -> None:
    costs = learned(*[0.01] * 5, 1.0)
    assert costs.of_kind(task()) is None
    assert costs.usual(task()) == pytest.approx(0.019)
    assert costs.by_prefix()["f"][0] == pytest.approx(0.307)
    assert costs.usual(task("g")) is None


@pytest.mark.parametrize(
    ("seconds", "group", "average_s", "expected_s"),
    [
        pytest.param([], "f-1", -1.0, None, id="nothing is known"),
        pytest.param([], "f-1", 3.0, 3.0, id="none of the group has ended: the name's average"),
        pytest.param([1.0], "f-2", 3.0, 3.0, id="only one of another group has"),
        pytest.param([1.0], "f-1", 3.0, 2.0, id="one has: it and the average count the same"),
        pytest.param([1.0] * 4, "f-1", 3.0, 1.4, id="four have"),
        pytest.param([1.0] * 49, "f-1", 51.0, 2.0, id="the more have, the less the average counts"),
        pytest.param([1.0], "f-1", -1.0, 1.0, id="Dask has forgotten the name"),
    ],
)
def test_a_group_is_expected_to_take_its_mean_drawn_towards_the_names(
    seconds: list[float], group: str, average_s: float, expected_s: float | None
) -> None:
    costs = learned(*seconds, group="f-1")
    assert costs.expected(task(group=group, average_s=average_s)) == pytest.approx(expected_s)


def test_what_is_usual_in_a_group_counts_from_its_second_task() -> None:
    costs = learned(*[0.01] * 5, group="f-1")
    learned(0.2, group="f-2", into=costs)
    assert costs.usual(task(group="f-2")) == pytest.approx(0.019)  # the name's
    learned(0.2, group="f-2", into=costs)
    assert costs.usual(task(group="f-2")) == pytest.approx(0.2)
    assert costs.usual(task(group="f-1")) == pytest.approx(0.01)


def test_results_are_as_large_as_those_of_the_group() -> None:
    costs = learned(*[0.01] * 9, group="f-1")
    learned(0.01, group="f-2", nbytes=1000, into=costs)
    assert costs.nbytes(task(group="f-1")) == 8
    assert costs.nbytes(task(group="f-2")) == 1000
    assert costs.nbytes(task(group="f-3")) == pytest.approx(8 + 0.3 * 992)


def test_how_long_one_may_be_a_group_tells_once_it_has_had_many() -> None:
    costs = learned(0.01, 5.0, 5.0, group="f-1")
    learned(*[0.01] * 13, group="f-2", into=costs)
    assert costs.longest_but_one(task(group="f-2"))[0] == 5.0  # type: ignore[index]
    learned(*[0.01] * 3, group="f-2", into=costs)
    learned(5.0, 5.0, group="f-1", into=costs)
    assert costs.longest_but_one(task(group="f-2"))[0] == 0.01  # type: ignore[index]
    assert costs.longest_but_one(task(group="f-3"))[0] == 5.0  # type: ignore[index]


def test_of_groups_as_many_are_kept_as_of_names_and_none_that_is_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ferroflow_dask.scheduler.cost_model._KEPT", 2)
    costs = learned(1.0)
    assert not costs.has_group(task())
    for group in ("f-1", "f-2", "f-1", "f-3"):
        learned(1.0, group=group, into=costs)
    kept = [group for group in ("f-1", "f-2", "f-3") if costs.has_group(task(group=group))]
    assert kept == ["f-1", "f-3"]


def test_no_worker_is_fast_because_another_was_held_up() -> None:
    costs, paces = CostModel(), Paces()

    def run(worker: int, seconds: float) -> float:
        expected_s = costs.usual(task(kind="k")) or seconds
        costs.record(task(kind="k"), seconds, 8)
        return paces.record(worker, expected_s, seconds)

    for i in range(28):
        run(i % 4, 0.01 + 0.0001 * (i % 4))
    run(0, 2.0)
    assert {run(1, 0.01) for _ in range(7)} == {1.0}  # right after that
    assert [paces.speed(worker) for worker in range(4)] == [1.0] * 4


def test_virtual_schedulers_of_this_process_are_nobodys_to_find() -> None:
    cluster = VirtualCluster(1)
    assert learned_in_this_process("Scheduler-1") == {}
    cluster.check()  # it was there
