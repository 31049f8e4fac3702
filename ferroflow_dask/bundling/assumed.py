"""Assumed durations: which tasks of unknown prefixes take about as long as their data let expect."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dask._task_spec import GraphNode
from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.bundling.isolation import Isolation
from ferroflow_dask.bundling.sequence import NO_WORK


def assumed_tasks(tasks: Mapping[Key, GraphNode], prefixes: Collection[str]) -> set[Key]:
    """Return the tasks of some prefixes that read data and call library functions only; O(their arguments).

    A task that reads no other one is left out: it may read a file, or compute as much as its arguments say.

    Parameters
    ----------
    tasks : mapping of Key to GraphNode
    prefixes : collection of str
        Those of which nothing is known.
    """
    if not prefixes:
        return set()
    isolation = Isolation()
    return {
        key
        for key, task in tasks.items()
        if key_split(key) in prefixes and task.dependencies and isolation.calls_library_only(task)
    }


def assumed_prefixes(tasks: Mapping[Key, GraphNode], unknown: Mapping[str, int], fewer: int) -> set[str]:
    """Return the unknown prefixes of which all tasks that do some work have assumed durations.

    Parameters
    ----------
    tasks : mapping of Key to GraphNode
    unknown : mapping of str to int
        The unknown prefixes, with the number of their tasks.
    fewer : int
        Of prefixes with so many tasks, the durations are worth a sample.
    """
    found = {prefix for prefix, n in unknown.items() if n < fewer}
    if not found:
        return found
    assumed = assumed_tasks(tasks, found)
    others = (key for key, task in tasks.items() if key not in assumed and not isinstance(task, NO_WORK))
    return found.difference(map(key_split, others))
