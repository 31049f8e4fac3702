"""A policy and its view of a cluster as pure objects, and what it decides carried out at once."""

from __future__ import annotations

from collections.abc import Iterable

from ferroflow_dask.policy import ClusterView, Policy, TaskView, make_policy
from ferroflow_dask.policy.events import Event, GraphArrived, TaskReady, WorkerJoined
from ferroflow_dask.policy.instructions import AssignTask, DeclineSteal, Instruction, SetPriority, StealTask


class Cluster:
    """A view and a policy, with instructions carried out as the plugin must: each before the next."""

    def __init__(self, policy: Policy, workers: int = 4, nthreads: int = 1, latency_s: float = 1e-3) -> None:
        self.policy = policy
        self.view = ClusterView(bandwidth=1e8, latency_s=latency_s)
        self.tasks: dict[object, TaskView] = {}
        self.declined: list[DeclineSteal] = []
        self.now = 0.0
        for i in range(workers):
            self.view.add_worker(f"w{i}", nthreads)
            self.tell(WorkerJoined(f"w{i}"))

    def task(self, key: object, cost_s: float = 1.0, **more: object) -> TaskView:
        index = len(self.tasks)
        self.tasks[key] = TaskView(key, cost_s, more.pop("priority", (0, 1, index)), index=index, **more)  # type: ignore[arg-type]
        return self.tasks[key]

    def tell(self, event: Event) -> list[Instruction]:
        given: list[Instruction] = []
        for instruction in self.policy.handle(event, self.view, self.now):
            match instruction:
                case DeclineSteal():
                    self.declined.append(instruction)
                    continue
                case AssignTask(key, worker) | StealTask(key, _, worker):
                    self.view.assign(self.tasks[key], worker, self.now)
                case SetPriority(key, order):
                    self.tasks[key].priority = (*self.tasks[key].priority[:-1], order)
            given.append(instruction)
        return given

    def ready(self, tasks: Iterable[TaskView]) -> list[str]:
        """Return the workers that get the tasks, in order."""
        chosen = []
        for task in tasks:
            (instruction,) = self.tell(TaskReady(task))
            assert isinstance(instruction, AssignTask)
            chosen.append(instruction.worker)
        return chosen

    def arrive(self, tasks: list[TaskView]) -> list[Instruction]:
        return self.tell(GraphArrived(tuple(tasks)))

    def put(self, worker: str, *tasks: TaskView) -> None:
        for task in tasks:
            self.view.assign(task, worker, self.now)


def ferroflow(**options: object) -> Cluster:
    return Cluster(make_policy("ferroflow", **options))


def steals(instructions: list[Instruction]) -> list[object]:
    assert all(isinstance(i, StealTask) for i in instructions)
    return [i.key for i in instructions]
