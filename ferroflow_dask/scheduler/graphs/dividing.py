"""Divisions on the scheduler: workers are asked for the steps of running bundles, or not to run them.

A worker divides a bundle when the scheduler asks, or when a step fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from dask._task_spec import cull
from dask.typing import Key

from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.scheduler.graphs.divided import Divided
from ferroflow_dask.scheduler.graphs.stuck import Stuck
from ferroflow_dask.scheduler.graphs.worker_runs import DIVIDE, NARROW

if TYPE_CHECKING:
    from ferroflow_dask.scheduler.core import Core
    from ferroflow_dask.scheduler.graphs.splitting import Splitting
    from ferroflow_dask.scheduler.refusals import Refusals

#: States of a bundle that has not ended.
_AHEAD = frozenset({"waiting", "queued", "no-worker", "processing"})


class Dividing:
    """Divides running bundles.

    Parameters
    ----------
    core : Core
    splitting : Splitting
    refusals : Refusals
    cluster : callable
        Returns the cluster for which graphs are cut.
    may_send : callable
        Returns whether a worker understands the messages, by its address.
    """

    def __init__(
        self,
        core: Core,
        splitting: Splitting,
        refusals: Refusals,
        cluster: Callable[[], ClusterProfile],
        may_send: Callable[[str], bool],
    ) -> None:
        self._scheduler = core.scheduler
        self._guard = core.guard
        self._view = core.view
        self._bundles = splitting.bundles
        self._may_send = may_send
        #: The shares and reasons of the divisions that workers have not answered, by bundle.
        self.asked: dict[Key, tuple[str, str]] = {}
        core.view.dividing = self.asked
        # Bundles of which some values are needed no longer.
        self._narrowed: dict[Key, None] = {}
        #: Divisions that workers were asked for.
        self.n_asked = 0
        self.stuck = Stuck(core, self._bundles, self.ask, may_send)
        #: Takes the answers of workers.
        self.answers = Divided(core, splitting, refusals, cluster, self)

    # Requests

    def ask(self, key: Key, share: str, reason: str) -> bool:
        """Ask a worker for steps of a bundle that it runs; return whether it is asked now."""
        ts, bundle = self._scheduler.tasks.get(key), self._bundles.get(key)
        if ts is None or ts.processing_on is None or bundle is None or key in self.asked:
            return False
        if len(bundle.tasks) < 2 or not bundle.returns_results(key):
            return False
        if not self._may_send(ts.processing_on.address):
            return False
        self.asked[key] = share, reason
        self._view.divisible.pop(key, None)
        self.n_asked += 1
        message = {"op": DIVIDE, "key": key, "run_id": ts.run_id, "share": share}
        self._scheduler.worker_send(ts.processing_on.address, {**message, "stimulus_id": "ferroflow-divide"})
        return True

    def ask_all_on(self, address: str, reason: str) -> None:
        """Ask a worker for all steps that it has not started."""
        ws = self._scheduler.workers.get(address)
        for ts in list(ws.processing) if ws is not None else ():
            self.ask(ts.key, "all", reason)

    def may_have_seceded(self, key: Key) -> None:
        """Ask for all steps of a bundle if it is long-running."""
        ts = self._scheduler.tasks.get(key)
        if ts is not None and ts.processing_on is not None and ts in ts.processing_on.long_running:
            self.stuck.seceded(key, ts.processing_on.address)
            self.ask(key, "all", "a step has seceded")

    def left(self, key: Key, address: str) -> None:
        """Stop a bundle that left `processing` without a result: its worker starts no further step."""
        self.asked.pop(key, None)
        if key in self._bundles and self._may_send(address):
            message = {"op": NARROW, "key": key, "run_id": None, "exports": ()}
            self._scheduler.worker_send(address, message)

    def ended(self, key: Key) -> None:
        """Note that a task has ended."""
        self.asked.pop(key, None)
        self.stuck.ended(key)

    def restarted(self) -> None:
        """Forget all tasks: the cluster restarts."""
        self.asked.clear()
        self._narrowed.clear()
        self.stuck.restarted()

    def forgotten(self, key: Key) -> None:
        """Note that a task is forgotten, before its bundle is: it may have read a value of a running one."""
        self.ended(key)
        bundle = self._bundles.get(key)
        for holder, _ in bundle.places.values() if bundle is not None else ():
            if holder not in self._bundles or self._scheduler.tasks[holder].state not in _AHEAD:
                continue
            if not self._narrowed:
                self._scheduler.loop.add_callback(self._guard(self._narrow))
            self._narrowed[holder] = None

    def _narrow(self) -> None:
        narrowed, self._narrowed = self._narrowed, {}
        for key in narrowed:
            ts, bundle = self._scheduler.tasks.get(key), self._bundles.get(key)
            if ts is None or bundle is None or ts.state not in _AHEAD or not bundle.returns_results(key):
                continue
            exports = tuple(self._bundles.values_read(ts, bundle))
            if not exports and ts.processing_on is None:
                continue  # Dask forgets it
            # A later graph computes the other values again.
            present = tuple(one if one in exports else None for one in bundle.exports)
            delivered = tuple(one for one in bundle.delivered if one in exports)
            rest = replace(bundle, exports=present, delivered=delivered)
            if is_unsent := ts.processing_on is None:
                kept = cull({task.key: task for task in bundle.tasks}, {*exports})
                rest = replace(rest, tasks=tuple(task for task in bundle.tasks if task.key in kept))
            elif self._may_send(ts.processing_on.address):
                message = {"op": NARROW, "key": key, "run_id": ts.run_id, "exports": exports}
                self._scheduler.worker_send(ts.processing_on.address, message)
            self._bundles.expect({key: rest})
            if is_unsent:
                self._bundles.rewrite({key: rest})
