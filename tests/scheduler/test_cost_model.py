"""What is learned of how long tasks take, where something else holds up one of them, and in runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ferroflow_dask.annotations import KIND_ANNOTATION
from ferroflow_dask.bundling.averages import size_class
from ferroflow_dask.bundling.sequence import ExecuteTasks
from ferroflow_dask.policy.estimators import Paces
from ferroflow_dask.scheduler.cost_model import CostModel
from ferroflow_dask.scheduler.extension import FerroflowStealing
from ferroflow_dask.scheduler.graphs.worker_runs import CORES_S
from ferroflow_dask.scheduler.learned import Known
from ferroflow_dask.virtual import VirtualCluster, VirtualTask


def task(
    name: str = "f",
    kind: str | None = None,
    group: str | None = None,
    average_s: float = -1.0,
    reads: tuple[int, ...] = (),
) -> Any:
    annotations = {} if kind is None else {KIND_ANNOTATION: kind}
    return SimpleNamespace(
        key=(name, 0),
        prefix=SimpleNamespace(name=name, duration_average=average_s),
        group=SimpleNamespace(name=name if group is None else group),
        annotations=annotations,
        dependencies=[SimpleNamespace(nbytes=nbytes) for nbytes in reads],
        run_spec=None,
    )


def learned(
    *seconds: float,
    kind: str | None = None,
    group: str | None = None,
    nbytes: int = 8,
    worker: str = "a",
    into: CostModel | None = None,
) -> CostModel:
    costs = CostModel() if into is None else into
    for each_s in seconds:
        costs.record(task(kind=kind, group=group), each_s, nbytes, worker)
    return costs


def test_one_that_was_held_up_does_not_make_its_kind_long() -> None:
    costs = learned(*[0.001] * 5, 0.2, kind="k")
    assert costs.of_kind(task(kind="k")) == pytest.approx(0.001 * 1.9)


def test_what_has_become_longer_is_learned() -> None:
    assert learned(*[0.001] * 5, *[0.2] * 20, kind="k").of_kind(task(kind="k")) == pytest.approx(
        0.2, rel=0.05
    )
    assert learned(0.0, *[0.2] * 30, kind="k").of_kind(task(kind="k")) == pytest.approx(0.2, rel=0.05)
    assert learned(*[0.2] * 5, *[0.001] * 20, kind="k").of_kind(task(kind="k")) == pytest.approx(
        0.001, rel=0.2
    )


def test_no_worker_is_fast_because_another_was_held_up() -> None:
    costs, paces = CostModel(), Paces()

    def run(worker: int, seconds: float) -> float:
        expected_s = costs.of_kind(task(kind="k")) or seconds
        costs.record(task(kind="k"), seconds, 8, "a")
        paces.record(worker, expected_s, seconds)
        return paces.speed(worker)

    for i in range(28):
        run(i % 4, 0.01 + 0.0001 * (i % 4))
    run(0, 2.0)
    assert {run(1, 0.01) for _ in range(7)} == {1.0}  # right after that
    assert [paces.speed(worker) for worker in range(4)] == [1.0] * 4


def test_a_prefix_has_means() -> None:
    costs = learned(5.0, 0.01, 1.0, nbytes=8)
    learned(0.01, nbytes=1000, into=costs)
    found = costs.of_prefix("f")
    assert found is not None
    assert found.duration_s == pytest.approx((0.01 + 1.0 + 0.01) / 3)
    assert (found.nbytes, found.most_nbytes) == (pytest.approx(8 + 992 / 4), 1000)
    assert costs.means() == {"f": (found.duration_s, found.nbytes)}
    assert costs.nbytes(task()) == pytest.approx(8 + 992 / 4)
    assert costs.nbytes(task("g")) is None
    assert costs.of_prefix("g") is None


def test_the_first_task_of_a_prefix_on_a_worker_counts_only_while_there_is_no_other() -> None:
    costs = learned(2.0)
    learned(1.0, worker="b", into=costs)
    assert costs.means()["f"][0] == pytest.approx((2 + 1) / 2)
    learned(0.01, worker="b", into=costs)
    learned(3.0, worker="c", into=costs)
    assert costs.means()["f"][0] == pytest.approx(0.01)


SMALL, LARGE = (2**18, 2**18), (2**24,)


def of_sizes(costs: CostModel, reads: tuple[int, ...]) -> tuple[float, float]:
    found = costs.of_prefix("f")
    assert found is not None
    own = found.of_size(sum(reads))
    return own.duration_s, own.nbytes


def test_tasks_that_read_other_amounts_are_learned_apart() -> None:
    costs = CostModel()
    for seconds, nbytes, reads in [(1.0, 8, SMALL), (0.2, 80, LARGE), (0.1, 8, SMALL), (0.2, 80, LARGE)]:
        costs.record(task(reads=reads), seconds, nbytes, "a")
    assert of_sizes(costs, SMALL) == (pytest.approx(0.1), 8)
    assert of_sizes(costs, LARGE) == (pytest.approx(0.2), 80)
    assert [costs.nbytes(task(reads=reads)) for reads in (SMALL, LARGE, (2**30,), ())] == [8, 80, 80, 8]


def test_a_declared_size_is_part_of_the_amount() -> None:
    costs, first, second = CostModel(), task(), task()
    costs.declare({first.key: 2.0**24})
    for each, seconds in ((first, 1.0), (second, 2.0)):
        costs.record(each, seconds, 8, "a")
    assert of_sizes(costs, LARGE)[0] == 1.0
    assert of_sizes(costs, ())[0] == 2.0  # its size counts once only


def bundle(**steps: dict[int, int]) -> Any:
    stands_for = {(name, place): n for name, by_size in steps.items() for place, n in by_size.items()}
    found = task("bundle-f")
    found.metadata = None
    found.run_spec = SimpleNamespace(func=ExecuteTasks((), (), (), (), (), stands_for, 0.0))
    return found


def test_a_bundle_corrects_the_durations_of_its_steps_of_their_size() -> None:
    costs = CostModel()
    for reads in (SMALL, LARGE) * 2:
        costs.record(task(reads=reads), 0.1, 8, "a")
    costs.record(bundle(f={size_class(sum(LARGE)): 4}), 0.8, 0, "a")
    assert of_sizes(costs, SMALL)[0] == 0.1
    assert of_sizes(costs, LARGE)[0] == pytest.approx(0.1 * (1 + 0.3))


def test_a_bundle_of_a_size_that_was_never_measured_is_learned_from() -> None:
    costs = CostModel()
    for _ in range(2):
        costs.record(task(reads=LARGE), 0.1, 8, "a")
    reads = (2**25,)
    assert of_sizes(costs, reads)[0] == 0.2
    costs.record(bundle(f={size_class(2**25): 4}, unknown={15: 3}), 1.6, 0, "a")
    assert of_sizes(costs, reads)[0] == pytest.approx(0.2 * (1 + 0.3))
    assert of_sizes(costs, LARGE)[0] == 0.1
    costs.record(task(reads=reads), 0.5, 8, "a")  # the first one that is measured counts alone
    assert of_sizes(costs, reads) == (0.5, 8)


def test_the_planned_class_counts_for_a_task_that_reads_a_bundle() -> None:
    costs, reader = CostModel(), task(reads=(2**28,))
    costs.expect({reader.key: size_class(2**20), "another": 15})
    costs.record(reader, 0.1, 8, "a")
    found = costs.of_prefix("f")
    assert found is not None
    assert found.by_size.keys() == {size_class(2**20)}
    costs.record(reader, 0.1, 8, "a")  # once only
    found = costs.of_prefix("f")
    assert found is not None
    assert found.by_size.keys() == {size_class(2**20), size_class(2**28)}


@pytest.mark.parametrize("odd", [-1, float("nan"), float("inf")])
def test_sizes_that_are_none_count_as_zero(odd: Any) -> None:
    costs = CostModel()
    costs.record(task(reads=(odd,)), 0.1, odd, "a")
    found = costs.of_prefix("f")
    assert found is not None
    assert (found.nbytes, found.most_nbytes) == (0, 0)
    assert found.by_size.keys() == {size_class(0)}
    costs.record(task(reads=LARGE), 0.1, 8, "a")
    assert costs.nbytes(task(reads=(odd,))) == 0


def test_known_averages_stay_as_they_were_found() -> None:
    costs = learned(0.1, 0.1)
    known = Known(costs, {"apart"})
    assert (set(known), len(known), known.get("other")) == ({"f", "apart"}, 2, None)
    assert known["apart"] is None
    first = known["f"]
    learned(5.0, into=costs)
    assert known["f"] is first
    learned(5.0, into=costs)
    assert first is not None
    assert first.duration_s == 0.1
    costs.record(task("later"), 0.1, 8, "a")
    assert "later" not in known


def test_record_forgets_the_prefix_that_was_used_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ferroflow_dask.scheduler.cost_model._KEPT", 2)
    costs = CostModel()
    for name in ("f", "g", "f", "h"):
        costs.record(task(name), 1.0, 8, "a")
    assert costs.names() == {"f", "h"}


# In runs

N = 100


def gauge(cluster: VirtualCluster, name: str) -> float:
    assert isinstance(cluster.stealing, FerroflowStealing)
    return cluster.stealing.parts.gauges()[name][1]


@pytest.mark.parametrize("latency_s", [0.001, 0.01])
def test_how_long_a_thread_waits_for_the_next_task(latency_s: float) -> None:
    # One task for a thread at a time, so that each ends before the next is sent.
    cluster = VirtualCluster(2, latency_s=latency_s, saturation=1.0)
    cluster.submit({("t-0a1", i): VirtualTask(0.1) for i in range(2 * N)})
    assert gauge(cluster, "round_trip_seconds") == 3 * latency_s
    cluster.run()
    cluster.check()
    # There and back, less what a worker takes between two tasks that it has, which here is nothing.
    assert gauge(cluster, "round_trip_seconds") == pytest.approx(2 * latency_s - 0.0005, rel=0.01)


def test_learned_durations_and_round_trip_outlive_the_extension() -> None:
    cluster = VirtualCluster(2, latency_s=0.001, saturation=1.0)
    cluster.submit({("t-0a1", i): VirtualTask(0.1, nbytes=8) for i in range(N)})
    cluster.run()
    cluster.check()
    before = gauge(cluster, "round_trip_seconds")
    assert before != 0.003
    assert isinstance(cluster.stealing, FerroflowStealing)
    expected = cluster.stealing.costs.means()
    cluster.stealing.teardown()
    again = FerroflowStealing(cluster.scheduler, latency_s=0.001)
    assert again.parts.gauges()["round_trip_seconds"][1] == before
    assert again.costs.means() == expected
    again.teardown()


def crowded(core_shares: dict[str, float], seconds: float) -> CostModel:
    """Return a model that has learned single tasks where four threads share each core."""
    metrics = {}
    for name, core_share in core_shares.items():
        metrics["execute", name, "thread-cpu", "seconds"] = core_share
        metrics["execute", name, "thread-noncpu", "seconds"] = 1 - core_share
    costs = CostModel(metrics)
    for name in core_shares:
        costs.record(task(name), seconds, 8, "a")
    costs.crowding = 4.0
    return costs


@pytest.mark.parametrize(
    ("core_share", "measured_s", "free_s", "share"),
    [
        (0.25, 0.02, 0.005, 0.99),  # it computes, and waits for a core most of the time
        (0.01, 0.02, 0.0194, 0.01031),  # it sleeps
        (1.0, 0.005, 0.005, 0.99),  # it had the core for itself
        (0.125, 0.02, 0.0125, 0.2),  # it waits for a core half of the time
    ],
)
def test_durations_are_those_on_free_cores_where_threads_share_them(
    core_share: float, measured_s: float, free_s: float, share: float
) -> None:
    found = crowded({"f": core_share}, measured_s).of_prefix("f")
    assert found is not None
    assert (found.duration_s, found.core_share) == pytest.approx((free_s, share), rel=1e-3)


def test_without_metrics_tasks_are_taken_to_compute() -> None:
    costs = learned(0.02, 0.02)
    costs.crowding = 4.0
    found = costs.of_prefix("f")
    assert found is not None
    assert (found.duration_s, found.core_share) == pytest.approx((0.005, 0.99))


def test_bundles_report_which_part_of_their_steps_ran_on_a_core() -> None:
    costs, nothing = crowded({"spin": 0.2, "nap": 0.02}, 0.02), size_class(0)
    for n_spin, n_nap in [(10, 10), (10, 1), (1, 10)] * 30:
        on_core_s, idle_s = 0.005 * n_spin, 0.005 * n_nap
        queued_s = 3 * on_core_s
        seconds = on_core_s + queued_s + idle_s
        steps = bundle(spin={nothing: n_spin}, nap={nothing: n_nap})
        costs.record(steps, seconds, 8, "a", {"metadata": {CORES_S: (on_core_s, queued_s)}})
    spin, nap = costs.of_prefix("spin"), costs.of_prefix("nap")
    assert spin is not None
    assert nap is not None
    assert (spin.duration_s, nap.duration_s) == pytest.approx((0.005, 0.005), rel=0.1)
    assert spin.core_share > 0.9
    assert nap.core_share < 0.1
    # Single tasks wait for cores, and do not say for how long.
    costs.record(task("spin"), 1.0, 8, "a")
    assert costs.of_prefix("spin") == spin
    # Some take less than others.
    for _ in range(100):
        costs.record(task("spin"), 0.1 * spin.duration_s, 8, "a")
        costs.record(task("spin"), 3.0 * spin.duration_s, 8, "a")
    again = costs.of_prefix("spin")
    assert again is not None
    assert again.duration_s == spin.duration_s
    # But they do not take longer than measured. Those that seem too long for bundles are measured alone.
    for _ in range(100):
        costs.record(task("spin"), 0.0002, 8, "a")
    again = costs.of_prefix("spin")
    assert again is not None
    assert (again.duration_s, again.core_share) == pytest.approx((0.0002, spin.core_share), rel=0.1)


def test_reported_cores_do_not_matter_where_each_thread_has_one() -> None:
    costs, plain = learned(0.02), learned(0.02)
    costs.record(bundle(f={size_class(0): 10}), 0.5, 8, "a", {"metadata": {CORES_S: (0.1, 0.3)}})
    plain.record(bundle(f={size_class(0): 10}), 0.5, 8, "a")
    assert costs.of_prefix("f") == plain.of_prefix("f")
