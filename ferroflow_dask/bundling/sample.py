"""Sample of a graph: a few tasks of each unknown prefix, run first so that the others can be bundled."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Container

from dask.core import toposort
from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.bundling.assumed import assumed_prefixes
from ferroflow_dask.bundling.fixed import Tasks
from ferroflow_dask.bundling.sequence import NO_WORK

#: Tasks of unknown prefixes for each thread below which they cost less than to wait for a sample.
MANY = 8
#: Tasks of a prefix for each thread: the first one in a process often takes longer, for imports and caches.
_WAVES = 2
#: Part of a graph that a sample may be.
_MOST = 0.2


def sample_of(
    tasks: Tasks,
    known: Container[str],
    n_threads: int,
    *,
    not_now: Collection[Key] = frozenset(),
) -> set[Key]:
    """Return the tasks that should run first, with all that they read; O(tasks + edges).

    Parameters
    ----------
    tasks : mapping of Key to GraphNode
        Dependencies that are not in it exist already.
    known : container of str
        Prefixes of which durations are known, or that are not bundled anyway. Those of which durations can be
        assumed count as known.
    n_threads : int
    not_now : collection of Key, optional
        Tasks that cannot run in a sample, nor can those that read them.

    Returns
    -------
    set of Key
        Empty if a sample does not pay.
    """
    prefixes = {key: key_split(key) for key, task in tasks.items() if not isinstance(task, NO_WORK)}
    n_unknown = {prefix: n for prefix, n in Counter(prefixes.values()).items() if prefix not in known}
    unknown_prefixes = n_unknown.keys() - assumed_prefixes(tasks, n_unknown, MANY * n_threads)
    if not unknown_prefixes:
        return set()
    unknown = {key: prefix for key, prefix in prefixes.items() if prefix in unknown_prefixes}
    if len(unknown) < MANY * n_threads:
        return set()
    ready = _ready(tasks, not_now)
    by_prefix: dict[str, list[Key]] = {}
    for key in ready:
        if key in unknown:
            by_prefix.setdefault(unknown[key], []).append(key)
    most = max(int(_MOST * len(tasks)), MANY)
    sample: set[Key] = set()
    n_sampled = Counter[str]()
    # In turns, the last prefixes first: what their tasks read is in the sample already when its turn comes.
    turns = deque(
        (prefix, iter(keys)) for prefix, keys in reversed(by_prefix.items()) if len(keys) > 2 * n_threads
    )
    while turns:
        prefix, keys = turns.popleft()
        chosen = next((key for key in keys if key not in sample), None)
        if chosen is None or n_sampled[prefix] >= _WAVES * n_threads:
            continue
        new = _closure(chosen, tasks, sample, most - len(sample))
        if new:
            sample |= new
            n_sampled.update(unknown[one] for one in new if one in unknown)
            turns.append((prefix, keys))
    return sample


def _ready(tasks: Tasks, not_now: Collection[Key]) -> dict[Key, None]:
    """Return the tasks that can run in a sample, dependencies first."""
    position = {key: i for i, key in enumerate(tasks)}
    dependencies = {
        key: sorted([one for one in task.dependencies if one in tasks], key=position.__getitem__)
        for key, task in tasks.items()
    }
    blocked, ready = set(not_now), dict[Key, None]()
    for key in toposort(tasks, dependencies):
        if key in blocked or not blocked.isdisjoint(tasks[key].dependencies):
            blocked.add(key)
        else:
            ready[key] = None
    return ready


def _closure(key: Key, tasks: Tasks, present: set[Key], most: int) -> set[Key]:
    """Return a task and all that it reads; nothing if these are too many."""
    found, stack = {key}, [key]
    while stack:
        one = stack.pop()
        if len(found) > most:
            return set()
        new = [needed for needed in tasks[one].dependencies if needed in tasks and needed not in present]
        stack += [needed for needed in new if needed not in found]
        found.update(new)
    return found if len(found) <= most else set()
