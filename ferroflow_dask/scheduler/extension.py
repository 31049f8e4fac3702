"""Stealing extension: stands where Dask's stealing stood, and connects distributed's hooks to the policy.

The extension owns the state and the collaborators; each hook hands its event to one of them. Three rules keep
the scheduler safe. Steals are never requested inside a transition, which is re-entrant: an event asks for a
pass, which the event loop runs after the transitions. No hook raises: an exception of the plugin ends the
plugin, not the scheduler. Every change to Dask is an entry of `changes`, so all of them can be undone.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dask.typing import Key
from distributed.metrics import time
from distributed.stealing import WorkStealing

from ferroflow_dask import config
from ferroflow_dask.device_reports import DEVICES_TOPIC, kind_of_worker
from ferroflow_dask.policy import ClusterView, Policy
from ferroflow_dask.policy.events import WorkerIdle, WorkerJoined, WorkerLeft
from ferroflow_dask.scheduler import _distributed, steal_exchange
from ferroflow_dask.scheduler.changes import FAILURES, Change, Changes, Guard, attempt
from ferroflow_dask.scheduler.core import Core, Counts
from ferroflow_dask.scheduler.cost_model import Learned, learned_on
from ferroflow_dask.scheduler.decisions import DecisionLog
from ferroflow_dask.scheduler.feature_set import FeatureSet
from ferroflow_dask.scheduler.features.base import Feature
from ferroflow_dask.scheduler.fixed_values import FixedValues
from ferroflow_dask.scheduler.graphs.graphs import Graphs
from ferroflow_dask.scheduler.idle_workers import IdleWorkers, Passes
from ferroflow_dask.scheduler.network import NetworkView
from ferroflow_dask.scheduler.placement import Placement
from ferroflow_dask.scheduler.placing import Placing
from ferroflow_dask.scheduler.refusals import Refusals
from ferroflow_dask.scheduler.remote import WorkerPluginChange
from ferroflow_dask.scheduler.remote_worker import TOPIC
from ferroflow_dask.scheduler.settings import configured_policy
from ferroflow_dask.scheduler.steal_protocol import StealProtocol
from ferroflow_dask.scheduler.task_events import TaskEvents
from ferroflow_dask.scheduler.task_view import TaskViews

if TYPE_CHECKING:
    from distributed import WorkerPlugin
    from distributed.scheduler import Scheduler, TaskState

logger = logging.getLogger("ferroflow_dask")

#: A longer `distributed.scheduler.work-stealing-interval` means that the user wants no stealing [s].
_LONGEST_INTERVAL_S = 600.0
#: Logged for each failure in the recovery; the step is tried again.
_STEP_FAILED = "a step of the recovery failed"

#: Name under which `FerroflowPlugin` is registered; a scheduler has at most one.
PLUGIN_NAME = "ferroflow"

Hook = TypeVar("Hook", bound=Callable[..., Any])


def _guarded(hook: Hook) -> Hook:
    """Make a hook that never raises; see `changes.Guard`, which does the same for functions."""

    @wraps(hook)
    def run(self: FerroflowStealing, *args: Any, **kwargs: Any) -> Any:
        if self.guard.error is not None:
            return None
        try:
            return hook(self, *args, **kwargs)
        except FAILURES as error:
            self.guard.fail(error)
            return None

    return cast(Hook, run)


class FerroflowStealing(WorkStealing):
    """Replacement of distributed's `WorkStealing` that asks a policy.

    A subclass, so that the dashboard, the metrics and the cluster dump find all attributes that they read. It
    may also be the value of `distributed.scheduler.DEFAULT_EXTENSIONS["stealing"]`.

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
    states : mapping of str to object, optional
        States of features in the installation that this one replaces, by name.
    without : collection of str, optional
        Names of features that are off, besides those that the settings switch off.
    features : sequence of type of Feature, optional
        In the order of installation; all if left out.
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
        self.clock = clock
        policy = configured_policy() if policy is None else policy
        self.replaced = replaced
        self.guard = Guard(self._failed)
        #: The scheduler plugin that installed this extension, if one did.
        self.installed_by: object = None
        self.changes = Changes()
        self._is_closed = False
        self._has_warned = False
        learned = learned_on(scheduler) if learned is None else learned
        latency_s = config.get_seconds("latency") if latency_s is None else latency_s
        self.costs = learned.costs
        self.view = ClusterView(latency_s=latency_s)
        self.decisions = DecisionLog(clock)
        core = self.core = Core(
            scheduler,
            self.view,
            clock,
            self.guard,
            learned,
            self.ask_pass,
            policy,
            self.decisions,
            self._is_usual,
            self._counts,
            self.gauges,
            lambda: self.graphs,
            put_on_workers or self._put_on_workers,
        )
        self.refusals = Refusals(core)
        self.graphs = Graphs(
            core,
            own=self,
            refused=self.refusals.add,
            is_fixed=self._is_fixed,
            changes=self.changes,
        )
        self._suspects = core.suspects
        self.fixed = FixedValues(
            scheduler,
            bundle_of=self.graphs.bundles.get,
            split=self.graphs.bundles.split,
            allowed=lambda ts: self.task_views(ts).allowed,
            restrict=self._restrict,
            changes=self.changes,
            guard=self.guard,
        )
        self.task_views = TaskViews(core, self.fixed)
        self._network = NetworkView(scheduler, self.view)
        self._steal_protocol = StealProtocol(core, self, self.task_views)
        self.placement = Placement(
            core,
            task_views=self.task_views,
            network=self._network,
            steals=self._steal_protocol,
            divide=self.graphs.dividing.ask,
        )
        overtake = self.graphs.overtaking.overtake
        self._placing = Placing(core, self.placement, self.fixed, self.refusals, overtake)
        self._idle_workers = IdleWorkers(
            scheduler, self.view, self._steal_for, self._may_steal, self.ask_pass
        )
        self._passes = Passes(scheduler.loop, self._pass, self.guard)
        # What `transition` looks at for each task.
        self._bundled = self.graphs.bundles.keys()
        self._refused = self.refusals.refused
        self._task_events = TaskEvents(
            core,
            placement=self.placement,
            steals=self._steal_protocol,
        )
        self._feature_set = FeatureSet(core, features, states or {}, without)
        #: Those that are on, in the order of installation, and why others are off, by name.
        self.features, self.off = self._feature_set.features, self._feature_set.off
        self._hooks = core.hooks
        self._exchange = steal_exchange.StealingExchange(scheduler, self, replaced)
        super().__init__(scheduler)
        try:
            self._take_over()
        except FAILURES:
            steal_exchange.remove(scheduler, self)
            raise

    def _take_over(self) -> None:
        """Follow the tasks that are processing, and place tasks from now on."""
        if self.error is not None:  # a hook failed when the constructor of `WorkStealing` called it
            raise self.error
        for ws in self.scheduler.workers.values():
            for ts in ws.processing:
                if ts not in ws.long_running:
                    self.view.assign(self.task_views(ts), ws.address, self.clock())
        for change in self._placing.changes():
            self.changes.make(change)
        # Before those of `graphs`, which split bundles instead.
        for change in (self.refusals.change(), *self.fixed.handlers()):
            self.changes.make(change)

    def _restrict(self) -> None:
        self._placing.restrict_assigned()

    def _is_fixed(self, ts: TaskState) -> bool:
        return self.fixed.is_fixed(ts)

    def _put_on_workers(self, plugin: WorkerPlugin, name: str) -> Change:
        return WorkerPluginChange(self.scheduler, plugin, name, self.guard.fail)

    @property
    def policy(self) -> Policy:
        """The policy that is asked, the one of `placement`."""
        return self.placement.policy

    # Life cycle

    async def start(self, scheduler: Any = None) -> None:
        """Serve idle workers, and make the other changes to Dask; called by distributed and by `exchange`."""
        await super().start(scheduler)
        if self._is_closed:
            return
        self.fixed.scheduler_started()
        self.open()

    def open(self) -> None:
        """Install the features."""
        self._feature_set.install(self.changes)
        for change in _distributed.message_changes(self.scheduler, self._hooks, self.guard):
            self.changes.make(change)

    def feature_states(self) -> dict[str, object]:
        """Return the states for the features of the next installation, by name."""
        return self._feature_set.states()

    async def close(self) -> None:
        """Detach when the scheduler closes; it tears down only extensions that are registered."""
        self.detach()

    def teardown(self) -> None:
        """Detach; called by distributed when the scheduler closes, and by `exchange`."""
        super().teardown()
        self.detach()

    def detach(self) -> None:
        """Stop, and undo all changes to Dask but the exchange of the extension."""
        self._is_closed = True
        self._placing.close()
        self._passes.close()
        self.changes.undo_all()

    @property
    def error(self) -> BaseException | None:
        """The failure that ended the plugin; None while there is none."""
        return self.guard.error

    def fail(self, error: BaseException) -> None:
        """End the plugin: from now on Dask schedules."""
        self.guard.fail(error)

    def _failed(self) -> None:
        # First, since Dask now sends these tasks itself. A task with two run ids never ends: each of its ends
        # is stale, and it is placed again. A withdrawal is only a message, safe within a transition.
        for hook in self._hooks.failed:
            attempt(hook, _STEP_FAILED)
        # Changes are undone by the event loop, never inside a transition.
        self.scheduler.loop.add_callback(self._recover)

    def _recover(self) -> None:
        if not self._has_warned:
            message = f"ferroflow: {self.error!r}; Dask's own scheduling takes over"
            logger.warning("%s", message, exc_info=self.error)
            attempt(lambda: _distributed.warn_clients(self.scheduler, message), _STEP_FAILED)
            self._has_warned = True
        self.leave()

    def leave(self) -> None:
        """Undo all changes to Dask: its own stealing is back when this returns, even if steps fail."""
        attempt(self.detach, _STEP_FAILED)
        attempt(self._exchange_back, _STEP_FAILED)

    def _exchange_back(self) -> None:
        self._exchange.undo()
        if not self.changes.names and not self._exchange.is_applied:  # else another call may repair
            plugin = self.scheduler.plugins.get(PLUGIN_NAME)
            if getattr(plugin, "extension", None) in (None, self):  # not that of an installation since
                self.scheduler.plugins.pop(PLUGIN_NAME, None)

    async def settled(self) -> None:
        """Wait until the changes on workers are made or undone."""
        await self.changes.settled()

    # Hooks of SchedulerPlugin: the scheduler's events

    def add_worker(self, scheduler: Any = None, worker: Any = None) -> None:
        """Note a worker that joined."""
        super().add_worker(scheduler, worker)
        self._worker_joined(worker)

    @_guarded
    def _worker_joined(self, address: str) -> None:
        ws = self.scheduler.workers[address]
        self.view.add_worker(address, ws.nthreads, kind_of_worker(ws), ws.host)
        self.decisions.named(address, str(ws.name))
        self.view.set_running(address, ws in self.scheduler.running)  # it may not be ready yet
        self.task_views.workers_changed()
        for hook in self._hooks.add_worker:
            hook(address)
        self.placement.handle(WorkerJoined(address))
        self.ask_pass()

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Note a worker that left."""
        super().remove_worker(scheduler, worker, **kwargs)
        self._worker_left(worker)

    @_guarded
    def _worker_left(self, address: str) -> None:
        if address in self.view.workers:
            self.view.remove_worker(address)
            self._steal_protocol.worker_left(address)
            for remote in self.core.remotes.values():
                remote.left(address)
            for hook in self._hooks.remove_worker:
                hook(address)
            self.graphs.worker_left(address)
            self.task_views.workers_changed()
            self.placement.handle(WorkerLeft(address))

    @_guarded
    def add_client(self, scheduler: Scheduler, client: str) -> None:
        """Note a client that connects."""
        for hook in self._hooks.add_client:
            hook(client)

    @_guarded
    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Note a client that disconnected."""
        for hook in self._hooks.remove_client:
            hook(client)

    @_guarded
    def update_graph(
        self, scheduler: Scheduler, *, tasks: list[Key], annotations: Mapping[str, Any], **kwargs: Any
    ) -> None:
        """Let the policy order a new graph."""
        self.graphs.created()
        self.task_views.annotations_arrived(annotations)
        for hook in self._hooks.update_graph:
            hook()
        states = [self.scheduler.tasks[key] for key in tasks]
        self.placement.graph_arrived(states)
        if self.view.divisible:
            self.graphs.overtaking.make_room(states)
        self.ask_pass()

    def transition(self, key: Key, start: Any, finish: Any, *args: Any, **kwargs: Any) -> None:
        """Follow a task's transition: flat and with early returns, since a task makes five of them."""
        steal = None
        try:
            if start == "processing" and self.in_flight:  # also after a failure: `stop` waits for them
                steal = _distributed.end_steal(self, self.scheduler.tasks[key])
            if self.guard.error is not None:
                return
            if self._bundled or self.graphs.samples.running or self.view.dividing:
                if start == "processing" and finish != "memory" and key in self.view.assigned:
                    self.graphs.dividing.left(key, self.view.assigned[key][1].key)
                self.graphs.changed(key, finish)
            hooks = self._hooks
            if finish == "processing":
                ts = self.scheduler.tasks[key]
                self._task_events.entered_processing(ts)
                if ts.dependents:
                    for task_sent in hooks.task_sent:
                        task_sent(ts)
            else:
                if start == "processing":
                    ts = self.scheduler.tasks[key]
                    self._task_events.left_processing(ts, finish, kwargs, steal)
                if finish == "waiting" and (ts := self.scheduler.tasks[key]).waiting_on:
                    for task_waits in hooks.task_waits:
                        task_waits(ts)
                elif finish == "erred":
                    for task_failed in hooks.task_failed:
                        task_failed(self.scheduler.tasks[key])
            if "processing" in (start, finish) and not self._passes.is_asked_for:
                view = self.view
                if view.n_idle and (view.n_crowded or view.divisible):
                    self._passes.ask()
                else:  # `any` would call a generator for each task
                    for wants_pass in hooks.wants_pass:
                        if wants_pass():
                            self._passes.ask()
                            break
            for watched, by_key, changed in hooks.watches:
                if watched and (not by_key or key in watched):
                    changed(key, start, finish)
            if start == "processing" and finish == "memory" and (metadata := kwargs.get("metadata")):
                for task_reported in hooks.task_reported:
                    task_reported(ts, metadata)
            if key in self._refused:
                self.refusals.changed(key, finish)
            if key in self._suspects:
                self.graphs.deaths.changed(key, finish)
        except FAILURES as error:
            self.guard.fail(error)

    @_guarded
    def log_event(self, topic: str, msg: Any) -> None:
        """Note events for which there is no hook: workers' states, their plugins, and their devices."""
        if topic == DEVICES_TOPIC and isinstance(msg, dict):
            self._device_reported(msg)
            return
        if topic == TOPIC and isinstance(msg, dict):
            self._announced(msg)
            return
        self.graphs.event(topic, msg)
        action = msg.get("action") if isinstance(msg, dict) else None
        if topic not in self.view.workers:
            return
        if action == "remove-worker":
            self.graphs.deaths.removed(topic)
        if action == "worker-status-change" and msg.get("status") != "running":
            self.graphs.dividing.ask_all_on(topic, "its worker has stopped taking tasks")
        if action in ("worker-status-change", "remove-worker"):
            self.view.set_running(topic, msg.get("status") == "running")
            self.task_views.workers_changed()
            self.ask_pass()

    def _announced(self, msg: dict[str, Any]) -> None:
        remote = self.core.remotes.get(str(msg.get("feature")))
        if remote is not None:
            remote.announced(msg.get("worker"), msg.get("number"))

    def _device_reported(self, msg: dict[str, Any]) -> None:
        kind, seconds, address = msg.get("kind"), msg.get("seconds"), msg.get("worker")
        if isinstance(kind, str) and isinstance(seconds, float) and seconds >= 0:
            self.costs.record_on_device(kind, seconds)
        elif isinstance(address, str) and address in self.view.workers:  # a device was attached or detached
            self.view.set_kind(address, kind_of_worker(self.scheduler.workers[address]))
            self.task_views.workers_changed()

    def restart(self, scheduler: Any) -> None:
        """Forget all tasks: the cluster restarts."""
        super().restart(scheduler)
        self._restart()

    @_guarded
    def _restart(self) -> None:
        self._steal_protocol.restarted()
        for key in list(self.view.assigned):
            self.view.release(key)
        self._task_events.averaged.clear()
        self.refusals.refused.clear()
        self._suspects.clear()
        for hook in self._hooks.restart:
            hook()
        self.graphs.restarted()

    # Methods that the scheduler and distributed's stealing call by name

    @_guarded
    def remove_key_from_stealable(self, ts: TaskState) -> None:
        """Note that a task becomes long-running, or that another worker is about to steal it."""
        self.view.release(ts.key)
        dividing = self.graphs.dividing
        if ts.key in self.graphs.bundles or ts.key in dividing.stuck.freed:
            self.scheduler.loop.add_callback(self.guard(dividing.may_have_seceded), ts.key)
        self.ask_pass()

    def put_key_in_stealable(self, ts: TaskState) -> None:
        """Do nothing: the queues of the view replace the stock tables."""

    def balance(self) -> None:
        """Serve idle workers now, even after `stop`; called periodically."""
        if self.error is not None:
            self._recover()  # the call by the event loop has failed, or is still to come
        else:
            self._balance()

    @_guarded
    def _balance(self) -> None:
        if self._wants_steals:
            self.task_views.see_resources()
            self._idle_workers.serve()
        self.graphs.dividing.stuck.look(self.clock())

    def move_task_confirm(self, *, key: str, state: str, stimulus_id: str, worker: str | None = None) -> None:
        """Take a worker's answer to a steal request; an exception here would close the worker's stream."""
        if self.error is None:
            self._answered(key, state, stimulus_id, worker)
        if self.error is not None and state in _distributed.GIVEN_UP and worker is not None:
            # The plugin has failed, and no worker has the task.
            attempt(lambda: self._place_again(key, worker, stimulus_id), _STEP_FAILED)

    def _place_again(self, key: Key, worker: str, stimulus_id: str) -> None:
        ts = self.scheduler.tasks.get(key)
        if ts is not None:
            _distributed.end_steal(self, ts)
        _distributed.reschedule_from(self.scheduler, key, worker, stimulus_id)

    @_guarded
    def _answered(self, key: Key, state: str, stimulus_id: str, worker: str | None) -> None:
        has_ended, event = self._steal_protocol.answered(key, state, stimulus_id, worker)
        if event is not None:
            self.placement.handle(event)
        if has_ended:
            self.ask_pass()

    # Idle workers

    def ask_pass(self) -> None:
        """Ask for a pass over idle workers after the present turn of the event loop."""
        self._passes.ask()

    def _pass(self) -> int:
        """Make a pass; return how many workers are still idle while others have waiting tasks."""
        for hook in self._hooks.in_pass:
            hook()
        if not self._idle_workers.n_hopeful():
            return 0
        self._idle_workers.serve()
        return self._idle_workers.n_hopeful()

    def _steal_for(self, address: str) -> bool:
        self._network.update_workers([address], self.clock())
        asked_before = self.steals["asked"] + self.graphs.dividing.n_asked
        self.placement.handle(WorkerIdle(address))
        return self.steals["asked"] + self.graphs.dividing.n_asked > asked_before

    @property
    def _wants_steals(self) -> bool:
        # If `distributed.scheduler.work-stealing` is false, tasks are placed, and stay.
        is_on = self.replaced is not None and not self._is_closed
        return is_on and _distributed.interval_s(self) <= _LONGEST_INTERVAL_S

    def _may_steal(self) -> bool:
        return self._wants_steals and "stealing" in self.scheduler.periodic_callbacks

    def _is_usual(self, address: str) -> bool:
        worker = self.view.workers.get(address)
        return worker is not None and worker.speed >= 1 and not self.task_views.has_gpus

    # What metrics, the dashboard and tests read

    @property
    def flows(self) -> Counter[tuple[str, str]]:
        """Confirmed steals by victim and thief."""
        return self._steal_protocol.flows

    @property
    def steals(self) -> dict[str, int]:
        """Steal requests, and how they ended."""
        return self._steal_protocol.counts

    def _counts(self) -> dict[str, Counts]:
        """Return the counts of the plugin and its features, by name."""
        steals = {"steals": Counts("Steal requests, and how they ended", "outcome", self.steals)}
        return steals | self._feature_set.counts()

    def gauges(self) -> dict[str, tuple[str, float]]:
        """Return what was learned, by name: a help text and the value. Shown among Dask's metrics."""
        workers = self.view.workers.values()
        learned = {
            "slow_workers": ("Workers slower than usual", sum(worker.speed < 1 for worker in workers)),
        }
        return learned | self._feature_set.gauges() | self.policy.gauges()

    def kept(self) -> dict[str, list[Key]]:
        """Return the tasks that are kept account of, by purpose; none once all have ended."""
        return {
            "are in the view": list(self.view.assigned),
            "have average durations": [
                key for one in self._task_events.averaged.values() for key in one.keys
            ],
            "are bundles": list(self.graphs.bundles.keys()),
            "have refused a worker": list(self.refusals.refused),
            "may have ended a worker": list(self._suspects),
            "are asked for tasks": list(self.view.dividing),
            "are kept by features": self._feature_set.pending(),
        }


def extension_on(scheduler: Scheduler) -> FerroflowStealing | None:
    """Return the extension of a scheduler if it is ours; it may have failed."""
    extension = scheduler.extensions.get(steal_exchange.STEALING)
    return extension if isinstance(extension, FerroflowStealing) else None
