"""The order in which Dask would run tasks, with chains and loose tasks left out of the search."""

from __future__ import annotations

from dask._task_spec import Task
from dask.order import order
from dask.typing import Key

from ferroflow_dask.bundling.fixed import Tasks

#: Chains for each task up to which a graph is one of chains. In others Dask's order, which also goes by how
#: many tasks a result needs, is kept to the letter: results may pile up higher by another.
_FEW = 0.5


def in_order(tasks: Tasks) -> list[Key]:
    """Return the keys of a graph in the order of `dask.order`.

    That takes longer than all else that cutting a graph does. But tasks of a chain come one after the other
    anyway, so of a graph of chains it is asked where these go; and tasks that neither read nor are read go
    last, as given.

    Raises
    ------
    RuntimeError
        Tasks need each other in a circle.
    """
    readers: dict[Key, list[Key]] = {key: [] for key in tasks}
    n_read = dict.fromkeys(tasks, 0)
    for key, task in tasks.items():
        for needed in task.dependencies:
            if needed in readers:
                readers[needed].append(key)
                n_read[key] += 1
    # What is no task, Dask's order puts where it is read.
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
    has_circle = sum(map(len, chains.values())) < len(linked)  # a circle has no first task
    if has_circle or len(chains) > _FEW * len(linked):
        chains = {key: [key] for key in linked}
    # A chain reads what its first task reads, and goes by the name of its last, which others read.
    turn = order({last: tasks[chain[0]] for last, chain in chains.items()})
    ordered = [key for last in sorted(chains, key=turn.__getitem__) for key in chains[last]]
    return ordered + [key for key in tasks if key not in linked]
