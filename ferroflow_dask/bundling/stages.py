"""Stages: the parts of a graph behind shuffles of unknown size are held until the data exist.

How a shuffle is best run depends on the size of its data. The data of the first shuffles of a graph exist
when the tasks before them have ended. The rest of the graph is held until then, in bundles that no worker
gets. Tasks that do not depend on each other are in different ones, so none waits for the data of another.
When its data exist, a part is planned like a graph that has just arrived. Shuffles behind others are held
again. Spark calls this adaptive query execution (Apache Spark 3.0, SPARK-31412).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from dask._task_spec import GraphNode
from dask.typing import Key

from ferroflow_dask.annotations import BUNDLE_PREFIX
from ferroflow_dask.bundling import shuffles
from ferroflow_dask.bundling.bundle import Bundle
from ferroflow_dask.bundling.division import components
from ferroflow_dask.bundling.graphs import written_task
from ferroflow_dask.bundling.isolation import Isolation, NotIsolatedError
from ferroflow_dask.bundling.ordering import dependents_of, in_order, needed_by
from ferroflow_dask.bundling.plain_shuffles import Choice, PlainShuffles, with_plain_tasks
from ferroflow_dask.bundling.small_shuffles import most_nbytes
from ferroflow_dask.bundling.snapshot import SentGraph, Snapshot
from ferroflow_dask.cluster_profile import ClusterProfile

#: Plain tasks of a size that no data exceed: they report none.
_PLAIN = Choice(2.0**60, is_plain=True)
#: Shuffles, together if they are the sides of a join.
Groups = Sequence[Sequence[shuffles.Shuffle]]


@dataclass(frozen=True, slots=True)
class Held:
    """A part of a graph that is held.

    Parameters
    ----------
    name : Key
        Of the task that stands for it.
    rest : SentGraph
        The tasks that are held, with P2P shuffles as they came.
    sources : tuple of (tuple of Key, float)
        The data of each shuffle of unknown size whose data are computed by tasks that are not held, and the
        size up to which it becomes plain tasks [B].
    bundles : dict of Key to Bundle
        All held tasks as one bundle, and the tasks that give its values the keys that clients want. If the
        bundle is split, its tasks run as they came.
    tasks : dict of Key to GraphNode
        The tasks of these bundles; that of the first one has plain tasks in place of the shuffles. A worker
        could run it.
    """

    name: Key
    rest: SentGraph
    sources: tuple[tuple[tuple[Key, ...], float], ...]
    bundles: Mapping[Key, Bundle]
    tasks: Mapping[Key, GraphNode]

    @property
    def inputs(self) -> Collection[Key]:
        """The results of other tasks that the held ones read."""
        return self.bundles[self.name].places.keys()


def held_parts(graph: SentGraph, plain: PlainShuffles, snapshot: Snapshot, token: str) -> tuple[Held, ...]:
    """Return the parts of a graph behind its shuffles of unknown size.

    Parameters
    ----------
    graph : SentGraph
    plain : PlainShuffles
        The same graph with plain tasks in place of the shuffles that are known to be small.
    snapshot : Snapshot
    token : str
        As in `rewrite`.
    """
    unknown = _held_shuffles(plain)
    if not unknown:
        return ()
    late = _late(unknown, plain.tasks)
    if not late.isdisjoint(snapshot.tasks) or snapshot.holds_some(late):
        return ()
    parts = _separate({key: task for key, task in plain.tasks.items() if key in late})
    found: list[Held] = []
    for keys in _with_needless(graph, plain, unknown, parts, snapshot):
        rest = {key: task for key, task in plain.tasks.items() if key in keys}
        part = replace(graph, tasks=rest, wanted=graph.wanted & keys, is_late=True)
        name = (f"{BUNDLE_PREFIX}-held-{token}", len(found))
        one = _held(part, _sources(unknown, part, snapshot.cluster), snapshot, name) if part.wanted else None
        if one is not None:
            found.append(one)
    return tuple(found)


def _separate(tasks: Mapping[Key, GraphNode]) -> list[set[Key]]:
    """Return the parts of a graph that do not depend on each other."""
    keys = list(tasks)
    numbers = {key: i for i, key in enumerate(keys)}
    reads = [[numbers[one] for one in task.dependencies if one in numbers] for task in tasks.values()]
    return [{keys[i] for i in part} for part in components(reads, 0, range(len(keys)))]


def _sources(
    unknown: Groups, part: SentGraph, cluster: ClusterProfile
) -> tuple[tuple[tuple[Key, ...], float], ...]:
    """Return the data of a part's shuffles that are computed before it, and the sizes for plain tasks."""
    # The transfers of a group are all in one part: the shuffles have a reader together.
    own = [group for group in unknown if group[0].transfers[0].key in part.tasks]
    return tuple(
        (tuple(keys), most_nbytes(cluster, sum(one.n_pieces for one in group)))
        for group in own
        for shuffle in group
        if part.tasks.keys().isdisjoint(keys := shuffle.sources(part.tasks))
    )


def _held(
    part: SentGraph, sources: tuple[tuple[tuple[Key, ...], float], ...], snapshot: Snapshot, name: Key
) -> Held | None:
    """Hold a part; None if a shuffle cannot be replaced, or the tasks cannot be a bundle."""
    all_plain = with_plain_tasks(part.tasks, lambda _: _PLAIN)
    if shuffles.has_p2p(all_plain.tasks):
        return None
    own = _as_bundle(part.tasks, part.wanted, snapshot)
    bundles = {name: own}
    bundles |= {key: Bundle.of_value(key, (name, item)) for item, key in enumerate(own.delivered)}
    runnable = _as_bundle(all_plain.tasks, part.wanted, snapshot)
    isolation = Isolation()
    try:
        written = {
            key: written_task(key, runnable if key == name else bundle, 0.0, isolation)
            for key, bundle in bundles.items()
        }
    except NotIsolatedError:
        return None
    return Held(name, part, sources, bundles, written)


def _late(unknown: Groups, tasks: Mapping[Key, GraphNode]) -> set[Key]:
    """Return the transfers of shuffles, and the tasks behind them."""
    transfers = {one.key for group in unknown for shuffle in group for one in shuffle.transfers}
    return transfers | dependents_of(transfers, tasks)


def _held_shuffles(plain: PlainShuffles) -> Groups:
    """Return the shuffles of unknown size behind which tasks can be held.

    If one side of a join is large and the other one is late, the large one would wait in memory.
    """
    if not plain.large:
        return plain.unknown
    parts = [{one.key for each in group for one in (each.barrier, *each.transfers)} for group in plain.large]
    found = [(group, _late([group], plain.tasks)) for group in plain.unknown]
    while found:
        late = set[Key]().union(*(behind for _, behind in found))
        divided = [part for part in parts if not part.isdisjoint(late) and not part <= late]
        if not divided:
            break
        found = [one for one in found if all(part.isdisjoint(one[1]) for part in divided)]
    return [group for group, _ in found]


def _as_bundle(tasks: Mapping[Key, GraphNode], wanted: frozenset[Key], snapshot: Snapshot) -> Bundle:
    """Return a bundle of the tasks that some keys need."""
    inside = needed_by(set(wanted), dict(tasks))
    keys = in_order(inside)
    exports = tuple(sorted(wanted, key=str))
    outside = sorted({one for task in inside.values() for one in task.dependencies} - inside.keys(), key=str)
    return Bundle(
        tuple(inside[key] for key in keys),
        exports,
        {key: (key, None) for key in outside},
        delivered=exports,
        shares_objects=snapshot.shares_objects,
    )


def _with_needless(
    graph: SentGraph, plain: PlainShuffles, unknown: Groups, parts: list[set[Key]], snapshot: Snapshot
) -> list[set[Key]]:
    """Add the tasks before held parts that would only fill memory until these are planned.

    Dask computes what is read together with the output of a shuffle when that exists. Few results are no
    burden, and computed in time. So is what several parts read: it would tie them to each other.
    """
    tasks, late = plain.tasks, set[Key]().union(*parts)
    first = {key for group in unknown for one in group for key in one.sources(tasks)} - late
    first |= (graph.wanted | snapshot.tasks.keys()) & tasks.keys() - late
    needless = tasks.keys() - late - needed_by(first, tasks).keys()
    n_read = len(needless & {one for key in late for one in tasks[key].dependencies})
    if n_read <= snapshot.cluster.n_threads or snapshot.holds_some(needless):
        return parts
    read = [_before(part, tasks, needless) for part in parts]
    seen, shared = set[Key](), set[Key]()
    for keys in read:
        shared |= keys & seen
        seen |= keys
    for part, keys in zip(parts, read, strict=True):
        part.update(keys - shared)
    return parts


def _before(part: set[Key], tasks: Mapping[Key, GraphNode], among: Collection[Key]) -> set[Key]:
    """Return the tasks among some that a part needs."""
    found, stack = set[Key](), list(part)
    while stack:
        new = [one for one in tasks[stack.pop()].dependencies if one in among and one not in found]
        found.update(new)
        stack += new
    return found
