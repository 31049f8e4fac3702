"""Bundles for any Dask graph: short tasks of collections and graphs are fused and grouped."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import iscoroutinefunction
from typing import Any, TypeVar

from dask._task_spec import GraphNode, Task, TaskRef, convert_legacy_graph
from dask.base import optimize
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.annotations import BUNDLE_PREFIX
from ferroflow_dask.bundling.cut import GUESS, MEMORY_SHARE, best_cut
from ferroflow_dask.bundling.fixed import Tasks, fixed_tasks, is_alone
from ferroflow_dask.bundling.futures import futures_in
from ferroflow_dask.bundling.ordering import in_order
from ferroflow_dask.bundling.predict import Cut, Work
from ferroflow_dask.bundling.results import Place, by_place
from ferroflow_dask.bundling.sequence import NO_WORK, BundleTask, sequence_of, unfused
from ferroflow_dask.cluster_profile import ClusterProfile

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Learned:
    """Learned averages of a task prefix.

    Parameters
    ----------
    duration_s : float
        Duration of a task [s].
    nbytes : float
        Size of a result [B].
    """

    duration_s: float
    nbytes: float = 0.0


_NOTHING = Learned(0.0)


def optimize_for(collection: C, cluster: ClusterProfile, learned: Mapping[str, Learned]) -> C:
    """Return a collection that computes the same in fewer tasks.

    After Dask's own optimization, chains of tasks are fused and short tasks are grouped. The number of tasks
    in a bundle is the one with the least predicted makespan that fits in a worker's memory. The collection
    keeps its keys, except a data frame, which gets new ones. Tasks with an unknown prefix are not bundled.
    The tasks of a P2P shuffle, and all tasks that they depend on, are not changed. Collections with
    annotations, and data frames that would not have fewer tasks, are returned unchanged.

    Parameters
    ----------
    collection : Dask collection
    cluster : ClusterProfile
    learned : mapping of str to Learned
        By task prefix (`dask.utils.key_split`).
    """
    given: Any = collection
    # Data frames are expressions, which optimize themselves; dask.optimize cannot lower all of them.
    is_expression = hasattr(type(given), "optimize")
    if not is_expression and is_annotated(given.__dask_graph__()):
        return collection
    optimized: Any = given.optimize() if is_expression else optimize(given)[0]
    # Dask's optimization drops Futures, too.
    held = () if is_expression else (given.__dask_graph__(),)
    dsk, keys = optimized.__dask_graph__(), optimized.__dask_keys__()
    bundled = bundle_graph(dsk, keys, cluster, learned, held, are_kept=not is_expression)
    # A rebuilt data frame has one more task for each of its keys, which are new.
    if is_expression and len(bundled.layer) + len(list(flatten(keys))) >= len(dsk):
        return collection
    rebuilt: C = _rebuild(optimized, bundled, is_expression)
    return rebuilt


def is_annotated(dsk: Mapping[Key, Any]) -> bool:
    """Return whether layers have annotations; a bundle could not honor those of its tasks."""
    return isinstance(dsk, HighLevelGraph) and any(layer.annotations for layer in dsk.layers.values())


def bundle_graph(
    dsk: Mapping[Key, Any],
    keys: Any,
    cluster: ClusterProfile,
    learned: Mapping[str, Learned],
    held: Iterable[Mapping[Key, Any]] = (),
    *,
    are_kept: bool = True,
) -> PackedGraph:
    """Cut the tasks of any Dask graph into bundles; `keys` may be nested. See `optimize_for`.

    Each of the `keys` gets a task of its own, under that key unless `are_kept` is False. Futures that tasks
    read, from the graph or from the graphs `held`, stay under their own keys.
    """
    graph, wanted = dict(dsk), set(flatten(keys))
    tasks = convert_legacy_graph(graph)
    packed = _pack(tasks, wanted, wanted, cluster, learned, kept=wanted if are_kept else ())
    return _with_futures(packed, tasks, wanted, (graph, *held))


def _with_futures(
    packed: PackedGraph, tasks: Tasks, wanted: Collection[Key], graphs: Iterable[Mapping[Key, Any]]
) -> PackedGraph:
    """Add the Futures that tasks read to a graph, so that the graph keeps their results alive."""
    read = {key for task in tasks.values() for key in task.dependencies}
    futures = futures_in(graphs, (read | {*wanted}) - tasks.keys())
    layer = packed.layer
    return replace(packed, layer=MaterializedLayer({**layer.mapping, **futures})) if futures else packed


def _rebuild(collection: Any, packed: PackedGraph, is_expression: bool) -> Any:
    """Return a collection with the tasks of a packed graph."""
    graph = dict(packed.layer)
    if is_expression:
        from dask.dataframe import from_graph

        keys = [packed.places[key][0] for key in flatten(collection.__dask_keys__())]
        return from_graph(graph, collection._meta, collection.divisions, keys, "bundled")
    rebuild, arguments = collection.__dask_postpersist__()
    # `dask.optimize` rebuilds collections in the same way, from tasks without layers. Dask optimizes the
    # result again.
    return rebuild({key: unfused(task) for key, task in graph.items()}, *arguments)


def graph_of(layer: MaterializedLayer) -> HighLevelGraph:
    """Return a graph of one layer."""
    name = f"bundled-{uuid.uuid4().hex}"
    return HighLevelGraph({name: layer}, {name: set()})


@dataclass(frozen=True, slots=True)
class PackedGraph:
    """A graph in fewer tasks, whose results may hold several of the wanted values.

    Parameters
    ----------
    layer : MaterializedLayer
    places : mapping of Key to (Key, int or None)
        For each wanted key, the task that yields its value, and the item of that task's result; None for all
        of it.
    """

    layer: MaterializedLayer
    places: Mapping[Key, Place]

    @property
    def dsk(self) -> HighLevelGraph:
        """The graph, for `Client.get`."""
        return graph_of(self.layer)

    @property
    def keys(self) -> list[Key]:
        """Keys of the tasks that yield wanted values, each once."""
        return list(dict.fromkeys(task for task, _ in self.places.values()))

    def values(self, results: Sequence[Any]) -> dict[Key, Any]:
        """Return the wanted values by key, given the results of `keys`."""
        return by_place(results, self.places)


def bundle_tasks(
    tasks: Tasks, wanted: Collection[Key], cluster: ClusterProfile, learned: Mapping[str, Learned]
) -> MaterializedLayer:
    """Cut the tasks of a graph into bundles; see `optimize_for`."""
    return _pack(tasks, wanted, wanted, cluster, learned, kept=wanted).layer


def pack_graph(
    dsk: Mapping[Key, Any], keys: Any, cluster: ClusterProfile, learned: Mapping[str, Learned]
) -> PackedGraph:
    """Cut the tasks of any Dask graph into bundles, including the tasks of the nested `keys`."""
    # `flatten` would take a tuple, which may be a key, apart.
    graph, wanted = dict(dsk), dict.fromkeys(flatten(keys if isinstance(keys, list) else [keys]))
    tasks = convert_legacy_graph(graph)
    packed = _pack(tasks, wanted, (), cluster, learned, kept=())
    return _with_futures(packed, tasks, wanted, (graph,))


def _pack(
    tasks: Tasks,
    wanted: Collection[Key],
    apart: Collection[Key],
    cluster: ClusterProfile,
    learned: Mapping[str, Learned],
    *,
    kept: Collection[Key],
) -> PackedGraph:
    """Cut a graph into bundles that yield the values `wanted`.

    Each key in `apart` gets a task of its own, under the same key if it is also in `kept`.
    """
    functions = {id(task.func): task.func for task in tasks.values() if isinstance(task, Task)}
    if any(map(iscoroutinefunction, functions.values())):
        # Coroutines run on the workers' event loops; a bundle could not await them.
        return PackedGraph(MaterializedLayer(tasks), {key: (key, None) for key in wanted})
    keys = in_order(tasks)
    position = {key: i for i, key in enumerate(keys)}
    known = [_known(tasks[key], learned) for key in keys]
    nbytes = [int(known_of.nbytes) if known_of is not None else 0 for known_of in known]
    fixed = fixed_tasks(tasks)
    costs_s = [known_of.duration_s if known_of is not None else GUESS * cluster.task_s for known_of in known]
    work = Work(
        [[position[needed] for needed in tasks[key].dependencies if needed in position] for key in keys],
        costs_s,
        nbytes.__getitem__,
        alone=frozenset(
            i for i, key in enumerate(keys) if known[i] is None or key in fixed or is_alone(tasks[key])
        ),
        last=frozenset(position[key] for key in apart if key in position),
    )
    most = MEMORY_SHARE * cluster.memory_nbytes or float("inf")

    def fits(cut: Cut) -> bool:
        return all(len(pieces) == 1 or sum(nbytes[i] for i in pieces) <= most for pieces in cut)

    cut, _ = best_cut(work, cluster, is_guess=False, fits=fits)
    groups = [[keys[i] for i in pieces] for pieces in cut]
    return _write(groups, tasks, wanted, kept, dict(zip(keys, costs_s, strict=True)))


def _known(task: GraphNode, learned: Mapping[str, Learned]) -> Learned | None:
    return _NOTHING if isinstance(task, NO_WORK) else learned.get(key_split(task.key))


def _token(
    groups: Sequence[Sequence[Key]], exports: Sequence[Sequence[Key]], are_kept: Sequence[bool]
) -> str:
    """Return a token that is the same whenever tasks of the same keys are cut alike."""
    # One token for all bundles: a bundle depends on the keys of other bundles.
    return hashlib.blake2s(repr((groups, exports, are_kept)).encode(), digest_size=16).hexdigest()


def _write(
    groups: Sequence[Sequence[Key]],
    tasks: Tasks,
    wanted: Collection[Key],
    kept: Collection[Key],
    costs_s: Mapping[Key, float],
) -> PackedGraph:
    group_of = {key: i for i, keys in enumerate(groups) for key in keys}
    read = {
        needed
        for key, task in tasks.items()
        for needed in task.dependencies
        if needed in group_of and group_of[needed] != group_of[key]
    }
    exports = [tuple(key for key in keys if key in read or key in wanted) for keys in groups]
    are_kept = [len(own) == 1 and own[0] in kept for own in exports]
    run = _token(groups, exports, are_kept)
    place: dict[Key, Place] = {}
    written: dict[Hashable, GraphNode] = {}
    for i, keys in enumerate(groups):
        if not exports[i]:
            continue  # no task or client needs its results
        inside = set(keys)
        needed = [key for own in keys for key in tasks[own].dependencies if key not in inside]
        places = {key: place.get(key, (key, None)) for key in needed}
        if len(keys) == 1 and all(result == (key, None) for key, result in places.items()):
            place[keys[0]] = (keys[0], None)
            written[keys[0]] = tasks[keys[0]]
            continue
        name = exports[i][0] if are_kept[i] else _name(keys, run, i)
        for item, key in enumerate(exports[i]):
            place[key] = (name, item if len(exports[i]) > 1 else None)
        results = {
            result: n for n, result in enumerate(dict.fromkeys(result for result, _ in places.values()))
        }
        arguments = {key: (results[result], item) for key, (result, item) in places.items()}
        cost_s = sum(costs_s[key] for key in keys)
        call = sequence_of([tasks[key] for key in keys], arguments, exports[i], cost_s)
        written[name] = BundleTask(name, call, *map(TaskRef, results))
    return PackedGraph(MaterializedLayer(written), {key: place.get(key, (key, None)) for key in wanted})


def _name(keys: Sequence[Key], run: str, i: int) -> Key:
    """Return a new key: Dask takes tasks of one key for the same task."""
    # Dask learns durations by prefix: a single task keeps its prefix, and bundles have their own.
    return (f"{BUNDLE_PREFIX if len(keys) > 1 else key_split(keys[0])}-{run}", i)
