"""Graphs on the scheduler: the collaborator of the extension that bundles and splits them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from ferroflow_dask.bundling.graphs import Averages
from ferroflow_dask.scheduler._distributed_graphs import RUN_SPEC, run_spec_change
from ferroflow_dask.scheduler.changes import CallChange, Change, Changes
from ferroflow_dask.scheduler.graphs.arrival import Knowledge
from ferroflow_dask.scheduler.graphs.arrivals import GraphArrivals
from ferroflow_dask.scheduler.graphs.bundles import Bundles
from ferroflow_dask.scheduler.graphs.cancelling import Cancelling
from ferroflow_dask.scheduler.graphs.deaths import Deaths
from ferroflow_dask.scheduler.graphs.deliveries import Deliveries
from ferroflow_dask.scheduler.graphs.dividing import Dividing
from ferroflow_dask.scheduler.graphs.observers import Observers
from ferroflow_dask.scheduler.graphs.overheads import Overheads
from ferroflow_dask.scheduler.graphs.overtaking import Overtaking
from ferroflow_dask.scheduler.graphs.samples import Samples
from ferroflow_dask.scheduler.graphs.scaling import Scaling
from ferroflow_dask.scheduler.graphs.task_streams import TaskStreams
from ferroflow_dask.scheduler.graphs.worker import TOPIC, WorkerBundles
from ferroflow_dask.scheduler.graphs.worker_runs import DELIVERED, DIVIDED, Runs
from ferroflow_dask.scheduler.remote import Remote

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

    from ferroflow_dask.scheduler.core import Core

_VERSION = version("ferroflow-dask")
#: Longest wait for the announcements of workers, each of which is one message after its plugin is set up [s].
_ANNOUNCED_S = 1.0


class Graphs:
    """Bundles arriving graphs from `open` until the registry of changes undoes it.

    Parameters
    ----------
    core : Core
    own : object
        As in `Deliveries`.
    refused : callable
        As in `Dividing`.
    is_fixed : callable
        As in `Knowledge`.
    changes : Changes
    """

    def __init__(
        self,
        core: Core,
        *,
        own: object,
        refused: Callable[[Key, str], None],
        is_fixed: Callable[[TaskState], bool],
        changes: Changes,
    ) -> None:
        scheduler = self._scheduler = core.scheduler
        guard = self._guard = core.guard
        self._learned = core.learned
        self._changes = changes
        self._is_fixed = is_fixed
        #: Workers that can run bundles.
        self._capable: set[str] = set()
        # Workers that have announced what they can run.
        self._announced: set[str] = set()
        self._has_announced = asyncio.Event()
        self._arrivals: GraphArrivals | None = None
        self._hooks = core.hooks
        self._on = core.on
        self._decisions = core.decisions
        note = self._note
        self._view = core.view
        self._clock = core.clock
        self._put_on_workers = core.put_on_workers
        self.samples = Samples(scheduler)
        self.bundles = Bundles(scheduler, guard, withdraw=self._redefined, note=note)
        self.deaths = Deaths(core, self.bundles)
        self._scaling = Scaling(scheduler, self.bundles, guard)
        self.deliveries = Deliveries(scheduler, guard, own, self._delivered)
        self._streams = TaskStreams(scheduler, changes, guard, self._may_send)
        self.observers = Observers(scheduler, self.bundles, guard, self._streams.look)
        self._cancelling = Cancelling(scheduler, self.bundles, guard)
        self._overheads = Overheads(scheduler, core.learned)
        self.dividing = Dividing(
            scheduler,
            self.bundles,
            guard,
            cluster=self._overheads.profile,
            view=core.view,
            may_send=self._may_send,
            note=note,
            refused=refused,
            clock=core.clock,
        )
        #: The ends of bundles on workers.
        self.remote = Remote(
            core,
            Runs,
            {
                DELIVERED: (self.deliveries.arrived, self.deliveries.ignored),
                DIVIDED: (self.dividing.received, lambda **_: None),
            },
            joined=self._streams.worker_announced,
        )
        self.overtaking = Overtaking(self.bundles, core.view, self.dividing.ask)

    def _note(self, key: Key, what: str, reason: str) -> None:
        self._decisions.note(key, what, "", reason)

    def _redefined(self, key: Key) -> None:
        for hook in self._hooks.task_redefined:
            hook(key)

    def _may_send(self, address: str) -> bool:
        return self.remote.may_send(address)

    def changes(self) -> Iterator[Change]:
        """Bundle graphs from now on: return all changes to Dask."""
        cluster = self._overheads.profile
        declare, has_idle = self._learned.costs.declare, lambda: bool(self._scheduler.idle)
        knowledge = Knowledge(cluster, self.learned, has_idle, self._is_fixed, declare, self._on)
        self._arrivals = GraphArrivals(
            self._scheduler,
            self.bundles,
            self.samples,
            knowledge,
            self._note,
            is_observed=self.observers.are_present,
            announced=self._workers_announced,
        )
        yield CallChange("bundled graphs", lambda: None, self._close)
        yield from self._receiving()
        if RUN_SPEC in self._scheduler.handlers:  # that of an extension of Dask's
            yield run_spec_change(self._scheduler, self._guard(self.bundles.original))
        yield from self.deaths.changes()
        yield self._cancelling.change()
        yield from self._scaling.changes()
        yield from self._arrivals.changes()
        # A worker gets bundles once it announces that it can run them: it delivers by then.
        announcing = self._put_on_workers(WorkerBundles(), "ferroflow-capable")
        yield announcing
        yield from self.observers.changes(announcing)
        self._streams.look()

    def receive(self) -> None:
        """Take the messages of workers about bundles, and nothing else."""
        for change in self._receiving():
            self._changes.make(change)

    def _receiving(self) -> Iterator[Change]:
        yield from self.bundles.changes()
        yield self.remote

    def _close(self) -> None:
        """Let graphs run as they come, and split the bundles that have not ended: Dask cannot."""
        if self._arrivals is not None:
            self._arrivals.close()
        self.samples.close()
        for key in list(self.bundles.keys()):
            self.bundles.split(key, "ferroflow-uninstall")
        self.bundles.clear()

    def learned(self) -> Mapping[str, Averages | None] | None:
        """Return what is known of prefixes, as in `Knowledge`; may be called by any thread."""
        if not self._capable.issuperset(list(self._scheduler.workers)):
            return None
        known: dict[str, Averages | None] = {
            prefix: Averages(*values) for prefix, values in self._learned.costs.by_prefix().items()
        }
        return known | dict.fromkeys(list(self._learned.separate))

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
        self._view.last_end_at = self._clock()
        self.changed(ts.key, "memory")

    def event(self, topic: str, msg: Any) -> None:
        """Note what a worker announces."""
        if topic != TOPIC or not isinstance(msg, dict):
            return
        if "observers" in msg:
            self.observers.reported(str(msg.get("worker")), msg)
        if isinstance(prefix := msg.get("prefix"), str):
            self._learned.separate.add(prefix)
        elif "version" in msg:
            self._announced.add(str(msg.get("worker")))
            self._has_announced.set()
            if msg["version"] == _VERSION:
                self._capable.add(str(msg.get("worker")))

    async def _workers_announced(self) -> None:
        """Wait until all workers have announced what they can run: a graph may follow `install` at once."""
        try:
            async with asyncio.timeout(_ANNOUNCED_S):
                while not self._announced.issuperset(self._scheduler.workers):
                    self._has_announced.clear()
                    await self._has_announced.wait()
        except TimeoutError:  # the next graph does not wait for them again
            self._announced.update(self._scheduler.workers)

    def restarted(self) -> None:
        """Forget all graphs: the cluster restarts."""
        self.bundles.clear()
        self.dividing.restarted()
        if self._arrivals is not None:
            self._arrivals.restarted()

    def worker_left(self, address: str) -> None:
        """Forget a worker."""
        self._capable.discard(address)
        self._announced.discard(address)
        self.observers.worker_left(address)

    def sampled(self) -> Collection[Key]:
        """Return the keys of the sample of the graph whose tasks Dask has just created."""
        return () if self._arrivals is None else self._arrivals.sampled()

    def created(self) -> None:
        """Note the bundles of the graph whose tasks Dask has just created."""
        if self._arrivals is not None:
            self.bundles.add(self._arrivals.created())
