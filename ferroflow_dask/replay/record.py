"""`record`: write what a program does on a cluster to a file, without values and code."""

from __future__ import annotations

import heapq
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dask._task_spec import cull
from dask.typing import Key
from dask.utils import key_split
from distributed import Client
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.metrics import time

from ferroflow_dask import config
from ferroflow_dask.bundling.bundle import Bundle
from ferroflow_dask.bundling.sequence import NO_WORK
from ferroflow_dask.clients import ask_workers, check_synchronous, workers_of
from ferroflow_dask.exceptions import ClusterError, UsageError
from ferroflow_dask.replay.files import FORMAT, VERSION
from ferroflow_dask.scheduler import extension_on, installed
from ferroflow_dask.whole_files import write_text

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler


@contextmanager
def record(client: Client, path: str | Path) -> Iterator[None]:
    """Record all tasks that a cluster runs, and write them to a file at the end.

    The file has the key, duration, result size, dependencies, worker and start of each task, and the
    transfers between workers. Tasks inside bundles are included. It has neither values nor code.
    `ferroflow simulate --record FILE` runs it again in virtual time.

    Parameters
    ----------
    client : distributed.Client
        Synchronous.
    path : path-like
        JSON file to write.

    Raises
    ------
    UsageError
        The client is closed or asynchronous, the file cannot be written, or no task has run.
    ClusterError
        A task could not be noted.

    Examples
    --------
    >>> with record(client, "job.json"):  # doctest: +SKIP
    ...     total.compute()
    """
    check_synchronous(client, "record")
    path = Path(path)
    if not path.resolve().parent.is_dir():
        raise UsageError(f"the folder of a record must exist, got {str(path)!r}")
    recorder = Recorder(f"ferroflow-record-{uuid.uuid4().hex}")
    client.register_plugin(recorder, recorder.name)
    try:
        before = ask_workers(client, _threads_s)
        yield
        after = ask_workers(client, _threads_s)
        found: dict[str, Any] = client.run_on_scheduler(_take, name=recorder.name)
    finally:
        client.unregister_scheduler_plugin(recorder.name)
    if not found["tasks"]:
        raise UsageError("a record must have a task, got none; compute something while it records")
    plugin = installed(client)
    document = {
        "format": FORMAT,
        "version": VERSION,
        "policy": "dask" if plugin is None else plugin.policy or config.get("policy"),
        "threads": [worker["nthreads"] for worker in workers_of(client).values()],
        **_shares(before, after, sum(task[2] for task in found["tasks"])),
        **found,
    }
    try:
        write_text(path, json.dumps(document))
    except OSError as error:
        raise UsageError(f"a record must be written to a file, got {str(path)!r}: {error}") from error


def _threads_s(dask_worker: Any) -> tuple[float, float] | None:
    """Return for how long the threads of a worker's tasks have computed, and waited for a core [s].

    None where the system does not tell: it does on Linux.
    """
    computed_ns = waited_ns = 0
    try:
        for thread in dask_worker.executors["default"]._threads:
            on_core, waiting, _ = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()
            computed_ns += int(on_core)
            waited_ns += int(waiting)
    except (AttributeError, OSError, ValueError):  # processes instead of threads, or another system
        return None
    return computed_ns / 1e9, waited_ns / 1e9


def _shares(
    before: Mapping[str, tuple[float, float] | None],
    after: Mapping[str, tuple[float, float] | None],
    lasted_s: float,
) -> dict[str, float]:
    """Return the parts of the durations of tasks in which they computed, and in which they waited for a core.

    If no worker told, they have computed all the time.
    """
    computed_s = waited_s = 0.0
    for address, at_end in after.items():
        if at_end is not None:
            at_start = before.get(address) or (0.0, 0.0)
            computed_s += at_end[0] - at_start[0]
            waited_s += at_end[1] - at_start[1]
    if not lasted_s or not computed_s:
        return {"core_share": 1.0, "queued_share": 0.0}
    core_share = min(1.0, computed_s / lasted_s)
    return {"core_share": core_share, "queued_share": min(waited_s / lasted_s, 1.0 - core_share)}


def _take(name: str, dask_scheduler: Any = None) -> dict[str, Any]:
    found: dict[str, Any] = dask_scheduler.plugins[name].document()
    return found


@dataclass(slots=True)
class _Ran:
    """A task that ran."""

    graph: int
    duration_s: float
    dependencies: list[Key]
    worker: str
    start_s: float
    turn: Any


def _noting_failures(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook of `Recorder` that keeps its first error, which Dask only logs."""

    @wraps(hook)
    def noting(self: Recorder, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:
            self.error = self.error or error
            raise

    return noting


class Recorder(SchedulerPlugin):
    """Notes the tasks that end on a scheduler.

    Parameters
    ----------
    name : str
    scheduler : distributed.Scheduler, optional
        Known from `start` if the plugin is registered.
    """

    def __init__(self, name: str, scheduler: Scheduler | None = None) -> None:
        self.name = name
        if scheduler is not None:
            self._scheduler = scheduler
        #: The first error of a hook.
        self.error: Exception | None = None
        self._ran: dict[Key, _Ran] = {}
        self._nbytes: dict[Key, int] = {}
        self._delivered_s: dict[Key, float] = {}
        # Values of bundles that have not ended: a client may have all results before, and release them.
        self._early: dict[Key, tuple[_Ran, list[Bundle | None]]] = {}
        self._wanted: set[Key] = set()
        self._graph_of: dict[Key, int] = {}
        self._graphs: list[dict[str, Any]] = []
        self._open: set[Key] = set()
        self._transfers: list[tuple[str, str, float, float]] = []
        self._first_s = self._arrived_s = self._ended_s = 0.0

    async def start(self, scheduler: Scheduler) -> None:
        """Take the scheduler."""
        self._scheduler = scheduler

    @_noting_failures
    def update_graph(self, scheduler: Scheduler, *, keys: set[Key], tasks: list[Key], **kwargs: Any) -> None:
        """Note when a graph arrives, and whether the earlier ones have ended by then."""
        now = time()
        new = [key for key in tasks if scheduler.tasks[key].state in ("released", "waiting")]
        if not new:
            return
        if not self._graphs:
            self._first_s = self._arrived_s = now
        waits = bool(self._graphs) and not self._open
        delay_s = now - (max(self._ended_s, self._first_s) if waits else self._arrived_s)
        self._graphs.append({"waits": waits, "delay_s": max(0.0, delay_s)})
        self._arrived_s = now
        self._graph_of.update(dict.fromkeys(new, len(self._graphs) - 1))
        self._open.update(new)
        self._wanted.update(keys)

    @_noting_failures
    def transition(self, key: Key, start: Any, finish: Any, *args: Any, **kwargs: Any) -> None:
        """Note a task that has ended."""
        if finish in ("memory", "erred", "forgotten", "released"):
            self._open.discard(key)
        graph = self._graph_of.get(key)
        if finish != "memory" or graph is None:
            return
        self._ended_s = time()
        ts = self._scheduler.tasks[key]
        self._nbytes[key] = max(ts.nbytes, 0)
        spans = kwargs.get("startstops") or ()
        computed = [span for span in spans if span["action"] == "compute"]
        if not computed:
            return
        duration_s = sum(span["stop"] - span["start"] for span in computed)
        bundle, worker = self._bundle(key), str(kwargs.get("worker"))
        if bundle is not None and all(isinstance(task, NO_WORK) for task in bundle.tasks):
            self._delivered_s[key] = duration_s  # it stands for a value of a bundle
            ran = _Ran(graph, duration_s, [], worker, computed[0]["start"], (ts.priority, 0))
            self._early[key] = ran, [self._bundle(one.key) for one in ts.dependencies]
            return
        for span in spans:
            if span["action"] == "transfer":
                self._transfers.append((span["source"], worker, span["start"], span["stop"]))
        needed = [dependency.key for dependency in ts.dependencies]
        ran = _Ran(graph, duration_s, needed, worker, computed[0]["start"], (ts.priority, 0))
        if bundle is None:
            self._ran[key] = ran
        else:
            self._bundle_ended(ran, bundle)

    def _bundle_ended(self, ran: _Ran, bundle: Bundle) -> None:
        self._note_bundle(ran, bundle)

    def _bundle(self, key: Key) -> Bundle | None:
        extension = extension_on(self._scheduler)
        return None if extension is None else extension.graphs.bundles.get(key)

    def _note_bundle(self, whole: _Ran, bundle: Bundle) -> None:
        """Note the tasks of a bundle.

        The durations of delivered tasks are measured. The others share the rest by the averages of their
        prefixes.
        """
        extension = extension_on(self._scheduler)
        known = {} if extension is None else extension.graphs.learned() or {}
        shares: dict[Key, float] = {}
        for task in bundle.tasks:
            average = known.get(key_split(task.key))
            if average is not None:
                self._nbytes.setdefault(task.key, int(average.nbytes))
            if not isinstance(task, NO_WORK) and task.key not in self._delivered_s:
                shares[task.key] = max(1e-9, 0.0 if average is None else average.duration_s)
        own_s = {task.key: self._delivered_s.get(task.key, 0.0) for task in bundle.tasks}
        rest_s = max(0.0, whole.duration_s - sum(own_s.values()))
        own_s |= {key: rest_s * share / sum(shares.values()) for key, share in shares.items()}
        start_s, (priority, _) = whole.start_s, whole.turn
        for at, task in enumerate(bundle.tasks):
            self._early.pop(task.key, None)
            self._ran[task.key] = replace(
                whole,
                duration_s=own_s[task.key],
                dependencies=sorted(task.dependencies, key=repr),
                start_s=start_s,
                turn=(priority, at),
            )
            start_s += own_s[task.key]

    def _note_early(self) -> None:
        """Note the tasks of bundles whose values clients had before the bundles ended."""
        for key in list(self._early):
            if key not in self._early:
                continue
            ran, bundles = self._early[key]
            tasks = {task.key: task for bundle in bundles if bundle is not None for task in bundle.tasks}
            needed = cull(tasks, tasks.keys() & self._early.keys())
            if key not in needed:
                self._ran[key] = replace(ran, dependencies=[])
                continue
            durations = [self._average_s(one) for one in needed if one not in self._delivered_s]
            total_s = sum(durations) + sum(self._delivered_s.get(one, 0.0) for one in needed)
            bundle = Bundle(tuple(task for one, task in tasks.items() if one in needed), (key,), {})
            self._note_bundle(replace(ran, duration_s=total_s), bundle)

    def _average_s(self, key: Key) -> float:
        extension = extension_on(self._scheduler)
        average = ((extension.graphs.learned() if extension is not None else None) or {}).get(key_split(key))
        return 0.0 if average is None else average.duration_s

    @property
    def n_tasks(self) -> int:
        """Tasks that have run."""
        return len(self._ran)

    def document(self) -> dict[str, Any]:
        """Return what was noted, as it is written; raise `ClusterError` if a task is missing."""
        if self.error is not None:
            raise ClusterError(f"a record must have all tasks, got an error: {self.error}") from self.error
        self._note_early()
        order = self._in_order()
        number = {key: at for at, key in enumerate(order)}
        # What a later graph reads must be there once its own graph has ended.
        for ran in self._ran.values():
            for needed in ran.dependencies:
                if needed in self._ran and self._ran[needed].graph != ran.graph:
                    self._wanted.add(needed)
        workers = list(dict.fromkeys(ran.worker for ran in self._ran.values()))
        place = {worker: at for at, worker in enumerate(workers)}
        read = {needed for ran in self._ran.values() for needed in ran.dependencies}
        names = _names(order)
        tasks = []
        for key in order:
            ran = self._ran[key]
            earlier = sorted(number[one] for one in set(ran.dependencies) if one in number)
            size = self._nbytes.get(key, 0)
            start_s = max(0.0, ran.start_s - self._first_s)
            is_wanted = key in self._wanted or key not in read
            tasks.append(
                [names[key], ran.graph, ran.duration_s, size, earlier, place[ran.worker], start_s, is_wanted]
            )
        transfers = [
            [place.get(source, -1), place.get(to, -1), start - self._first_s, stop - self._first_s]
            for source, to, start, stop in self._transfers
        ]
        return {
            "makespan_s": max(0.0, self._ended_s - self._first_s),
            "graphs": self._graphs,
            "tasks": tasks,
            "transfers": transfers,
        }

    def _in_order(self) -> list[Key]:
        """Return the tasks by graph and priority, each after its dependencies."""
        missing = {}
        readers: dict[Key, list[Key]] = {}
        for key, ran in self._ran.items():
            needed = {one for one in ran.dependencies if one in self._ran and one != key}
            missing[key] = len(needed)
            for one in needed:
                readers.setdefault(one, []).append(key)
        turn = {key: (ran.graph, ran.turn, at) for at, (key, ran) in enumerate(self._ran.items())}
        ready = [(turn[key], key) for key, n in missing.items() if not n]
        heapq.heapify(ready)
        order = []
        while ready:
            _, key = heapq.heappop(ready)
            order.append(key)
            for reader in readers.get(key, ()):
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(ready, (turn[reader], reader))
        return order


def _names(keys: list[Key]) -> dict[Key, str]:
    """Return each key as text, all different."""
    names: dict[Key, str] = {}
    used: set[str] = set()
    for key in keys:
        name = key if isinstance(key, str) else repr(key)
        while name in used:
            name += "'"
        used.add(name)
        names[key] = name
    return names
