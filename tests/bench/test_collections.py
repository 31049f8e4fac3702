"""Workloads that are Dask collections: each knows its answer, and no two instances share a task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from conftest import checked_client
from dask.utils import key_split
from distributed.diagnostics.plugin import SchedulerPlugin
from measured import build

pytest.importorskip("pandas")
pytest.importorskip("pyarrow")
pytest.importorskip("xarray")

from ferroflow_dask.bench.public.answers import difference
from ferroflow_dask.bench.workloads.arrays import ARRAYS
from ferroflow_dask.bench.workloads.base import Instance, Request, Workload
from ferroflow_dask.bench.workloads.frames import FRAMES
from ferroflow_dask.bench.workloads.rsds import RSDS
from ferroflow_dask.exceptions import ResultError, UnknownNameError

pytestmark = pytest.mark.cluster

WORKLOADS = {workload.name: workload for workload in (*RSDS, *ARRAYS, *FRAMES)}

#: Dask names index arrays, which are parts of the graph that nothing computes, by their content alone.
CONSTANTS = {"shuffle-taker"}

#: Which of their tasks Dask fuses depends on the order of sets of names.
UNSTEADY = {"bag"}

#: Sizes that make another graph of the same workload.
OTHER_SIZES = {"basic_sum": {"shape": "square"}, "rechunk": {"method": "tasks"}}


class Tasks(SchedulerPlugin):
    """Notes which tasks there were, and how they were annotated."""

    name = "tasks"
    ferroflow_bundles = True

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.annotations: dict[Any, dict[str, Any]] = {}

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if finish == "memory":
            self.annotations[key] = dict(self.scheduler.tasks[key].annotations or {})


@dataclass(frozen=True)
class Ran:
    """An instance that was computed."""

    instance: Instance
    results: Sequence[Any]
    annotations: dict[Any, dict[str, Any]]

    @property
    def keys(self) -> set[Any]:
        return set(self.annotations)


Run = Callable[..., Ran]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Computes a workload at its small size on two workers in this process, which are no default client's."""

    def ran(workload: Workload, salt: str, seed: int = 1, costs: str = "learned", **sizes: Any) -> Ran:
        arguments = workload.arguments(sizes, is_small=True)
        instance = workload.build(Request(arguments, seed, salt, n_threads=2, costs=costs))
        scheduler.add_plugin(tasks := Tasks(scheduler))
        results = client.gather(instance.submit(client))
        scheduler.remove_plugin(tasks.name)
        return Ran(instance, results, tasks.annotations)

    with checked_client(2, processes=False, set_as_default=False) as client:
        scheduler: Any = client.cluster.scheduler
        yield ran


@pytest.fixture(scope="module", params=WORKLOADS)
def workload(request: pytest.FixtureRequest) -> Workload:
    return WORKLOADS[request.param]


@pytest.fixture(scope="module")
def first(workload: Workload, run: Run) -> Ran:
    return run(workload, "first")


def corrupted(result: Any) -> Any:
    """Return a result that is off by a little in one place."""
    if isinstance(result, list):
        word, count = result[-1]
        return [*result[:-1], (word, count + 1)]
    if isinstance(result, int):
        return result + 1
    if hasattr(result, "iloc"):
        result = result.copy()
        result.iloc[-1, 0] += 1
        return result
    if hasattr(result, "to_array"):
        return result.assign(uv=result.uv * 1.0001)
    wrong = np.array(getattr(result, "values", result), dtype=float)
    wrong.flat[-1] *= 1.0001
    return result.copy(data=wrong) if hasattr(result, "dims") else wrong[()]


def test_the_result_is_right(first: Ran) -> None:
    first.instance.check(first.results)


def test_a_result_that_is_a_little_wrong_is_refused_in_one_line(workload: Workload, first: Ran) -> None:
    with pytest.raises(ResultError, match=rf"^{workload.name}: .*expected.*") as info:
        first.instance.check([corrupted(first.results[0])])
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("results", [[None], [], [float("nan")], ["done"]], ids=repr)
def test_what_is_no_result_is_refused(results: list[Any], workload: Workload, first: Ran) -> None:
    with pytest.raises(ResultError, match=f"^{workload.name}: "):
        first.instance.check(results)


def test_ops_are_the_tasks_that_dask_executes(workload: Workload, first: Ran) -> None:
    if workload.name in UNSTEADY:
        assert first.instance.n_ops == 2 * 4 + 4**2
    else:
        assert first.instance.n_ops == len(first.keys)


def test_another_salt_gives_the_same_result_by_tasks_of_other_names(
    workload: Workload, first: Ran, run: Run
) -> None:
    second = run(workload, "second")
    first.instance.check(second.results)
    # Dask learns durations by these names, from one instance for the next.
    if workload.name not in UNSTEADY:
        assert Counter(map(key_split, second.keys)) == Counter(map(key_split, first.keys))
    shared = {str(key) for key in second.keys & first.keys}
    assert {key_split(key) for key in shared} <= CONSTANTS


def test_another_seed_gives_another_result(workload: Workload, first: Ran, run: Run) -> None:
    other = run(workload, "other seed", seed=2)
    other.instance.check(other.results)
    with pytest.raises(ResultError):
        first.instance.check(other.results)


@pytest.mark.parametrize(("name", "sizes"), OTHER_SIZES.items(), ids=OTHER_SIZES)
def test_other_graphs_give_the_right_result(name: str, sizes: dict[str, Any], run: Run) -> None:
    ran = run(WORKLOADS[name], "other graph", **sizes)
    ran.instance.check(ran.results)


@pytest.mark.parametrize("name", OTHER_SIZES)
def test_a_graph_that_does_not_exist_is_refused(name: str) -> None:
    workload = WORKLOADS[name]
    arguments = workload.arguments(dict.fromkeys(OTHER_SIZES[name], "no such"), is_small=True)
    with pytest.raises(UnknownNameError, match="no such"):
        workload.build(Request(arguments, 1, "salt", n_threads=2))


@pytest.mark.parametrize(
    "method", ["dataframe_merge", "dataframe_shuffle", "dataframe_set_index", "join", "rechunk"]
)
def test_shuffles_go_from_worker_to_worker(method: str, run: Run) -> None:
    keys = run(WORKLOADS[method], "p2p").keys
    assert any("barrier" in str(key) for key in keys)


@pytest.mark.parametrize(("costs", "declared"), [("known", 40), ("learned", 0), ("unknown", 0)])
def test_sleeping_tasks_declare_their_durations_where_costs_are_known(
    costs: str, declared: int, run: Run
) -> None:
    ran = run(WORKLOADS["merge_slow"], costs, costs=costs)
    assert (ran.instance.t1_s, ran.instance.t_inf_s) == pytest.approx((0.4, 0.01))
    found = [annotations for annotations in ran.annotations.values() if "ferroflow_cost" in annotations]
    assert found == [{"ferroflow_cost": 0.01}] * declared


@pytest.mark.parametrize(
    ("found", "expected", "problem"),
    [
        (1.0, 1.0 + 1e-12, ""),
        (1.0, 1.1, "the value is 1.0, expected 1.1 (1 of 1 wrong)"),
        ([1.0, 2.0], np.ones(2), "value (1,) is 2.0, expected 1.0 (1 of 2 wrong)"),
        (np.ones(2), np.ones(3), "shape (2,), expected (3,)"),
        ([1], [1, 2], "the result is a list of 1, expected the result is a list of 2"),
        ([1, 3], [1, 2], "value 1: the value is 3, expected 2"),
        ([1e12, 1.0], np.array([1e12, 1.1]), ""),
        ([1e9, 1.0], np.array([1e9, 1.1]), "value (1,) is 1.0, expected 1.1 (1 of 2 wrong)"),
        (10**12, 10**12 + 1, "the value is 1000000000000, expected 1000000000001"),
        (1, [1], "the result is a int, expected the result is a list of 1"),
    ],
)
def test_differences_in_words(found: Any, expected: Any, problem: str) -> None:
    assert difference(found, expected) == problem


def test_the_answer_of_a_shuffle_is_computed_without_the_cluster_that_there_is() -> None:
    pytest.importorskip("pandas")
    (groupby,) = (workload for workload in RSDS if workload.name == "groupby")
    with checked_client(1, processes=False, set_as_default=True):
        instance = build(groupby, seed=20_261_127)  # whose answer no other test has computed
    assert instance.n_ops > 0
