"""The contract of the virtual cluster with distributed: what it touches, and what it says over again."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import core
from distributed.scheduler import Scheduler, SchedulerState
from distributed.worker import Worker

from ferroflow_dask.virtual import VirtualCluster, VirtualTask, upstream, upstream_worker

#: Attributes that methods of `upstream.REQUIRED` read. `Scheduler.__init__` sets them in distributed, and
#: `VirtualScheduler` sets them itself.
ATTRIBUTES = (
    "_broker",
    "_last_time",
    "_no_workers_since",
    "_workers_added_total",
    "_workers_removed_total",
    "allowed_failures",
    "client_comms",
    "generation",
    "loop",
    "periodic_callbacks",
    "stream_comms",
    "stream_handlers",
)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (owner, name)
        for required in (upstream.REQUIRED, upstream_worker.REQUIRED)
        for owner, names in required.items()
        for name in names
    ],
)
def test_the_name_exists(owner: type, name: str) -> None:
    assert hasattr(owner, name) or name in owner.__annotations__


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_the_scheduler_has_the_attribute(name: str) -> None:
    sources = map(inspect.getsource, (Scheduler, SchedulerState, core.Server))
    assert any(f"self.{name}" in source for source in sources)


def test_workers_and_scheduler_understand_the_same_messages() -> None:
    for op, event in upstream_worker._EVENTS.items():
        handled = f'"{op}": self._handle_remote_stimulus({event.__name__})'
        assert handled in inspect.getsource(Worker.__init__) or op == "remove-worker"
    for op, handler in VirtualCluster(0).scheduler.stream_handlers.items():
        if op != "steal-response" and not op.startswith("ferroflow-"):
            assert f'"{op}": self.{handler.__name__}' in inspect.getsource(Scheduler.__init__)


# A virtual worker joins and leaves as a real one


def busy() -> VirtualCluster:
    """Return a cluster in the middle of a run: results here and there, tasks running, ready and queued."""
    cluster = VirtualCluster(3, nthreads=2, resources={1: {"GPU": 1}}, policy="no-stealing")
    graph = {f"root-{i}": VirtualTask(0.25, nbytes=8) for i in range(20)}
    graph |= {f"sum-{i}": VirtualTask(1.0, (f"root-{i}", f"root-{i + 1}")) for i in range(19)}
    graph["gpu"] = VirtualTask(9.0, annotations={"resources": {"GPU": 1}})
    cluster.submit(graph, keep=graph)
    cluster.run(until=1.6)
    return cluster


def story(scheduler: Any) -> list[tuple[Any, ...]]:
    return [(t.key, t.start, t.finish) for t in scheduler.transition_log]


def account(scheduler: Any) -> dict[str, Any]:
    return {
        "workers": {address: (ws.name, ws.status) for address, ws in scheduler.workers.items()},
        "running": {ws.address for ws in scheduler.running},
        "idle": list(scheduler.idle),
        "free": {ws.address for ws in scheduler.idle_task_count},
        "streams": set(scheduler.stream_comms),
        "aliases": scheduler.aliases,
        "resources": scheduler.resources,
        "used": {address: ws.used_resources for address, ws in scheduler.workers.items()},
        "hosts": {host: (info["addresses"], info["nthreads"]) for host, info in scheduler.host_info.items()},
        "threads": scheduler.total_nthreads,
        "counts": (scheduler._workers_added_total, scheduler._workers_removed_total),
        "suspicious": {ts.key: ts.suspicious for ts in scheduler.tasks.values()},
    }


@pytest.mark.parametrize("allowed_failures", [3, 0], ids=["tasks run again", "tasks fail"])
def test_a_worker_leaves_as_upstream_removes_it(allowed_failures: int) -> None:
    mine, theirs = busy(), busy()
    assert story(mine.scheduler) == story(theirs.scheduler)
    for cluster in (mine, theirs):
        cluster.scheduler.allowed_failures = allowed_failures
        cluster.workers[1].die()
    address = mine.workers[1].state.address
    n_before = len(mine.scheduler.transition_log)
    mine.scheduler.leave(address)

    async def remove() -> None:
        scheduler: Any = theirs.scheduler
        scheduler.rpc = SimpleNamespace(remove=lambda address: None)
        scheduler.bandwidth_workers = {}
        scheduler._ongoing_background_tasks = SimpleNamespace(call_later=lambda *args: None)
        await scheduler.remove_worker(address, stimulus_id="test", close=False)

    asyncio.run(remove())
    assert len(story(mine.scheduler)) > n_before
    assert story(mine.scheduler) == story(theirs.scheduler)
    assert account(mine.scheduler) == account(theirs.scheduler)
    assert mine.run() == theirs.run()
    assert mine.record.executions == theirs.record.executions


def test_a_worker_joins_as_upstream_adds_it() -> None:
    mine, theirs = busy(), busy()
    mine.join(nthreads=4, resources={"GPU": 2})
    added = mine.workers[3].state.address

    async def add() -> None:
        scheduler: Any = theirs.scheduler

        async def nothing(*args: Any) -> None: ...

        scheduler.handle_worker = nothing
        scheduler.cumulative_worker_metrics = {}
        scheduler.bandwidth_types = scheduler.bandwidth_workers = {}
        scheduler.worker_plugins = {}
        bandwidth = {"total": scheduler.bandwidth, "workers": {}, "types": {}}
        await scheduler.add_worker(
            SimpleNamespace(write=nothing),
            address=added,
            status="init",
            server_id=added,
            nthreads=4,
            name=3,
            now=0.0,
            resources={"GPU": 2},
            memory_limit=0,
            metrics={
                "bandwidth": bandwidth,
                "digests_total_since_heartbeat": {},
                "memory": 0,
                "spilled_bytes": {"memory": 0},
            },
            services={},
            local_directory="",
            versions={},
            nanny="",
            extra={},
            stimulus_id="test",
        )
        scheduler.stream_comms[added] = SimpleNamespace(send=lambda *messages: None)
        scheduler.handle_worker_status_change("running", added, "test")

    asyncio.run(add())
    assert account(mine.scheduler) == account(theirs.scheduler)
    assert story(mine.scheduler) == story(theirs.scheduler)
