"""Array programs in virtual time: their graphs as Dask orders them, with results of true relative sizes."""

from __future__ import annotations

import random
from typing import Any

import dask
import dask.array as da
from dask._task_spec import Task, TaskRef, convert_legacy_graph
from dask.order import order
from dask.sizeof import sizeof

from ferroflow_dask.virtual import VirtualCluster, VirtualTask

#: Blocks of a graph have 80 kB; the virtual ones have 8 MB.
_BLOCK, _SCALE = 100, 100
MB = 10**6


def random_array(*n_blocks: int) -> Any:
    shape = tuple(n * _BLOCK for n in n_blocks)
    return da.random.default_rng(1).random(shape, chunks=(_BLOCK,) * len(shape))


def double_difference(n: int = 12) -> Any:
    """Return a sum of differences of two arrays, one of them transposed, one shifted by a row."""
    x, y = random_array(n, n), random_array(n, n)
    return (x - y)[1:, :].sum() + (x + y.T).sum()


def anomaly_mean(n: int = 60) -> Any:
    """Return the mean deviation from the mean over time; all blocks are read twice."""
    t = da.random.default_rng(1).random((10 * n, 40, 40), chunks=(10, 20, 20))
    return (t - t.mean(axis=0)).mean(axis=(1, 2))


class ArrayProgram:
    """A program for virtual clusters; each run submits the same graph.

    Parameters
    ----------
    collection : dask.array.Array
        It is computed in this process, for the sizes of its results.
    """

    def __init__(self, collection: Any) -> None:
        (optimized,) = dask.optimize(collection)
        tasks = convert_legacy_graph(dict(optimized.__dask_graph__()))
        # Numbers, since sets of strings have another order in each process.
        numbers = {key: number for number, key in enumerate(sorted(tasks, key=repr))}
        needed = {key: sorted(tasks[key].dependencies, key=numbers.__getitem__) for key in numbers}
        numbered = {
            numbers[key]: Task(numbers[key], len, *(TaskRef(numbers[one]) for one in needed[key]))
            for key in numbers
        }
        places = order(numbered)
        self._order = {key: places[number] for key, number in numbers.items()}
        rng, values = random.Random(0), dict[Any, Any]()
        for key in sorted(tasks, key=self._order.__getitem__):
            values[key] = tasks[key](values)
        self.graph = {
            key: VirtualTask(rng.uniform(0.45, 0.55), tuple(needed[key]), nbytes=_SCALE * sizeof(values[key]))
            for key in numbers
        }

    def run(self, cluster: VirtualCluster) -> VirtualCluster:
        """Run it to its end, which is checked."""
        cluster.submit(self.graph, order=self._order)
        cluster.run()
        cluster.check()
        return cluster
