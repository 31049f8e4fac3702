"""The shell around a policy: stands where Dask's stealing extension stood.

Scheduler transitions are translated into changes of the view and into events; the policy's
instructions into assignments, steal requests and priorities. Nothing is decided here.

Three rules keep the scheduler safe. Steals are never asked for inside a transition, which is
re-entrant: an event only asks for a pass, which the event loop runs once the transitions are done.
The handler of workers' answers never raises, since that would cost the worker its connection. And
whatever goes wrong, `fail` is called once and Dask is left as it was without us.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.metrics import time
from distributed.stealing import WorkStealing

from ferroflow_dask import config
from ferroflow_dask.plugin import metrics, pages, seams
from ferroflow_dask.plugin.bypass import Bypass
from ferroflow_dask.plugin.describe import TaskDescriber
from ferroflow_dask.plugin.device_reports import DeviceTotals
from ferroflow_dask.plugin.devices import DEVICES_TOPIC, kind_of_worker
from ferroflow_dask.plugin.idle import IdleWorkers
from ferroflow_dask.plugin.journal import Journal
from ferroflow_dask.plugin.knowledge import Knowledge, knowledge_of
from ferroflow_dask.plugin.messages import Messages
from ferroflow_dask.plugin.passes import Passes
from ferroflow_dask.plugin.placing import Placing
from ferroflow_dask.plugin.polled import Polled
from ferroflow_dask.plugin.prices import Prices
from ferroflow_dask.plugin.replicas import keep_placed, restore_replicas
from ferroflow_dask.plugin.settings import configured_policy
from ferroflow_dask.plugin.slots import Slots
from ferroflow_dask.plugin.swap import restore
from ferroflow_dask.policy import ClusterView, Policy, StealingPolicy
from ferroflow_dask.policy.events import (
    GraphArrived,
    WorkerIdle,
    WorkerJoined,
    WorkerLeft,
)

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

logger = logging.getLogger("ferroflow_dask")

#: One-way messages from the end of a task to the start of the next, at least.
_MESSAGES = 3
#: Who sets Dask's stealing interval to more than ten minutes wants no stealing [ms].
_LONGEST_INTERVAL_MS = 600_000


class FerroflowStealing(Placing):
    """Replacement of distributed's `WorkStealing` that asks a policy.

    A subclass, so that the dashboard, the metrics and the cluster dump find all that they read. It may
    also stand in `distributed.scheduler.DEFAULT_EXTENSIONS["stealing"]`.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    policy : Policy, optional
        `ferroflow.policy` from the configuration if left out.
    latency_s : float, optional
        `ferroflow.latency` from the configuration if left out [s].
    replaced : type of WorkStealing or None, optional
        What is put back when this shell fails or leaves; None if there was no stealing before.
    clock : callable, optional
        Returns the time [s]; the workers' wall clock if left out.
    knowledge : Knowledge, optional
        What was learned before; what earlier shells on this scheduler have learned if left out.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        policy: Policy | None = None,
        latency_s: float | None = None,
        replaced: type[WorkStealing] | None = WorkStealing,
        *,
        clock: Callable[[], float] = time,
        knowledge: Knowledge | None = None,
    ) -> None:
        self.clock = clock
        self.policy = policy if policy is not None else configured_policy()
        known = knowledge_of(scheduler) if knowledge is None else knowledge
        latency_s = config.get_seconds("latency") if latency_s is None else latency_s
        self.view = ClusterView(latency_s=latency_s, transfers=known.transfers)
        self.steals = {"asked": 0, "confirmed": 0, "refused": 0, "aborted": 0}
        self.flows = Counter()
        self.journal = Journal()
        self.error: BaseException | None = None
        self.replaced = replaced
        #: The plugin that put us here, if one did.
        self.installed_by: object = None
        self._is_closed = False
        self._restore_placement: Callable[[], None] | None = None
        self._planned: dict[Key, str] = {}
        ask_again = lambda: self._passes.ask()  # noqa: E731, PLW0108 -- there are no passes yet
        self._idle = IdleWorkers(scheduler, self.view, self._steal_for, self._may_steal, ask_again)
        self._passes = Passes(scheduler.loop, lambda: self._guarded(self._pass), self._idle.n_hopeful, clock)
        self.durations = known.durations
        self.messages = Messages(
            scheduler, self.durations, self._is_usual, ask_again, self._was_withdrawn, guarded=self._guarded
        )
        self._describe = TaskDescriber(scheduler, self.durations, self.messages.inlining.comes_with)
        self._bypass = Bypass(
            scheduler, self._describe.known_cost, self.durations.nbytes, self.policy.places_queued
        )
        self._prices = Prices(self.durations, self.view.reprice)
        self._polled = Polled(scheduler, self.view)
        self._slots = Slots(scheduler, known.durations, known.round_trip, _MESSAGES * latency_s)
        self.device_totals = DeviceTotals()
        super().__init__(scheduler)
        for ws in scheduler.workers.values():
            for ts in ws.processing:
                if ts not in ws.long_running:
                    task = self._describe(ts)
                    self.view.assign(task, ws.address, self.clock())
                    self._sent(ts, task)
        if self.error is None:
            self._restore_placement = seams.override_placement(
                scheduler, self._decide_worker, self._passes_queue
            )

    # Life cycle

    async def start(self, scheduler: Any = None) -> None:
        """Serve idle workers from now on; called by distributed and by `swap`."""
        await super().start(scheduler)
        if not self._is_closed:
            self.messages.open(self.keeps_successors)
            keep_placed(self.scheduler)
            metrics.show(self)
            pages.show(self.scheduler)

    @property
    def keeps_successors(self) -> bool:
        """Whether the policy leaves tasks where their inputs are."""
        return bool(getattr(self.policy, "keeps_successors", False))

    def teardown(self) -> None:
        """Do nothing from now on; called when the scheduler closes, and when another takes our place."""
        if not self._is_closed:
            self._is_closed = True
            self._passes.close()
            super().teardown()
            if self._restore_placement is not None:
                self._restore_placement()
            self._slots.restore()
            self.messages.close()
            restore_replicas(self.scheduler)
            metrics.hide(self)
            pages.hide(self.scheduler)

    def fail(self, error: BaseException) -> None:
        """Give up: from now on Dask decides, as without us."""
        if self.error is not None:
            return
        self.error = error
        self.teardown()
        logger.warning("ferroflow: %r; Dask's own scheduling takes over", error, exc_info=error)
        seams.warn_clients(self.scheduler, f"ferroflow: {error!r}; Dask's own scheduling takes over")
        self.scheduler.loop.add_callback(restore, self.scheduler, self, self.replaced)

    def _guarded(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call, unless we failed before; any exception is a failure of ours, never of the scheduler."""
        if self.error is not None:
            return None
        try:
            return call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 -- whatever it is, Dask must go on
            self.fail(error)
            return None

    def gauges(self) -> dict[str, tuple[str, float]]:
        """Return what was learned, by name, each with what it means; shown among Dask's metrics."""
        workers = self.view.workers.values()
        learned = {
            "round_trip_seconds": ("From the end of a task to the next one sent", self._slots.round_trip_s),
            "slots_per_thread": ("Queued tasks sent to each thread", self.scheduler.WORKER_SATURATION),
            "slow_workers": ("Workers slower than usual", sum(worker.speed < 1 for worker in workers)),
            "steal_seconds": ("From a steal's request to the task's start", self.view.steal_s(self.clock())),
            "transfer_slowness": ("Transfer times relative to the bandwidth's", self.view.transfer_slowness),
        }
        return learned | self.policy.gauges() if isinstance(self.policy, StealingPolicy) else learned

    def kept(self) -> dict[str, list[Key]]:
        """Return the tasks that are kept account of, by what for; none is once all have ended."""
        return {
            "are in the view": list(self.view.assigned),
            "are planned": list(self._planned),
            "may be priced anew": self._prices.keys(),
            "bear on what passes by the queue": self._bypass.keys(),
            "were sent ahead": self.messages.successors.keys(),
        }

    # Hooks of SchedulerPlugin: the scheduler's events become changes of the view

    def add_worker(self, scheduler: Any = None, worker: Any = None) -> None:
        """Note a worker that joined."""
        super().add_worker(scheduler, worker)
        self._guarded(self._worker_joined, worker)

    def _worker_joined(self, address: str) -> None:
        ws = self.scheduler.workers[address]
        self.view.add_worker(address, ws.nthreads, kind_of_worker(ws), ws.host)
        self.view.set_running(address, ws in self.scheduler.running)  # it may not be ready yet
        self._describe.workers_changed()
        self.messages.worker_joined(address)
        self._tell(WorkerJoined(address))
        self._passes.ask()

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Note a worker that left."""
        super().remove_worker(scheduler, worker, **kwargs)
        self._guarded(self._worker_left, worker)

    def _worker_left(self, address: str) -> None:
        if address in self.view.workers:
            self.view.remove_worker(address)
            for pair in [pair for pair in self.flows if address in pair]:
                del self.flows[pair]
            self._slots.left(address)
            self.messages.worker_left(address)
            self._describe.workers_changed()
            if not self.in_flight:
                self.in_flight_tasks.clear()
            self._tell(WorkerLeft(address))

    def add_client(self, scheduler: Scheduler, client: str) -> None:
        """Note a client that connects."""
        self._guarded(self.messages.streams.client_joins, client)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Note a client that is gone."""
        self._guarded(self.messages.streams.client_left, client)

    def update_graph(self, scheduler: Scheduler, *, tasks: list[Key], **kwargs: Any) -> None:
        """Let the policy order a new graph and place what can start at once."""
        self._guarded(self._graph_arrived, tasks)

    def _graph_arrived(self, keys: list[Key]) -> None:
        if not self.scheduler.queued:
            self._slots.adapt(self.clock())
        states = [self.scheduler.tasks[key] for key in keys]
        ordered = [ts for ts in states if ts.state == "released" and self._describe.has_rank(ts)]
        if not ordered:
            return
        views = [self._describe(ts) for ts in ordered]
        for ts, view in zip(ordered, views, strict=True):
            view.dependencies = tuple(dependency.key for dependency in ts.dependencies)
        ready = self._bypass.at_arrival(ts for ts in states if ts.state == "released")
        self._polled.see_workers(self.view.workers, self.clock())
        self._tell(GraphArrived(tuple(sorted(views, key=lambda task: task.priority)), ready), views)
        if self._planned:
            self._passes.ask()

    def log_event(self, topic: str, msg: Any) -> None:
        """Note that a worker starts, pauses, resumes or is about to go; there is no other hook for it.

        Workers also tell so that they have devices, and how long tasks took there.
        """
        if topic == DEVICES_TOPIC and isinstance(msg, dict):
            self._guarded(self._device_told, msg)
            return
        self._guarded(self.messages.told, topic, msg)
        action = msg.get("action") if isinstance(msg, dict) else None
        if topic not in self.view.workers:
            return
        if action == "remove-worker" and msg.get("expected") is False:
            self._guarded(self._take_blame_back, topic, msg.get("processing-tasks", ()))
        if action in ("worker-status-change", "remove-worker"):
            self._guarded(self._status_changed, topic, msg.get("status") == "running")

    def _device_told(self, msg: dict[str, Any]) -> None:
        kind, seconds, address = msg.get("kind"), msg.get("seconds"), msg.get("worker")
        if isinstance(kind, str) and isinstance(seconds, float) and seconds >= 0:
            self.durations.record_on_device(kind, seconds)
        elif isinstance(address, str) and address in self.view.workers:  # it has got its device, or lost it
            self.view.set_kind(address, kind_of_worker(self.scheduler.workers[address]))
            self._describe.workers_changed()

    def _status_changed(self, address: str, is_running: bool) -> None:
        self.view.set_running(address, is_running)
        self._describe.workers_changed()
        self._passes.ask()

    def restart(self, scheduler: Any) -> None:
        """Forget all tasks: the cluster restarts."""
        super().restart(scheduler)
        for ts in list(self.in_flight):
            self._remove_from_in_flight(ts)
        for key in list(self.view.assigned):
            self.view.release(key)
        self._planned.clear()
        self._bypass.clear()
        self._prices.clear()
        self.messages.clear()

    # What the scheduler and distributed's own stealing call by name

    def remove_key_from_stealable(self, ts: TaskState) -> None:
        """Note that a task left its worker's slots (it became long-running)."""
        self._guarded(self.view.release, ts.key)
        self._guarded(self._bypass.left, ts.key)
        self._passes.ask()

    def put_key_in_stealable(self, ts: TaskState) -> None:
        """Do nothing: the view's queues take the place of the stock tables."""

    def balance(self) -> None:
        """Serve idle workers now, even after `stop`; called periodically for what no event told."""
        if self.replaced is not None and not self._is_closed:
            self._guarded(self._describe.see_resources)
            self._guarded(self._idle.serve, self.clock())

    # Tasks that are sent ahead

    def _is_usual(self, address: str) -> bool:
        worker = self.view.workers.get(address)
        return worker is not None and worker.speed >= 1 and not self._describe.has_gpus

    def _was_withdrawn(self, key: Key, address: str) -> None:
        self.journal.note(
            self.clock(), key, "withdrawn", address, "it was sent ahead, and something came between"
        )

    # Steals

    def _pass(self) -> int | None:
        """Serve idle workers if there is hope; return how many of them found nothing to steal."""
        for key in list(self._planned):  # planned, and then not wanted after all
            del self._planned[key]
            self.view.release(key)
        now = self.clock()
        self._slots.adapt(now)
        self.messages.successors.send()
        return self._idle.serve_hopeful(now)

    def _steal_for(self, address: str) -> bool:
        self._polled.see_workers([address], self.clock())
        asked_before = self.steals["asked"]
        self._tell(WorkerIdle(address))
        return self.steals["asked"] > asked_before

    def _may_steal(self) -> bool:
        # Where `distributed.scheduler.work-stealing` is false, tasks are placed, and stay.
        callback = self.scheduler.periodic_callbacks.get("stealing") if self.replaced is not None else None
        return callback is not None and callback.callback_time <= _LONGEST_INTERVAL_MS and not self._is_closed
