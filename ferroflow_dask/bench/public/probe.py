"""Measures of a run: when it got how far, CPU time, memory, bytes and messages.

No plugin of the scheduler follows tasks, since that would cost most where most tasks are. The scheduler's own
`computations` know how many tasks there were. Workers have a plugin that notes each task that is started, and
the bytes that are fetched. It shows tasks that ran twice.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import psutil

from ferroflow_dask.bench.observe import (
    PEAK,
    RUNNING_ALREADY,
    FetchCounter,
    Marks,
    sent_by,
    sent_to_workers,
    steals_since,
)
from ferroflow_dask.clients import ask_workers
from ferroflow_dask.scheduler.extension import FerroflowStealing, extension_on

if TYPE_CHECKING:
    from distributed import Client, Worker
    from distributed.scheduler import Scheduler

_NAME = "ferroflow-bench-public"
#: Bytes of a key's digest.
_DIGEST = 8


class StartLog(FetchCounter):
    """Notes on a worker each task that is started there, and counts the bytes that it fetches."""

    name = _NAME

    def reset(self) -> None:
        """Forget the run before."""
        super().reset()
        self.started: list[Any] = []
        self.first = 0.0
        self.cpu_s = time.process_time()
        self.p2p = _p2p(self.worker)

    def transition(self, key: Any, start: Any, finish: Any, **kwargs: Any) -> None:
        """Note the start of a task, unless it gives itself back (`distributed.Reschedule`)."""
        super().transition(key, start, finish, **kwargs)
        if finish == "executing" and start not in RUNNING_ALREADY:
            # Not read from the scheduler: a worker that was stopped may be wrong about the scheduler's clock.
            self.first = self.first or time.time()
            self.started.append(key)
        elif finish == "rescheduled" and key in self.started:
            self.started.remove(key)


def _p2p(worker: Worker) -> float:
    """Return the bytes that P2P shuffles have sent from a worker; the scheduler hears of them later."""
    totals: Mapping[Any, float] = worker.digests_total
    return sum((n for name, n in totals.items() if "p2p-shards" in name and "bytes" in name), 0.0)


class Probe:
    """Measures the runs of a client; registered on its cluster for as long as that lives.

    Parameters
    ----------
    client : distributed.Client
        Not asynchronous.
    """

    def __init__(self, client: Client) -> None:
        self._client: Any = client
        self._is_local = client.scheduler_info()["address"] in _local_schedulers()
        client.register_plugin(StartLog())
        self._marks = Marks(client)

    def start(self) -> None:
        """Forget everything until now; called right before the clock starts."""
        ask_workers(self._client, _reset_worker)
        self._before = self._client.run_on_scheduler(_counts)
        PEAK.reset()
        self._cpu_s = _process_cpu_s()
        self._marks.clear()

    def stop(self) -> None:
        """Take the CPU time of this process; called right after the clock has stopped."""
        self._spent_s = _process_cpu_s() - self._cpu_s
        self._peak = PEAK.read()

    def read(self, started: float) -> dict[str, Any]:
        """Return the fields of the run's row, and `repeated`, the number of tasks that were started again.

        Parameters
        ----------
        started : float
            When the clock was started, by `time.time` [s].
        """
        seen = self._client.run_on_scheduler(_read_scheduler, before=self._before, started=started)
        workers = ask_workers(self._client, _read_worker).values()
        starts = Counter(digest for one in workers for digest in one["started"])
        total = sum((one["sent"] for one in workers), Counter(seen.pop("sent")))
        scheduler_cpu_s, peak = seen["scheduler_cpu_s"], seen.pop("peak")
        moments = seen.pop("moments")
        if firsts := [one["first"] for one in workers if one["first"]]:
            moments["started_s"] = min(firsts)
        return {
            **seen,
            **self._marks.since(started),
            **{name: max(0.0, at - started) for name, at in moments.items()},
            "client_cpu_s": max(0.0, self._spent_s - scheduler_cpu_s * self._is_local),
            "worker_cpu_s": sum(one["cpu_s"] for one in workers),
            "peak_client_memory": self._peak or None,
            "peak_scheduler_memory": None if self._is_local else peak or None,
            "peak_worker_memory": max((one["peak"] for one in workers), default=0),
            "bytes_moved": sum(one["fetched"] for one in workers),
            "p2p_bytes": int(sum(one["p2p"] for one in workers)),
            "messages": total["messages"],
            "batches": total["batches"],
            "executed": starts.total(),
            "repeated": starts.total() - len(starts),
        }


def _local_schedulers() -> set[str]:
    from distributed.scheduler import Scheduler

    return {str(getattr(scheduler, "address", "")) for scheduler in Scheduler._instances}


def _process_cpu_s() -> float:
    """Return the CPU time of this process and of its children that have ended [s]."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _reset_worker(dask_worker: Worker) -> None:
    dask_worker.plugins[_NAME].reset()  # type: ignore[attr-defined]
    PEAK.reset()


def _read_worker(dask_worker: Worker) -> dict[str, Any]:
    log: Any = dask_worker.plugins[_NAME]
    return {
        # Digests: keys may be long, and hashes of strings differ from process to process.
        "started": [hashlib.blake2b(repr(key).encode(), digest_size=_DIGEST).digest() for key in log.started],
        "first": log.first,
        "fetched": log.fetched,
        "p2p": _p2p(dask_worker) - log.p2p,
        "cpu_s": time.process_time() - log.cpu_s,
        "sent": sent_by(dask_worker.batched_stream) - log.sent,
        "peak": PEAK.read(),
    }


def _counts(dask_scheduler: Scheduler) -> dict[str, Any]:
    """Return the counters of the scheduler; the CPU time comes last."""
    sent = sent_to_workers(dask_scheduler)
    PEAK.reset()
    return {"sent": sent, "cpu_s": time.thread_time()}


def _read_scheduler(dask_scheduler: Scheduler, before: Mapping[str, Any], started: float) -> dict[str, Any]:
    peak, cpu_s = PEAK.read(), time.thread_time()
    now = _counts(dask_scheduler)
    groups = {
        group
        for computation in dask_scheduler.computations
        for group in computation.groups
        if computation.start > started or not computation.start
    }
    created = [
        at
        for at, message in dask_scheduler.get_events("scheduler")
        if at > started and isinstance(message, dict) and message.get("action") == "update-graph"
    ]
    extension = extension_on(dask_scheduler)
    return {
        "moments": {"created_s": min(created)} if created else {},
        "tasks": sum(sum(group.states.values()) for group in groups),
        "busy_s": sum(group.all_durations.get("compute", 0.0) for group in groups),
        **{f"steals_{name}": n for name, n in steals_since(dask_scheduler, started).items()},
        "sent": now["sent"] - before["sent"],
        "scheduler_cpu_s": cpu_s - before["cpu_s"],
        "peak": peak,
        "bundled": None if extension is None else _is_bundling(extension),
    }


def _is_bundling(extension: FerroflowStealing) -> bool:
    has_bundles = any(feature.name == "bundles" for feature in extension.features)
    return has_bundles and not extension.parts.graphs.observers.are_present()


def cpu_seconds(group: int) -> float:
    """Return the CPU time that the processes of a process group have taken until now [s]."""
    return sum(_cpu_of(process) for process in psutil.process_iter() if _is_in(process, group))


def _is_in(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group
    except OSError:
        return False


def _cpu_of(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
