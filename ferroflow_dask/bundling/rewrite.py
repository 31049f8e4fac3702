"""Rewriting: a plan for the tasks of an arriving graph; the door of this package.

A caller takes a `Snapshot` of the keys in `keys_read` and gets a `Plan` from `rewrite`. In the tick in which
it creates the tasks, `revalidate` compares the facts that the plan relies on with a later snapshot. If they
have changed, the graph runs as it came: `unchanged` is the plan for that.

If too little is known of the tasks, the plan is a sample: a few tasks, and the rest of the graph. Once the
sample has ended, the caller plans the rest with a later snapshot.

All functions are pure. They use no scheduler, thread, clock or random number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import inf
from typing import Any

from dask._task_spec import GraphNode
from dask.typing import Key
from dask.utils import format_bytes, key_split

from ferroflow_dask.annotations import BUNDLE_ANNOTATION, is_bundling_off
from ferroflow_dask.bundling import shuffles
from ferroflow_dask.bundling.averages import Averages
from ferroflow_dask.bundling.graphs import BundledGraph, bundle_graph
from ferroflow_dask.bundling.ordering import dependents_of, needed_by, static_order
from ferroflow_dask.bundling.plan import Plan, Premises, Until, known_of
from ferroflow_dask.bundling.sample import MANY, sample_of
from ferroflow_dask.bundling.sequence import NO_WORK
from ferroflow_dask.bundling.sharing import Sharing, share
from ferroflow_dask.bundling.small_shuffles import plain_keys, with_small_shuffles
from ferroflow_dask.bundling.snapshot import SentGraph, Snapshot, outside
from ferroflow_dask.bundling.stages import Held, held_parts

#: Smaller graphs run as they come [tasks].
FEWEST = 10
#: Part of the memory of all workers that the results of a sample may fill: a task that reads one may be the
#: last of the graph.
_SAMPLE_SHARE = 0.1
#: Duration of a task that yields a piece of a direct shuffle: it looks up a shard, or copies a part [s].
_PIECE_S = 2e-5
#: Annotations that the tasks of a bundle pass on to it, if all tasks of the graph have the same value.
INHERITED = frozenset({"priority", "span"})


def keys_read(graph: SentGraph) -> set[Key]:
    """Return the keys of which `rewrite` needs facts: the graph's, its inputs, and those of shuffles."""
    tasks, plain = dict(graph.tasks), set[Key]()
    if shuffles.has_p2p(tasks):
        tasks |= (unfused := shuffles.unfused(tasks))
        plain = plain_keys(unfused)
    return outside(tasks).union(tasks, plain)


def rewrite(graph: SentGraph, snapshot: Snapshot, token: str) -> Plan:
    """Plan a graph.

    Parameters
    ----------
    graph : SentGraph
    snapshot : Snapshot
    token : str
        Part of new keys that no other graph has: digits or a hexadecimal UUID.

    Raises
    ------
    RuntimeError
        Tasks depend on each other in a cycle.
    """
    if "bundles" not in snapshot.features:
        return unchanged(graph)
    sample = _sample(graph, snapshot)
    return _bundled(graph, snapshot, token) if sample is None else sample


def revalidate(plan: Plan, snapshot: Snapshot) -> bool:
    """Return whether the facts that a plan relies on are as they were; O(keys)."""
    premises = plan.premises
    if premises is None:
        return True
    known = known_of(premises.keys, premises.outside, snapshot.tasks)
    return known == (premises.defined, premises.failed) and premises.sharing.is_possible(snapshot)


def unchanged(graph: SentGraph) -> Plan:
    """Return the plan by which a graph runs as it came.

    Raises
    ------
    RuntimeError
        Tasks depend on each other in a cycle.
    """
    return Plan(graph, graph.tasks, graph.wanted, _order(graph, graph.tasks), graph.annotations)


def _order(
    graph: SentGraph, tasks: Mapping[Key, GraphNode], bundled: BundledGraph | None = None
) -> dict[Key, float]:
    """Return the position of each task: by the client's priorities, else by Dask's static order."""
    if not graph.priorities:
        return bundled.order if bundled is not None else dict(static_order(tasks))
    found: dict[Key, float] = {key: graph.priorities[key] for key in tasks if key in graph.priorities}
    for key, bundle in bundled.bundles.items() if bundled is not None else ():
        inside = [graph.priorities[one.key] for one in bundle.tasks if one.key in graph.priorities]
        found.setdefault(key, min(inside, default=0))
    return found


# Samples


def _sample(graph: SentGraph, snapshot: Snapshot) -> Plan | None:
    """Return the plan of a sample; None if enough is known of the graph, or it would not start at once."""
    tasks, learned = graph.tasks, snapshot.learned
    if "samples" not in snapshot.features or graph.sampled or graph.is_late or not snapshot.has_idle_threads:
        return None
    if len(tasks) < FEWEST or snapshot.holds_some(tasks):
        return None
    if learned.keys() >= {key_split(key) for key in tasks}:
        return None
    parts = set[Key]()
    if "plain_shuffles" in snapshot.features and shuffles.has_p2p(tasks):
        tasks = shuffles.unfused(tasks)
        parts = shuffles.parts_before_outputs(tasks)
    missing = {key: task for key, task in tasks.items() if key not in snapshot.tasks}
    missing = needed_by(graph.wanted & missing.keys(), missing)
    not_now = {
        key
        for key, task in missing.items()
        if key in parts or not all(one in missing or snapshot.is_in_memory(one) for one in task.dependencies)
    }
    keys = sample_of(missing, learned, snapshot.cluster.n_threads, not_now=not_now)
    if not keys:
        return None
    # Workers drop the results that only tasks of the sample read.
    kept = keys & graph.wanted
    kept |= {one for key, task in missing.items() if key not in keys for one in task.dependencies & keys}
    most_nbytes = _SAMPLE_SHARE * snapshot.cluster.all_memory_nbytes
    if 0 < most_nbytes < sum(graph.declared_nbytes.get(key, 0.0) for key in kept):
        return None
    chosen = {key: task for key, task in missing.items() if key in keys}
    n_of = Counter(map(key_split, tasks))
    return Plan(
        graph,
        chosen,
        frozenset(kept),
        _order(graph, chosen),
        graph.annotations,
        reasons=dict.fromkeys(chosen, ("in a sample", "too little is known of its prefix")),
        rest=replace(graph, tasks=tasks, sampled=frozenset(keys)),
        until=Until(_awaited(chosen, snapshot, n_of), n_of),
    )


def _awaited(sample: Mapping[Key, GraphNode], snapshot: Snapshot, n_of: Mapping[str, int]) -> frozenset[Key]:
    """Return the tasks of a sample from which most is learned; `n_of` has the tasks of each prefix."""
    # The first of them that ends limits the wait for the others; data and known tasks end long before.
    unknown = {
        key: n_of[prefix]
        for key, task in sample.items()
        if not isinstance(task, NO_WORK) and (prefix := key_split(key)) not in snapshot.learned
    }
    many = MANY * snapshot.cluster.n_threads
    return frozenset(key for key, n in unknown.items() if n >= many) or frozenset(unknown)


# Shuffles and bundles


def _bundled(graph: SentGraph, snapshot: Snapshot, token: str) -> Plan:
    """Return the plan of a graph with plain shuffles and bundles."""
    tasks, shuffled, kept = graph.tasks, dict[Key, float](), dict[Key, tuple[str, list[Key]]]()
    pieces, direct = dict[Key, Averages](), set[Key]()
    wanted_now, held, measured = graph.wanted, tuple[Held, ...](), dict[str, float]()
    annotations = {name: dict(by_key) for name, by_key in graph.annotations.items()}
    if "plain_shuffles" in snapshot.features and shuffles.has_p2p(tasks):
        plain = with_small_shuffles(graph, snapshot)
        kept, measured = plain.kept, plain.measured
        if plain.outputs:
            tasks, shuffled = plain.tasks, plain.outputs
            pieces = {key: Averages(_PIECE_S, nbytes, nbytes) for key, nbytes in plain.pieces.items()}
            direct = {key for key in shuffled if not pieces.keys().isdisjoint(tasks[key].dependencies)}
        common = _common(graph) if "stages" in snapshot.features else None
        if common is not None:
            held = held_parts(graph, plain, snapshot, token)
            for name, value in common.items():  # their plans give them to their tasks
                annotations[name] |= {key: value for part in held for key in part.tasks}
        for by_key in annotations.values():
            by_key |= {new: by_key[old] for new, old in plain.origins.items() if old in by_key}
    premises = Premises.of(plain.tasks if held else tasks, snapshot)
    if held:
        late = {key for part in held for key in part.rest.tasks}
        tasks = {key: task for key, task in plain.tasks.items() if key not in late}
        wanted_now = (graph.wanted - late).union(*(part.inputs & tasks.keys() for part in held))
        kept = {key: one for key, one in kept.items() if key not in late}
    bundled: BundledGraph | None = None
    if len(tasks) >= FEWEST or snapshot.holds_some(tasks):
        missing, wanted = _missing(wanted_now, tasks, premises)
        sharing = share(missing, wanted, snapshot)
        inherited, alone = _annotated(annotations, sharing.tasks)
        alone |= _alone(sharing.tasks, premises, snapshot)
        known = replace(graph, averages={**graph.averages, **pieces}) if pieces else graph
        bundled = _cut(known, sharing, wanted, snapshot, token, alone=alone)
    prediction = bundled.prediction if bundled is not None and not held else None
    if bundled is not None and not bundled.bundles:
        bundled = None
    if bundled is not None:
        premises = replace(premises, sharing=sharing)
        for name, value in inherited.items():
            annotations[name] |= dict.fromkeys(bundled.bundles, value)
        tasks = bundled.tasks
    elif not shuffled and not held:
        return replace(unchanged(graph), prediction=prediction, kept_shuffles=kept, measured=measured)
    order = _order(graph, tasks, bundled)
    bundles = bundled.bundles if bundled is not None else {}
    if held:
        last = max(order.values(), default=0.0)
        late_tasks = {key: task for part in held for key, task in part.tasks.items()}
        order |= {key: last + i for i, key in enumerate(late_tasks, 1)}
        tasks = {**tasks, **late_tasks}
        bundles = {**bundles, **{key: one for part in held for key, one in part.bundles.items()}}
    return Plan(
        graph,
        tasks,
        graph.wanted,
        order,
        annotations,
        bundles=bundles,
        shuffled=shuffled,
        reasons=_reasons(shuffled, direct, held),
        kept_shuffles=kept,
        measured=measured,
        held=held,
        premises=premises,
        prediction=prediction,
    )


def _common(graph: SentGraph) -> dict[str, Any] | None:
    """Return the annotations that all tasks have, if bundles may have them; None if tasks differ."""
    found: dict[str, Any] = {}
    for name, by_key in graph.annotations.items():
        values = [by_key.get(key) for key in graph.tasks]
        if all(value is None for value in values):
            continue
        if name not in INHERITED or any(value != values[0] for value in values):
            return None
        found[name] = values[0]
    return found


def _reasons(
    shuffled: Mapping[Key, float], direct: Collection[Key], held: Collection[Held]
) -> dict[Key, tuple[str, str]]:
    found: dict[Key, tuple[str, str]] = {}
    for key, nbytes in shuffled.items():
        what = "direct shuffle" if key in direct else "plain tasks"
        found[key] = what, f"a P2P shuffle of {_in_words(nbytes)}"
    for part in held:
        found[part.name] = "held", f"until {len(part.inputs)} inputs are complete"
    return found


def _in_words(nbytes: float) -> str:
    return format_bytes(int(nbytes)) if nbytes < inf else "unknown size"


def _missing(
    wanted: Collection[Key], tasks: Mapping[Key, GraphNode], premises: Premises
) -> tuple[dict[Key, GraphNode], set[Key]]:
    """Return the tasks that the scheduler needs, and which of their results have keys of their own."""
    # Tasks that exist stay as they are: Dask warns of a key with other dependencies than before.
    missing = {key: task for key, task in tasks.items() if not premises.defined.get(key)}
    keys = {key for key in wanted if key in missing}
    missing = needed_by(keys, missing)
    # Tasks that exist without a definition get it from this graph.
    return missing, keys | {key for key in premises.defined if key in missing}


def _alone(tasks: Mapping[Key, GraphNode], premises: Premises, snapshot: Snapshot) -> set[Key]:
    """Return the tasks that share no bundle because of their inputs."""
    # They fail, and the tasks that share a bundle with one would fail with it.
    alone = dependents_of(premises.failed, tasks)
    fixed = {key for key, facts in snapshot.tasks.items() if facts.is_fixed}
    return alone | {key for key, task in tasks.items() if not fixed.isdisjoint(task.dependencies)}


def _cut(
    graph: SentGraph,
    sharing: Sharing,
    wanted: set[Key],
    snapshot: Snapshot,
    token: str,
    *,
    alone: set[Key],
) -> BundledGraph | None:
    """Return a graph in bundles, if any; None if there is nothing to do."""
    tasks = sharing.tasks
    if not tasks:
        return None
    read = _read_nbytes(tasks, sharing, snapshot)
    return bundle_graph(
        *(tasks, wanted, snapshot.cluster, snapshot.learned, token),
        alone=alone,
        places=sharing.places,
        shares_objects=snapshot.shares_objects,
        by_key=graph.averages,
        declared_nbytes=graph.declared_nbytes,
        outside_nbytes=read,
        holders={key: snapshot.tasks[key].holders for key in read if snapshot.is_in_memory(key)},
        repeats=snapshot.repeats,
        may_try=not graph.is_urgent,
    )


def _read_nbytes(tasks: Mapping[Key, GraphNode], sharing: Sharing, snapshot: Snapshot) -> dict[Key, float]:
    """Return the known or learned sizes of the results that a graph reads, by key of their task [B]."""
    found: dict[Key, float] = {}
    for key in sorted({sharing.places.get(key, (key, None))[0] for key in outside(tasks)}, key=str):
        facts, one = snapshot.tasks.get(key), snapshot.learned.get(key_split(key))
        if facts is not None and facts.nbytes >= 0:
            found[key] = facts.nbytes
        elif one is not None:
            found[key] = max(one.nbytes, one.most_nbytes)
    return found


def _annotated(
    annotations: Mapping[str, Mapping[Key, Any]], graph: Mapping[Key, GraphNode]
) -> tuple[dict[str, Any], set[Key]]:
    """Return the annotations that bundles inherit, and the tasks that stay separate for their own."""
    inherited: dict[str, Any] = {}
    alone: set[Key] = set()
    for name, by_key in annotations.items():
        own = {key: value for key, value in by_key.items() if key in graph and value is not None}
        if name == BUNDLE_ANNOTATION:
            own = {key: value for key, value in own.items() if is_bundling_off(value)}
        elif name in INHERITED and graph and len(own) == len(graph):
            value = next(iter(own.values()))
            if all(other == value for other in own.values()):
                inherited[name] = value
                continue
        alone.update(own)
    return inherited, alone
