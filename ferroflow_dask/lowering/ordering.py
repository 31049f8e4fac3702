"""The order in which Dask would run tasks, with chains and loose tasks left out of the search."""

from __future__ import annotations

from dask._task_spec import Task
from dask.order import order
from dask.typing import Key

from ferroflow_dask.lowering.fixed import Tasks

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
        key: only
        for key, (only, *others) in ((key, found) for key, found in readers.items() if found)
        if not others and n_read[only] == 1 and isinstance(tasks[key], Task)
    }
    inner = set(following.values())
    chains: dict[Key, list[Key]] = {}
    loose: list[Key] = []
    for key in tasks:
        if key in inner:
            continue
        if not (n_read[key] or readers[key]):
            loose.append(key)
            continue
        chain = [key]
        while (at := following.get(chain[-1])) is not None:
            chain.append(at)
        chains[chain[-1]] = chain
    n_linked = len(tasks) - len(loose)
    if len(chains) > _FEW * n_linked or sum(map(len, chains.values())) < n_linked:  # a circle has no first
        chains = {key: [key] for key in tasks if n_read[key] or readers[key]}
    # A chain reads what its first task reads, and goes by the name of its last, which others read.
    turn = order({last: tasks[chain[0]] for last, chain in chains.items()})
    ordered = sorted(chains, key=turn.__getitem__)
    return [key for last in ordered for key in chains[last]] + loose
