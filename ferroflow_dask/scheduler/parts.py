"""Parts: the collaborators of the extension, each made with those that it uses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.cluster_events import ClusterEvents
from ferroflow_dask.scheduler.core import Core, Counts, Gauge
from ferroflow_dask.scheduler.failed_transfers import FailedTransfers
from ferroflow_dask.scheduler.feature_set import FeatureSet
from ferroflow_dask.scheduler.features.base import Feature
from ferroflow_dask.scheduler.fixed_values import FixedValues
from ferroflow_dask.scheduler.graphs.bundles import Bundles
from ferroflow_dask.scheduler.graphs.graphs import Graphs
from ferroflow_dask.scheduler.graphs.splitting import Splitting
from ferroflow_dask.scheduler.idle_workers import IdleWorkers
from ferroflow_dask.scheduler.network import NetworkView
from ferroflow_dask.scheduler.placement import Placement
from ferroflow_dask.scheduler.placing import Placing
from ferroflow_dask.scheduler.refusals import Refusals
from ferroflow_dask.scheduler.steal_protocol import StealProtocol
from ferroflow_dask.scheduler.task_events import TaskEvents
from ferroflow_dask.scheduler.task_view import TaskViews

if TYPE_CHECKING:
    from ferroflow_dask.scheduler.extension import FerroflowStealing


class Parts:
    """The collaborators of an extension.

    Parameters
    ----------
    core : Core
    own : FerroflowStealing
    features : sequence of type of Feature or None
    states : mapping of str to object or None
    without : collection of str
        The last three are as in `FeatureSet`.
    """

    def __init__(
        self,
        core: Core,
        own: FerroflowStealing,
        features: Sequence[type[Feature]] | None,
        states: Mapping[str, Any] | None,
        without: Collection[str],
    ) -> None:
        self._core = core
        self._is_open = False
        self.refusals = Refusals(core)
        splitting = Splitting(core, Bundles(core))
        self.fixed = FixedValues(core, splitting)
        self.graphs = Graphs(core, splitting, self.refusals, self.fixed, own)
        self.task_views = TaskViews(core, self.fixed)
        self.steals = StealProtocol(core, own, self.task_views)
        network = NetworkView(core.scheduler, core.view)
        dividing, overtake = self.graphs.dividing, self.graphs.overtaking.overtake
        self.placement = Placement(
            core, task_views=self.task_views, network=network, steals=self.steals, divide=dividing.ask
        )
        self._placing = Placing(core, self.placement, self.fixed, self.refusals, overtake)
        self._transfers = FailedTransfers(core, self.fixed, self.task_views, self._placing)
        self.idle_workers = IdleWorkers(core, self.placement, self.steals, dividing, own)
        self.tasks = TaskEvents(core, self.placement, self.steals, self.graphs, self.refusals)
        cluster = ClusterEvents(core, self.placement, self.steals, self.graphs)
        self.features = FeatureSet(core, features, states, without)
        guard = core.guard
        # What the hooks of the extension call: these functions do not raise.
        self.worker_joined, self.worker_left = guard(cluster.worker_joined), guard(cluster.worker_left)
        self.client_joined, self.client_left = guard(cluster.client_joined), guard(cluster.client_left)
        self.logged, self.graph_created = guard(cluster.logged), guard(self.tasks.graph_created)
        self.left_queue, self.restarted = guard(self.tasks.left_queue), guard(self.tasks.restarted)
        self.balance = guard(self.idle_workers.balance)
        self.steal_answered = guard(self.placement.steal_answered)

    def take_over(self) -> None:
        """Follow the tasks that are processing, and place tasks from now on."""
        core = self._core
        for ws in core.scheduler.workers.values():
            for ts in ws.processing:
                if ts not in ws.long_running:
                    core.view.assign(self.task_views(ts), ws.address, core.clock())
        # Those of reports before those of `graphs`, which split bundles instead.
        for change in chain(self._placing.changes(), [self.refusals.change()], self._transfers.changes()):
            core.changes.make(change)

    def open(self) -> None:
        """Install the features: the scheduler has started. A second call does nothing.

        If a preload installs the plugin, distributed starts the extension, too.
        """
        if self._is_open:
            return
        self._is_open = True
        core = self._core
        self.fixed.scheduler_started()
        self.features.install(core.changes)
        for change in _distributed.message_changes(core.scheduler, core.hooks, core.guard):
            core.changes.make(change)

    def counts(self) -> dict[str, Counts]:
        """Return the counts of the plugin and its features, by name."""
        steals = Counts("Steal requests, and how they ended", "outcome", self.steals.counts)
        return {"steals": steals} | self.features.counts()

    def gauges(self) -> dict[str, Gauge]:
        """Return what was learned, by name."""
        workers = self._core.view.workers.values()
        slow = ("Workers slower than usual", sum(worker.speed < 1 for worker in workers))
        return (
            {"slow_workers": slow}
            | self._core.pauses.gauges()
            | self.features.gauges()
            | self.placement.policy.gauges()
        )

    def kept(self) -> dict[str, list[Key]]:
        """Return the tasks that are kept account of, by purpose; none once all have ended."""
        core = self._core
        averaged = self.tasks.averaged.values()
        return {
            "are in the view": list(core.view.assigned),
            "have average durations": [key for one in averaged for key in one.keys],
            "are bundles": list(self.graphs.bundles.keys()),
            "have refused a worker": list(core.refused),
            "may have ended a worker": list(core.suspects),
            "are asked for tasks": list(core.view.dividing),
            "are kept by features": self.features.pending(),
        }
