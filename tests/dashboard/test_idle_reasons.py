"""Why workers have free threads: in one word and a number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client
from distributed.core import Status
from waiting import pause, until

from ferroflow_dask import install
from ferroflow_dask.clients import workers_of
from ferroflow_dask.dashboard.idle import MOST_TASKS, idle_reasons
from ferroflow_dask.dashboard.recorder import start_recording, stop_recording
from ferroflow_dask.dashboard.recording import WorkerLoad
from ferroflow_dask.dashboard.terminal import view


def task(*only: str) -> Any:
    """A task, maybe one that may run on some workers only."""
    return SimpleNamespace(worker_restrictions=set(only), host_restrictions=None, resource_restrictions=None)


def worker(
    address: str, *tasks: Any, n_threads: int = 1, status: str = "running", **task_counts: int
) -> SimpleNamespace:
    return SimpleNamespace(
        address=address,
        nthreads=n_threads,
        processing=tasks,  # of the mapping only its order and length are needed
        status=SimpleNamespace(name=status),
        metrics={"task_counts": task_counts},
    )


def scheduler(*workers: SimpleNamespace, unrunnable: tuple[Any, ...] = (), n_unready: int = 0) -> Any:
    known = {one.address: one for one in workers}
    return SimpleNamespace(
        workers=known,
        unrunnable=unrunnable,
        task_prefixes={"inc": SimpleNamespace(states={"waiting": n_unready})},
        valid_workers=lambda ts: [known[address] for address in ts.worker_restrictions if address in known],
    )


@pytest.mark.parametrize(
    ("cluster", "reasons"),
    [
        (scheduler(worker("a")), {"a": "no ready task"}),
        (scheduler(worker("a"), n_unready=12), {"a": "no ready task 12"}),
        (scheduler(worker("a", task(), executing=1)), {}),
        (scheduler(worker("a", task(), n_threads=2)), {"a": "no ready task"}),
        (scheduler(worker("a", task(), task(), task(), status="paused")), {"a": "paused 3"}),
        (scheduler(worker("a", task(), task(), waiting=2, flight=5)), {"a": "waiting for data 2"}),
        (scheduler(worker("a", task(), task(), executing=1, waiting=1)), {}),
        (scheduler(worker("a"), worker("b", *(task("b") for _ in range(9)))), {"a": "restricted 8"}),
        (scheduler(worker("a"), worker("b", *(task() for _ in range(4)))), {"a": "not worth moving 3"}),
        (scheduler(worker("a"), unrunnable=(task("gone"), task("gone"))), {"a": "restricted 2"}),
        (
            scheduler(worker("a"), worker("b", task("b"), task("b"), task("a", "b"))),
            {"a": "not worth moving 1"},
        ),
        (
            scheduler(worker("a"), worker("b", *(task() for _ in range(2 * MOST_TASKS)))),
            {"a": f"not worth moving {MOST_TASKS:,}"},
        ),
    ],
    ids=[
        "nothing to do",
        "tasks wait for others",
        "it is busy",
        "one of two threads",
        "it is paused",
        "inputs are on their way",
        "one runs while another waits",
        "all that waits is for another",
        "what waits may move",
        "no worker may run it",
        "one of those that wait may move",
        "no more are counted than that",
    ],
)
def test_a_worker_with_free_threads_has_a_reason(cluster: Any, reasons: dict[str, str]) -> None:
    assert {address: str(idle) for address, idle in idle_reasons(cluster).items()} == reasons


@pytest.mark.cluster
def test_reasons_memory_and_cpu_of_a_cluster_are_in_the_terminal(thread_client: Client) -> None:
    install(thread_client)
    dask_scheduler = thread_client.cluster.scheduler
    first, second, third = sorted(workers_of(thread_client))
    recorder = start_recording(dask_scheduler, "test")
    futures = thread_client.map(pause, range(3), seconds=1.0, pure=False, workers=[first])
    until(lambda: len(dask_scheduler.workers[first].processing) == 3)
    thread_client.run(lambda dask_worker: setattr(dask_worker, "status", Status.paused), workers=[third])
    until(lambda: dask_scheduler.workers[third].status == Status.paused)
    loads = {load.address: load for load in recorder.workers(why_idle=True)}
    assert loads[first].idle is None
    assert str(loads[second].idle) == "restricted 2"
    assert str(loads[third].idle) == "paused"
    table = view(recorder.recording()).renderables[-1]
    states, cpu, memory = (list(table.columns[i].cells) for i in (1, 4, 5))  # type: ignore[union-attr]
    assert sorted(map(str, states)) == ["executing", "paused", "restricted 2"]
    assert all(str(cell).endswith("%") for cell in cpu)
    assert all(load.memory > 0 for load in loads.values())
    assert not any(str(cell).startswith("0") for cell in memory)
    thread_client.run(lambda dask_worker: setattr(dask_worker, "status", Status.running), workers=[third])
    thread_client.cancel(futures)
    stop_recording(dask_scheduler, "test")


def test_memory_is_a_part_of_the_limit_where_there_is_one() -> None:
    def part(memory: int, limit: int) -> float | None:
        return WorkerLoad("a", "a", "cpu", 1, 0, 0, 0.0, True, 0.5, memory, limit).memory_part

    assert part(1, 4) == 0.25
    assert part(1, 0) is None
