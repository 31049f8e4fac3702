"""What is learned on a scheduler: it outlives the shell that has learned it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ferroflow_dask.plugin.durations import Durations
from ferroflow_dask.plugin.slots import RoundTrip
from ferroflow_dask.policy.learned import Transfers

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What tasks are like, and the network.

    Not how fast workers are, nor how late they answer, which may be of the moment.
    """

    durations: Durations = field(default_factory=Durations)
    transfers: Transfers = field(default_factory=Transfers)
    round_trip: RoundTrip = field(default_factory=RoundTrip)


_of_schedulers: WeakKeyDictionary[Any, Knowledge] = WeakKeyDictionary()


def knowledge_of(scheduler: Scheduler) -> Knowledge:
    """Return what was learned on a scheduler, by whichever shells it has had."""
    return _of_schedulers.setdefault(scheduler, Knowledge())


def learned_in_this_process(scheduler_id: str) -> dict[str, tuple[float, float]]:
    """Return `Durations.by_name` of a scheduler of that id in this process, empty if there is none."""
    scheduler = _in_this_process(scheduler_id)
    return {} if scheduler is None else _of_schedulers[scheduler].durations.by_name()


def threads_in_this_process(scheduler_id: str) -> tuple[int, ...]:
    """Return the threads of each worker that such a scheduler has now."""
    scheduler = _in_this_process(scheduler_id)
    return () if scheduler is None else tuple(ws.nthreads for ws in scheduler.workers.values())


def _in_this_process(scheduler_id: str) -> Scheduler | None:
    # Virtual ones are nobody's to find.
    return next((one for one in list(_of_schedulers) if getattr(one, "id", None) == scheduler_id), None)
