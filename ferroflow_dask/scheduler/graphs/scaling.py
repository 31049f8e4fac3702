"""Adaptive scaling: Dask limits the workers that it asks for by the number of tasks; steps count, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import dask
from dask.utils import parse_timedelta

from ferroflow_dask.bundling.sequence import bundle_in
from ferroflow_dask.scheduler.changes import Change, Guard, ItemChange
from ferroflow_dask.scheduler.graphs.bundles import Bundles

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

_NAME = "adaptive_target"
#: States of tasks that Dask counts: they can run now.
_READY = frozenset({"queued", "no-worker", "processing"})


class Scaling:
    """Asks for as many workers as the steps of bundles can use.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    bundles : Bundles
    guard : Guard
    """

    def __init__(self, scheduler: Scheduler, bundles: Bundles, guard: Guard) -> None:
        self._scheduler = scheduler
        self._bundles = bundles
        self._guard = guard

    def changes(self) -> Iterator[Change]:
        """Return the changes to the scheduler."""
        scheduler = self._scheduler
        stock: Callable[..., int] = scheduler.adaptive_target
        needed = self._guard(self._needed, default=0)

        def adaptive_target(target_duration: Any = None) -> int:
            return int(max(stock(target_duration), needed(target_duration)))

        yield ItemChange(f"Scheduler.{_NAME}", vars(scheduler), _NAME, adaptive_target)
        if _NAME in scheduler.handlers:
            yield ItemChange(f"Scheduler.handlers[{_NAME!r}]", scheduler.handlers, _NAME, adaptive_target)

    def _needed(self, target_duration: Any = None) -> int:
        """Return the workers that run all steps that are ready in the target duration, one each at most."""
        n_steps, expected_s = 0, 0.0
        for key in list(self._bundles.keys()):
            ts = self._scheduler.tasks.get(key)
            if ts is None or ts.state not in _READY:
                continue
            if (bundle := bundle_in(ts.run_spec)) is not None:
                n_steps += len(bundle.steps)
                expected_s += bundle.cost_s
        if not n_steps:
            return 0
        if target_duration is None:
            target_duration = dask.config.get("distributed.adaptive.target-duration")
        target_s: float = parse_timedelta(target_duration)
        n_threads = min(n_steps, math.ceil(expected_s / target_s))
        workers = self._scheduler.workers.values()
        n_of_each: float = sum(ws.nthreads for ws in workers) / len(workers) if workers else 1
        return math.ceil(n_threads / n_of_each)
