"""Tasks of Dask's that stay as they are: those that others look up by their key, and what they go with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dask._task_spec import Alias, DataNode, Dict, GraphNode, List, NestedContainer, Set, Task, Tuple
from dask.typing import Key

from ferroflow_dask.bundling.sequence import NO_WORK, BundleTask, ExecuteTasks, UnfusedTask, is_call

Tasks = Mapping[Key, GraphNode]

#: What may be written anew. Of other classes somebody knows more than can be seen of a task: distributed
#: finds the barrier of a P2P shuffle by its key, and reads from it what the shuffle is.
_PLAIN = frozenset({Task, UnfusedTask, BundleTask, DataNode, Alias, NestedContainer, List, Tuple, Set, Dict})

#: Functions of these packages look at the task that they run in.
_AWARE = ("distributed", "dask.graph_manipulation")


def fixed_tasks(tasks: Tasks) -> set[Key]:
    """Return the tasks that must stay as they are, under their keys: O(edges).

    Those of classes that are not known, those that read them, and whatever any of these needs: a task stays
    the same under its key only if all that it reads does.
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


def is_alone(task: GraphNode) -> bool:
    """Return whether a task is put together with no others."""
    if isinstance(task, NO_WORK):
        return False
    if not is_call(task) or task.data_producer or isinstance(task.func, ExecuteTasks):
        return True
    return any(_module(part).startswith(_AWARE) for part in _parts(task))


def _module(task: Task) -> str:
    return getattr(task.func, "__module__", None) or ""


def _parts(task: Task) -> Iterator[Task]:
    """Yield a task, or the tasks that Dask has fused to it."""
    if task.has_subgraph():
        for part in task.args[0].values():
            if isinstance(part, Task):
                yield from _parts(part)
    else:
        yield task
