"""Bundled graphs: short tasks of any Dask graph are fused and grouped."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from dask._task_spec import Alias, DataNode, GraphNode, Task, TaskRef
from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.annotations import BUNDLE_PREFIX
from ferroflow_dask.bundling.assumed import assumed_tasks
from ferroflow_dask.bundling.averages import Averages, expected
from ferroflow_dask.bundling.bundle import Bundle
from ferroflow_dask.bundling.cut import GUESS, MEMORY_SHARE, SHARED, best_cut
from ferroflow_dask.bundling.deliveries import DeliveringTask
from ferroflow_dask.bundling.fixed import Tasks, fixed_tasks, lone_tasks
from ferroflow_dask.bundling.isolation import Isolation, NotIsolatedError
from ferroflow_dask.bundling.ordering import in_order
from ferroflow_dask.bundling.peak import GraphMemory, held_nbytes, shared_nbytes
from ferroflow_dask.bundling.predict import Cut, Prediction, Work, values_apart
from ferroflow_dask.bundling.repeats import Measured, shape_of
from ferroflow_dask.bundling.results import Place, value_of
from ferroflow_dask.bundling.sample import MANY
from ferroflow_dask.bundling.sequence import sequence_of
from ferroflow_dask.cluster_profile import ClusterProfile

#: Bundles may hold together so many times the bytes that single tasks hold, or this part of the memory of all
#: workers, whichever is more (docs/bundles.md, "How large a bundle is").
_MOST_HELD, _HELD_SHARE = 1.5, 0.05
_NO_LETTERS = re.compile("[^A-Za-z-]")


@dataclass(frozen=True, slots=True)
class BundledGraph:
    """A graph in fewer tasks.

    Parameters
    ----------
    tasks : dict of Key to GraphNode
    bundles : dict of Key to Bundle
        For each task that differs from the given graph: the tasks that it runs.
    order : dict of Key to float
        Place of each task in the order of the given graph, by which Dask prefers it.
    prediction : Prediction, optional
    """

    tasks: dict[Key, GraphNode]
    bundles: dict[Key, Bundle]
    order: dict[Key, float] = field(default_factory=dict, compare=False)
    prediction: Prediction | None = field(default=None, compare=False)


def bundle_graph(
    tasks: Tasks,
    wanted: Collection[Key],
    cluster: ClusterProfile,
    learned: Mapping[str, Averages | None],
    token: str,
    *,
    alone: Collection[Key] = frozenset(),
    places: Mapping[Key, Place] | None = None,
    by_key: Mapping[Key, Averages] | None = None,
    declared_nbytes: Mapping[Key, float] | None = None,
    shares_objects: bool = False,
    outside_nbytes: Mapping[Key, float] | None = None,
    holders: Mapping[Key, Collection[str]] | None = None,
    repeats: Mapping[int, Measured] | None = None,
    may_try: bool = False,
) -> BundledGraph:
    """Cut a graph into bundles; O(tasks · log tasks + edges).

    Chains of tasks are fused and short tasks are grouped. The number of tasks in a bundle is the one with the
    least predicted makespan, if a part of a worker's memory is enough for it. Tasks with an unknown prefix
    stay separate. The tasks of a P2P shuffle, and all tasks that they depend on, are not changed.

    Parameters
    ----------
    tasks : mapping of Key to GraphNode
        Dependencies that are not in it exist already, under their own keys.
    wanted : collection of Key
        Each gets a task of its own, under its own key. If a bundle computes several, these tasks read it. The
        worker delivers their values while the bundle runs, so they usually need not run.
    cluster : ClusterProfile
    learned : mapping of str to Averages
        By task prefix (`dask.utils.key_split`); None for one that is never bundled.
    token : str
        Part of the keys of bundles that no other graph has: digits or a hexadecimal UUID.
    alone : collection of Key, optional
        Tasks that stay separate.
    places : mapping of Key to (Key, int or None), optional
        For dependencies that exist as items of another task's result: that task and the item.
    by_key : mapping of Key to Averages, optional
        Of tasks of which more is known than of their prefix.
    declared_nbytes : mapping of Key to float, optional
        Declared sizes of results [B].
    shares_objects : bool, optional
        See `Bundle`. If not, tasks stay separate if they need copies of objects that cannot be pickled.
    outside_nbytes : mapping of Key to float, optional
        Sizes of the results of other graphs that tasks read, by the key of the task that yields them [B].
    holders : mapping of Key to collection of str, optional
        The workers that hold these results; none for those that do not exist yet.
    repeats : mapping of int to mapping of str to Mean, optional
        Measured durations of graphs by shape and cut.
    may_try : bool, optional
        As in `best_cut`.
    """
    keys = in_order(tasks)
    position = {key: i for i, key in enumerate(keys)}
    prefixes = [key_split(key) for key in keys]
    edges = [sorted([position[one] for one in tasks[key].dependencies if one in position]) for key in keys]
    # Not `dependencies - position.keys()`, which takes a pass over all keys.
    outside = [
        _read_from(needed, places or {}) if (needed := tasks[key].dependencies.difference(position)) else ()
        for key in keys
    ]
    sizes, holders = outside_nbytes or {}, holders or {}
    by_prefix: dict[str, Averages | None] = {prefix: learned.get(prefix) for prefix in set(prefixes)}
    unknown = {prefix for prefix, one in by_prefix.items() if one is None and prefix not in learned}
    n_of, n_many = Counter(prefixes if None in by_prefix.values() else ()), MANY * cluster.n_threads
    of_tasks = expected(
        [tasks[key] for key in keys],
        [(by_key or {}).get(key, by_prefix[prefix]) for key, prefix in zip(keys, prefixes, strict=True)],
        edges,
        [sum([sizes.get(key, 0.0) for key in read]) if read else 0.0 for read in outside],
        declared_nbytes or {},
        guess_s=GUESS * cluster.added_s,
        crowding=cluster.crowding,
        assumed={position[key] for key in assumed_tasks(tasks, unknown)},
        many={i for i, prefix in enumerate(prefixes) if n_of[prefix] >= n_many} if n_of else (),
    )
    costs_s = of_tasks.costs_s
    separate = fixed_tasks(tasks).union(lone_tasks(tasks), alone)
    work = Work(
        edges,
        costs_s,
        [int(each) for each in of_tasks.nbytes].__getitem__,
        alone=frozenset(of_tasks.unknown).union([position[key] for key in separate if key in position]),
        last=frozenset([position[key] for key in wanted if key in position]),
        outside_nbytes=sum(sizes.values()),
        held=[_held(read, sizes, holders) for read in outside],
        cores_s=sum(of_tasks.cores_s),
    )
    memory = GraphMemory(
        edges, of_tasks.most_nbytes, work.last, outside, sizes, sizes.keys() - holders.keys()
    )
    declared = (declared_nbytes or {}).values()
    shape = shape_of(prefixes, edges, declared, len(work.last), cluster.threads)
    fits, measured = _MemoryLimit(work, memory, cluster), (repeats or {}).get(shape)
    shares = dict(zip(keys, zip(prefixes, costs_s, strict=True), strict=True))
    while True:
        cut, prediction = best_cut(work, cluster, False, fits, measured, may_try=may_try)
        groups = [[keys[i] for i in pieces] for pieces in cut]
        apart = {keys[i] for i in values_apart(work, cut, cluster)}
        bundles = bundles_of(groups, tasks, wanted, shares, places or {}, token=token, apart=apart)
        # The first bundle of each thread: the client can process their values while the others run.
        early = [name for name, bundle in bundles.items() if not apart.issuperset(bundle.delivered)][
            : cluster.n_threads
        ]
        bundles |= {name: replace(bundles[name], is_early=True) for name in early}
        rewritten = {}
        for name, bundle in bundles.items():
            if not bundle.is_plain(name):
                turns = tuple([position[task.key] for task in bundle.tasks])
                classes = {keys[i]: of_tasks.size_classes[i] for i in turns}
                rewritten[name] = replace(
                    bundle, shares_objects=shares_objects, turns=turns, size_classes=classes
                )
        written, failed = _written(bundles, rewritten, shares)
        if not failed:
            order = _places_in_order(bundles, position)
            return BundledGraph(written, rewritten, order, replace(prediction, shape=shape))
        work = replace(work, alone=frozenset(work.alone).union([position[key] for key in failed]))


def _written(
    bundles: Mapping[Key, Bundle], rewritten: Mapping[Key, Bundle], shares: Mapping[Key, tuple[str, float]]
) -> tuple[dict[Key, GraphNode], set[Key]]:
    """Return the Dask tasks of bundles, and the keys of steps that cannot have copies of their own.

    `rewritten` has the bundles that are more than their only task. `shares` is as in `bundles_of`.
    """
    isolation, failed = Isolation(), set[Key]()
    written: dict[Key, GraphNode] = {}
    for name, bundle in bundles.items():
        if name not in rewritten:
            written[name] = bundle.tasks[0]
            continue
        cost_s = sum([shares[task.key][1] for task in bundle.tasks])
        try:
            written[name] = written_task(name, rewritten[name], cost_s, isolation)
        except NotIsolatedError as error:
            failed |= error.keys
    return written, failed


def _places_in_order(bundles: Mapping[Key, Bundle], position: Mapping[Key, int]) -> dict[Key, float]:
    """Return where tasks stand in the order of the graph: bundles where their first task does.

    Each comes after those that it reads: in Dask, too, no task is looked at before those that it needs.
    """
    turn: dict[Key, float] = {}
    for name, bundle in bundles.items():
        read = (turn[holder] for holder, _ in bundle.places.values() if holder in turn)
        first = min([position[task.key] for task in bundle.tasks])
        turn[name] = max(first, max(read, default=-1.0) + 1 / (len(bundles) + 1))
    return turn


def _read_from(needed: Iterable[Key], places: Mapping[Key, Place]) -> Collection[Key]:
    """Return the keys of the tasks that yield some values."""
    return dict.fromkeys([places.get(key, (key, None))[0] for key in sorted(needed, key=str)])


def _held(
    read: Collection[Key], nbytes: Mapping[Key, float], holders: Mapping[Key, Collection[str]]
) -> dict[str, float]:
    """Return the bytes that each worker holds of some results."""
    held: dict[str, float] = {}
    for key in read:
        for holder in holders.get(key, ()):
            held[holder] = held.get(holder, 0.0) + nbytes.get(key, 0.0)
    return held


class _MemoryLimit:
    """Returns whether the bundles of a cut fit in the memory of a cluster."""

    def __init__(self, work: Work, memory: GraphMemory, cluster: ClusterProfile) -> None:
        self._work, self._memory, self._cluster = work, memory, cluster
        self._n_threads = cluster.n_threads
        # Each thread of a worker runs a bundle.
        self._most_nbytes = MEMORY_SHARE * cluster.memory_nbytes / max(cluster.threads)
        self._cluster_nbytes = cluster.all_memory_nbytes
        most_nbytes = min(self._most_nbytes, SHARED * self._cluster_nbytes)
        self._is_limited = 0 < most_nbytes < memory.total_nbytes()

    @cached_property
    def _plain(self) -> tuple[float, float]:
        """The bytes that single tasks hold in Dask's order, and those of them that graphs share [B]."""
        needs = self._memory.needs([[i] for i in range(len(self._memory.nbytes))])
        return held_nbytes(needs, self._n_threads), shared_nbytes(needs, self._n_threads)

    def __call__(self, cut: Cut) -> bool:
        if not self._is_limited:
            return True
        needs = self._memory.needs(cut, values_apart(self._work, cut, self._cluster))
        if any(
            need.peak_nbytes > self._most_nbytes for need, at in zip(needs, cut, strict=True) if len(at) > 1
        ):
            return False
        sums = held_nbytes(needs, self._n_threads), shared_nbytes(needs, self._n_threads)
        return all(
            nbytes <= share * self._cluster_nbytes or nbytes <= _MOST_HELD * plain_nbytes
            for nbytes, share, plain_nbytes in zip(sums, (_HELD_SHARE, SHARED), self._plain, strict=True)
        )


def bundles_of(
    groups: Sequence[Sequence[Key]],
    tasks: Tasks,
    wanted: Collection[Key],
    shares: Mapping[Key, tuple[str, float]],
    places: Mapping[Key, Place],
    *,
    token: str,
    apart: Collection[Key] = frozenset(),
) -> dict[Key, Bundle]:
    """Return the bundles of a cut by the key of their task, in an order in which they can run.

    `shares` has the prefix of each task and its expected duration [s]. `token` is a part of the keys that no
    other bundles have. Tasks in `apart` get keys of their own, as those in `wanted` do.
    """
    group_of = {key: n for n, inside in enumerate(groups) for key in inside}
    read = {
        needed
        for key, task in tasks.items()
        for needed in task.dependencies
        if needed in group_of and group_of[needed] != group_of[key]
    }
    place = dict(places)
    found: dict[Key, Bundle] = {}
    for n, inside in enumerate(groups):
        exports = tuple(key for key in inside if key in read or key in wanted)
        if not exports:
            continue  # no task or client needs its results
        own_key = len(exports) == 1 and exports[0] in wanted and is_chain([tasks[key] for key in inside])
        if len(inside) == 1 or own_key:
            name = exports[0]
            delivered: tuple[Key, ...] = ()
        else:
            delivered = tuple(key for key in exports if key in wanted or key in apart)
            name = (f"{BUNDLE_PREFIX}-{_main_prefix([shares[key] for key in inside])}-{token}", n)
        own = set(inside)
        needed = sorted({key for one in inside for key in tasks[one].dependencies if key not in own}, key=str)
        places_of = {key: place.get(key, (key, None)) for key in needed}
        found[name] = bundle = Bundle(tuple(tasks[key] for key in inside), exports, places_of, delivered)
        returns_results = bundle.returns_results(name)
        place |= {key: (name, item if returns_results else None) for item, key in enumerate(exports)}
        for key in delivered:
            found[key] = Bundle.of_value(key, place.pop(key))
    return found


def is_chain(tasks: Sequence[GraphNode]) -> bool:
    """Return whether each task of a sequence reads the one before; data are left out."""
    calls = [task for task in tasks if not isinstance(task, DataNode)]
    return all(before.key in task.dependencies for before, task in pairwise(calls))


def _main_prefix(shares: Sequence[tuple[str, float]]) -> str:
    """Return the prefix of the tasks that take the longest together.

    Dask learns by prefix: a bundle has another one than the tasks inside.
    """
    total_s: defaultdict[str, float] = defaultdict(float)
    for prefix, cost_s in shares:
        total_s[prefix] += cost_s
    # `key_split` keeps only words of letters.
    return _NO_LETTERS.sub("", max(total_s, key=total_s.__getitem__)) or "tasks"


def _single_task(name: Key, bundle: Bundle) -> GraphNode:
    """Return a task that is no bundle, but reads values from bundles."""
    (task,) = bundle.tasks
    if isinstance(task, Alias):
        ((result, item),) = bundle.places.values()
        return Task(name, value_of, TaskRef(result), item)
    places: dict[Key, Key | GraphNode] = {
        key: result if item is None else Task(key, value_of, TaskRef(result), item)
        for key, (result, item) in bundle.places.items()
    }
    return task.substitute(places, key=name)


def written_task(name: Key, bundle: Bundle, cost_s: float, isolation: Isolation | None = None) -> GraphNode:
    """Return the Dask task of a bundle with an expected duration [s].

    `isolation` remembers what it finds about the objects of a graph.
    """
    if not bundle.returns_results(name) and len(bundle.tasks) == 1:
        return _single_task(name, bundle)
    results = {
        result: n for n, result in enumerate(dict.fromkeys(task for task, _ in bundle.places.values()))
    }
    arguments = {key: (results[result], item) for key, (result, item) in bundle.places.items()}
    isolation = None if bundle.shares_objects else isolation or Isolation()
    call = sequence_of(
        bundle.tasks,
        arguments,
        bundle.exports,
        cost_s,
        bundle.delivered,
        returns_results=bundle.returns_results(name),
        is_early=bundle.is_early,
        size_classes=bundle.size_classes,
        isolation=isolation,
    )
    # Dask keeps tasks that produce data in its queue until workers have room for their results.
    produces = any(getattr(task, "data_producer", False) for task in bundle.tasks)
    make = DeliveringTask if bundle.delivered else Task
    return make(name, call, *map(TaskRef, results), _data_producer=produces)
