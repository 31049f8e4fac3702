"""Trials of rows: a row runs on a cluster of one variant, in a thread with a limit of time."""

from __future__ import annotations

import contextvars
import gc
import logging
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import dask
import pytest
from assume_short import AllShort
from distributed import Client, LocalCluster, SchedulerPlugin

import ferroflow_dask
from ferroflow_dask.scheduler import extension_on
from ferroflow_dask.scheduler.graphs.graphs import Graphs
from matrix.row import BUNDLED, SEPARATE, Row
from matrix.tasks import error_of, wait_until

#: Policies of a trial: Dask's own, the plugin without bundles, and with bundles of all short tasks.
STOCK, PLAIN, BUNDLES = "stock", "plain", "bundled"
#: Part of the tasks of a row marked `B` that are in bundles, at least.
_IN_BUNDLES = 0.8
#: A program that takes longer hangs [s].
LIMIT_S = 60.0
#: After a program, the scheduler forgets its tasks within this time [s].
_FORGOTTEN_S = 4.0
_SETTINGS = {
    "distributed.scheduler.validate": True,
    "distributed.worker.validate": True,
    "distributed.admin.tick.limit": "1m",
    "dataframe.convert-string": False,
}
#: Workers that are threads send messages as processes do: they pickle.
_THREADS = {"n_workers": 4, "threads_per_worker": 1, "processes": False, "protocol": "tcp://"}
_PROCESSES = {"n_workers": 2, "threads_per_worker": 2, "processes": True}


@dataclass
class Trial:
    """The cluster and the client of a program.

    Parameters
    ----------
    policy : str
        One of the constants above.
    cluster : distributed.LocalCluster
    client : distributed.Client
    folder : str
        An empty folder that all workers can reach.
    """

    policy: str
    cluster: LocalCluster
    client: Client
    folder: str

    @property
    def scheduler(self) -> Any:
        """The scheduler, which runs in this process."""
        return self.cluster.scheduler

    @property
    def extension(self) -> Any:
        """The plugin's extension; None in stock."""
        return extension_on(self.scheduler)

    @property
    def workers(self) -> list[str]:
        """Addresses of the workers, in the order of their names."""
        return [ws.address for ws in sorted(self.scheduler.workers.values(), key=lambda ws: ws.name)]


#: First item of the observations of a program that raises an exception.
_RAISES = "the program raises"


@dataclass
class Result:
    """Observations of a trial.

    Parameters
    ----------
    observed : object
        Plain data.
    n_tasks : int
        Tasks that arrived in graphs; only in stock.
    bundled : set of str
        Keys of the tasks that were in bundles.
    hangs : bool
        Whether the program took longer than the limit.
    divisions : int
        Bundles that were divided.
    """

    observed: Any
    n_tasks: int = 0
    bundled: set[str] = field(default_factory=set)
    hangs: bool = False
    divisions: int = 0

    @property
    def raises(self) -> bool:
        """Whether the program raised an exception."""
        return isinstance(self.observed, tuple) and self.observed[:1] == (_RAISES,)


def has_divided(extension: Any) -> int:
    """Return how many bundles have been divided or split since the extension started."""
    counts = extension.graphs.bundles.counts
    return int(counts.get("divided", 0) + counts.get("split", 0))


class _Arrived(SchedulerPlugin):
    """Counts the tasks of arriving graphs; only on stock clusters, since it follows tasks."""

    name = "matrix-arrived"

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def update_graph(self, scheduler: Any, *, tasks: list[Any], **_: Any) -> None:
        known = scheduler.tasks
        self.keys.update(str(key) for key in tasks if key in known and known[key].run_spec is not None)


@contextmanager
def all_short() -> Iterator[None]:
    """Take tasks of all prefixes as short, once the workers can run bundles."""
    original = Graphs.learned

    def learned(self: Graphs) -> Any:
        known = original(self)
        return None if known is None else AllShort(frozenset(self._learned.separate))

    logger = logging.getLogger("distributed")
    level = logger.level
    with pytest.MonkeyPatch.context() as patch, dask.config.set(_SETTINGS):
        patch.setattr(Graphs, "learned", learned)
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)


class Variant:
    """Clusters of one policy: one that most rows share, and fresh ones.

    Parameters
    ----------
    policy : str
    processes : bool, optional
        Whether workers are processes: 2 × 2 instead of 4 × 1.
    limit_s : float, optional
        A program that takes longer hangs.
    """

    def __init__(self, policy: str, processes: bool = False, limit_s: float = LIMIT_S) -> None:
        self.policy = policy
        self._options = _PROCESSES if processes else _THREADS
        self._limit_s = limit_s
        self._shared: tuple[LocalCluster, Client] | None = None

    def run(self, row: Row) -> Result:
        """Run a row."""
        with dask.config.set(row.settings):
            return self._run_on_cluster(row)

    def _run_on_cluster(self, row: Row) -> Result:
        is_shared = not row.is_alone
        if is_shared and self._shared is None:
            self._shared = self._started({})
        options = {**(_PROCESSES if row.needs_processes else {}), **(row.cluster or {})}
        cluster, client = self._shared if is_shared and self._shared is not None else self._started(options)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            result, is_clean = self._run(row, Trial(self.policy, cluster, client, folder))
        if not is_shared or not is_clean:
            if is_shared:
                self._shared = None
            _close(cluster, client, waits=not result.hangs)
        return result

    def close(self) -> None:
        """Close the shared cluster."""
        if self._shared is not None:
            _close(*self._shared, waits=True)
            self._shared = None

    def _started(self, options: Any) -> tuple[LocalCluster, Client]:
        # In an empty context: tasks run in copies of the one in which workers start.
        return contextvars.Context().run(self._start, options)

    def _start(self, options: Any) -> tuple[LocalCluster, Client]:
        settings = {"dashboard_address": ":0", "silence_logs": False}
        cluster = LocalCluster(**{**self._options, **settings, **options})
        client = Client(cluster, set_as_default=False)
        if self.policy != STOCK:
            ferroflow_dask.install(client, without=() if self.policy == BUNDLES else ["bundles"])
            extension = extension_on(cluster.scheduler)
            if self.policy == BUNDLES and cluster.workers:
                assert wait_until(lambda: extension.graphs.learned() is not None)
        return cluster, client

    def _run(self, row: Row, trial: Trial) -> tuple[Result, bool]:
        """Return the observations, and whether the cluster can be used again."""
        arrived, bundled = _Arrived(), set[str]()
        extension = trial.extension
        if trial.policy == STOCK:
            trial.scheduler.add_plugin(arrived)
        original = extension.graphs.bundles.add if extension is not None else None
        before = has_divided(extension) if extension is not None else 0

        def add(bundles: Any) -> None:
            for bundle in bundles.values():
                if len(bundle.tasks) > 1:
                    bundled.update(str(task.key) for task in bundle.tasks)
            original(bundles)

        if extension is not None:
            extension.graphs.bundles.add = add
        try:
            result = self._in_thread(row, trial)
        finally:
            if extension is not None:
                extension.graphs.bundles.add = original
            if trial.policy == STOCK:
                trial.scheduler.plugins.pop(arrived.name, None)
        result.n_tasks, result.bundled = len(arrived.keys), bundled
        if extension is not None:
            result.divisions = has_divided(extension) - before
        if result.hangs:
            return result, False
        if extension is not None and extension.error is not None:
            result.observed = ("the plugin failed", repr(extension.error))
            return result, False
        if row.is_alone:
            return result, False
        left = _left(trial)
        if left:
            result.observed = {"observed": result.observed, "keys left on the scheduler": len(left)}
        return result, not left

    def _in_thread(self, row: Row, trial: Trial) -> Result:
        results: list[Any] = []

        def run() -> None:
            with trial.client.as_current():
                try:
                    results.append(row.run(trial))
                except BaseException as error:  # noqa: BLE001 -- any is an observation
                    results.append((_RAISES, error_of(error)))
                    error.__traceback__ = None

        with dask.config.set(scheduler="dask.distributed"):
            thread = threading.Thread(target=run, name=f"matrix: {row.name}", daemon=True)
            thread.start()
            thread.join(self._limit_s)
        return Result(results[0]) if results else Result("hangs", hangs=True)


def _left(trial: Trial) -> list[str]:
    """Return the keys that the scheduler does not forget after a program."""
    if not wait_until(lambda: not trial.scheduler.tasks, _FORGOTTEN_S / 8):
        gc.collect()
        wait_until(lambda: not trial.scheduler.tasks, _FORGOTTEN_S)
    return sorted(map(str, trial.scheduler.tasks))


def _close(cluster: LocalCluster, client: Client, waits: bool) -> None:
    """Close a cluster; workers of a program that hangs may never end."""

    def close() -> None:
        client.close(timeout=2)
        cluster.close(timeout=10)

    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(20 if waits else 2)


def problem_of(row: Row, stock: Result, other: Result, policy: str) -> str | None:
    """Return how a trial breaks the promise of a row; None if it does not."""
    if other.hangs and not stock.hangs:
        return "hangs"
    if other.raises and not stock.raises:
        return f"raises {other.observed[1]}"
    found = row.compare(stock.observed, other.observed)
    if found is not None:
        return f"differs: {found}"
    if policy == BUNDLES:
        return _problem_of_bundles(row, stock.n_tasks, other.bundled)
    return f"{len(other.bundled)} tasks in bundles" if policy == PLAIN and other.bundled else None


def _problem_of_bundles(row: Row, n_tasks: int, bundled: set[str]) -> str | None:
    if SEPARATE in row.letters:
        wrong = [key for key in bundled if row.separate is None or row.separate(key)]
        if wrong:
            return f"{len(wrong)} tasks in bundles that must stay separate, such as {min(wrong)}"
    if BUNDLED in row.letters and len(bundled) < _IN_BUNDLES * n_tasks:
        return f"only {len(bundled)} of {n_tasks} tasks in bundles"
    return None
