"""Lean transitions: the same results as distributed's own functions, which stay if anything is unknown."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import Scheduler, SchedulerState
from overhead_graphs import GRAPHS

from ferroflow_dask.scheduler import _distributed_transitions as lean
from ferroflow_dask.virtual import VirtualCluster, VirtualTask
from ferroflow_dask.virtual.upstream import VirtualScheduler

NAMES = {"_transition", "check_idle_saturated", "decide_worker_rootish_queuing_enabled"}


def put_on(scheduler: Scheduler) -> None:
    for change in lean.lean_changes(scheduler):
        change.apply()


def is_lean(cluster: VirtualCluster) -> bool:
    present = NAMES & vars(cluster.scheduler).keys()
    assert present in (set(), NAMES)
    return bool(present)


def cluster_of(workers: int) -> VirtualCluster:
    """Return a cluster on which nothing else changes these functions."""
    return VirtualCluster(workers, without=("siblings",))


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one of the functions be unknown."""
    monkeypatch.setitem(lean.KNOWN, "_worker_full", frozenset({"another"}))


def test_all_functions_of_this_distributed_are_known() -> None:
    assert lean.unknown_functions(VirtualCluster(1, policy="dask").scheduler) == []


def test_the_plugin_installs_them_and_undoes_them() -> None:
    cluster = cluster_of(2)
    assert is_lean(cluster)
    cluster.stealing.lifecycle.detach()
    assert not is_lean(cluster)


def test_with_an_unknown_function_dasks_own_stay_and_everything_works(refused: None) -> None:
    cluster = cluster_of(3)
    assert not is_lean(cluster)
    cluster.submit(GRAPHS["shuffle"](200))
    cluster.run()
    cluster.check()


class Overriding(VirtualScheduler):
    """A scheduler with a rule of its own."""

    def is_unoccupied(self, *args: Any) -> bool:
        """Return what Dask would."""
        return super().is_unoccupied(*args)


def missing(_: object) -> str:
    raise OSError


#: What is patched on a scheduler or elsewhere, with which value.
REFUSED: dict[str, tuple[Any, ...]] = {
    "a method of the instance": ("is_unoccupied", lambda *_: True),
    "a subclass": ("__class__", Overriding),
    "a patched class": (SchedulerState, "total_occupancy", property(lambda _: 1.0)),
    "no source": ("inspect.getsource", missing),
    "a debugger": ("distributed.scheduler.LOG_PDB", True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_they_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = VirtualCluster(1, policy="dask").scheduler
    assert len(list(lean.lean_changes(scheduler))) == len(NAMES)
    patched = REFUSED[name]
    is_of_the_instance = isinstance(patched[0], str) and "." not in patched[0]
    monkeypatch.setattr(*([scheduler] if is_of_the_instance else []), *patched)
    assert list(lean.lean_changes(scheduler)) == []


def story(policy: str, name: str, is_lean: bool, **options: Any) -> tuple[Any, ...]:
    """Run a graph with departures, failures and pauses; return all that can be told of the run."""
    cluster = VirtualCluster(5, 2, policy=policy, seed=3, **options)
    if is_lean:
        put_on(cluster.scheduler)
        compare_sets(cluster.scheduler)
    graph = GRAPHS[name](200, 1)
    key = next(iter(graph))
    graph[key] = VirtualTask(graph[key].duration_s, graph[key].dependencies, failures=9)
    cluster.submit(graph)
    cluster.submit({("later", i): VirtualTask(0.01, nbytes=8) for i in range(30)}, client="other")
    cluster.at(0.05, cluster.pause, 1)
    cluster.at(0.1, cluster.leave, 2)
    cluster.at(0.15, cluster.resume, 1)
    cluster.at(0.2, cluster.join, 3)
    cluster.at(0.25, cluster.release, [("later", i) for i in range(30)], "other")
    cluster.run()
    cluster.check()
    log = [(key, *states, dict(recs)) for key, *states, recs, _, _ in cluster.scheduler.transition_log]
    counted = {name: dict(group.states) for name, group in cluster.scheduler.task_groups.items()}
    return cluster.record.timeline(), log, counted, cluster.scheduler.transition_counter


def compare_sets(scheduler: Any) -> None:
    """Compare the sets of workers with those of Dask's own function after each check."""
    check = vars(scheduler)["check_idle_saturated"]

    def sets() -> tuple[Any, ...]:
        return dict(scheduler.idle), set(scheduler.saturated), set(scheduler.idle_task_count)

    def compared(ws: Any, occ: float = -1.0) -> None:
        check(ws, occ)
        found = sets()
        SchedulerState.check_idle_saturated(scheduler, ws, occ)
        assert found == sets()

    scheduler.check_idle_saturated = compared


@pytest.mark.parametrize("policy", ["dask", "ferroflow"])
@pytest.mark.parametrize("name", GRAPHS)
def test_runs_are_the_same_as_with_dasks_own(name: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = story(policy, name, is_lean=True)
    monkeypatch.setitem(lean.KNOWN, "_worker_full", frozenset())
    assert story(policy, name, is_lean=False) == found


@pytest.mark.parametrize("seed", range(3))
def test_the_chosen_worker_is_the_one_that_dask_would_choose(seed: int) -> None:
    cluster = VirtualCluster(9, nthreads=2, speeds={0: 0.25, 1: 3.0}, saturation=1.6, seed=seed)
    scheduler: Any = cluster.scheduler
    choose = scheduler.decide_worker_rootish_queuing_enabled
    loads: list[float] = []

    def checked() -> Any:
        expected = SchedulerState.decide_worker_rootish_queuing_enabled(scheduler)
        assert choose() is expected
        loads.append(len(expected.processing) / expected.nthreads if expected is not None else math.inf)
        return expected

    scheduler.decide_worker_rootish_queuing_enabled = checked
    cluster.submit(GRAPHS["independent"](300, seed))
    for when, action, *args in (
        (0.05, cluster.pause, 1),
        (0.1, cluster.leave, 2),
        (0.15, cluster.join, 5),
        (0.2, cluster.resume, 1),
        (0.3, cluster.submit, GRAPHS["shuffle"](200, seed)),
    ):
        cluster.at(when, action, *args)
    cluster.run()
    cluster.check()
    assert len(set(loads)) > 4  # workers without tasks, busy ones, and none


def test_few_workers_are_looked_at_if_many_are_idle() -> None:
    cluster = VirtualCluster(64)
    scheduler: Any = cluster.scheduler

    class Counted(set[Any]):
        n = 0

        def __iter__(self) -> Any:
            Counted.n += 1
            return super().__iter__()

    scheduler.idle_task_count = Counted(scheduler.idle_task_count)
    cluster.submit(GRAPHS["independent"](300))
    # Once for the first task and once for the second of each worker; Dask adds up the slots itself.
    assert Counted.n <= 4
    assert {len(ws.processing) for ws in scheduler.workers.values()} == {2}


def test_saturated_workers_are_known() -> None:
    cluster = VirtualCluster(4, policy="no-stealing")
    put_on(cluster.scheduler)
    near = {"workers": [0], "allow_other_workers": True}
    cluster.submit({i: VirtualTask(1.0, annotations=near) for i in range(20)})
    cluster.run(until=2.5)
    assert {ws.name for ws in cluster.scheduler.saturated} == {0}
    cluster.run()
    assert not cluster.scheduler.saturated


class Hooks(SchedulerPlugin):
    """Notes what hooks see."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.seen: list[tuple[Any, ...]] = []

    def transition(self, key: Any, start: Any, finish: Any, *args: Any, **kwargs: Any) -> None:
        """Look the task up, and fail."""
        ts = self.scheduler.tasks[key]
        self.seen.append(
            (key, start, finish, {d.key for d in ts.dependencies}, {d.key for d in ts.dependents})
        )
        raise ValueError("a hook")


@pytest.fixture
def lean_cluster() -> VirtualCluster:
    cluster = VirtualCluster(1, policy="no-stealing")
    put_on(cluster.scheduler)
    assert is_lean(cluster)
    return cluster


def test_hooks_see_a_forgotten_task_with_its_links_and_may_fail(lean_cluster: VirtualCluster) -> None:
    hooks = Hooks(lean_cluster.scheduler)
    lean_cluster.scheduler.add_plugin(hooks)
    lean_cluster.submit({"a": VirtualTask(0.1), "b": VirtualTask(0.1, ("a",))})
    lean_cluster.run()
    lean_cluster.release(["b"])
    lean_cluster.run()
    forgotten = [seen for seen in hooks.seen if seen[2] == "forgotten"]
    assert [(key, finish, *links) for key, _, finish, *links in forgotten] == [
        ("b", "forgotten", {"a"}, set()),
        ("a", "forgotten", set(), set()),
    ]
    assert not lean_cluster.scheduler.tasks
    assert not lean_cluster.scheduler.task_groups


def test_an_impossible_transition_is_reported_as_by_dask(
    lean_cluster: VirtualCluster, caplog: pytest.LogCaptureFixture
) -> None:
    lean_cluster.submit({"a": VirtualTask(0.1)})
    lean_cluster.run()
    lean_cluster.scheduler.tasks["a"]._state = "released"
    with (
        caplog.at_level(logging.ERROR, logger="distributed.scheduler"),
        pytest.raises(RuntimeError, match="Impossible transition from released to processing for 'a'"),
    ):
        lean_cluster.scheduler.transition("a", "processing", stimulus_id="test")
    assert "Error transitioning 'a' from 'released' to 'processing'" in caplog.text
    ((_, event),) = lean_cluster.scheduler.get_events("transitions")
    assert event["action"] == "scheduler-transition-failed"


@pytest.mark.parametrize(("key", "finish"), [("unknown", "memory"), ("a", "memory")])
def test_nothing_happens_to_unknown_tasks_or_without_a_change(
    lean_cluster: VirtualCluster, key: str, finish: Any
) -> None:
    lean_cluster.submit({"a": VirtualTask(0.1)})
    lean_cluster.run()
    before = lean_cluster.scheduler.transition_counter
    assert lean_cluster.scheduler._transition(key, finish, "test") == ({}, {}, {})
    assert lean_cluster.scheduler.transition_counter == before


def test_a_transition_without_a_stimulus_is_refused_while_states_are_validated(
    lean_cluster: VirtualCluster,
) -> None:
    lean_cluster.submit({"a": VirtualTask(0.1)})
    with pytest.raises(RuntimeError, match="stimulus_id not set"):
        lean_cluster.scheduler._transition("a", "released", "")
