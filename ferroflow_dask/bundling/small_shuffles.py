"""Small shuffles: which P2P shuffles of a graph become plain tasks, by the size of their data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from dask._task_spec import DataNode, GraphNode, Task
from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.bundling import shuffles
from ferroflow_dask.bundling.cut import MEMORY_SHARE
from ferroflow_dask.bundling.library import is_library
from ferroflow_dask.bundling.snapshot import SentGraph, Snapshot
from ferroflow_dask.cluster_profile import ClusterProfile

#: Most data of a P2P shuffle that becomes plain tasks [B], and the longest time to send them to a worker [s].
#: Plain tasks send them to each worker, so their costs grow with the data. P2P costs some tenths of a second
#: for no data, and less for each byte. On four workers of two cores both take equally long at 64 to 128 MB.
_MOST_SHUFFLED, _MOST_SHUFFLED_S = 32 * 2**20, 0.25
#: Partitions or chunks of a shuffle that are measured.
_MEASURED = 3


def with_small_shuffles(graph: SentGraph, snapshot: Snapshot) -> shuffles.PlainShuffles:
    """Replace the P2P shuffles of little data by plain tasks."""
    most = most_nbytes(snapshot.cluster)
    plain = shuffles.unfused(graph.tasks)
    measured: dict[str, float] = {}

    def nbytes_of(group: list[shuffles.Shuffle]) -> float | None:
        outputs = {task.key for shuffle in group for task in shuffle.unpacks}
        nbytes, is_unknown = 0.0, False
        for shuffle in group:
            sources = shuffle.sources(plain)
            own_nbytes, is_final = _nbytes(sources, shuffle.id, snapshot, plain)
            may_wait = "stages" in snapshot.features and not is_final
            is_unknown |= may_wait
            nbytes += 0.0 if may_wait and own_nbytes == inf else own_nbytes
            if is_final and own_nbytes < inf and all(key in snapshot.tasks for key in sources):
                measured[shuffle.id] = own_nbytes
        parts = {task.key for shuffle in group for task in (shuffle.barrier, *shuffle.transfers)}
        if not parts.isdisjoint(snapshot.tasks) or not parts.isdisjoint(graph.wanted):
            return None  # the scheduler has them as P2P tasks, or the client wants one
        if not outputs.isdisjoint(snapshot.tasks) or snapshot.holds_some(outputs):
            return min(nbytes, _MOST_SHUFFLED)  # the scheduler has them as plain tasks
        if nbytes > most:
            return None
        return inf if is_unknown else nbytes

    return replace(shuffles.with_plain_tasks(plain, nbytes_of, most), measured=measured)


def to_measure(
    shuffle: str, sources: Sequence[Key], snapshot: Snapshot, graph: shuffles.Graph
) -> Iterable[Key]:
    """Return the data of a shuffle from which its size is estimated; none if that is known, or surely large.

    A prefix may stand for data of many sizes, so learned sizes do not show that a shuffle is small.
    """
    known = [snapshot.learned.get(key_split(key)) for key in sources]
    is_large = sum(one.most_nbytes for one in known if one is not None) > most_nbytes(snapshot.cluster)
    if is_large or (shuffle in snapshot.shuffled and _is_identified(sources, graph)):
        return ()
    last = len(sources) - 1
    return dict.fromkeys(sources[last * i // (_MEASURED - 1)] for i in range(_MEASURED))


def most_nbytes(cluster: ClusterProfile) -> float:
    """Return the size up to which a shuffle becomes plain tasks [B]."""
    memory = MEMORY_SHARE * (cluster.memory_nbytes or inf)
    return min(_MOST_SHUFFLED, _MOST_SHUFFLED_S * cluster.bandwidth, memory)


def _nbytes(
    sources: Sequence[Key], shuffle: str, snapshot: Snapshot, graph: shuffles.Graph
) -> tuple[float, bool]:
    """Return the size of data [B], and whether more will not become known of it.

    It is estimated by the data that exist, or as it was before; infinite if neither is known.
    """
    tasks = snapshot.tasks
    found = [tasks[key].nbytes for key in sources if key in tasks and tasks[key].nbytes >= 0]
    if len(found) < len(sources):
        nbytes = snapshot.shuffled.get(shuffle, inf)
        if nbytes < inf and _is_identified(sources, graph):
            return nbytes, True
    is_final = len(found) == len(sources) or all(map(snapshot.is_in_memory, sources))
    return extrapolated(found, len(sources)), is_final


def extrapolated(found: Sequence[float], n: int) -> float:
    """Return the size of `n` partitions of which some are known [B]; infinite if none is."""
    return sum(found) + (n - len(found)) * max(found) if found else (inf if n else 0.0)


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
