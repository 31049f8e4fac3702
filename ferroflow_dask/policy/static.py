"""Round robin by place in the graph, never corrected: ferroflow's baseline."""

from __future__ import annotations

from collections.abc import Iterator

from ferroflow_dask.policy.events import Event, TaskReady
from ferroflow_dask.policy.instructions import AssignTask, Instruction
from ferroflow_dask.policy.view import ClusterView


class StaticPolicy:
    """Give task i to worker i mod P, whatever it costs and whoever is idle."""

    places_queued = True

    def handle(self, event: Event, view: ClusterView, now: float) -> Iterator[Instruction]:  # noqa: ARG002 -- timeless
        """Assign a ready task; ignore everything else."""
        if isinstance(event, TaskReady):
            task = event.task
            workers = [w for w in view.running if task.may_run_on(w.key)]
            if workers:
                position = task.index % len(workers)
                yield AssignTask(
                    task.key, workers[position].key, f"task {task.index} mod {len(workers)} workers"
                )
