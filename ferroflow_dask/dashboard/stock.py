"""Stock estimate: how long the last graphs would have taken under stock Dask, by the light engine."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.replay import stock_s
from ferroflow_dask.replay.files import FORMAT, VERSION, job_of_document
from ferroflow_dask.replay.record import Recorder
from ferroflow_dask.scheduler.graphs.overheads import Overheads
from ferroflow_dask.scheduler.learned import learned_on

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

logger = logging.getLogger(__name__)

#: The event loop copies so many tasks in about 50 ms; more are not simulated.
_MOST_TASKS = 10_000


class StockEstimate:
    """Simulates the last graphs under stock Dask once they have ended, in a thread.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        #: None if more has run than is simulated.
        self._run: Recorder | None = Recorder("ferroflow-stock", scheduler)
        self._has_ended = False
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="ferroflow-stock")
        #: Makespan of a list schedule of single tasks [s]; None until it is known.
        self.seconds: float | None = None

    def update_graph(self, *, keys: set[Key], tasks: list[Key], goes_on: bool) -> None:
        """Follow a graph that was submitted; `goes_on` if tasks of it came before."""
        if self._has_ended:
            self._run = self._run if goes_on else Recorder("ferroflow-stock", self._scheduler)
            self._has_ended, self.seconds = False, None
        if self._run is not None and self._run.n_tasks + len(tasks) > _MOST_TASKS:
            self._run = None
        if self._run is not None:
            self._run.update_graph(self._scheduler, keys=keys, tasks=tasks)

    def transition(self, key: Key, start: Any, finish: Any, details: dict[str, Any]) -> None:
        """Note a task that has ended."""
        if self._run is not None and not self._has_ended:
            self._run.transition(key, start, finish, **details)

    def ended(self) -> None:
        """Simulate what has run since nothing was left to do."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._run is not None and self._run.error is None and 0 < self._run.n_tasks <= _MOST_TASKS:
            profile = Overheads(self._scheduler, learned_on(self._scheduler)).profile()
            document = {"format": FORMAT, "version": VERSION, "threads": [], **self._run.document()}
            self._threads.submit(self._simulate, self._run, document, profile)

    def close(self) -> None:
        """Simulate no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _simulate(self, run: Recorder, document: dict[str, Any], profile: ClusterProfile) -> None:
        try:
            found_s = stock_s(job_of_document(document), profile)
        except Exception:
            logger.exception("the makespan under stock Dask could not be simulated")
            return
        if run is self._run:
            self.seconds = found_s
