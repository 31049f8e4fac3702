"""Stealing extension: stands where Dask's stealing stood, and connects distributed's hooks to the parts.

Each hook hands its event to one part. Three rules keep the scheduler safe. Steals are never requested inside
a transition, which is re-entrant: an event asks for a pass, which the event loop runs after the transitions.
No hook raises: an exception of the plugin ends the plugin, not the scheduler. Every change to Dask is an
entry of `changes`, so all of them can be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distributed.metrics import time
from distributed.stealing import WorkStealing

from ferroflow_dask import config
from ferroflow_dask.policy import ClusterView, Policy
from ferroflow_dask.scheduler import steal_exchange
from ferroflow_dask.scheduler.changes import FAILURES, Change, attempt
from ferroflow_dask.scheduler.core import Core
from ferroflow_dask.scheduler.decisions import DecisionLog
from ferroflow_dask.scheduler.features.base import Feature
from ferroflow_dask.scheduler.learned import Learned, learned_on
from ferroflow_dask.scheduler.lifecycle import STEP_FAILED, Lifecycle
from ferroflow_dask.scheduler.parts import Parts
from ferroflow_dask.scheduler.passes import Passes
from ferroflow_dask.scheduler.pauses import Pauses
from ferroflow_dask.scheduler.remote import WorkerPluginChange
from ferroflow_dask.scheduler.settings import configured_policy

if TYPE_CHECKING:
    from distributed import WorkerPlugin
    from distributed.scheduler import Scheduler, TaskState


class FerroflowStealing(WorkStealing):
    """Replacement of distributed's `WorkStealing` that asks a policy.

    A subclass, so that the dashboard, the metrics and the cluster dump find all attributes that they read.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    policy : Policy, optional
        The policy of the setting `ferroflow.policy` if left out.
    latency_s : float, optional
        The setting `ferroflow.latency` if left out [s].
    replaced : type of WorkStealing or None, optional
        Class of the extension that is put back when this one fails or is uninstalled; None for no stealing.
    clock : callable, optional
        Returns the time [s]; the wall clock of workers if left out.
    learned : Learned, optional
        What earlier extensions on this scheduler have learned if left out.
    states, without, features : optional
        As in `FeatureSet`.
    put_on_workers : callable, optional
        As in `Core`; by Dask's worker plugins if left out.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        policy: Policy | None = None,
        latency_s: float | None = None,
        replaced: type[WorkStealing] | None = WorkStealing,
        *,
        clock: Callable[[], float] = time,
        learned: Learned | None = None,
        states: Mapping[str, Any] | None = None,
        without: Collection[str] = (),
        features: Sequence[type[Feature]] | None = None,
        put_on_workers: Callable[[WorkerPlugin, str], Change] | None = None,
    ) -> None:
        self.replaced = replaced
        #: The scheduler plugin that installed this extension, if one did.
        self.installed_by: object = None
        self.lifecycle = Lifecycle(scheduler, self, replaced)
        self.guard, self.changes = self.lifecycle.guard, self.lifecycle.changes
        latency_s = config.get_seconds("latency") if latency_s is None else latency_s
        learned = learned_on(scheduler) if learned is None else learned
        core = self.core = Core(
            scheduler,
            ClusterView(latency_s=latency_s),
            clock,
            self.guard,
            self.changes,
            self.lifecycle.hooks,
            Passes(scheduler.loop, self.guard),
            learned,
            Pauses(scheduler, learned, latency_s),
            configured_policy() if policy is None else policy,
            DecisionLog(clock),
            lambda: self.parts,
            put_on_workers or self._put_on_workers,
        )
        self.view, self.decisions, self.costs = core.view, core.decisions, core.learned.costs
        parts = self.parts = Parts(core, self, features, states, without)
        self.graphs, self.placement = parts.graphs, parts.placement
        #: Steal requests, and how they ended; confirmed steals by victim and thief.
        self.steals, self.flows = parts.steals.counts, parts.steals.flows
        #: Features that are on, in the order of installation, and why others are off, by name.
        self.features, self.off = parts.features.features, parts.features.off
        # The part's own method: each task makes five transitions.
        self.transition = parts.tasks.transition  # type: ignore[method-assign]
        super().__init__(scheduler)
        try:
            if self.error is not None:  # a hook failed when the constructor of `WorkStealing` called it
                raise self.error
            parts.take_over()
        except FAILURES:
            steal_exchange.remove(scheduler, self)
            raise

    def _put_on_workers(self, plugin: WorkerPlugin, name: str) -> Change:
        return WorkerPluginChange(self.scheduler, plugin, name, self.guard.fail)

    # Life cycle

    async def start(self, scheduler: Any = None) -> None:
        """Serve idle workers, and make the other changes to Dask; called by distributed and by `exchange`."""
        await super().start(scheduler)
        if not self.guard.is_closed:
            self.parts.open()

    async def close(self) -> None:
        """Detach when the scheduler closes; it tears down only extensions that are registered."""
        self.lifecycle.detach()

    def teardown(self) -> None:
        """Detach; called by distributed when the scheduler closes, and by `exchange`."""
        super().teardown()
        self.lifecycle.detach()

    @property
    def error(self) -> BaseException | None:
        """The failure that ended the plugin; None while there is none."""
        return self.guard.error

    # Hooks of SchedulerPlugin: the scheduler's events

    def add_worker(self, scheduler: Any = None, worker: Any = None) -> None:
        """Handle a worker that joined."""
        super().add_worker(scheduler, worker)
        self.parts.worker_joined(worker)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Handle a worker that left."""
        super().remove_worker(scheduler, worker, **kwargs)
        self.parts.worker_left(worker)

    def add_client(self, scheduler: Scheduler, client: str) -> None:
        """Handle a client that connects."""
        self.parts.client_joined(client)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Handle a client that disconnected."""
        self.parts.client_left(client)

    def update_graph(self, scheduler: Scheduler, *, tasks: Any, annotations: Any, **kwargs: Any) -> None:
        """Handle a graph whose tasks were created."""
        self.parts.graph_created(tasks, annotations)

    def log_event(self, topic: str, msg: Any) -> None:
        """Handle events without a hook."""
        self.parts.logged(topic, msg)

    def restart(self, scheduler: Any) -> None:
        """Forget all tasks: the cluster restarts."""
        super().restart(scheduler)
        self.parts.restarted()

    # Methods that the scheduler and distributed's stealing call by name

    def remove_key_from_stealable(self, ts: TaskState) -> None:
        """Handle a task that becomes long-running, or that another worker is about to steal."""
        self.parts.left_queue(ts)

    def put_key_in_stealable(self, ts: TaskState) -> None:
        """Do nothing: the queues of the view replace the stock tables."""

    def balance(self) -> None:
        """Serve idle workers now; called periodically."""
        if self.error is not None:
            self.lifecycle.recover()  # the call by the event loop has failed, or is still to come
        else:
            self.parts.balance()

    def move_task_confirm(self, *, key: str, state: str, stimulus_id: str, worker: str | None = None) -> None:
        """Take a worker's answer to a steal request; an exception here would close the worker's stream."""
        if self.error is None:
            self.parts.steal_answered(key, state, stimulus_id, worker)
        if self.error is not None and worker is not None:
            attempt(lambda: self.parts.steals.place_again(key, state, worker, stimulus_id), STEP_FAILED)


def extension_on(scheduler: Scheduler) -> FerroflowStealing | None:
    """Return the extension of a scheduler if it is ours; it may have failed."""
    extension = scheduler.extensions.get(steal_exchange.STEALING)
    return extension if isinstance(extension, FerroflowStealing) else None
