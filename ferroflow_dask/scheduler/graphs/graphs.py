"""Graphs on the scheduler: the collaborator of the extension that bundles and splits them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from ferroflow_dask.bundling.averages import Averages
from ferroflow_dask.bundling.plan import Plan
from ferroflow_dask.scheduler._distributed_graphs import RUN_SPEC, run_spec_change
from ferroflow_dask.scheduler.changes import CallChange, Change
from ferroflow_dask.scheduler.graphs.arrival import Knowledge
from ferroflow_dask.scheduler.graphs.arrivals import GraphArrivals, arriving
from ferroflow_dask.scheduler.graphs.cancelling import Cancelling
from ferroflow_dask.scheduler.graphs.capable import CapableWorkers
from ferroflow_dask.scheduler.graphs.deaths import Deaths
from ferroflow_dask.scheduler.graphs.deliveries import Deliveries
from ferroflow_dask.scheduler.graphs.dividing import Dividing
from ferroflow_dask.scheduler.graphs.observers import Observers
from ferroflow_dask.scheduler.graphs.overheads import Overheads
from ferroflow_dask.scheduler.graphs.overtaking import Overtaking
from ferroflow_dask.scheduler.graphs.scaling import Scaling
from ferroflow_dask.scheduler.graphs.stages import Stages
from ferroflow_dask.scheduler.graphs.task_streams import TaskStreams
from ferroflow_dask.scheduler.graphs.worker import TOPIC, WorkerBundles
from ferroflow_dask.scheduler.graphs.worker_runs import DELIVERED, DIVIDED, Runs
from ferroflow_dask.scheduler.learned import Known
from ferroflow_dask.scheduler.remote import Remote

if TYPE_CHECKING:
    from distributed.scheduler import TaskState
    from distributed.stealing import WorkStealing

    from ferroflow_dask.scheduler.core import Core
    from ferroflow_dask.scheduler.fixed_values import FixedValues
    from ferroflow_dask.scheduler.graphs.splitting import Splitting
    from ferroflow_dask.scheduler.refusals import Refusals


class Graphs:
    """Bundles arriving graphs once its changes are made, until they are undone.

    Parameters
    ----------
    core : Core
    splitting : Splitting
    refusals : Refusals
    fixed : FixedValues
    own : distributed.stealing.WorkStealing
        The extension, as in `Deliveries`.
    """

    def __init__(
        self, core: Core, splitting: Splitting, refusals: Refusals, fixed: FixedValues, own: WorkStealing
    ) -> None:
        scheduler = self._scheduler = core.scheduler
        guard = self._guard = core.guard
        self._core = core
        self._learned = core.learned
        self._splitting = splitting
        bundles = self.bundles = splitting.bundles
        self.deaths = Deaths(core, splitting)
        self._scaling = Scaling(scheduler, bundles, guard)
        self.deliveries = Deliveries(scheduler, guard, own, self._delivered)
        self._streams = TaskStreams(scheduler, core.changes, guard, self._may_send)
        self.observers = Observers(scheduler, splitting, guard, self._streams.look)
        self._cancelling = Cancelling(scheduler, bundles, guard)
        self._capable = CapableWorkers(scheduler)
        cluster = Overheads(scheduler, core.learned, self._capable.cores).profile
        self.dividing = Dividing(core, splitting, refusals, cluster, self._may_send)
        #: The ends of bundles on workers.
        self.remote = Remote(
            core,
            Runs,
            {
                DELIVERED: (self.deliveries.arrived, self.deliveries.ignored),
                DIVIDED: (self.dividing.answers.received, lambda **_: None),
            },
            joined=self._streams.worker_announced,
        )
        self.overtaking = Overtaking(bundles, core.view, self.dividing.ask)
        declare, has_idle = core.learned.costs.declare, lambda: bool(scheduler.idle)
        #: What graphs are bundled by.
        self.knowledge = Knowledge(
            cluster,
            self.learned,
            has_idle,
            fixed.is_fixed,
            declare,
            core.on,
            core.learned.repeats.known,
            core.learned.shuffled,
        )
        self._arrivals = GraphArrivals(core, bundles, self.knowledge, self.observers, self._capable)
        self.samples = self._arrivals.samples
        self.stages = Stages(core, splitting, self.knowledge, self._stage_created)

    def _may_send(self, address: str) -> bool:
        return self.remote.may_send(address)

    def changes(self) -> Iterator[Change]:
        """Bundle graphs from now on: return all changes to Dask."""
        yield CallChange("bundled graphs", lambda: None, self._close)
        yield from self._receiving()
        if RUN_SPEC in self._scheduler.handlers:  # that of an extension of Dask's
            yield run_spec_change(self._scheduler, self._guard(self.bundles.original))
        yield from self.deaths.changes()
        yield self._cancelling.change()
        yield from self._scaling.changes()
        yield from self._arrivals.changes()
        # A worker gets bundles once it announces that it can run them: it delivers by then.
        announcing = self._core.put_on_workers(WorkerBundles(), "ferroflow-capable")
        yield announcing
        yield from self.observers.changes(announcing)
        self._streams.look()

    def receive(self) -> None:
        """Take the messages of workers about bundles, and nothing else."""
        for change in self._receiving():
            self._core.changes.make(change)

    def _receiving(self) -> Iterator[Change]:
        yield from self._splitting.changes()
        yield self.remote

    def _close(self) -> None:
        """Let graphs run as they come, and split the bundles that have not ended: Dask cannot."""
        self._arrivals.close()
        for key in list(self.bundles.keys()):
            self._splitting.split(key, "ferroflow-uninstall")
        self.bundles.clear()

    def learned(self) -> Mapping[str, Averages | None] | None:
        """Return what is known of prefixes, as in `Knowledge`; may be called by any thread."""
        if not self._capable.are_all():
            return None
        return Known(self._learned.costs, self._learned.separate.copy())

    def changed(self, key: Key, finish: str) -> None:
        """Note a transition of a task."""
        if finish == "forgotten":
            self.dividing.forgotten(key)
            self.bundles.forget(key)
        elif finish == "memory":
            self.dividing.ended(key)
            self.bundles.completed(key)
        self.samples.changed(key)

    def _delivered(self, ts: TaskState, seconds: float, nbytes: int, worker: str) -> None:
        self._learned.costs.record(ts, seconds, nbytes, worker)
        self._core.view.last_end_at = self._core.clock()
        self.changed(ts.key, "memory")
        self._core.hooks.task_changed(ts.key, "waiting", "memory")

    def event(self, topic: str, msg: Any) -> None:
        """Note what a worker announces."""
        if topic != TOPIC or not isinstance(msg, dict):
            return
        if "observers" in msg:
            self.observers.reported(str(msg.get("worker")), msg)
        if isinstance(prefix := msg.get("prefix"), str):
            self._learned.separate.add(prefix)
        elif "shuffle" in msg:
            self._learned.record_shuffle(str(msg["shuffle"]), float(msg["nbytes"]))
        elif "version" in msg:
            self._capable.note(str(msg.get("worker")), msg["version"], msg.get("cores"))
            self._learned.costs.crowding = self._capable.crowding()

    def restarted(self) -> None:
        """Forget all graphs: the cluster restarts."""
        self.bundles.clear()
        self.stages.clear()
        self.dividing.restarted()
        self._arrivals.restarted()

    def worker_left(self, address: str) -> None:
        """Forget a worker."""
        self._capable.worker_left(address)
        self._learned.costs.crowding = self._capable.crowding()
        self.observers.worker_left(address)

    def sampled(self) -> Collection[Key]:
        """Return the keys of the sample of the graph whose tasks Dask has just created."""
        plan = self.planned()
        return () if plan is None else plan.graph.sampled

    def planned(self) -> Plan | None:
        """Return the plan of the graph whose tasks Dask has just created."""
        return self._arrivals.planned()

    def created(self) -> None:
        """Note the bundles of the graph whose tasks Dask has just created."""
        created, plan = dict(self._arrivals.created()), self.planned()
        for part in plan.held if plan is not None else ():  # as one bundle they never run
            self.bundles.expect({part.name: created.pop(part.name)})
        self.bundles.add(created)
        # Their inputs are bundles, which say nothing of how much data they read.
        readers = ((key, one) for key, one in created.items() if len(one.tasks) == 1)
        self._learned.costs.expect(
            {key: one.size_classes[key] for key, one in readers if key in one.size_classes}
        )
        if plan is not None:
            self.stages.add(plan)

    def _stage_created(self, plan: Plan) -> None:
        """Note the bundles of a part of a graph that was held."""
        with arriving(plan):
            self.created()
            for hook in self._core.hooks.update_graph:
                hook()
