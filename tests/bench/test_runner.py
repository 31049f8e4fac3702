"""The runner of benchmarks: every run is counted and checked, and what is broken is never fast."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bench_sums import SHAPE, SUMS, check, fail, plan, sums
from dask._task_spec import Task
from distributed import Client, Reschedule
from distributed.diagnostics.plugin import SchedulerPlugin
from waiting import until

from ferroflow_dask.bench.observe import longest_chain
from ferroflow_dask.bench.schema import BenchRecord, Shape, identity_of
from ferroflow_dask.bench.session import Session
from ferroflow_dask.bench.suite import run_plan
from ferroflow_dask.bench.workloads import Cluster, Instance, Request, Workload, get_workload
from ferroflow_dask.deploy import local_client
from ferroflow_dask.policy import StealingPolicy

# What is run


def test_every_case_runs_once_in_each_repetition() -> None:
    wanted = plan("dask", "ferroflow")
    rows = list(run_plan(wanted))
    assert [row.status for row in rows] == ["ok"] * 6
    assert {identity_of(row) for row in rows} == {
        wanted.identity(case, repetition) for case in wanted.cases for repetition in range(2)
    }
    # Dask in both lowerings, ours in the plain one.
    assert sorted((row.policy, row.lowering) for row in rows[:3]) == [
        ("dask", "other"),
        ("dask", "plain"),
        ("ferroflow", "plain"),
    ]
    assert {row.repetition for row in rows[:3]} == {0}
    for row in rows:
        assert (row.ops, row.tasks, row.executed) == (6, 7, 7)
        assert 0 < row.bound_s <= row.makespan_s
        assert row.efficiency == pytest.approx(row.bound_s / row.makespan_s)
        assert row.scheduler_cpu_s > 0
        assert row.peak_worker_memory > 1e7


def test_what_is_done_is_not_run_again() -> None:
    wanted = plan("dask", "ferroflow")
    first = next(iter(rows := run_plan(wanted)))
    rows.close()
    rest = list(run_plan(wanted, done={identity_of(first)}))
    assert len(rest) == wanted.n_runs - 1
    assert identity_of(first) not in {identity_of(row) for row in rest}


def test_inputs_differ_between_repetitions_and_agree_between_policies() -> None:
    seeds = []

    def noting(request: Request) -> Instance:
        seeds.append(request.seed)
        return sums(request)

    workload = Workload("noting", "", noting, defaults={"n": 2})
    list(run_plan(plan("dask", "ferroflow", workload=workload)))
    assert sorted(seeds) == [0, 0, 0, 0, 1, 1]  # two of them unmeasured


# What is broken


def statuses(workload: Workload, policy: str = "ferroflow", **options: Any) -> list[str]:
    rows: list[BenchRecord] = list(run_plan(plan(policy, workload=workload, repetitions=1), **options))
    assert all(row.bound_s is None and row.efficiency is None for row in rows if row.status != "ok")
    return [row.status for row in rows]


def test_a_wrong_result_breaks_the_run() -> None:
    def wrong(request: Request) -> Instance:
        right = sums(request)
        return Instance(right.submit, partial(check, ["something else"]), n_ops=right.n_ops)

    (status,) = statuses(Workload("wrong", "", wrong, defaults={"n": 2}))
    assert status == "warm-up: wrong result: [0, 1] is not ['something else']"


def test_a_warm_up_that_breaks_is_told_in_place_of_the_next_run() -> None:
    n_built = 0

    def breaking(request: Request) -> Instance:
        nonlocal n_built
        n_built += 1
        return replace(sums(request), check=fail) if n_built == 1 else sums(request)

    workload = Workload("breaking", "", breaking, defaults={"n": 2})
    rows = list(run_plan(plan("dask", workload=workload, repetitions=2)))
    assert [row.status for row in rows] == ["warm-up: failed: ArithmeticError: broken on purpose", "ok"]
    assert n_built == 3  # the new cluster has a warm-up of its own


def test_a_task_that_fails_breaks_the_run_and_the_next_run_is_sound() -> None:
    def failing(request: Request) -> Instance:
        divide = partial(divmod, 1)
        return Instance(lambda client: [client.submit(divide, 0, key=f"d-{request.salt}")], print, n_ops=1)

    (status,) = statuses(Workload("failing", "", failing))
    assert status.startswith("warm-up: failed: ZeroDivisionError: ")


def lose_all_workers(cluster: Cluster) -> None:
    until(lambda: cluster.client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)) == 3)
    cluster.scale(0)
    fail()


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param({"prepare": fail}, id="what comes before the clock"),
        pytest.param({"during": lose_all_workers}, id="a run that leaves no workers"),
        pytest.param({"count_executed": fail}, id="counting"),
        pytest.param({"check": fail}, id="checking"),
        pytest.param({"restore": fail}, id="what comes after"),
        pytest.param({"collect": fail, "restore": sorted}, id="two things, of which the first is told"),
    ],
)
def test_whatever_fails_breaks_this_run_alone(broken: dict[str, Any]) -> None:
    clusters = []

    def failing(request: Request) -> Instance:
        right = sums(request, lambda client: clusters.append(client.id))
        return replace(right, **broken) if request.lowering == "other" else right

    workload = Workload("failing", "", failing, defaults={"n": 2}, lowerings=("plain", "other"))
    rows = list(run_plan(plan("dask", workload=workload)))
    assert {(row.lowering, row.status) for row in rows} == {
        ("plain", "ok"),
        ("other", "warm-up: failed: ArithmeticError: broken on purpose"),
    }
    assert {row.tasks for row in rows if row.lowering == "other"} == {0 if "prepare" in broken else 3}
    assert len(set(clusters)) > 1  # none is used on


@pytest.mark.parametrize("error", [RuntimeError, TimeoutError, asyncio.CancelledError])
@pytest.mark.parametrize("is_fresh", [False, True])
def test_a_cluster_that_fails_to_end_is_told_and_another_takes_its_place(
    error: type[BaseException], is_fresh: bool
) -> None:
    clusters: list[str] = []

    @contextmanager
    def start() -> Iterator[Client]:
        with local_client(SHAPE.workers, SHAPE.threads, SHAPE.processes) as client:
            clusters.append(client.id)
            yield client
        raise error("scancel:\nno answer")

    def failing(request: Request) -> Instance:
        right = sums(request)
        return replace(right, check=fail) if request.lowering == "other" else right

    told: list[str] = []
    workload = Workload("failing", "", failing, defaults={"n": 2}, lowerings=("plain", "other"))
    wanted = plan("dask", workload=workload, is_fresh=is_fresh)
    rows = list(run_plan(wanted, start=start, on_problem=told.append))
    assert len(rows) == 4
    assert {row.status for row in rows if row.lowering == "plain"} == {"ok"}
    assert len(clusters) > 1
    line = f"a cluster did not end cleanly, and may be there still: failed: {error.__name__}: scancel:"
    assert told == [line] * len(clusters)  # also of the last one, when all runs are made


def test_a_cluster_that_cannot_be_observed_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    is_there = []

    @contextmanager
    def start() -> Iterator[Client]:
        with local_client(SHAPE.workers, SHAPE.threads, processes=False) as client:
            is_there.append(True)
            yield client
        is_there.pop()

    def fail_to_observe(client: Client) -> None:
        raise ConnectionError

    monkeypatch.setattr("ferroflow_dask.bench.session.Probe", fail_to_observe)
    with pytest.raises(ConnectionError), Session(SHAPE, seed=0, timeout_s=10, start=start):
        pytest.fail("there is nothing to measure with")
    assert not is_there


@pytest.mark.parametrize(
    "collect", [None, lambda client, futures: client.gather(futures)], ids=["gathered", "collected"]
)
def test_a_run_that_hangs_is_ended(collect: Any) -> None:
    def hanging(request: Request) -> Instance:
        nowhere = {"workers": ["tcp://10.255.255.1:1"], "key": f"h-{request.salt}"}
        return Instance(lambda client: [client.submit(int, 1, **nowhere)], print, n_ops=1, collect=collect)

    (status,) = statuses(Workload("hanging", "", hanging), timeout_s=0.3)
    assert status == "warm-up: failed: ResultError: no result within 0.3 s"


def test_a_task_that_gives_itself_back_counts_once(tmp_path: Path) -> None:
    def once(salt: str) -> str:
        if not (tmp_path / salt).exists():
            (tmp_path / salt).touch()
            raise Reschedule
        return salt

    def giving_back(request: Request) -> Instance:
        def submit(client: Client) -> list[Any]:
            return [client.submit(once, request.salt, key=f"back-{request.salt}")]

        return Instance(submit, partial(check, [request.salt]), n_ops=1)

    assert statuses(Workload("giving back", "", giving_back)) == ["ok"]
    assert len(list(tmp_path.iterdir())) == 2  # in the unmeasured run and in the measured one


class Tampering(SchedulerPlugin):
    """Exchanges the function of one op of a graph as soon as the scheduler knows it."""

    name = "tampering"
    ferroflow_bundles = True

    def __init__(self, exchange: Callable[[Any], Any]) -> None:
        self.exchange = exchange

    def update_graph(self, scheduler: Any, *, tasks: list[Any], **kwargs: Any) -> None:
        ops = [key for key in tasks if isinstance(key, tuple) and scheduler.tasks[key].dependencies]
        if ops:
            ts = scheduler.tasks[ops[0]]
            ts.run_spec = Task(ts.key, self.exchange(ts.run_spec.func), *ts.run_spec.args)


def skip(call: Any) -> Callable[..., Any]:
    return lambda *operands: operands[0]  # what a sleeping op returns, without the sleep


def twice(call: Any) -> Callable[..., Any]:
    return lambda *operands: (call(*operands), call(*operands))[0]


@pytest.mark.parametrize(
    ("exchange", "status"),
    [(skip, "executed 11 ops of 12"), (twice, "executed 13 ops of 12")],
    ids=["an op is skipped", "an op is run twice"],
)
def test_a_policy_that_does_not_run_every_op_once_is_broken(
    exchange: Callable[[Any], Any], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = get_workload("wide")

    def tampered(request: Request) -> Instance:
        instance = wide.build(request)

        def submit(client: Client) -> Any:
            # What a policy gone wrong could do: it lives in the scheduler.
            client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.add_plugin(Tampering(exchange)))
            return instance.submit(client)

        fields = {name: getattr(instance, name) for name in Instance.__dataclass_fields__}
        return Instance(**{**fields, "submit": submit})

    sizes = {"width": 4, "depth": 3, "skew": 0.25}
    workload = Workload("tampered", "", tampered, defaults=sizes, lowerings=wide.lowerings[:1])
    assert statuses(workload) == [f"warm-up: {status}"]


def test_a_policy_that_fails_is_broken_although_dask_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = StealingPolicy.handle
    n_events = 0

    def failing(self: StealingPolicy, *args: Any) -> Iterator[Any]:
        nonlocal n_events
        n_events += 1
        if n_events > 5:
            raise ArithmeticError("broken on purpose")
        return handle(self, *args)

    monkeypatch.setattr(StealingPolicy, "handle", failing)
    monkeypatch.setattr(StealingPolicy, "ignores", frozenset())
    with pytest.warns(UserWarning, match="broken on purpose"):
        assert statuses(SUMS) == ["warm-up: policy 'ferroflow' gave up during the run"]


# What is seen


def test_what_the_client_gathers_has_not_moved_between_workers() -> None:
    workload = Workload("sums", "", sums, defaults={"n": 6})
    for workers, moves in ((1, False), (2, True)):
        (row,) = run_plan(
            plan("dask", workload=workload, repetitions=1, shape=Shape(workers, 1, processes=False))
        )
        assert (row.status, row.bytes_moved > 0) == ("ok", moves)
        # Dask sends each task in a message of its own, and each worker answers in another.
        assert row.messages >= 2 * row.tasks
        assert row.messages >= row.batches > 0
        assert 0 < row.sent_s <= row.first_result_s <= row.makespan_s


@pytest.mark.parametrize(
    ("dependencies", "seconds", "expected"),
    [
        ({}, {}, 0.0),
        ({"a": ()}, {"a": 2.0}, 2.0),
        ({"a": (), "b": ("a",), "c": ()}, {"a": 1.0, "b": 2.0, "c": 2.5}, 3.0),
        ({"b": ("a",), "a": ()}, {"a": 1.0, "b": 2.0}, 3.0),
        ({"b": ("data",)}, {"b": 2.0}, 2.0),
    ],
    ids=["nothing", "one task", "a chain beside a task", "in any order", "data that was there before"],
)
def test_the_longest_chain(
    dependencies: dict[str, tuple[str, ...]], seconds: dict[str, float], expected: float
) -> None:
    assert longest_chain(dependencies, seconds) == expected
