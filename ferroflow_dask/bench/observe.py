"""Plugins and functions that observe runs, the same under every policy."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import Client
from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin

from ferroflow_dask.exceptions import ClusterError
from ferroflow_dask.scheduler.extension import FerroflowStealing

if TYPE_CHECKING:
    from distributed import Worker
    from distributed.batched import BatchedSend
    from distributed.scheduler import Scheduler

#: How often the scheduler is asked whether a run has left it [s].
_POLL_S = 0.01
#: Names of the outcomes of a steal, by those of its events.
STEALS = {"confirm": "confirmed", "already-computing": "refused"}
#: States that a task is in while its function runs; one that was cancelled and is wanted again runs on.
RUNNING_ALREADY = frozenset({"cancelled", "resumed", "long-running"})


def steals_since(scheduler: Scheduler, started: float) -> dict[str, int]:
    """Count steals since a `time.time` [s], from the events that Dask's stealing and ours both log."""
    counts = {"asked": 0, "confirmed": 0, "refused": 0}
    for at, message in scheduler.get_events("stealing"):
        if at <= started:
            continue
        if message[0] == "request":
            counts["asked"] += len(message[1])
        elif message[0] in STEALS:
            counts[STEALS[message[0]]] += 1
    return counts


class RunCounter(SchedulerPlugin):
    """Counts the time that each worker spends in tasks; notes steals and the steal threshold."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def start(self, scheduler: Scheduler) -> None:
        """Start at zero."""
        self.scheduler, self.started = scheduler, time.time()
        self.busy_s: dict[str, float] = {}
        self.threshold_changes = self._gauge("steal_threshold_changes") or 0

    def transition(self, key: Any, start: Any, finish: Any, *args: Any, **kwargs: Any) -> None:
        """Note how long a worker took for a task."""
        worker = kwargs.get("worker")
        if start == "processing" and worker is not None:
            spans = (span for span in kwargs.get("startstops") or () if span["action"] == "compute")
            spent_s = sum(span["stop"] - span["start"] for span in spans)
            self.busy_s[worker] = self.busy_s.get(worker, 0.0) + spent_s

    def seen(self) -> RunCounts:
        """Return what was counted until now."""
        threshold, changes = self._gauge("steal_threshold"), self._gauge("steal_threshold_changes")
        workers = self.scheduler.workers.values()
        return RunCounts(
            steals_since(self.scheduler, self.started),
            {str(ws.name): self.busy_s.get(ws.address, 0.0) for ws in workers},
            {str(ws.name): ws.nthreads for ws in workers},
            None if threshold is None else int(threshold),
            None if changes is None else int(changes - self.threshold_changes),
        )

    def _gauge(self, name: str) -> float | None:
        """Return a gauge of the policy that is installed; None if it has none of this name."""
        stealing = self.scheduler.extensions.get("stealing")
        gauges = stealing.parts.gauges() if isinstance(stealing, FerroflowStealing) else {}
        return float(gauges[name][1]) if name in gauges else None


@dataclass(frozen=True, slots=True)
class RunCounts:
    """What `RunCounter` counted.

    Parameters
    ----------
    steals : mapping of str to int
        Numbers asked, confirmed and refused.
    busy_s : mapping of str to float
        Time in tasks, by the name of the worker [s].
    threads : mapping of str to int
        By the name of the worker.
    steal_threshold, steal_threshold_changes : int or None
        At the end, and how often it changed; None for policies without a threshold.
    """

    steals: Mapping[str, int] = field(default_factory=dict)
    busy_s: Mapping[str, float] = field(default_factory=dict)
    threads: Mapping[str, int] = field(default_factory=dict)
    steal_threshold: int | None = None
    steal_threshold_changes: int | None = None

    def idle_s(self, makespan_s: float) -> dict[str, float]:
        """Return the time that each worker's threads spent in no task, by its name [s]."""
        return {
            name: max(0.0, makespan_s * self.threads[name] - busy_s) for name, busy_s in self.busy_s.items()
        }


def sent_by(stream: BatchedSend) -> Counter[str]:
    """Return how many `messages` a stream has sent until now, and in how many `batches`."""
    return Counter(messages=stream.message_count, batches=stream.batch_count)


def sent_to_workers(scheduler: Scheduler) -> Counter[str]:
    """Return what the scheduler has sent to the workers that it has now; see `sent_by`."""
    streams = scheduler.stream_comms
    return sum((sent_by(streams[one]) for one in scheduler.workers if one in streams), Counter[str]())


class Marks(dict[str, float]):
    """When the first graph of a run was sent, and when its first result was known, by `time.time` [s].

    Noted in the client's process, since no plugin of the scheduler sees when the client hears of results.

    Parameters
    ----------
    client : distributed.Client
    """

    def __init__(self, client: Client) -> None:
        noted: Any = client  # two functions of it are replaced
        send, known = noted._send_to_scheduler, noted._stream_handlers["key-in-memory"]

        def send_and_note(message: Any) -> Any:
            if message.get("op") == "update-graph":
                self.setdefault("sent_s", time.time())
            return send(message)

        def know_and_note(key: Any = None, **options: Any) -> Any:
            if key in noted.futures:  # not a result that only the plugin wants
                self.setdefault("first_result_s", time.time())
            return known(key=key, **options)

        noted._send_to_scheduler = send_and_note
        noted._stream_handlers["key-in-memory"] = know_and_note

    def since(self, started: float) -> dict[str, float]:
        """Return the same as durations from a moment on [s]."""
        return {name: max(0.0, at - started) for name, at in self.items()}


class FetchCounter(WorkerPlugin):
    """Counts on a worker what it sends to the scheduler, and what it fetches from other workers [B].

    What P2P shuffles send is not fetched.

    Not read from Dask: its log of transfers forgets, and what it counts as sent goes to clients too.
    """

    def setup(self, worker: Worker) -> None:
        """Start at zero."""
        self.worker = worker
        self.reset()

    def reset(self) -> None:
        """Forget the run before."""
        self.fetched = 0
        self.sent = sent_by(self.worker.batched_stream)

    def transition(self, key: Any, start: Any, finish: Any, **kwargs: Any) -> None:
        """Count what has arrived."""
        if start == "flight" and finish == "memory":
            self.fetched += self.worker.state.tasks[key].get_nbytes()


class PeakMemory:
    """The largest resident set of this process since the last reset."""

    def __init__(self) -> None:
        self._is_known = False

    def reset(self) -> None:
        """Start anew, at the memory that the process has now."""
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            self._is_known = True
        except OSError:  # limits of the machine may forbid it
            self._is_known = False

    def read(self) -> int:
        """Return the peak [B]; 0 if it is unknown."""
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:") and self._is_known:
                return int(line.split()[1]) * 1024
        return 0


#: Of this process.
PEAK = PeakMemory()


def error_line(error: BaseException) -> str:
    """Return the class and the message of an error in one line of at most 300 characters."""
    return f"{type(error).__name__}: {error}".split("\n", 1)[0][:300]


def settle(client: Client, timeout_s: float) -> None:
    """Wait until the results of a run have left the scheduler."""
    deadline = time.monotonic() + timeout_s
    while n_tasks := client.run_on_scheduler(_n_tasks):
        if time.monotonic() > deadline:
            raise ClusterError(f"{n_tasks} tasks of an earlier run do not leave the scheduler")
        time.sleep(_POLL_S)


def _n_tasks(dask_scheduler: Scheduler) -> int:
    return len(dask_scheduler.tasks)
