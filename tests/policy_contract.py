"""What every policy keeps to, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable

from pure_policy import Cluster

from ferroflow_dask.policy import Policy
from ferroflow_dask.policy.events import Event, TaskReady, WorkerIdle
from ferroflow_dask.policy.instructions import AssignTask, Instruction, StealTask

Make = Callable[[], Policy]


ANYWHERE: dict[str, object] = {}


THERE: dict[str, object] = {"allowed": frozenset({"w1", "w3"})}


HELD: dict[str, object] = {"held": {"w1": 10**9}, "input_bytes": 10**9}


class Checked(Cluster):
    """A cluster on which no task is given to a worker that may not have it."""

    def tell(self, event: Event) -> list[Instruction]:
        given = super().tell(event)
        for instruction in given:
            match instruction:
                case AssignTask(key, worker) | StealTask(key, _, worker):
                    assert self.tasks[key].may_run_on(worker)
                    assert self.view.workers[worker].is_running
        return given

    def try_all(self, crowded: str, **more: object) -> None:
        """Let tasks become ready, arrive with a graph, and wait on a worker while others are idle."""
        n = len(self.tasks)
        self.ready(self.task(n + i, **more) for i in range(20))
        self.arrive([self.task(n + i, has_cost=True, rank_s=1.0, **more) for i in range(20, 40)])
        self.put(crowded, *(self.task(n + i, **more) for i in range(40, 80)))
        for worker in self.view.running:
            if worker.key != crowded:
                self.tell(WorkerIdle(worker.key))


def keeps_to_restrictions(make: Make) -> None:
    Checked(make()).try_all("w1", **THERE)


def gives_paused_workers_nothing(make: Make) -> None:
    cluster = Checked(make())
    cluster.view.set_running("w1", False, cluster.now)
    for more in (HELD, ANYWHERE, THERE):
        cluster.try_all("w3", **more)


def leaves_what_may_not_move(make: Make) -> None:
    cluster = Cluster(make())
    cluster.put("w0", *(cluster.task(i, is_movable=False) for i in range(40)))
    assert cluster.tell(WorkerIdle("w2")) == []


def places_nothing_without_workers(make: Make) -> None:
    cluster = Cluster(make(), workers=0)
    assert cluster.tell(TaskReady(cluster.task("a"))) == []


def decides_alike_for_equal_events(make: Make) -> None:
    def decisions() -> list[str]:
        cluster = Cluster(make())
        return cluster.ready(cluster.task(i, cost_s=1 + i % 3) for i in range(50))

    assert decisions() == decisions()


CONTRACT = (
    keeps_to_restrictions,
    gives_paused_workers_nothing,
    leaves_what_may_not_move,
    places_nothing_without_workers,
    decides_alike_for_equal_events,
)
