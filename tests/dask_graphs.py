"""Dask graphs of collections, and functions to bundle and to run them, shared by tests."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import numpy as np
from dask._task_spec import GraphNode, Task, TaskRef, convert_legacy_graph
from dask.core import flatten

from ferroflow_dask.bundling.averages import Averages
from ferroflow_dask.bundling.graphs import BundledGraph
from ferroflow_dask.bundling.results import VALUE, Place
from ferroflow_dask.cluster_profile import ClusterProfile

FOUR = ClusterProfile((1,) * 4)
#: How often `combine` ran, by its first argument.
CALLS: Counter[Any] = Counter()

Graph = dict[Any, GraphNode]


class Known(dict[str, Averages]):
    """The same averages for all task prefixes, except those of some prefixes.

    Parameters
    ----------
    duration_s : float
        Duration of a task [s].
    nbytes : float, optional
        Size of a result [B].
    except_for : mapping of str to Averages, optional
        Averages of some prefixes; None if nothing is known of one.
    """

    def __init__(
        self,
        duration_s: float,
        nbytes: float = 0.0,
        except_for: Mapping[str, Averages | None] | None = None,
    ) -> None:
        super().__init__()
        self._averages = Averages(duration_s, nbytes)
        self._except_for = except_for or {}

    def get(self, name: Any, default: Any = None) -> Any:
        """Return the averages of a prefix."""
        found = self._except_for.get(name, self._averages)
        return default if found is None else found


def combine(key: Any, *values: int) -> int:
    """Count the call and return 1 plus the sum of the values."""
    CALLS[key] += 1
    return sum(values) + 1


def chain(name: str, first: Task, n: int) -> dict[str, Task]:
    """Return a task and `n` more, each of which reads the one before."""
    tasks = {first.key: first}
    for i in range(n):
        key = f"{name}-{i}"
        tasks[key] = Task(key, combine, i, TaskRef([*tasks][-1]))
    return tasks


def tree(height: int) -> Any:
    """Return a delayed binary tree of `2 ** (height + 1) - 1` tasks."""
    level = [dask.delayed(combine)(i, i) for i in range(2**height)]
    while len(level) > 1:
        level = [dask.delayed(combine)(None, *level[i : i + 2]) for i in range(0, len(level), 2)]
    return level[0]


def _total(key: int, values: list[int]) -> tuple[int, int]:
    return key, sum(values)


def _zipped() -> Any:
    read = db.from_sequence(range(20), npartitions=4).map(lambda x: x + 1)
    return db.zip(read.map(lambda x: 2 * x), read.map(lambda x: 3 * x))


#: Collections by description.
COLLECTIONS: dict[str, Callable[[], Any]] = {
    "array": (da.ones((60, 60), chunks=10) + 1).sum,
    "chunks": lambda: da.arange(100, chunks=10) * 2,
    "two axes": lambda: da.random.default_rng(1).random((40, 40), chunks=8).T.dot(da.ones((40, 8), chunks=8)),
    "bag": lambda: db.from_sequence(range(100), npartitions=20).map(lambda x: x + 1).filter(bool).sum(),
    "delayed": lambda: tree(6),
    "overlaps": lambda: da.arange(400, chunks=20).map_overlap(np.cumsum, depth=3, boundary="periodic"),
    "slices": lambda: da.stack([da.arange(60, chunks=7)[i::2] for i in range(2)]).rechunk(4).cumsum(axis=1),
    "lines of delayed": lambda: (
        db.from_delayed([dask.delayed(range)(i) for i in range(20)]).repartition(7).fold(operator.add)
    ),
    "groups of a bag": lambda: (
        db.from_sequence(range(60), npartitions=12).groupby(lambda x: x % 5, shuffle="tasks").starmap(_total)
    ),
    "bag read twice": _zipped,
}


def graph_of(collection: Any) -> tuple[Graph, list[Any]]:
    """Return the tasks of a collection and the wanted keys, as they arrive on a scheduler."""
    is_expression = hasattr(type(collection), "optimize")
    optimized = collection.optimize() if is_expression else dask.optimize(collection)[0]
    keys = list(flatten(optimized.__dask_keys__()))
    return convert_legacy_graph(dict(optimized.__dask_graph__())), keys


def delivered_keys(found: BundledGraph) -> set[Any]:
    """Return the keys whose values bundles deliver: their tasks need not run."""
    return {key for bundle in found.bundles.values() for key in bundle.delivered}


def inner_keys(found: BundledGraph) -> set[frozenset[Any]]:
    """Return the keys of the tasks in each bundle."""
    delivered = delivered_keys(found)
    bundles = [bundle for key, bundle in found.bundles.items() if key not in delivered]
    return {frozenset(task.key for task in bundle.tasks) for bundle in bundles}


def assert_consistent(
    tasks: Graph, wanted: set[Any], found: BundledGraph, places: Mapping[Any, Place] | None = None
) -> None:
    """Check a bundled graph: each needed task is in it once, wanted keys stay, each change is noted."""
    places = places or {}
    assert wanted <= found.tasks.keys()
    assert found.bundles.keys() <= found.tasks.keys()
    plain = found.tasks.keys() - found.bundles.keys()
    assert all(found.tasks[key] is tasks[key] for key in plain)
    delivered = delivered_keys(found)
    assert delivered <= wanted
    bundles = {key: bundle for key, bundle in found.bundles.items() if key not in delivered}
    for key in delivered:
        ((read, (holder, item)),) = found.bundles[key].places.items()
        assert read == (VALUE, key)
        assert found.tasks[key].dependencies == {holder}
        assert found.bundles[holder].exports[item] == key
    inside = Counter(task.key for bundle in bundles.values() for task in bundle.tasks)
    inside.update(plain)
    assert set(inside.values()) <= {1}
    assert inside.keys() <= tasks.keys()
    outside = {key for task in tasks.values() for key in task.dependencies} - tasks.keys()
    outside = {places.get(key, (key, None))[0] for key in outside}
    for key, task in found.tasks.items():
        assert task.key == key
        assert task.dependencies <= found.tasks.keys() | outside
    for key, bundle in bundles.items():
        own = {task.key for task in bundle.tasks}
        assert set(bundle.exports) <= own
        assert bundle.places.keys() == {k for task in bundle.tasks for k in task.dependencies} - own
        assert found.tasks[key].dependencies == {holder for holder, _ in bundle.places.values()}
        for read, (holder, item) in bundle.places.items():
            if holder in bundles:
                exports = found.bundles[holder].exports
                assert exports[item or 0] == read
                assert (item is None) == (holder == read)
            else:
                assert (holder, item) == places.get(read, (read, None))
