"""Uniform random placement, never corrected: the baseline that any policy has to beat."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ferroflow_dask.counts import checked_count
from ferroflow_dask.policy.events import Event, TaskReady
from ferroflow_dask.policy.instructions import AssignTask, Instruction
from ferroflow_dask.policy.view import ClusterView


class RandomPolicy:
    """Give each task to a worker drawn from a seeded generator.

    Parameters
    ----------
    seed : int, optional

    Raises
    ------
    UsageError
        The seed is negative, or no whole number.
    """

    places_queued = True

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(checked_count("seed", seed))

    def handle(self, event: Event, view: ClusterView, now: float) -> Iterator[Instruction]:  # noqa: ARG002 -- timeless
        """Assign a ready task; ignore everything else."""
        if isinstance(event, TaskReady):
            task = event.task
            workers = [w for w in view.running if task.may_run_on(w.key)]
            if workers:
                worker = workers[int(self._rng.integers(len(workers)))]
                yield AssignTask(task.key, worker.key, "drawn at random")
