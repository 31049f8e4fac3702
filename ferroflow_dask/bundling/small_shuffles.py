"""Small shuffles: which P2P shuffles of a graph become plain tasks, by the size of their data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from dask._task_spec import DataNode, GraphNode, Task
from dask.typing import Key

from ferroflow_dask.bundling import shuffles
from ferroflow_dask.bundling.cut import MEMORY_SHARE
from ferroflow_dask.bundling.library import is_library
from ferroflow_dask.bundling.plain_shuffles import Choice, PlainShuffles, with_plain_tasks
from ferroflow_dask.bundling.snapshot import SentGraph, Snapshot
from ferroflow_dask.cluster_profile import ClusterProfile

#: Data that one task may gather [B], and the longest time to send them to a worker [s]. They move to each
#: worker, so costs grow with the data.
_MOST_GATHERED, _MOST_GATHERED_S = 32 * 2**20, 0.25
#: Pieces of a direct shuffle. Each costs the scheduler about as much as a task.
_MOST_PIECES = 1024
#: Part of the memory of all workers that the data of a direct shuffle may have: there are two copies of them.
_DIRECT_SHARE = MEMORY_SHARE / 2


def with_small_shuffles(graph: SentGraph, snapshot: Snapshot) -> PlainShuffles:
    """Replace the P2P shuffles of little data by plain tasks."""
    cluster = snapshot.cluster
    plain = shuffles.unfused(graph.tasks)
    unfused = replace(graph, tasks=plain)
    measured: dict[str, float] = {}

    def choose(group: list[shuffles.Shuffle]) -> Choice:
        outputs = {task.key for shuffle in group for task in shuffle.unpacks}
        nbytes, is_unknown = 0.0, False
        for shuffle in group:
            sources = shuffle.sources(plain)
            own_nbytes, is_final = _nbytes(sources, shuffle.id, snapshot, unfused)
            may_wait = "stages" in snapshot.features and not is_final
            is_unknown |= may_wait
            nbytes += 0.0 if may_wait and own_nbytes == inf else own_nbytes
            if is_final and own_nbytes < inf and all(key in snapshot.tasks for key in sources):
                measured[shuffle.id] = own_nbytes
        parts = {task.key for shuffle in group for task in (shuffle.barrier, *shuffle.transfers)}
        if not parts.isdisjoint(snapshot.tasks) or not parts.isdisjoint(graph.wanted):
            return Choice()  # the scheduler has them as P2P tasks, or the client wants one
        n_pieces = sum(shuffle.n_pieces for shuffle in group)
        most = most_nbytes(cluster, n_pieces)
        if not outputs.isdisjoint(snapshot.tasks) or snapshot.holds_some(outputs):
            # The scheduler has them as plain tasks.
            return Choice(min(nbytes, _MOST_GATHERED), is_plain=True, most_nbytes=most)
        if nbytes > most:
            return Choice()
        if is_unknown:
            return Choice(is_unknown=True)
        return Choice(
            nbytes, is_plain=True, is_direct=_is_direct(nbytes, n_pieces, cluster), most_nbytes=most
        )

    return replace(with_plain_tasks(plain, choose), measured=measured)


def _is_direct(nbytes: float, n_pieces: int, cluster: ClusterProfile) -> bool:
    """Return whether a direct shuffle is possible, and faster than a task that gathers all pieces."""
    if not _may_be_direct(n_pieces):
        return False
    gathered_s = nbytes * (len(cluster.threads) - 1) / cluster.bandwidth
    return nbytes > _most_gathered(cluster) or gathered_s > n_pieces * cluster.task_s


def _may_be_direct(n_pieces: int) -> bool:
    return n_pieces <= _MOST_PIECES


def plain_keys(unfused: shuffles.Graph) -> set[Key]:
    """Return the keys of a graph with plain tasks in place of all P2P shuffles, in each possible form."""

    def direct(group: list[shuffles.Shuffle]) -> Choice:
        may_be = _may_be_direct(sum(shuffle.n_pieces for shuffle in group))
        return Choice(0.0, is_plain=True, is_direct=may_be)

    gathered = with_plain_tasks(unfused, lambda _: Choice(0.0, is_plain=True))
    return {*gathered.tasks, *with_plain_tasks(unfused, direct).tasks}


def most_nbytes(cluster: ClusterProfile, n_pieces: int) -> float:
    """Return the size up to which a shuffle becomes plain tasks [B].

    Parameters
    ----------
    cluster : ClusterProfile
    n_pieces : int
        That outputs get.
    """
    direct = _DIRECT_SHARE * cluster.all_memory_nbytes  # none if memory is unknown
    return max(_most_gathered(cluster), direct if _may_be_direct(n_pieces) else 0.0)


def _most_gathered(cluster: ClusterProfile) -> float:
    memory = MEMORY_SHARE * (cluster.memory_nbytes or inf)
    return min(_MOST_GATHERED, _MOST_GATHERED_S * cluster.bandwidth, memory)


@dataclass(slots=True, eq=False)
class DataSize:
    """Size of the data of a shuffle, as far as they exist [B].

    Parameters
    ----------
    n : int
        Partitions or chunks in all.
    most_nbytes : float, optional
        More are too many for plain tasks [B].
    """

    n: int
    most_nbytes: float = inf
    n_known: int = 0
    known_nbytes: float = 0.0
    largest_nbytes: float = 0.0

    def add(self, nbytes: float) -> None:
        """Add a partition or chunk that exists."""
        self.n_known += 1
        self.known_nbytes += nbytes
        self.largest_nbytes = max(self.largest_nbytes, nbytes)

    @property
    def expected_nbytes(self) -> float:
        """All data, if the missing ones are as large as the largest; infinite if none is known."""
        n_missing = self.n - self.n_known
        if n_missing and not self.n_known:
            return inf
        return self.known_nbytes + n_missing * self.largest_nbytes


def _nbytes(sources: Sequence[Key], shuffle: str, snapshot: Snapshot, graph: SentGraph) -> tuple[float, bool]:
    """Return the size of data [B], and whether it stays: more of the data will not help.

    It is that of the data that exist, the declared one, or that of before; infinite if nothing is known.
    """
    tasks, size = snapshot.tasks, DataSize(len(sources))
    for key in sources:
        if key in tasks and tasks[key].nbytes >= 0:
            size.add(tasks[key].nbytes)
        elif key in graph.declared_nbytes:
            size.add(graph.declared_nbytes[key])
    if size.n_known < size.n:
        nbytes = snapshot.shuffled.get(shuffle, inf)
        if nbytes < inf and _is_identified(sources, graph.tasks):
            return nbytes, True
    is_final = size.n_known == size.n or all(map(snapshot.is_in_memory, sources))
    return size.expected_nbytes, is_final


def _is_identified(sources: Sequence[Key], graph: shuffles.Graph) -> bool:
    """Return whether equal identifiers mean equal data.

    Dask's readers and random numbers have checksums of files, and seeds, in their keys. A function of a user
    may read a file that has grown.
    """
    reached, stack = set(sources), list(sources)
    while stack:
        task = graph.get(stack.pop())
        if task is None:
            continue
        if not task.dependencies and not _reads_by_library(task):
            return False
        new = task.dependencies - reached
        reached |= new
        stack += new
    return True


def _reads_by_library(task: GraphNode) -> bool:
    if isinstance(task, DataNode):
        return True
    parts = task.args[0].values() if isinstance(task, Task) and task.has_subgraph() else (task,)
    return all(isinstance(part, DataNode) or part.dependencies or _is_library_call(part) for part in parts)


def _is_library_call(task: GraphNode) -> bool:
    function = task.func if isinstance(task, Task) else None
    while isinstance(function, partial):
        function = function.func
    return is_library(function)
