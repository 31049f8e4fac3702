"""Tasks that must not be bundled or rewritten: Dask looks them up by key or inspects them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from inspect import iscoroutinefunction
from typing import Any

from dask._task_spec import Alias, DataNode, Dict, GraphNode, List, NestedContainer, Set, Task, Tuple
from dask.typing import Key

from ferroflow_dask.bundling.sequence import NO_WORK, ExecuteTasks, is_call

Tasks = Mapping[Key, GraphNode]

#: Task classes that may be rewritten. Other classes carry more than a function and arguments: distributed
#: finds the barrier task of a P2P shuffle by its key and reads the shuffle's specification from it.
_PLAIN = frozenset({Task, DataNode, Alias, NestedContainer, List, Tuple, Set, Dict})

#: Functions of these packages inspect the task that they run in.
_AWARE = ("distributed", "dask.graph_manipulation")


def fixed_tasks(tasks: Tasks) -> set[Key]:
    """Return the keys of the tasks that must not be rewritten; O(edges).

    These are tasks of unknown classes, their dependents, and all tasks that any of these depends on: a task
    means the same under its key only if its dependencies do.
    """
    special = {key for key, task in tasks.items() if type(task) not in _PLAIN}
    if not special:
        return set()
    readers = {key for key, task in tasks.items() if not special.isdisjoint(task.dependencies)}
    fixed = special | readers
    stack = list(fixed)
    while stack:
        new = [key for key in tasks[stack.pop()].dependencies if key in tasks and key not in fixed]
        fixed.update(new)
        stack += new
    return fixed


def lone_tasks(tasks: Tasks) -> set[Key]:
    """Return the keys of the tasks that must not share a bundle with others."""
    # By the ids of functions, which the tasks keep alive: there are few, and some take long to look at.
    aware: dict[int, bool] = {}
    found = set()
    for key, task in tasks.items():
        if isinstance(task, NO_WORK):
            continue
        if not is_call(task) or isinstance(task.func, ExecuteTasks):
            found.add(key)
            continue
        for part in _parts(task) if task.has_subgraph() else (task,):
            function = part.func
            is_aware = aware.get(id(function))
            if is_aware is None:
                is_aware = aware[id(function)] = _is_aware(function)
            if is_aware:
                found.add(key)
    return found


def _is_aware(function: Callable[..., Any]) -> bool:
    module = getattr(function, "__module__", None) or ""
    # Coroutines run on the workers' event loops; a bundle could not await them.
    return module.startswith(_AWARE) or iscoroutinefunction(function)


def _parts(task: Task) -> Iterator[Task]:
    """Yield a task, or the tasks that Dask has fused into it."""
    if task.has_subgraph():
        for part in task.args[0].values():
            if isinstance(part, Task):
                yield from _parts(part)
    else:
        yield task
