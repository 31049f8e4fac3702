"""Working sets: tasks that ended a worker together run one after another.

Dask starts as many tasks on a worker as it has threads, however much memory they take. If that ends the
worker, Dask runs the same tasks again in the same way, until it gives up (`KilledWorker`). Here the prefixes
of the tasks that ran get the whole memory of a worker as a resource of their messages: Dask's worker starts
one of them at a time. The first that runs alone is measured. From then on as many run together as fit. This
follows TaskVine, which learns the resources of categories of tasks (Sly-Delgado et al., "TaskVine: Managing
In-Cluster Storage for High-Throughput Data Intensive Workflows", 2023).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dask.utils import key_split

from ferroflow_dask.bundling.sequence import bundle_in
from ferroflow_dask.scheduler.changes import Change
from ferroflow_dask.scheduler.core import Core, Gauge
from ferroflow_dask.scheduler.features.base import Feature
from ferroflow_dask.scheduler.features.working_sets_worker import RESOURCE, TOPIC, WorkingSetsEnd
from ferroflow_dask.scheduler.remote import Remote

if TYPE_CHECKING:
    from distributed.scheduler import TaskState, WorkerState

logger = logging.getLogger("ferroflow_dask")

#: Topic by which a nanny reports that it ends a worker for its memory.
_ENDED_FOR_MEMORY = "worker-restart-memory"
#: A worker that is gone was ended for its memory if its last heartbeat told of more than this part of it.
_FULL = 0.7
#: A measured working set counts so many times: the next one may be larger.
_MARGIN = 1.2
#: Prefixes that are remembered.
_KEPT = 1000


class WorkingSets(Feature):
    """Limits how many tasks run at once on a worker, if too many have ended one."""

    name = "working_sets"
    summary = "Tasks that ended a worker by their memory run one at a time, then as many as fit"
    reason = "programs end that stock Dask gives up: `tests/scheduler/test_working_sets.py`"

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.remote = Remote(core, WorkingSetsEnd, joined=self._announced)
        # Workers with memory as a resource.
        self._ready: set[str] = set()
        self._has_announced = False
        # Memory that a task of a prefix needs [B]; infinite if it is not measured yet.
        self._needs: dict[str, float] = {}
        self.filtered = self._needs
        # Workers that their nannies end.
        self._dying: set[str] = set()
        self._n_deaths = 0

    def state(self) -> dict[str, float]:
        """Return what is known of prefixes."""
        return self._needs

    def inherit(self, state: dict[str, float]) -> None:
        """Take over what is known of prefixes."""
        self._needs.update(state)

    def changes(self) -> Iterable[Change]:
        """Have memory as a resource on workers."""
        yield self.remote

    def counts(self) -> Mapping[str, int]:
        """Return the number of workers that were ended for their memory."""
        return {"deaths": self._n_deaths}

    def gauges(self) -> Mapping[str, Gauge]:
        """Return how many prefixes are limited."""
        return {"limited_prefixes": ("prefixes whose tasks need memory as a resource", len(self._needs))}

    def _announced(self, address: str) -> None:
        self._has_announced = True
        self._ready.add(address)

    def add_worker(self, address: str) -> None:
        """Rely on the end of a worker that joins: it is opened before the worker takes its first task.

        Its announcement comes later. One of another worker shows that ends can be opened.
        """
        if self._has_announced and self.remote.is_on_new_workers:
            self._ready.add(address)

    def remove_worker(self, address: str) -> None:
        """Forget a worker."""
        self._ready.discard(address)

    def log_event(self, topic: str, msg: dict[str, Any]) -> None:
        """Learn which worker a nanny ends, and what measured tasks took."""
        if topic == _ENDED_FOR_MEMORY:
            self._dying.add(str(msg["worker"]))
        elif topic == TOPIC:
            self._measured(msg["prefix"], msg["nbytes"])

    def worker_dies(self, address: str) -> None:
        """Give the tasks that ran on a worker without memory a whole worker each next time."""
        ws = self.core.scheduler.workers[address]
        is_full = ws.metrics.get("memory", 0) > _FULL * ws.memory_limit > 0
        if not (is_full or address in self._dying) or address not in self.core.view.workers:
            return
        self._dying.discard(address)
        self._n_deaths += 1
        for task in self.core.view.workers[address].queue[: ws.nthreads]:
            # The tasks of a bundle run one by one after a death.
            if task.has_started and not task.is_bundle:
                prefix = key_split(task.key)
                if prefix not in self._needs:
                    logger.warning(
                        "ferroflow: worker %s was ended for its memory; tasks %s run one at a time until one "
                        "is measured",
                        ws.name,
                        prefix,
                    )
                self._needs[prefix] = math.inf
        while len(self._needs) > _KEPT:
            del self._needs[next(iter(self._needs))]

    def _measured(self, prefix: str, nbytes: int) -> None:
        if prefix in self._needs:
            known, need = self._needs[prefix], _MARGIN * nbytes
            self._needs[prefix] = need if known == math.inf else max(known, need)

    def message(self, ts: TaskState, ws: WorkerState, message: dict[str, Any]) -> dict[str, Any]:
        """Add memory to the resources that a task needs; called only if something is known."""
        need = max((self._needs.get(prefix, 0.0) for prefix in _prefixes(ts)), default=0.0)
        if need and ws.memory_limit and ws.address in self._ready:
            amount = min(need, ws.memory_limit)
            message["resource_restrictions"] = {**(ts.resource_restrictions or {}), RESOURCE: amount}
        return message


def _prefixes(ts: TaskState) -> Iterator[str]:
    bundle = bundle_in(ts.run_spec)
    if bundle is None:
        yield ts.prefix.name
    else:
        yield from map(key_split, bundle.keys)
