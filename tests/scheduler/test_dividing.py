"""Running bundles that are divided: tasks go on elsewhere, each once; some fail or are cancelled."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable
from typing import Any

import dask
import pytest
from bundled import (
    CALLS,
    Bundling,
    Gate,
    PlannedError,
    add,
    apart,
    chain,
    fail,
    fail_once,
    fork,
    leaves,
    on_bundling_cluster,
    take_all_for_short,
    task,
    wait_at,
    wait_if_first,
)
from cluster_tests import runs_on
from distributed import Reschedule, secede, wait
from distributed.core import Status
from distributed.recreate_tasks import ReplayTaskClient
from waiting import comes

from ferroflow_dask import uninstall
from ferroflow_dask.bundling import deliveries, sequence
from ferroflow_dask.policy import stealing
from ferroflow_dask.scheduler.graphs import overtaking

pytestmark = pytest.mark.cluster

Program = Callable[[Gate], list[Any]]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    take_all_for_short(monkeypatch)
    monkeypatch.setattr(deliveries, "_INTERVAL_S", 0.0)
    monkeypatch.setattr(sequence, "_given_up", {})
    monkeypatch.setattr(stealing, "_BUNDLES_LOOKED_AT", 0)  # only the tests ask for divisions


async def divide(cluster: Bundling, gate: Gate, key: str, share: str) -> Any:
    """Divide the bundle of a step once it waits at its gate; return the key of the bundle."""
    await comes(gate.reached.is_set)
    name = cluster.bundles._holders[key]
    assert cluster.stealing.graphs.dividing.ask(name, share, "a test")
    await comes(lambda: name not in cluster.stealing.graphs.dividing.asked)
    cluster.scheduler.validate_state()
    return name


def ran_once() -> bool:
    return set(CALLS.values()) <= {1}


async def with_values(cluster: Bundling, futures: list[Any], outputs: list[Any], gate: Gate) -> None:
    """Open the gate and assert that all values are those of Dask, and that each task has run once."""
    gate.open()
    values = await asyncio.wait_for(cluster.client.gather(futures), 20)
    assert ran_once(), CALLS
    assert values == list(dask.compute(*outputs, scheduler="sync"))
    assert cluster.counts["split"] == 0


# Programs of which a task waits at a gate


def independent(gate: Gate) -> list[Any]:
    return [gate.task("leaf-0", 0), *leaves("leaf", 20)[1:]]


def readers_of_a_finished_value(gate: Gate) -> list[Any]:
    first = task("first-0", 1)
    return [gate.task("next-0", first), *[task(f"next-{i}", first, i) for i in range(1, 12)]]


def readers_of_a_running_step(gate: Gate) -> list[Any]:
    first = gate.task("next-0", 1)
    return [task("total-0", *[task(f"next-{i}", first, i) for i in range(1, 12)])]


def readers_of_hidden_values(gate: Gate) -> list[Any]:
    first, second = task("first-0", 1), task("second-0", 2)
    start = gate.task("next-0", first, second)
    return [task("total-0", start, *[task(f"next-{i}", first, second, i) for i in range(1, 12)])]


def pairs(gate: Gate) -> list[Any]:
    """Each second task reads the one before: one of them the running one, the others are free."""
    return [task(f"next-{i}", task(f"first-{i}", i) if i else gate.task("first-0", 0), i) for i in range(20)]


def diamond(gate: Gate) -> list[Any]:
    first = task("first-0", 1)
    return [task("end-0", gate.task("next-0", first), *[task(f"next-{i}", first, i) for i in range(1, 8)])]


def chains(gate: Gate) -> list[Any]:
    lines = [chain(f"line-{i}", i, 4)[-1] for i in range(6)]
    return [task("total-0", gate.task("next-0", 1), *lines)]


def readers_in_other_tasks(gate: Gate) -> list[Any]:
    first = task("first-0", 1)
    inner = [gate.task("next-0", first), *[task(f"next-{i}", first, i) for i in range(1, 12)]]
    total = task("total-0", *inner)
    return [apart(f"out-{i}", first, inner[i], total) for i in range(3)]


PROGRAMS: list[tuple[Program, str]] = [
    (independent, "leaf-0"),
    (readers_of_a_finished_value, "next-0"),
    (readers_of_a_running_step, "next-0"),
    (readers_of_hidden_values, "next-0"),
    (diamond, "next-0"),
    (chains, "next-0"),
    (readers_in_other_tasks, "next-0"),
]


@pytest.mark.parametrize("share", ["all", "free", "half"])
@pytest.mark.parametrize(("program", "key"), PROGRAMS, ids=[one.__name__ for one, _ in PROGRAMS])
@runs_on(on_bundling_cluster)
async def test_a_divided_bundle_has_the_same_values_and_each_task_runs_once(
    cluster: Bundling, program: Program, key: str, share: str, gate: Gate
) -> None:
    await cluster.stealing.changes.settled()
    outputs = program(gate)
    futures = cluster.client.compute(outputs)
    await divide(cluster, gate, key, share)
    await with_values(cluster, futures, outputs, gate)


@pytest.mark.parametrize("share", ["free", "all"])
@pytest.mark.parametrize(
    ("program", "key"),
    [
        (independent, "leaf-0"),
        (readers_of_a_finished_value, "next-0"),
        (pairs, "first-0"),
    ],
)
@runs_on(on_bundling_cluster)
async def test_free_tasks_end_while_the_running_one_waits(
    cluster: Bundling, program: Program, key: str, gate: Gate, share: str
) -> None:
    await cluster.stealing.changes.settled()
    outputs = program(gate)
    futures = cluster.client.compute(outputs)
    await divide(cluster, gate, key, share)
    # No clock makes the other worker steal the bundles that wait for the thread.
    await comes(lambda: all(future.done() for future in futures[1:]) or cluster.stealing.core.passes.ask())
    assert not futures[0].done()
    await with_values(cluster, futures, outputs, gate)


@runs_on(on_bundling_cluster)
async def test_values_come_while_the_last_task_of_a_bundle_waits(
    cluster: Bundling, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "_INTERVAL_S", 60.0)
    await cluster.stealing.changes.settled()
    monkeypatch.setattr(deliveries, "EARLY_S", 60.0)
    futures = cluster.client.compute([*leaves("leaf", 19), gate.task("leaf-19", 19)])
    await comes(gate.reached.is_set)
    name = cluster.bundles._holders["leaf-19"]
    inside = [one.key for one in cluster.bundles.get(name).tasks]
    others = [future for future in futures if future.key in inside[: inside.index("leaf-19")]]
    assert not any(future.done() for future in others)
    await divide(cluster, gate, "leaf-19", "free")
    await comes(lambda: all(future.done() for future in others))
    await with_values(cluster, futures, [*leaves("leaf", 19), gate.task("leaf-19", 19)], gate)


@runs_on(on_bundling_cluster)
async def test_a_bundle_is_divided_several_times(cluster: Bundling, gate: Gate) -> None:
    await cluster.stealing.changes.settled()
    outputs = readers_of_hidden_values(gate)
    futures = cluster.client.compute(outputs)
    await divide(cluster, gate, "next-0", "half")
    await divide(cluster, gate, "next-0", "half")
    await divide(cluster, gate, "next-0", "all")
    await with_values(cluster, futures, outputs, gate)


@runs_on(on_bundling_cluster, resources=(None, None))
async def test_a_worker_that_dies_before_it_answers_is_not_waited_for(cluster: Bundling, gate: Gate) -> None:
    await cluster.stealing.changes.settled()
    outputs = diamond(gate)
    futures = cluster.client.compute(outputs)
    await comes(gate.reached.is_set)
    name = cluster.bundles._holders["next-0"]
    dying = cluster.scheduler.tasks[name].processing_on
    assert cluster.stealing.graphs.dividing.ask(name, "all", "a test")
    await cluster.scheduler.remove_worker(dying.address, stimulus_id="a test")
    assert not cluster.stealing.graphs.dividing.asked
    gate.open()
    assert await cluster.client.gather(futures) == list(dask.compute(*outputs, scheduler="sync"))


@runs_on(on_bundling_cluster, resources=(None,))
async def test_the_others_leave_a_bundle_of_which_a_task_secedes(cluster: Bundling, gate: Gate) -> None:
    await cluster.stealing.changes.settled()
    start = dask.delayed(secede_and_wait)("leaf-0", gate.name, 0, dask_key_name="leaf-0")
    outputs = [start, *leaves("leaf", 20)[1:]]
    futures = cluster.client.compute(outputs)
    await comes(lambda: all(future.done() for future in futures[1:]))
    assert not futures[0].done()
    gate.open()
    assert await cluster.client.gather(futures) == [i + 1 for i in range(20)]
    assert ran_once()


def secede_and_wait(key: str, gate: str, *values: int) -> int:
    secede()
    return wait_at(key, gate, *values)


@pytest.mark.parametrize("is_actor", [False, True])
@runs_on(on_bundling_cluster, resources=(None,))
async def test_a_task_of_another_graph_starts_after_the_running_step(
    cluster: Bundling, gate: Gate, is_actor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overtaking, "_SOON_S", 0.0)
    await cluster.stealing.changes.settled()
    futures = cluster.client.compute([gate.task("leaf-0", 0), *leaves("leaf", 20)[1:]])
    await comes(gate.reached.is_set)
    function = Noting if is_actor else add
    other = cluster.client.submit(function, "other-0", key="other-0", actor=is_actor, fifo_timeout="0s")
    await comes(lambda: cluster.counts["divided"] == 1)
    gate.open()
    await wait([other])
    order = list(CALLS)
    assert order.index("other-0") == order.index("leaf-0") + 1
    assert await cluster.client.gather(futures) == [i + 1 for i in range(20)]
    assert ran_once()


@runs_on(on_bundling_cluster, resources=(None,))
async def test_a_less_urgent_task_of_another_graph_divides_no_bundle(
    cluster: Bundling, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overtaking, "_SOON_S", 0.0)
    await cluster.stealing.changes.settled()
    futures = cluster.client.compute([gate.task("leaf-0", 0), *leaves("leaf", 20)[1:]])
    await comes(gate.reached.is_set)
    other = cluster.client.submit(add, "other-0", key="other-0", priority=-1, fifo_timeout="0s")
    await cluster.processing(other)
    gate.open()
    await cluster.client.gather(futures)
    await other
    assert cluster.counts["divided"] == 0


class Noting:
    """Actor that notes when it is made."""

    def __init__(self, key: str) -> None:
        CALLS[key] += 1


@runs_on(on_bundling_cluster)
async def test_a_bundle_that_is_stolen_is_not_divided(cluster: Bundling, gate: Gate) -> None:
    await cluster.stealing.changes.settled()
    start = apart("start-0", 1)
    futures = cluster.client.compute(
        [task(f"next-{i}", gate.name, start, function=wait_if_first) for i in range(400)]
    )
    await comes(gate.reached.is_set)
    await comes(lambda: cluster.stealing.steals["asked"] or cluster.stealing.core.passes.ask())
    gate.open()
    await cluster.client.gather(futures)
    assert cluster.stealing.graphs.dividing.n_asked == 0


# Errors


@runs_on(on_bundling_cluster)
async def test_ten_failing_tasks_have_ten_errors_run_once_and_may_be_retried(cluster: Bundling) -> None:
    await cluster.stealing.changes.settled()
    failing = {f"at_{i}": fail_once for i in range(0, 70, 7)}
    futures = cluster.client.compute(leaves("leaf", 70, **failing))
    await wait(futures)
    failed = [future for future in futures if future.status == "error"]
    assert [future.key for future in failed] == [f"leaf-{i}" for i in range(0, 70, 7)]
    for future in failed:
        assert (await future.exception()).args == (future.key,)
    assert ran_once()
    await cluster.client.retry(failed)
    assert await asyncio.wait_for(cluster.client.gather(futures), 10) == [i + 1 for i in range(70)]


@runs_on(on_bundling_cluster)
async def test_an_error_within_a_diamond_is_that_of_its_end_only(cluster: Bundling) -> None:
    await cluster.stealing.changes.settled()
    first = task("first-0", 1)
    sides = [task(f"side-{i}", first, function=fail if i == 1 else add) for i in range(12)]
    futures = cluster.client.compute([task("end-0", *sides), task("end-1", *sides[2:])])
    await wait(futures)
    assert [future.status for future in futures] == ["error", "finished"]
    assert (await futures[0].exception()).args == ("side-1",)
    assert cluster.scheduler.tasks["end-0"].exception_blame.key == "side-1"
    assert dict.fromkeys(["first-0", "end-1", *[f"side-{i}" for i in range(12)]], 1) == CALLS
    assert cluster.counts["divided"] == 1


@runs_on(on_bundling_cluster)
async def test_an_error_is_that_of_readers_in_other_bundles(cluster: Bundling) -> None:
    await cluster.stealing.changes.settled()
    inner = leaves("leaf", 40, at_3=fail)
    outputs = [task("total-0", *inner), task("total-1", *inner[20:]), apart("out-0", inner[3])]
    futures = cluster.client.compute(outputs)
    await wait(futures)
    assert [future.status for future in futures] == ["error", "finished", "error"]
    for future in futures[::2]:
        assert (await future.exception()).args == ("leaf-3",)
        assert cluster.scheduler.tasks[future.key].exception_blame.key == "leaf-3"
    assert ran_once()


@runs_on(on_bundling_cluster)
async def test_a_traceback_begins_at_the_function_of_the_task(cluster: Bundling) -> None:
    await cluster.stealing.changes.settled()
    futures = cluster.client.compute(leaves("leaf", 20, at_3=fail))
    await wait(futures)
    names = [frame.name for frame in traceback.extract_tb(await futures[3].traceback())]
    assert names == ["fail"]
    function, inputs = await ReplayTaskClient(cluster.client)._get_components_from_future(futures[3])
    with pytest.raises(PlannedError, match="leaf-3"):
        function(inputs)


@runs_on(on_bundling_cluster)
async def test_a_traceback_begins_at_the_function_of_a_task_that_reads_a_bundle(cluster: Bundling) -> None:
    await cluster.stealing.changes.settled()
    inner, _ = fork()
    future = cluster.client.compute([apart(f"out-{i}", inner[-1], function=fail) for i in range(3)])[0]
    await wait([future])
    assert [frame.name for frame in traceback.extract_tb(await future.traceback())] == ["fail"]
    assert cluster.counts["created"]


@pytest.mark.parametrize("at", ["at_0", "at_5", "at_19"])
@runs_on(on_bundling_cluster)
async def test_a_task_that_asks_for_another_worker_moves_alone(cluster: Bundling, at: str) -> None:
    await cluster.stealing.changes.settled()
    futures = cluster.client.compute(leaves("leaf", 20, **{at: reschedule_once}))
    assert await asyncio.wait_for(cluster.client.gather(futures), 10) == [i + 1 for i in range(20)]
    assert {n for key, n in CALLS.items() if key.startswith("leaf-")} == {1}
    refused, used = (next(key for key in CALLS if key.startswith(word)) for word in ("refused", "used"))
    assert refused.split()[1] != used.split()[1]


def reschedule_once(key: str, *values: int) -> int:
    if not CALLS[f"asked {key}"]:
        CALLS[f"asked {key}"] += 1
        CALLS[f"refused {threading.current_thread().name}"] += 1
        raise Reschedule
    CALLS[f"used {threading.current_thread().name}"] += 1
    return add(key, *values)


# Cancelled futures, and workers that stop


@runs_on(on_bundling_cluster, resources=(None,))
async def test_cancelled_tasks_do_not_start(cluster: Bundling, gate: Gate) -> None:
    await cluster.stealing.changes.settled()
    futures = cluster.client.compute(independent(gate))
    await comes(gate.reached.is_set)
    before, cancelled = {*CALLS}, {future.key for future in futures[1::2]}
    await cluster.client.cancel(futures[1::2])
    await comes(lambda: not cancelled & cluster.scheduler.tasks.keys())
    run = running(cluster, "leaf-0")
    await comes(lambda: not any(run.bundle.keys[i] in cancelled for i in run.pending))
    gate.open()
    assert await asyncio.wait_for(cluster.client.gather(futures[::2]), 10) == [i + 1 for i in range(0, 20, 2)]
    assert {*CALLS} & cancelled <= before
    assert ran_once()


def running(cluster: Bundling, key: str) -> Any:
    """Return the run of the bundle that has a step."""
    (run,) = [
        run
        for worker in cluster.workers
        for run in worker.extensions[deliveries.EXTENSION]._runs.values()
        if key in run.bundle.keys
    ]
    return run


@runs_on(on_bundling_cluster, resources=(None,))
async def test_cancelled_tasks_may_come_again_while_their_bundle_runs(cluster: Bundling, gate: Gate) -> None:
    await cluster.stealing.changes.settled()
    outputs = independent(gate)
    futures = cluster.client.compute(outputs)
    await comes(gate.reached.is_set)
    before, cancelled = {*CALLS}, {future.key for future in futures[1::2]}
    await cluster.client.cancel(futures[1::2])
    await comes(lambda: not cancelled & cluster.scheduler.tasks.keys())
    run = running(cluster, "leaf-0")
    await comes(lambda: not any(run.bundle.keys[i] in cancelled for i in run.pending))
    again = cluster.client.compute(outputs[1::2])
    gate.open()
    expected = [i + 1 for i in range(20)]
    assert await asyncio.wait_for(cluster.client.gather(futures[::2]), 10) == expected[::2]
    assert await asyncio.wait_for(cluster.client.gather(again), 10) == expected[1::2]
    assert {key for key, n in CALLS.items() if n > 1} <= before & cancelled


@runs_on(on_bundling_cluster, resources=(None,))
async def test_no_task_starts_once_all_are_cancelled(cluster: Bundling, gate: Gate) -> None:
    await cluster.stealing.changes.settled()
    futures = cluster.client.compute(independent(gate))
    await comes(gate.reached.is_set)
    run, before = running(cluster, "leaf-0"), {*CALLS}
    await cluster.client.cancel(futures)
    await comes(lambda: not run.pending)
    gate.open()
    await cluster.is_empty()
    await comes(lambda: not any(worker.data or worker.state.tasks for worker in cluster.workers))
    assert {*CALLS} - {"leaf-0"} <= before


@runs_on(on_bundling_cluster)
async def test_a_paused_worker_starts_no_further_task(cluster: Bundling, gate: Gate) -> None:
    await cluster.stealing.changes.settled()
    outputs = independent(gate)
    futures = cluster.client.compute(outputs)
    await comes(gate.reached.is_set)
    run = running(cluster, "leaf-0")
    (paused,) = [
        worker for worker in cluster.workers if run in worker.extensions[deliveries.EXTENSION]._runs.values()
    ]
    paused.memory_manager.memory_pause_fraction = False  # otherwise Dask resumes the worker
    paused.status = Status.paused
    await comes(lambda: not run.pending)
    # The other one runs them.
    await comes(lambda: all(future.done() for future in futures[1:]) or cluster.stealing.core.passes.ask())
    await with_values(cluster, futures, outputs, gate)
    paused.status = Status.running


@pytest.mark.parametrize("share", ["all", "free", "half"])
@pytest.mark.parametrize(("program", "key"), PROGRAMS, ids=[one.__name__ for one, _ in PROGRAMS])
@runs_on(on_bundling_cluster)
async def test_dask_takes_over_a_bundle_that_is_being_divided(
    cluster: Bundling, program: Program, key: str, share: str, gate: Gate
) -> None:
    await cluster.stealing.changes.settled()
    outputs = program(gate)
    futures = cluster.client.compute(outputs)
    await comes(gate.reached.is_set)
    cluster.stealing.graphs.dividing.ask(cluster.bundles._holders[key], share, "a test")
    await uninstall(cluster.scheduler)
    cluster.scheduler.validate_state()
    gate.open()
    values = await asyncio.wait_for(cluster.client.gather(futures), 20)
    assert set(CALLS.values()) <= {1, 2}
    assert values == list(dask.compute(*outputs, scheduler="sync"))
