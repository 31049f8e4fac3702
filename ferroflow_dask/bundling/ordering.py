"""Orders of tasks that are the same in every process.

Sets of strings have another order in each process, and `order` and `cull` of Dask iterate over sets of keys.
So this package sorts the keys of a set by their texts, and takes the order of tasks from their mapping.
"""

from __future__ import annotations

from collections.abc import Collection

from dask._task_spec import DataNode, GraphNode, Task, cull
from dask.order import order
from dask.typing import Key

from ferroflow_dask.bundling.fixed import Tasks

#: Ratio of chains to tasks up to which each chain is ordered as one node. In other graphs the order is
#: exactly Dask's, which also considers how many tasks need a result: another order may use more memory.
_FEW = 0.5


class _Numbered(GraphNode):
    """Stands for a task whose key is a number, and has its dependencies only."""

    __slots__ = ()


def needed_by(wanted: Collection[Key], tasks: dict[Key, GraphNode]) -> dict[Key, GraphNode]:
    """Return the tasks that some keys need, in the given order."""
    needed = cull(tasks, wanted)
    return {key: task for key, task in tasks.items() if key in needed}


def dependents_of(keys: Collection[Key], tasks: Tasks) -> set[Key]:
    """Return the tasks that depend on some keys, directly or not; O(edges)."""
    readers: dict[Key, list[Key]] = {}
    for key, task in tasks.items() if keys else ():
        for needed in task.dependencies:
            readers.setdefault(needed, []).append(key)
    found: set[Key] = set()
    stack = list(keys)
    while stack:
        new = [key for key in readers.get(stack.pop(), ()) if key not in found]
        found.update(new)
        stack += new
    return found


def static_order(tasks: Tasks) -> dict[Key, int]:
    """Return the position of each task by `dask.order`, with numbers as keys.

    Dask breaks ties by the texts of keys, and by the order of sets. The texts of the numbers compare as those
    of the keys, and sets of numbers have the same order in every process.

    Raises
    ------
    RuntimeError
        Tasks depend on each other in a cycle.
    """
    keys = sorted({key for task in tasks.values() for key in task.dependencies}.union(tasks), key=str)
    number = {key: n for n, key in enumerate(keys, 10 ** len(str(len(keys))))}
    data, nodes = DataNode(0, None), dict[Key, GraphNode]()
    for key, task in tasks.items():
        node: GraphNode = data
        if not isinstance(task, DataNode):
            node = _Numbered()
            node._dependencies = frozenset(sorted(map(number.__getitem__, task.dependencies)))
        nodes[number[key]] = node
    try:
        turn = order(nodes)
    except RuntimeError:
        order(tasks)  # raises the error with the keys
        raise
    return {key: turn[number[key]] for key in tasks}


def in_order(tasks: Tasks) -> list[Key]:
    """Return the keys of a graph in the order of `dask.order`.

    `dask.order` takes longer than all other steps of bundling together. The tasks of a chain follow each
    other anyway, so in a graph of chains only the chains are ordered. Tasks without dependencies and
    dependents come last, in the given order.

    Raises
    ------
    RuntimeError
        Tasks depend on each other in a cycle.
    """
    readers: dict[Key, list[Key]] = {key: [] for key in tasks}
    n_read = dict.fromkeys(tasks, 0)
    for key, task in tasks.items():
        for needed in task.dependencies:
            if needed in readers:
                readers[needed].append(key)
                n_read[key] += 1
    # `dask.order` puts data nodes where they are read.
    following = {
        key: found[0]
        for key, found in readers.items()
        if len(found) == 1 and n_read[found[0]] == 1 and isinstance(tasks[key], Task)
    }
    inner = set(following.values())
    linked = {key: None for key in tasks if n_read[key] or readers[key]}
    chains: dict[Key, list[Key]] = {}
    for key in linked:
        if key not in inner:
            chain = [key]
            while chain[-1] in following:
                chain.append(following[chain[-1]])
            chains[chain[-1]] = chain
    has_circle = sum(map(len, chains.values())) < len(linked)  # a cycle has no first task
    if has_circle or len(chains) > _FEW * len(linked):
        chains = {key: [key] for key in linked}
    # A chain has the dependencies of its first task, and the key of its last one, which other tasks read.
    turn = static_order({last: tasks[chain[0]] for last, chain in chains.items()})
    ordered = [key for last in sorted(chains, key=turn.__getitem__) for key in chains[last]]
    return ordered + [key for key in tasks if key not in linked]
