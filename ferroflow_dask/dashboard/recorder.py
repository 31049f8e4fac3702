"""What pages, terminals and reports show: noted by the scheduler while somebody looks, and no longer."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from dask.typing import Key
from dask.utils import key_split
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.metrics import time

from ferroflow_dask.annotations import CPU, GPU
from ferroflow_dask.dashboard.idle import Idle, idle_reasons
from ferroflow_dask.dashboard.progress import GraphProgress
from ferroflow_dask.dashboard.recording import Failure, OpRun, Recording, RunStart, Sample, WorkerLoad
from ferroflow_dask.dashboard.stock import StockEstimate
from ferroflow_dask.device_reports import has_gpu
from ferroflow_dask.policy import policy_name
from ferroflow_dask.scheduler.decisions import Decision
from ferroflow_dask.scheduler.extension import FerroflowStealing, extension_on
from ferroflow_dask.scheduler.installation import decisions_about
from ferroflow_dask.scheduler.task_view import declared_cost

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

#: Ops and samples that are kept, whatever is computed: together less than 20 MB.
MOST_OPS = 20_000
_MOST_SAMPLES = 1200
#: Of those, what a terminal shows.
SUMMARY_SAMPLES = 40
#: Time between two samples [s], and the longest one: if there was none for longer, nobody looked.
SAMPLE_S = 0.25
_GAP_S = 10.0
#: Decisions in which those of a kind or of a worker are searched.
_MOST_DECISIONS = 5000
#: After so many ops somebody looks whether any who asked for them is still there.
_CHECKED_EVERY = 1000
_STOLEN = "steal confirmed"


class Recorder(SchedulerPlugin):
    """Notes what runs where; its memory is bounded.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    """

    name = "ferroflow-recorder"

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.ops: deque[OpRun] = deque(maxlen=MOST_OPS)
        self.n_ops = 0
        self.samples: deque[Sample] = deque(maxlen=_MOST_SAMPLES)
        self.n_samples = 0
        self.progress = GraphProgress(self._declared_s, _mean_s)
        self.stock = StockEstimate(scheduler)
        self._stolen: set[Key] = set()
        self._began: RunStart | None = None
        stealing = self.stealing
        self._n_noted = 0 if stealing is None else stealing.decisions.n_noted
        self._n_confirmed = 0 if stealing is None else stealing.steals["confirmed"]
        self._seen = (0.0, 0, 0)
        unfinished = [
            ts for ts in scheduler.tasks.values() if ts.state not in ("memory", "erred", "released")
        ]
        self.progress.add(unfinished, self.n_threads, time())
        self.sample()

    # What the scheduler tells

    async def close(self) -> None:
        """Forget the scheduler, which ends."""
        _recorders.pop(self._scheduler, None)

    def update_graph(self, scheduler: Scheduler, *, tasks: list[Key], **kwargs: Any) -> None:
        """Follow a graph that was submitted."""
        goes_on = False
        if (stealing := self.stealing) is not None:
            # A sample of the graph ran before it, and may have ended.
            goes_on = self.progress.has_any(stealing.graphs.sampled())
            self.stock.update_graph(keys=kwargs["keys"], tasks=tasks, goes_on=goes_on)
        states = (scheduler.tasks[key] for key in tasks if key in scheduler.tasks)
        self.progress.add(states, self.n_threads, time(), goes_on=goes_on)

    def transition(self, key: Key, start: Any, finish: Any, *args: Any, **kwargs: Any) -> None:
        """Note a task that has run, was stolen, or was released."""
        if self.stealing is not None:
            self.stock.transition(key, start, finish, kwargs)
        if finish in ("memory", "erred"):
            seconds = self._note_run(key, kwargs) if start == "processing" else None
            self.progress.done(key, time(), seconds if finish == "memory" else None)
        elif finish == "forgotten":
            self.progress.forget(key, time())
            if self._stolen:
                self._stolen.discard(key)

    def _note_run(self, key: Key, told: dict[str, Any]) -> float | None:
        """Note a task that has run; return how long it took [s], if that is known."""
        worker, thread = told.get("worker", ""), told.get("thread") or 0
        self._note_steals()
        is_stolen = key in self._stolen
        self._stolen.discard(key)
        seconds = None
        for span in told.get("startstops") or ():
            if span["action"] == "compute":
                seconds = (seconds or 0.0) + span["stop"] - span["start"]
                self.ops.append(
                    OpRun(key_split(key), str(key), worker, thread, span["start"], span["stop"], is_stolen)
                )
                self.n_ops += 1
                if not self.n_ops % _CHECKED_EVERY:
                    stop_recording(self._scheduler)
        return seconds

    def _note_steals(self) -> None:
        stealing = self.stealing
        # Of each task that ran: the decisions are read only when there was another steal.
        if stealing is not None and stealing.steals["confirmed"] != self._n_confirmed:
            self._n_confirmed = stealing.steals["confirmed"]
            n_new = stealing.decisions.n_noted - self._n_noted
            self._n_noted = stealing.decisions.n_noted
            if n_new > 0:  # else it is another extension's
                self._stolen.update(stealing.decisions.keys(n_new, _STOLEN))

    @staticmethod
    def _declared_s(ts: TaskState) -> float | None:
        declared = [seconds for kind in (CPU, GPU) if (seconds := declared_cost(ts, kind)) is not None]
        return min(declared, default=None)

    # What there is to see

    @property
    def stealing(self) -> FerroflowStealing | None:
        """Ours, if it is in place."""
        return extension_on(self._scheduler)

    @property
    def time(self) -> float:
        """The scheduler's time [s]."""
        return time()

    @property
    def n_threads(self) -> int:
        """Threads of all workers."""
        return self._scheduler.total_nthreads

    def new_ops(self, n_seen: int) -> list[OpRun]:
        """Return the ops that came after the first `n_seen`, as far as they are kept."""
        n_new = min(self.n_ops - n_seen, len(self.ops))
        return [self.ops[i] for i in range(len(self.ops) - n_new, len(self.ops))]

    def new_samples(self, n_seen: int) -> list[Sample]:
        """Return the samples that came after the first `n_seen`, as far as they are kept."""
        n_new = min(self.n_samples - n_seen, len(self.samples))
        return [self.samples[i] for i in range(len(self.samples) - n_new, len(self.samples))]

    def workers(self, *, why_idle: bool = False) -> list[WorkerLoad]:
        """Return the workers as they are, maybe with the reasons why they have free threads."""
        return list(self._workers(idle_reasons(self._scheduler) if why_idle else {}))

    def _workers(self, idle: Mapping[str, Idle]) -> Iterator[WorkerLoad]:
        stealing = self.stealing
        for address, ws in self._scheduler.workers.items():
            n_tasks = len(ws.processing)
            remaining_s = ws.occupancy / max(1, ws.nthreads)
            if stealing is not None and address in stealing.view.workers:
                remaining_s = stealing.view.workers[address].backlog_s / max(1, ws.nthreads)
            n_running = min(n_tasks, ws.nthreads)
            yield WorkerLoad(
                address,
                str(ws.name),
                "gpu" if has_gpu(ws) else "cpu",
                ws.nthreads,
                n_running,
                n_tasks - n_running,
                remaining_s,
                ws.status.name == "running",
                ws.metrics.get("cpu", 0.0) / 100 / max(1, ws.nthreads),
                ws.metrics.get("memory", 0),
                ws.memory_limit or 0,
                idle.get(address),
            )

    def flows(self) -> Counter[tuple[str, str]]:
        """Return the tasks that one worker has given up to another, by their addresses."""
        stealing = self.stealing
        return Counter() if stealing is None else stealing.flows

    @property
    def steals(self) -> dict[str, int]:
        """Steals by outcome."""
        stealing = self.stealing
        return {} if stealing is None else stealing.steals

    @property
    def failures(self) -> list[Failure]:
        """Tasks that raised exceptions, latest first, those before this recorder included."""
        return [
            Failure(
                task.timestamp,
                str(task.key),
                tuple(sorted(self.name_of(address) for address in task.erred_on)),
                task.exception_text,
                task.traceback_text,
            )
            for task in self._scheduler.erred_tasks
        ]

    def name_of(self, address: str) -> str:
        """Return the name of a worker, maybe of one that has left."""
        ws = self._scheduler.workers.get(address)
        if ws is not None:
            return str(ws.name)
        return address if self.stealing is None else self.stealing.decisions.name_of(address)

    # Decisions

    @property
    def n_decisions(self) -> int:
        """Decisions ever noted."""
        return 0 if self.stealing is None else self.stealing.decisions.n_noted

    def decisions(self, n: int) -> list[Decision]:
        """Return the last decisions, oldest first."""
        return [] if self.stealing is None else self.stealing.decisions.last(n)

    def decisions_of(self, what: str) -> Iterator[Decision]:
        """Yield decisions of one kind among the last, newest first."""
        return (one for one in reversed(self.decisions(_MOST_DECISIONS)) if one.what == what)

    def about(self, key: str) -> list[Decision]:
        """Return the decisions about a task or its bundle, oldest first; O(decisions)."""
        return decisions_about(self._scheduler, key)

    def about_worker(self, address: str, n: int) -> list[Decision]:
        """Return the last decisions that name a worker, newest first."""
        name = self.name_of(address)
        return [one for one in reversed(self.decisions(_MOST_DECISIONS)) if one.worker == name][:n]

    @property
    def bundle_counts(self) -> dict[str, int]:
        """Bundles, the tasks in them, and bundles that were split."""
        return {} if self.stealing is None else self.stealing.graphs.bundles.counts

    def state_of(self, key: str) -> str:
        """Return the state of a task and the workers that have it; O(tasks)."""
        ts = next((ts for known, ts in self._scheduler.tasks.items() if str(known) == key), None)
        if ts is None:
            return "The scheduler has forgotten it, or it runs within a bundle."
        holders = [ts.processing_on] if ts.processing_on is not None else list(ts.who_has or ())
        where = ", ".join(str(ws.name) for ws in holders if ws is not None)
        return f"{ts.state}{f' on worker {where}' if where else ''}"

    def tasks_on(self, address: str, n: int) -> list[str]:
        """Return the keys of the first tasks that a worker has."""
        ws = self._scheduler.workers.get(address)
        return [] if ws is None else [str(ts.key) for ts in islice(ws.processing, n)]

    def recording(self, is_summary: bool = False) -> Recording:
        """Return what was noted; as a summary the last samples and what is now, no ops, flows or levels."""
        stealing = self.stealing
        in_flight = () if stealing is None else stealing.in_flight.values()
        n_samples = SUMMARY_SAMPLES if is_summary else _MOST_SAMPLES
        return Recording(
            [] if is_summary else list(self.ops),
            self.n_ops,
            self.new_samples(max(0, self.n_samples - n_samples)),
            self.workers(why_idle=True),
            Counter() if is_summary else Counter(self.flows()),
            self.progress.summary(has_levels=not is_summary),
            self.n_threads,
            dict(self.steals),
            frozenset(steal["thief"].address for steal in in_flight),
            None if stealing is None else policy_name(stealing.placement.policy),
            self.time,
            [] if is_summary else self.failures,
            self._began,
            self.stock_s,
        )

    @property
    def stock_s(self) -> float | None:
        """Simulated makespan of the last graphs as single tasks [s]; None if it is not known."""
        return self.stock.seconds

    def begin_run(self) -> None:
        """Note that a measured run begins now."""
        self._began = RunStart(time(), dict(self.steals), Counter(self.flows()))

    def sample(self) -> None:
        """Take a sample, unless the last one is still fresh."""
        now_s = time()
        last_s, n_done, n_confirmed = self._seen
        elapsed_s = now_s - last_s
        if elapsed_s < SAMPLE_S:
            return
        if self.progress.is_all_done and self.stealing is not None:
            self.stock.ended()
        is_first = elapsed_s > _GAP_S
        if is_first and self.samples:  # a point without a value, for a gap in the line
            self._add_sample(Sample(now_s, *[float("nan")] * 5))
        stealing = self.stealing
        steals = self.steals or {"asked": 0, "confirmed": 0}
        gauges = {} if stealing is None else stealing.parts.gauges()
        busy = sum(min(len(ws.processing), ws.nthreads) for ws in self._scheduler.workers.values())
        self._seen = (now_s, self.n_ops, steals["confirmed"])
        self._add_sample(
            Sample(
                now_s,
                # Of the time before nothing is known.
                0.0 if is_first else (self.n_ops - n_done) / elapsed_s,
                busy / max(1, self.n_threads),
                0.0 if is_first else max(0, steals["confirmed"] - n_confirmed) / elapsed_s,
                steals["confirmed"] / steals["asked"] if steals["asked"] else float("nan"),
                gauges["steal_threshold"][1] if "steal_threshold" in gauges else float("nan"),
            )
        )

    def _add_sample(self, sample: Sample) -> None:
        self.samples.append(sample)
        self.n_samples += 1


def _mean_s(ts: TaskState) -> float | None:
    """Return the mean over all tasks of the prefix of a task: Dask's average is mostly the last of them."""
    n, total_s = ts.prefix.state_counts["memory"], ts.prefix.all_durations["compute"]
    if n and total_s > 0:
        return total_s / n
    return ts.prefix.duration_average if ts.prefix.duration_average > 0 else None


class _Users:
    """Who wants a recorder, and until when."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def add(self, who: str, lease_s: float) -> None:
        self._until_s[who] = time() + lease_s

    def has(self, who: str) -> bool:
        return who in self._until_s

    def remove(self, who: str) -> None:
        self._until_s.pop(who, None)

    def any(self) -> bool:
        now_s = time()
        return any(until_s > now_s for until_s in self._until_s.values())


_recorders: WeakKeyDictionary[Scheduler, tuple[Recorder, _Users]] = WeakKeyDictionary()


def start_recording(scheduler: Scheduler, who: str, lease_s: float = math.inf) -> Recorder:
    """Return the recorder of a scheduler, which records until the last who asked for it stops.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    who : str
    lease_s : float, optional
        Those who may be gone without a word ask again within this time [s].
    """
    if scheduler not in _recorders:
        recorder = Recorder(scheduler)
        scheduler.add_plugin(recorder, name=Recorder.name)
        _recorders[scheduler] = (recorder, _Users())
    recorder, users = _recorders[scheduler]
    users.add(who, lease_s)
    return recorder


def recorder_of(scheduler: Scheduler) -> Recorder | None:
    """Return the recorder of a scheduler; None while nothing is recorded."""
    return _recorders[scheduler][0] if scheduler in _recorders else None


def renew_recording(scheduler: Scheduler, who: str, lease_s: float) -> None:
    """Record longer for somebody, unless they have stopped: their last message may come after that."""
    if scheduler in _recorders and _recorders[scheduler][1].has(who):
        start_recording(scheduler, who, lease_s)


def stop_recording(scheduler: Scheduler, who: str = "") -> None:
    """Record no longer for somebody; without a name, for those whose time is over."""
    if scheduler not in _recorders:
        return
    recorder, users = _recorders[scheduler]
    users.remove(who)
    if not users.any():
        recorder.stock.close()
        del _recorders[scheduler]
        if Recorder.name in scheduler.plugins:
            scheduler.remove_plugin(name=Recorder.name)
