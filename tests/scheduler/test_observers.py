"""Plugins of other packages that follow tasks: they see each task of a graph, since none is bundled."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import dask
import pytest
from bundled import Bundling, Gate, add, fork, gates, leaves, on_bundling_cluster, take_all_for_short, task
from cluster_tests import runs_on
from distributed import Worker, WorkerPlugin
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.diagnostics.progress import AllProgress, MultiProgress, Progress
from one_loop import Cluster, on_cluster
from waiting import comes

from ferroflow_dask import FerroflowPlugin
from ferroflow_dask.bundling import sequence
from ferroflow_dask.bundling.plan import Plan
from ferroflow_dask.scheduler.features.inlined_results_worker import ReportedResults
from ferroflow_dask.scheduler.graphs import arrivals
from ferroflow_dask.scheduler.graphs.worker import TOPIC
from ferroflow_dask.scheduler.graphs.worker_observers import OPERATION, WorkerObservers, observers
from ferroflow_dask.scheduler.plugin import uninstall_from
from ferroflow_dask.scheduler.remote_worker import RemotePlugin

pytestmark = pytest.mark.cluster

#: The keys that each plugin has seen, in their order.
SEEN: dict[str, list[Any]] = {}
N = 30
TURN_OFF = "plugins that follow tasks turn bundling off: .*{}.*ferroflow.observers: ignore"


class OnWorkers(WorkerPlugin):
    """Looks up the tasks that end on a worker."""

    name = "on-workers"

    def setup(self, worker: Worker) -> None:
        self._worker = worker

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        if (start, finish) == ("executing", "memory"):
            SEEN["worker"].append(self._worker.state.tasks[key].key)


class OnScheduler(SchedulerPlugin):
    """Looks up the tasks that end."""

    name = "on-scheduler"

    async def start(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def transition(self, key: Any, start: str, finish: str, *_: Any, **__: Any) -> None:
        if (start, finish) == ("processing", "memory"):
            SEEN["scheduler"].append(self.scheduler.tasks[key].key)


class OfGraphs(SchedulerPlugin):
    """Notes the tasks of each graph."""

    name = "of-graphs"

    def update_graph(self, scheduler: Any, *, tasks: list[Any], **_: Any) -> None:
        SEEN["graphs"].append(set(tasks))


class OfWorkers(SchedulerPlugin):
    """Follows workers, and no task."""

    name = "of-workers"

    def add_worker(self, scheduler: Any, worker: str) -> None:
        """Do nothing."""


class KnowsBundles(OnScheduler):
    """Follows tasks and knows bundles."""

    ferroflow_bundles = True


class KnowsBundlesOnWorkers(OnWorkers):
    """Follows tasks on workers and knows bundles."""

    ferroflow_bundles = True


@pytest.fixture(autouse=True)
def _all_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    take_all_for_short(monkeypatch)
    monkeypatch.setattr(sequence, "_given_up", {})
    SEEN.update(worker=[], scheduler=[], graphs=[])


@pytest.fixture
def _may_warn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=TURN_OFF.format(""))
        yield


@pytest.fixture
def gate() -> Iterator[Gate]:
    with gates() as make:
        yield make()


def mapped(cluster: Cluster) -> tuple[list[Any], set[Any]]:
    """Return the futures of mapped tasks, and the keys of the tasks."""
    keys = [f"mapped-{i}" for i in range(N)]
    return cluster.client.map(add, keys, range(N), key=keys), set(keys)


def delayed(cluster: Cluster) -> tuple[list[Any], set[Any]]:
    """Return the future of a total, and the keys of the tasks that it needs."""
    inner = leaves("leaf", N)
    return [cluster.client.compute(task("total-0", *inner))], {"total-0", *(one.key for one in inner)}


PROGRAMS = {"map": mapped, "delayed": delayed}


async def add_to_workers(cluster: Cluster) -> None:
    for worker in cluster.workers:
        await worker.plugin_add(OnWorkers())
        await worker.heartbeat()
    if "graphs" in vars(cluster.stealing):  # the plugin is installed
        await reports(cluster, 2)


async def reports(cluster: Cluster, n: int) -> None:
    """Wait until the scheduler knows of observers on so many workers."""
    known = cluster.stealing.graphs.observers._reports
    await comes(lambda: sum(bool(names) for _, names in known.values()) == n)


async def add_to_scheduler(cluster: Cluster) -> None:
    plugin = OnScheduler()
    await plugin.start(cluster.scheduler)
    cluster.scheduler.add_plugin(plugin)


#: How plugins come, with the hooks that must have seen all tasks.
WAYS: dict[str, tuple[Callable[[Cluster], Awaitable[Any]], str]] = {
    "a worker plugin is registered by a client": (lambda c: c.client.register_plugin(OnWorkers()), "worker"),
    "a worker plugin is added on the workers": (add_to_workers, "worker"),
    "a scheduler plugin is registered by a client": (
        lambda c: c.client.register_plugin(OnScheduler()),
        "scheduler",
    ),
    "a scheduler plugin is added on the scheduler": (add_to_scheduler, "scheduler"),
}


@pytest.mark.usefixtures("_may_warn")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("is_first", [True, False], ids=["before the installation", "after the installation"])
@pytest.mark.parametrize("way", WAYS)
@runs_on(on_cluster, plugin=False)
async def test_a_plugin_sees_each_task(cluster: Cluster, way: str, is_first: bool, program: str) -> None:
    register, hook = WAYS[way]
    if is_first:
        await register(cluster)
    await cluster.client.register_plugin(FerroflowPlugin())
    if is_first and hook == "worker":
        await reports(cluster, 2)
    if not is_first:
        await register(cluster)
    futures, keys = PROGRAMS[program](cluster)
    await cluster.client.gather(futures)
    assert len(SEEN[hook]) == len(keys)
    assert set(SEEN[hook]) == keys


ALLOWED = {
    "the scheduler plugin knows bundles": (KnowsBundles, "respect"),
    "the worker plugin knows bundles": (KnowsBundlesOnWorkers, "respect"),
    "the plugin follows no tasks": (OfWorkers, "respect"),
    "observers of the scheduler are ignored": (OnScheduler, "ignore"),
    "observers of workers are ignored": (OnWorkers, "ignore"),
}


@pytest.mark.parametrize("name", ALLOWED)
@runs_on(on_cluster, plugin=False)
async def test_graphs_are_bundled_without_a_warning_if(cluster: Cluster, name: str) -> None:
    plugin, setting = ALLOWED[name]
    with dask.config.set({"ferroflow.observers": setting}):
        await cluster.client.register_plugin(FerroflowPlugin())
    await cluster.client.register_plugin(plugin())
    futures, keys = delayed(cluster)
    assert await cluster.client.gather(futures) == [sum(range(1, N + 1)) + 1]
    assert cluster.stealing.graphs.bundles.counts["tasks"] > 0
    assert keys.isdisjoint(set(SEEN["worker"] + SEEN["scheduler"]) - {"total-0"})


@pytest.mark.parametrize("plugin", [OnWorkers, OnScheduler, OfGraphs])
@runs_on(on_bundling_cluster)
async def test_one_warning_names_the_plugin_and_bundling_resumes_without_it(
    cluster: Bundling, plugin: Any
) -> None:
    is_on_workers = issubclass(plugin, WorkerPlugin)
    client = cluster.client
    for round_no in (1, 2):
        n_before = cluster.counts["created"]
        await client.register_plugin(plugin())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                await client.gather(delayed(cluster)[0])
                await cluster.is_empty()
            await comes(lambda n=round_no, caught=caught: n > 1 or caught)
        assert cluster.counts["created"] == n_before
        assert [one for one in caught if plugin.__name__ not in str(one.message)] == []
        assert len(caught) == (round_no == 1)
        unregister = client.unregister_worker_plugin if is_on_workers else client.unregister_scheduler_plugin
        await unregister(plugin.name)
        await client.gather(delayed(cluster)[0])
        await cluster.is_empty()
        assert cluster.counts["created"] > n_before


@pytest.mark.usefixtures("_may_warn")
@runs_on(on_bundling_cluster)
async def test_a_plugin_that_was_taken_off_the_workers_is_forgotten(cluster: Bundling) -> None:
    await add_to_workers(cluster)
    for worker in cluster.workers:
        await worker.plugin_remove(OnWorkers.name)
        await worker.heartbeat()
    await reports(cluster, 0)
    await cluster.client.gather(delayed(cluster)[0])
    assert cluster.counts["created"] > 0


@pytest.mark.usefixtures("_may_warn")
@runs_on(on_bundling_cluster)
async def test_a_worker_that_joins_with_a_plugin_turns_bundling_off_until_it_leaves(
    cluster: Bundling,
) -> None:
    async with Worker(cluster.scheduler.address, nthreads=1, plugins=[OnWorkers()]):
        await reports(cluster, 1)
        await cluster.client.gather(delayed(cluster)[0])
        assert cluster.counts["created"] == 0
    await comes(lambda: len(cluster.scheduler.workers) == 2)
    await cluster.is_empty()
    await cluster.client.gather(delayed(cluster)[0])
    assert cluster.counts["created"] > 0


@runs_on(on_bundling_cluster)
async def test_the_first_report_of_a_worker_that_joins_has_the_plugins_that_the_scheduler_gives_it(
    cluster: Bundling,
) -> None:
    await cluster.client.register_plugin(OnWorkers())
    async with Worker(cluster.scheduler.address, nthreads=1) as worker:
        await reports(cluster, 3)
        events = [msg for _, msg in cluster.scheduler.get_events(TOPIC)]
        first, *_ = (msg for msg in events if msg["worker"] == worker.address)
        assert list(first["observers"]) == [f"{__name__}.OnWorkers"]
    await comes(lambda: len(cluster.scheduler.workers) == 2)


@pytest.mark.usefixtures("_may_warn")
@pytest.mark.parametrize("way", WAYS)
@runs_on(on_bundling_cluster)
async def test_bundles_that_no_worker_has_are_split_when_a_plugin_comes(
    cluster: Bundling, way: str, gate: Gate
) -> None:
    register, hook = WAYS[way]
    inner, outs = fork(gate.future(cluster.client))
    futures = cluster.client.compute(outs)
    await comes(lambda: cluster.counts["created"] == 1)
    await register(cluster)
    await comes(lambda: cluster.counts["split"] == 1)
    gate.open()
    await cluster.client.gather(futures)
    assert set(SEEN[hook]) >= {one.key for one in (*inner, *outs)}


@pytest.mark.usefixtures("_may_warn")
@runs_on(on_bundling_cluster)
async def test_a_bundle_that_a_worker_has_stays(cluster: Bundling, gate: Gate) -> None:
    last = gate.task("gate-1", fork()[0][-1])
    futures = cluster.client.compute([last])
    await comes(gate.reached.is_set)
    await cluster.client.register_plugin(OnScheduler())
    gate.open()
    await cluster.client.gather(futures)
    assert cluster.counts["split"] == 0


@pytest.mark.usefixtures("_may_warn")
@runs_on(on_bundling_cluster)
async def test_a_graph_stays_as_it_came_if_a_plugin_comes_while_it_is_bundled(
    cluster: Bundling, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = arrivals.rewrite

    def rewrite(*args: Any) -> Plan:
        plan = stock(*args)
        assert plan.bundles
        cluster.scheduler.plugins["of-graphs"] = OfGraphs()
        return plan

    monkeypatch.setattr(arrivals, "rewrite", rewrite)
    futures, keys = delayed(cluster)
    await cluster.client.gather(futures)
    assert SEEN["graphs"] == [keys]


@pytest.mark.usefixtures("_may_warn")
@runs_on(on_cluster)
async def test_a_graph_has_no_sample_while_a_plugin_follows_tasks(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # nothing is known of any task
    await cluster.client.register_plugin(OfGraphs())
    futures, keys = delayed(cluster)
    await cluster.client.gather(futures)
    assert SEEN["graphs"] == [keys]


@runs_on(on_bundling_cluster)
async def test_uninstalling_leaves_no_change(cluster: Bundling) -> None:
    worker = cluster.workers[0]
    await cluster.stealing.changes.settled()
    assert "ferroflow-observers" in worker.metrics
    await uninstall_from(cluster.scheduler)
    assert "add_plugin" not in vars(cluster.scheduler)
    assert cluster.scheduler.handlers["register_worker_plugin"] == cluster.scheduler.register_worker_plugin
    assert "ferroflow-observers" not in worker.metrics
    assert "ferroflow-observers" not in worker.handlers


# Which plugins follow tasks


class LikeDask(Progress):
    """Inherits the hooks of one of Dask's plugins."""

    def __init__(self) -> None:
        """Do nothing."""


def with_attribute() -> OfWorkers:
    plugin = OfWorkers()
    plugin.transition = lambda *_, **__: None  # type: ignore[method-assign]
    return plugin


KINDS: dict[str, tuple[Any, bool]] = {
    "a scheduler plugin with transition": (OnScheduler(), True),
    "a scheduler plugin with update_graph": (OfGraphs(), True),
    "a worker plugin with transition": (OnWorkers(), True),
    "a plugin whose instance has the hook": (with_attribute(), True),
    "a scheduler plugin with other hooks": (OfWorkers(), False),
    "a plugin that knows bundles": (KnowsBundles(), False),
    "a subclass of one of Dask's that adds no hook": (LikeDask(), False),
    "one of Dask's": (AllProgress.__new__(AllProgress), False),
    "one of this package": (RemotePlugin(ReportedResults), False),
    "an object without hooks": (object(), False),
}


@pytest.mark.parametrize("name", KINDS)
def test_foreign_plugins_with_hooks_follow_tasks(name: str) -> None:
    plugin, expected = KINDS[name]
    names = [f"{type(plugin).__module__}.{type(plugin).__qualname__}"]
    assert observers([plugin, plugin], ["transition", "update_graph"]) == (names if expected else [])


# Progress bars


@pytest.mark.parametrize("is_complete", [True, False], ids=["of all tasks", "of the rest"])
@pytest.mark.parametrize("bar", [Progress, MultiProgress])
@runs_on(on_bundling_cluster)
async def test_a_progress_bar_goes_on_when_a_bundle_is_split(
    cluster: Bundling, bar: Any, is_complete: bool, gate: Gate
) -> None:
    futures = cluster.client.compute(fork(gate.future(cluster.client))[1])
    await comes(lambda: cluster.counts["created"] == 1)
    progress = bar({future.key for future in futures}, cluster.scheduler, complete=is_complete)
    await progress.setup()
    assert cluster.stealing.graphs._splitting.split(cluster.bundle_of("inc"), "test")
    assert progress.status is None
    gate.open()
    await cluster.client.gather(futures)
    await comes(lambda: progress.status)
    assert progress.status == "finished"


def test_a_heartbeat_before_the_first_report_announces_the_worker_too() -> None:
    sent: list[dict[str, Any]] = []
    later: list[tuple[Any, ...]] = []
    worker: Any = SimpleNamespace(
        handlers={},
        metrics={},
        plugins={},
        loop=SimpleNamespace(add_callback=lambda *call: later.append(call)),
        log_event=lambda _topic, report: sent.append(report),
    )
    WorkerObservers(worker, TOPIC, {"version": "1"})
    worker.metrics[OPERATION](worker)  # as in a heartbeat
    for function, *arguments in later:
        function(*arguments)
    assert [report["version"] for report in sent] == ["1"]
