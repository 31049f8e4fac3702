"""Job: the tasks of a program with their durations and sizes, in graphs, without values or code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dask.order import order as dask_order
from dask.typing import Key

from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.virtual import VirtualTask
from ferroflow_dask.virtual.upstream import spec_of


@dataclass(frozen=True, slots=True)
class JobGraph:
    """Tasks that a client sends together.

    Parameters
    ----------
    tasks : mapping of key to VirtualTask
        They may depend on tasks of earlier graphs.
    wanted : tuple of key
        The tasks whose results the client wants.
    waits : bool, optional
        Whether the client sent the graph after all earlier ones had ended.
    delay_s : float, optional
        Time from the end of the earlier graphs, or from the arrival of the last one, to the arrival of this
        one at the scheduler [s]. None if the client sends it at the start; then sending it takes its time.
    knows_costs : bool, optional
        Whether the client knows the duration of each task, as of the ops of a model.
    """

    tasks: Mapping[Key, VirtualTask]
    wanted: tuple[Key, ...]
    waits: bool = False
    delay_s: float | None = None
    knows_costs: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """What a program asks of a cluster.

    Parameters
    ----------
    graphs : tuple of JobGraph
        In the order in which they arrive.
    name : str, optional
    policy : str, optional
        The policy of a recorded run.
    threads : tuple of int, optional
        Of each worker of a recorded run.
    makespan_s : float, optional
        Of a recorded run, from the arrival of the first graph to the last result [s].
    """

    graphs: tuple[JobGraph, ...]
    name: str = ""
    policy: str = ""
    threads: tuple[int, ...] = ()
    makespan_s: float | None = None
    _tasks: dict[Key, VirtualTask] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found: dict[Key, VirtualTask] = {}
        for graph in self.graphs:
            found.update(graph.tasks)
        object.__setattr__(self, "_tasks", found)
        if not found:
            raise UsageError("a job must have a task, got none")

    @property
    def tasks(self) -> Mapping[Key, VirtualTask]:
        """The tasks of all graphs."""
        return self._tasks

    @property
    def work_s(self) -> float:
        """Duration of all tasks together [s]."""
        return sum(task.duration_s for task in self._tasks.values())

    def bound_s(self, n_threads: int, speed: float = 1.0) -> float:
        """Return what no schedule is shorter than on threads of a speed [s]."""
        ends_s: dict[Key, float] = {}
        for key in in_order(self._tasks):
            task = self._tasks[key]
            before_s = max((ends_s[needed] for needed in task.dependencies), default=0.0)
            ends_s[key] = before_s + task.duration_s
        return max(*ends_s.values(), self.work_s / n_threads) / speed


def in_order(tasks: Mapping[Key, VirtualTask]) -> list[Key]:
    """Return the keys so that each comes after its dependencies, otherwise in the given order.

    Raises
    ------
    UsageError
        Tasks depend on each other in a cycle, or on one that is missing.
    """
    missing = dict.fromkeys(tasks, 0)
    readers: dict[Key, list[Key]] = {}
    for key, task in tasks.items():
        for needed in set(task.dependencies):
            if needed not in tasks:
                raise UsageError(f"dependencies of task {key!r} must be tasks of the job, got {needed!r}")
            readers.setdefault(needed, []).append(key)
            missing[key] += 1
    if all(is_before(tasks)):
        return list(tasks)
    order = [key for key, n in missing.items() if not n]
    for key in order:
        for reader in readers.get(key, ()):
            missing[reader] -= 1
            if not missing[reader]:
                order.append(reader)
    if len(order) < len(tasks):
        stuck = next(key for key, n in missing.items() if n)
        raise UsageError(f"tasks must not depend on each other in a cycle, got one with {stuck!r}")
    return order


def in_static_order(tasks: Mapping[Key, VirtualTask]) -> dict[Key, VirtualTask]:
    """Return tasks in the static order of Dask, which is that of their priorities."""
    # Numbers as keys: sets of them have the same order in every process.
    keys = sorted(tasks, key=repr)
    number = {key: n for n, key in enumerate(keys)}
    turn = dask_order(
        {n: spec_of(n, [number[one] for one in tasks[key].dependencies]) for n, key in enumerate(keys)}
    )
    by_turn = sorted(range(len(keys)), key=turn.__getitem__)
    return {keys[n]: tasks[keys[n]] for n in by_turn}


def is_before(tasks: Mapping[Key, VirtualTask]) -> Iterable[bool]:
    """Yield for each task whether its dependencies come before it."""
    seen: set[Key] = set()
    for key, task in tasks.items():
        yield seen.issuperset(task.dependencies)
        seen.add(key)
