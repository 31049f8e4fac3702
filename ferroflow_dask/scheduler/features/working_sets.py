"""Working sets: tasks that ended workers together run one after another.

Dask starts as many tasks on a worker as it has threads, however much memory they take. If that ends the
worker, Dask runs the same tasks again in the same way, until it gives up (`KilledWorker`). Here the prefixes
of tasks that ran at two such deaths get the whole memory of a worker as a resource of their messages: Dask's
worker starts one of them at a time. The first that runs alone is measured. From then on as many run together
as fit. This follows TaskVine, which learns the resources of categories of tasks (Sly-Delgado et al.,
"TaskVine: Managing In-Cluster Storage for High-Throughput Data Intensive Workflows", 2023).

One death is not enough. Another task may only have waited while one took the memory. If it ran alone, too, it
might wait for ever for a task of its own prefix.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.scheduler.changes import Change
from ferroflow_dask.scheduler.core import Core, Gauge
from ferroflow_dask.scheduler.cost_model import keep
from ferroflow_dask.scheduler.features.base import Feature
from ferroflow_dask.scheduler.features.working_sets_worker import RESOURCE, TOPIC, WHOLE, WorkingSetsEnd
from ferroflow_dask.scheduler.remote import Remote

if TYPE_CHECKING:
    from distributed.scheduler import TaskState, WorkerState

    from ferroflow_dask.policy import TaskView

logger = logging.getLogger("ferroflow_dask")

#: Topic by which a nanny reports that it ends a worker for its memory.
_ENDED_FOR_MEMORY = "worker-restart-memory"
#: If the last heartbeat of a dead worker reported more than this part of its memory, memory ended the worker.
#: Workers pause above this part.
_FULL = 0.8
#: Deaths after which a prefix is limited.
_DEATHS = 2
#: A measured working set counts so many times: the next one may be larger.
_MARGIN = 1.2
#: After a death in spite of a measured limit, so many times as many tasks are measured before the next limit.
_TIMES_MORE = 8
#: So many deaths are not blamed on a task that waited for memory, as far as the scheduler knows.
_SPARED = 8


class WorkingSets(Feature):
    """Limits how many tasks run at once on a worker, if too many have ended one."""

    name = "working_sets"
    summary = "Tasks that ended a worker by their memory run one at a time, then as many as fit"
    reason = "programs end that stock Dask gives up: `tests/scheduler/test_working_sets.py`"

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.remote = Remote(core, WorkingSetsEnd)
        self._learned = _Learned()
        self.filtered = self._learned.limited
        # Workers that their nannies end.
        self._dying: set[str] = set()
        self._n_deaths = 0

    def state(self) -> _Learned:
        """Return the deaths and limits of prefixes."""
        return self._learned

    def inherit(self, state: _Learned) -> None:
        """Take over the deaths and limits of prefixes."""
        self._learned.limited.update(state.limited)
        self._learned.deaths.update(state.deaths)

    def changes(self) -> Iterable[Change]:
        """Have memory as a resource on workers."""
        yield self.remote

    def counts(self) -> Mapping[str, int]:
        """Return the number of workers that were ended for their memory."""
        return {"deaths": self._n_deaths}

    def gauges(self) -> Mapping[str, Gauge]:
        """Return how many prefixes are limited."""
        n_limited = len(self._learned.limited)
        return {"limited_prefixes": ("prefixes whose tasks need memory as a resource", n_limited)}

    def remove_worker(self, address: str) -> None:
        """Forget a worker."""
        self._dying.discard(address)

    def log_event(self, topic: str, msg: dict[str, Any]) -> None:
        """Handle the report of a nanny that ends a worker, or of a worker that has measured a task."""
        if topic == _ENDED_FOR_MEMORY:
            self._dying.update(self.core.view.workers.keys() & {str(msg.get("worker"))})
        elif topic == TOPIC:
            limit, nbytes = self._learned.limited.get(str(msg.get("prefix"))), msg.get("nbytes")
            if limit is not None and isinstance(nbytes, int):
                limit.measured(nbytes)

    def worker_dies(self, address: str) -> Collection[Key]:
        """Record the tasks that ran on a worker, if memory ended it; return those that waited for memory."""
        ws = self.core.scheduler.workers[address]
        is_full = ws.metrics.get("memory", 0) > _FULL * ws.memory_limit > 0
        if not (is_full or address in self._dying) or address not in self.core.view.workers:
            return ()
        self._n_deaths += 1
        running, waiting = self._divided(ws)
        # The tasks of a bundle run one by one after a death.
        prefixes = {key_split(one.key) for one in running if not one.is_bundle}
        for prefix in prefixes:
            if self._learned.died(prefix):
                # Only single tasks are measured.
                self.core.learned.separate.add(prefix)
                logger.warning(
                    "ferroflow: tasks %s ran on workers that were ended for their memory, the last one %s; "
                    "they run one at a time until one is measured",
                    prefix,
                    ws.name,
                )
        return [key for key in waiting if self._learned.spares(key)]

    def _divided(self, ws: WorkerState) -> tuple[list[TaskView], list[Key]]:
        """Return the tasks that probably run on a worker, and those that wait for memory.

        The view does not know of limits: others run while tasks of a limited prefix wait for memory.
        """
        queue, free = self.core.view.workers[ws.address].queue, WHOLE
        n_started = sum(one.has_started for one in queue[: ws.nthreads])
        running: list[TaskView] = []
        waiting: list[Key] = []
        for task in queue:
            limit = self._learned.limited.get(key_split(task.key))
            needed = limit.part_of(ws.memory_limit) if limit is not None and ws.memory_limit else 0
            if needed > free:
                waiting.append(task.key)
            elif len(running) < n_started:
                free -= needed
                running.append(task)
        return running, waiting

    def message(self, ts: TaskState, ws: WorkerState, message: dict[str, Any]) -> dict[str, Any]:
        """Add memory to the resources that a task needs; called only if a prefix is limited."""
        limited = self._learned.limited.get(ts.prefix.name)
        if limited is not None and ws.memory_limit and self.remote.has_end(ws.address):
            amount = limited.part_of(ws.memory_limit)
            message["resource_restrictions"] = {**(ts.resource_restrictions or {}), RESOURCE: amount}
        return message


@dataclass(slots=True)
class _Limit:
    """Memory that each task of a prefix gets.

    Parameters
    ----------
    nbytes : int
        The largest measured working set [B].
    n_measured : int
    n_needed : int
        A task gets a whole worker until so many are measured.
    """

    nbytes: int = 0
    n_measured: int = 0
    n_needed: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether each task gets the whole memory of a worker."""
        return self.n_measured < self.n_needed

    def measured(self, nbytes: int) -> None:
        """Record the memory of a task that ran alone [B]."""
        self.nbytes = max(self.nbytes, nbytes)
        self.n_measured += 1

    def failed(self) -> None:
        """Have more tasks measured: those that were measured take less than others."""
        self.n_needed = _TIMES_MORE * max(self.n_needed, self.n_measured)

    def part_of(self, limit: int) -> int:
        """Return the part of a worker's memory that a task gets; `WHOLE` is all."""
        part = math.ceil(WHOLE * _MARGIN * self.nbytes / limit)
        # Only tasks that get a part are measured.
        return WHOLE if self.is_whole else min(WHOLE, max(part, 1))


@dataclass(slots=True)
class _Learned:
    """Deaths at which tasks of a prefix ran, and the prefixes that are limited; the oldest are forgotten.

    Tasks that waited for memory at deaths are counted, too.
    """

    deaths: OrderedDict[str, int] = field(default_factory=OrderedDict)
    limited: OrderedDict[str, _Limit] = field(default_factory=OrderedDict)
    spared: OrderedDict[Key, int] = field(default_factory=OrderedDict)

    def spares(self, key: Key) -> bool:
        """Return whether a task that seems to have waited is not blamed for a death: this may be wrong."""
        self.spared[key] = n = self.spared.get(key, 0) + 1
        keep(self.spared, key)
        return n <= _SPARED

    def died(self, prefix: str) -> bool:
        """Record a death while a task of a prefix ran; return whether the prefix gets a whole worker now."""
        self.deaths[prefix] = n = self.deaths.get(prefix, 0) + 1
        keep(self.deaths, prefix)
        if n < _DEATHS:
            return False
        limit = self.limited.setdefault(prefix, _Limit())
        keep(self.limited, prefix)
        was_whole = limit.is_whole
        if not was_whole:
            limit.failed()
        return n == _DEATHS or not was_whole
