"""Plans of arriving graphs: a table of graphs and snapshots, and random ones, without a scheduler."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import dask.dataframe as dd
import pandas as pd
import pytest
from dask._task_spec import Alias, DataNode, List, Task, TaskRef
from dask.utils import key_split
from dask_graphs import FOUR, Graph, Known, combine
from random_shuffles import graph_of, n_barriers

from ferroflow_dask.bundling.averages import Averages
from ferroflow_dask.bundling.bundle import Bundle
from ferroflow_dask.bundling.plain_shuffles import Choice, with_plain_tasks
from ferroflow_dask.bundling.plan import Plan
from ferroflow_dask.bundling.results import Results
from ferroflow_dask.bundling.rewrite import keys_read, revalidate, rewrite, unchanged
from ferroflow_dask.bundling.sequence import bundle_in
from ferroflow_dask.bundling.shuffles import groups_of, unfused
from ferroflow_dask.bundling.snapshot import FEATURES, BundleFacts, SentGraph, Snapshot, TaskFacts, outside
from ferroflow_dask.cluster_profile import ClusterProfile

#: Random graphs and snapshots; set it to 2,000 after a change of `rewrite`.
N_RANDOM = 300
#: Result of each task outside of a graph.
OUTSIDE = 100

SHORT = Known(1e-3)
KNOWN = Snapshot(FOUR, SHORT)
#: Nothing is known of any task, and a sample would start at once.
NEW = Snapshot(FOUR, has_idle_threads=True)


# Graphs


def calls(prefix: str, n: int, *read: str) -> Graph:
    """Return tasks that each read the same others."""
    return {f"{prefix}-{i}": Task(f"{prefix}-{i}", combine, i, *map(TaskRef, read)) for i in range(n)}


def line(prefix: str, n: int = 12, first: str = "") -> Graph:
    """Return tasks of which each reads the one before."""
    read = [first, *(f"{prefix}-{i}" for i in range(n - 1))]
    return {
        f"{prefix}-{i}": Task(f"{prefix}-{i}", combine, i, *map(TaskRef, filter(None, [read[i]])))
        for i in range(n)
    }


def pairs(n: int = 40) -> Graph:
    """Return tasks that each read one other task."""
    reading = {f"clean-{i}": Task(f"clean-{i}", combine, i, TaskRef(f"load-{i}")) for i in range(n)}
    return calls("load", n) | reading


def sent(tasks: Graph, *wanted: Any, **options: Any) -> SentGraph:
    """Return a graph of which the client wants some keys; those that no task reads if left out."""
    read = {key for task in tasks.values() for key in task.dependencies}
    return SentGraph(tasks, frozenset(wanted or tasks.keys() - read), **options)


def annotated(graph: SentGraph, name: str, value: Any, n: int | None = None) -> SentGraph:
    return replace(graph, annotations={name: dict.fromkeys([*graph.tasks][:n], value)})


def rechunked() -> SentGraph:
    with dask.config.set({"array.rechunk.method": "p2p"}):
        tasks, keys = graph_of(da.arange(400, chunks=20).reshape(20, 20).rechunk((20, 4)) + 1)
    return SentGraph(tasks, frozenset(keys))


LINE, LEAVES, PAIRS, P2P = sent(line("inc")), sent(calls("leaf", 30)), sent(pairs()), rechunked()
FORK = sent(line("inc") | calls("out", 3, "inc-11"))
SOURCES = [
    key
    for group in groups_of(unfused(P2P.tasks))
    for shuffle in group
    for key in shuffle.sources(unfused(P2P.tasks))
]


# Snapshots


def has(*keys: Any, snapshot: Snapshot = KNOWN, **facts: Any) -> Snapshot:
    """Return a snapshot with tasks that the scheduler has."""
    return replace(snapshot, tasks={**snapshot.tasks, **dict.fromkeys(keys, TaskFacts(**facts))})


def holds(graph: SentGraph, *exports: Any, snapshot: Snapshot = KNOWN, **facts: Any) -> Snapshot:
    """Return a snapshot in which one bundle, `B`, holds all tasks of a graph."""
    places = {key: (key, None) for key in outside(graph.tasks)}
    facts_of = {"B": BundleFacts(Bundle(tuple(graph.tasks.values()), exports, places), **facts)}
    return has("B", snapshot=replace(snapshot, held=dict.fromkeys(graph.tasks, "B"), bundles=facts_of))


def without(*features: str, snapshot: Snapshot = KNOWN) -> Snapshot:
    return replace(snapshot, features=FEATURES.difference(features))


# Properties of plans


def is_unchanged(plan: Plan) -> bool:
    return plan == unchanged(plan.graph)


def inside(plan: Plan) -> set[frozenset[Any]]:
    """Return the keys of the tasks in each bundle of several."""
    return {
        frozenset(one.key for one in bundle.tasks)
        for bundle in plan.bundles.values()
        if len(bundle.tasks) > 1
    }


def bundles(*prefixes: str) -> Callable[[Plan], bool]:
    """Return whether all tasks of these prefixes, and no others, are in bundles."""

    def is_so(plan: Plan) -> bool:
        keys = frozenset().union(*inside(plan))
        return keys == {key for key in plan.graph.tasks if key_split(key) in prefixes}

    return is_so


def separate(*keys: Any) -> Callable[[Plan], bool]:
    """Return whether some tasks stay as they came, and others are bundled."""
    return lambda plan: bool(plan.bundles) and all(plan.tasks[key] is plan.graph.tasks[key] for key in keys)


def inherits(name: str, value: Any) -> Callable[[Plan], bool]:
    return lambda plan: (
        bool(plan.bundles) and all(plan.annotations[name][key] == value for key in plan.bundles)
    )


def samples(*awaited: str, **n_of: int) -> Callable[[Plan], bool]:
    """Return whether so many tasks of each prefix are in a sample; it waits for the `awaited`, or all."""

    def is_so(plan: Plan) -> bool:
        found = [key_split(key) for key in plan.tasks]
        assert plan.rest is not None
        assert plan.until is not None
        assert plan.premises is None
        assert plan.rest.sampled == plan.tasks.keys() == plan.reasons.keys()
        assert plan.until.keys == {key for key in plan.tasks if not awaited or key_split(key) in awaited}
        return {prefix: found.count(prefix) for prefix in found} == n_of

    return is_so


def has_no_sample(plan: Plan) -> bool:
    return plan.rest is None


def holds_a_part(plan: Plan) -> bool:
    (held,) = plan.held
    ((sources, _),) = held.sources
    assert {*held.inputs} == {*sources}
    assert plan.tasks.keys() >= {*sources}
    assert plan.wanted == plan.graph.wanted == held.rest.wanted
    assert not n_barriers(plan.tasks)
    return held.tasks.items() <= plan.tasks.items()


def shuffles_by_p2p(plan: Plan) -> bool:
    return n_barriers(plan.tasks) == 1


def shares(*exports: Any, n_again: int = 0) -> Callable[[Plan], bool]:
    """Return whether the bundle `B` is to return the values of these tasks, and how many tasks run again."""

    def is_so(plan: Plan) -> bool:
        wanted = {"B": exports} if exports else {}
        return (plan.sharing.exports, plan.sharing.n_again) == (wanted, n_again)

    return is_so


def is_plain(plan: Plan) -> bool:
    return (
        not n_barriers(plan.tasks) and len(plan.shuffled) == 5 and plan.shuffled.keys() <= plan.reasons.keys()
    )


MORE = sent(line("dec", first="inc-5") | LINE.tasks, "dec-11")
BIG = Snapshot(replace(FOUR, memory_nbytes=2**20), Known(1e-3, 2.0**18))
LARGE = dict.fromkeys(LEAVES.tasks, 2.0**25)
SMALL = {key: TaskFacts(nbytes=100.0) for key in SOURCES}

CASES: dict[str, tuple[SentGraph, Snapshot, Callable[[Plan], bool]]] = {
    # Graphs that run as they came
    "no tasks": (SentGraph({}, frozenset()), KNOWN, is_unchanged),
    "nine tasks": (sent(line("inc", 9)), KNOWN, is_unchanged),
    "tasks of unknown prefixes": (LEAVES, Snapshot(FOUR), is_unchanged),
    "tasks of prefixes that are never bundled": (LEAVES, Snapshot(FOUR, {"leaf": None}), is_unchanged),
    "tasks of ten seconds": (LEAVES, Snapshot(FOUR, Known(10.0)), is_unchanged),
    "workers that cannot run bundles": (LINE, without("bundles"), is_unchanged),
    "an annotation that keeps tasks separate": (
        annotated(LINE, "ferroflow_bundle", False),
        KNOWN,
        is_unchanged,
    ),
    "tasks with retries": (annotated(LINE, "retries", 2), KNOWN, is_unchanged),
    "wanted tasks that exist": (LINE, has("inc-11"), is_unchanged),
    "results that fill the memory": (LEAVES, BIG, is_unchanged),
    # Bundles
    "a chain": (LINE, KNOWN, lambda plan: [*plan.tasks] == [*plan.bundles] == ["inc-11"]),
    "a chain that several tasks read": (FORK, KNOWN, bundles("inc", "out")),
    "separate readers of a chain": (
        replace(FORK, annotations={"retries": dict.fromkeys(["out-0", "out-1", "out-2"], 1)}),
        KNOWN,
        bundles("inc"),
    ),
    "many wanted tasks": (
        LEAVES,
        KNOWN,
        lambda plan: {key for one in plan.bundles.values() for key in one.delivered} == LEAVES.wanted,
    ),
    "keys with the token": (
        LEAVES,
        KNOWN,
        lambda plan: {key[0] for key in plan.bundles.keys() - LEAVES.tasks.keys()} == {"bundle-leaf-7"},
    ),
    "tasks that the client does not need": (
        sent(LINE.tasks | calls("leaf", 9), "inc-11"),
        KNOWN,
        lambda plan: {*plan.tasks} == {"inc-11"},
    ),
    "workers in the process of the scheduler": (
        LINE,
        replace(KNOWN, shares_objects=True),
        lambda plan: plan.bundles["inc-11"].shares_objects,
    ),
    "an annotation without a value": (annotated(LINE, "retries", None), KNOWN, bundles("inc")),
    "an annotation that allows bundles": (annotated(LINE, "ferroflow_bundle", True), KNOWN, bundles("inc")),
    "one priority for all": (annotated(LINE, "priority", 7), KNOWN, inherits("priority", 7)),
    "one span for all": (
        annotated(LINE, "span", {"name": ("work",)}),
        KNOWN,
        inherits("span", {"name": ("work",)}),
    ),
    "a priority for some": (annotated(LINE, "priority", 7, 3), KNOWN, separate("inc-0", "inc-1", "inc-2")),
    "an order of the client": (
        replace(FORK, priorities={key: i + 5 for i, key in enumerate(reversed(FORK.tasks))}),
        KNOWN,
        lambda plan: min(plan.order.values()) == 5,
    ),
    "a task that exists": (
        FORK,
        has("inc-5", holders=["a"]),
        lambda plan: "inc-5" not in plan.tasks | plan.bundles,
    ),
    "a key that exists without a task": (
        FORK,
        has("inc-5", is_defined=False),
        lambda plan: "inc-5" in plan.tasks,
    ),
    "readers of a task that failed": (
        sent(line("inc") | line("dec", 3, "bad")),
        has("bad", has_failed=True),
        separate("dec-0", "dec-1", "dec-2"),
    ),
    "readers of a result that stays on its worker": (
        sent(line("inc") | line("dec", 3, "fixed")),
        has("fixed", holders=["a"], is_fixed=True),
        separate("dec-0"),
    ),
    "declared sizes that fill the memory": (
        replace(LEAVES, declared_nbytes=LARGE),
        replace(BIG, learned=SHORT),
        is_unchanged,
    ),
    "small declared sizes": (
        replace(LEAVES, declared_nbytes=dict.fromkeys(LEAVES.tasks, 1.0)),
        KNOWN,
        bundles("leaf"),
    ),
    "averages of single tasks": (
        replace(LEAVES, averages={"leaf-3": Averages(10.0)}),
        KNOWN,
        lambda plan: all("leaf-3" not in keys for keys in inside(plan)),
    ),
    # Values of other graphs
    "a value that a bundle returns": (MORE, holds(LINE, "inc-5"), shares("inc-5")),
    "a value that a bundle can return": (
        MORE,
        holds(LINE, "inc-11", may_export=True),
        shares("inc-11", "inc-5"),
    ),
    "a value that a bundle cannot return": (MORE, holds(LINE, "inc-11"), shares(n_again=6)),
    "a value of a bundle that is gone": (MORE, holds(LINE, "inc-5", is_gone=True), shares(n_again=6)),
    "no sharing": (MORE, holds(LINE, "inc-5", snapshot=without("sharing")), shares(n_again=6)),
    "few tasks of which a bundle holds some": (
        sent(line("dec", 3, "inc-5") | LINE.tasks, "dec-2"),
        holds(LINE, "inc-5"),
        shares("inc-5"),
    ),
    "a wanted task in a bundle": (LINE, holds(LINE, "inc-11"), lambda plan: [*plan.tasks] == ["inc-11"]),
    # Samples
    "unknown tasks": (PAIRS, NEW, samples(load=8, clean=8)),
    "unknown tasks and busy threads": (PAIRS, Snapshot(FOUR), has_no_sample),
    "unknown tasks without samples": (PAIRS, without("samples", snapshot=NEW), has_no_sample),
    "unknown tasks of which a bundle holds some": (PAIRS, holds(PAIRS, snapshot=NEW), has_no_sample),
    "unknown tasks after a sample": (replace(PAIRS, sampled=frozenset({"load-0"})), NEW, has_no_sample),
    "known tasks and idle threads": (
        PAIRS,
        replace(NEW, learned={"load": Averages(1.0), "clean": None}),
        has_no_sample,
    ),
    "unknown readers of known tasks": (
        PAIRS,
        replace(NEW, learned={"load": Averages(1.0)}),
        samples("clean", load=8, clean=8),
    ),
    "unknown readers of data": (
        sent({**PAIRS.tasks, **{f"load-{i}": DataNode(f"load-{i}", i) for i in range(60)}}),
        NEW,
        samples("clean", load=8, clean=8),
    ),
    "unknown tasks, some of which exist": (PAIRS, has("load-0", snapshot=NEW), samples(load=8, clean=7)),
    "unknown tasks that read what does not exist yet": (sent(calls("use", 60, "later")), NEW, has_no_sample),
    "unknown tasks that read what exists": (
        sent(calls("use", 60, "x")),
        has("x", snapshot=NEW, holders=["a"]),
        samples(use=8),
    ),
    "unknown tasks whose values the client wants": (
        PAIRS,
        NEW,
        lambda plan: plan.wanted == {key for key in plan.tasks if key[0] == "c"},
    ),
    "unknown tasks whose declared sizes would fill the memory in a sample": (
        replace(PAIRS, declared_nbytes=dict.fromkeys(PAIRS.tasks, 2.0**16)),
        replace(BIG, learned={}, has_idle_threads=True),
        has_no_sample,
    ),
    "unknown tasks whose declared sizes fill a part of the memory in a sample": (
        replace(PAIRS, declared_nbytes=dict.fromkeys(PAIRS.tasks, 2.0**15)),
        replace(BIG, learned={}, has_idle_threads=True),
        samples(load=8, clean=8),
    ),
    # Shuffles
    "data of a shuffle of unknown size": (P2P, KNOWN, holds_a_part),
    "data of unknown size in a graph with a priority": (
        replace(P2P, annotations={"priority": dict.fromkeys(P2P.tasks, 3)}),
        KNOWN,
        lambda plan: (
            holds_a_part(plan) and all(plan.annotations["priority"][key] == 3 for key in plan.held[0].tasks)
        ),
    ),
    "data of unknown size in a graph with retries": (
        replace(P2P, annotations={"retries": dict.fromkeys(P2P.tasks, 3)}),
        KNOWN,
        lambda plan: not plan.held and n_barriers(plan.tasks) == 1,
    ),
    "data of a shuffle of unknown size without stages": (
        P2P,
        without("stages"),
        shuffles_by_p2p,
    ),
    "a shuffle of large data": (
        P2P,
        replace(KNOWN, tasks={SOURCES[0]: TaskFacts(nbytes=2.0**40)}),
        shuffles_by_p2p,
    ),
    "a shuffle of data that are declared to be large": (
        replace(P2P, declared_nbytes=dict.fromkeys(SOURCES, 2.0**40)),
        KNOWN,
        lambda plan: shuffles_by_p2p(plan) and not plan.held,
    ),
    "a shuffle of data that are declared to be small": (
        replace(P2P, declared_nbytes=dict.fromkeys(SOURCES, 100.0)),
        KNOWN,
        lambda plan: is_plain(plan) and not plan.held,
    ),
    "a shuffle without features": (P2P, replace(without("plain_shuffles"), tasks=SMALL), shuffles_by_p2p),
    "a shuffle of small data": (P2P, replace(KNOWN, tasks=SMALL), is_plain),
}


@pytest.mark.parametrize("name", CASES)
def test_the_plan_of(name: str) -> None:
    graph, snapshot, is_so = CASES[name]
    plan = rewrite(graph, snapshot, "7")
    assert is_so(plan)
    if not n_barriers(plan.tasks):
        assert_values(plan, snapshot)
    assert revalidate(plan, snapshot)


def as_text(plan: Plan) -> str:
    """Return all that a plan says, in its order; sets are sorted, since their order is no part of it."""
    bundles = {key: [getattr(one, name) for name in Bundle.__slots__] for key, one in plan.bundles.items()}
    until = plan.until and [plan.until.keys, dict(plan.until.prefixes)]
    rest = plan.rest and [[*plan.rest.tasks], plan.rest.sampled]
    facts = [plan.order, plan.annotations, plan.shuffled, plan.reasons, bundles, until, rest, plan.wanted]
    sharing = [plan.sharing.places, plan.sharing.exports, [*plan.sharing.tasks]]
    return _text([*facts, sharing, {key: _of_task(task) for key, task in plan.tasks.items()}])


def _of_task(task: Any) -> list[Any]:
    arguments = [*getattr(task, "args", ())]
    if (run := bundle_in(task)) is None:
        return [type(task), arguments]
    steps = [(function, read, gone) for function, _, read, gone in run.steps]
    return [type(task), arguments, steps, run.keys, run.arguments, run.exports, run.delivered, run.cost_s]


def _text(value: Any) -> str:
    """Return the text of nested containers, the same in every process."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_text(each)}' for key, each in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return str(sorted(map(repr, value))) if isinstance(value, (set, frozenset)) else repr(value)


def assert_values(plan: Plan, snapshot: Snapshot) -> None:
    """Run the tasks of a plan one after another, then the rest, and compare the wanted values."""
    tasks = plan.graph.tasks
    if n_barriers(tasks):
        tasks = with_plain_tasks(unfused(tasks), lambda _: Choice(0.0, is_plain=True)).tasks
    elsewhere: Graph = {key: DataNode(key, OUTSIDE) for key in outside(tasks)}
    values = dict(zip(tasks, dask.get({**tasks, **elsewhere}, [*tasks]), strict=True))
    for key in values.keys() & snapshot.tasks.keys():
        # A task without a definition gets it from the plan. A sample reads what workers hold.
        if snapshot.tasks[key].is_defined or (plan.rest is not None and snapshot.is_in_memory(key)):
            elsewhere[key] = DataNode(key, values[key])
    for key, facts in snapshot.bundles.items():
        exports = plan.sharing.exports.get(key, facts.bundle.exports)
        elsewhere[key] = DataNode(key, Results(tuple(values[one] for one in exports)))
    for key in plan.wanted:
        assert repr(dask.get({**plan.tasks, **elsewhere}, key)) == repr(values[key])
    if plan.premises is not None and not plan.graph.priorities:
        order = plan.order
        assert all(
            order[one] < order[key]
            for key, task in plan.tasks.items()
            for one in task.dependencies
            if one in order
        )
    if plan.rest is not None:
        later = has(*plan.tasks, snapshot=replace(snapshot, learned=SHORT), holders=["a"], nbytes=8)
        rest = rewrite(plan.rest, later, "8")
        assert rest.rest is None
        assert_values(rest, later)


# Random graphs and snapshots


def random_tasks(rng: random.Random) -> Graph:
    """Draw a graph of calls and aliases, some of which read results that are not in it."""
    tasks: Graph = {}
    n, most, share = rng.choice([3, 12, 60, 120, 120]), rng.randint(0, 3), rng.choice([0.0, 0.08])
    prefixes = "abcd"[: rng.randint(1, 4)]
    for i in range(n):
        key = f"{rng.choice(prefixes)}-{i}"
        read = rng.sample([*tasks], min(len(tasks), rng.randint(0, most)))
        read += [f"outside-{rng.randrange(4)}"] if rng.random() < share else []
        is_alias = len(read) == 1 and rng.random() < 0.1
        tasks[key] = Alias(key, read[0]) if is_alias else Task(key, combine, i, *map(TaskRef, read))
    return tasks


def random_graph(rng: random.Random) -> SentGraph:
    tasks = random_tasks(rng)
    graph = sent(tasks, *(key for key in tasks if rng.random() < 0.3))
    name = rng.choice(["priority", "retries", "ferroflow_bundle", None])
    if name is not None:
        graph = annotated(graph, name, name != "ferroflow_bundle", rng.randint(0, len(tasks)))
    if rng.random() < 0.3:
        keys = rng.sample([*tasks], len(tasks))
        graph = replace(graph, priorities={key: i for i, key in enumerate(keys)})
    declared = {key: rng.choice([1.0, 2.0**25]) for key in tasks if rng.random() < 0.2}
    return replace(graph, declared_nbytes=declared)


def random_averages(rng: random.Random) -> Averages:
    return Averages(rng.choice([1e-4, 1e-3, 1.0]), *rng.choices([10.0, 1e5, 1e8], k=2))


def random_snapshot(rng: random.Random, graph: SentGraph) -> Snapshot:
    keys, share = sorted(keys_read(graph)), rng.choice([0.0, 0.1, 0.3])
    tasks = {
        key: TaskFacts(
            is_defined=rng.random() < 0.8,
            nbytes=rng.choice([-1, 10, 1e8]),
            holders=rng.sample("abc", rng.randint(0, 2)),
            has_failed=rng.random() < 0.1,
            is_fixed=rng.random() < 0.1,
        )
        for key in keys
        if rng.random() < share or key not in graph.tasks
    }
    free = [key for key in graph.tasks if key not in tasks]
    held, found = dict[Any, Any](), dict[Any, BundleFacts]()
    for i in range(rng.choice([0, 0, 1, 3])):
        own = rng.sample(free, min(len(free), rng.randint(2, 8)))
        if len(own) > 1:
            bundle = Bundle(
                tuple(graph.tasks[key] for key in own), tuple(own[: rng.randint(1, len(own))]), {}
            )
            found[f"B{i}"] = BundleFacts(bundle, rng.random() < 0.3, rng.random() < 0.5)
            held |= dict.fromkeys(own, f"B{i}")
    prefixes = [prefix for prefix in sorted(set(map(key_split, keys))) if rng.random() < 0.6]
    return Snapshot(
        ClusterProfile((1,) * rng.choice([1, 1, 2, 8]), memory_nbytes=rng.choice([0, 10**9])),
        {prefix: random_averages(rng) for prefix in prefixes},
        {**tasks, **dict.fromkeys(found, TaskFacts())},
        held,
        found,
        has_idle_threads=rng.random() < 0.5,
        shares_objects=rng.random() < 0.5,
        features=FEATURES.difference(name for name in sorted(FEATURES) if rng.random() < 0.1),
    )


def changed(plan: Plan, snapshot: Snapshot) -> Iterator[tuple[str, Snapshot]]:
    """Yield snapshots that differ in one fact on which a plan relies, and what has changed."""
    assert plan.premises is not None
    for key in plan.premises.keys:
        facts = snapshot.tasks.get(key)
        if facts is None:
            yield f"{key} exists", has(key, snapshot=snapshot)
        else:
            rest = {one: facts for one, facts in snapshot.tasks.items() if one != key}
            yield f"{key} is gone", replace(snapshot, tasks=rest)
            other = replace(facts, is_defined=not facts.is_defined)
            yield f"{key} has another definition", replace(snapshot, tasks={**rest, key: other})
    for key in (*plan.premises.keys, *plan.premises.outside):
        if (facts := snapshot.tasks.get(key)) is not None:
            other = replace(facts, has_failed=not facts.has_failed)
            yield f"{key} has another outcome", replace(snapshot, tasks={**snapshot.tasks, key: other})
    for key, exports in plan.sharing.exports.items():
        facts_of, found = snapshot.bundles, snapshot.bundles[key]
        others = {one: facts for one, facts in facts_of.items() if one != key}
        yield f"{key} is no bundle", replace(snapshot, bundles=others)
        other = replace(found.bundle, exports=(*exports, "more"))
        yield (
            f"{key} returns other values",
            replace(snapshot, bundles={**others, key: replace(found, bundle=other)}),
        )
        if exports != found.bundle.exports:
            sent_now = replace(found, may_export=False)
            yield f"{key} was sent", replace(snapshot, bundles={**others, key: sent_now})


def random_case(seed: int) -> tuple[SentGraph, Snapshot]:
    rng = random.Random(seed)
    graph = random_graph(rng)
    return graph, random_snapshot(rng, graph)


def test_random_plans_give_the_values_of_their_graphs_and_are_the_same_each_time() -> None:
    kinds: Counter[str] = Counter()
    for seed in range(N_RANDOM):
        graph, snapshot = random_case(seed)
        plan = rewrite(graph, snapshot, "1")
        assert_values(plan, snapshot)
        assert as_text(plan) == as_text(rewrite(*random_case(seed), "1")), seed
        kinds["bundled"] += bool(inside(plan))
        kinds["sampled"] += plan.rest is not None
        kinds["shared"] += bool(plan.sharing.exports)
        kinds["again"] += bool(plan.sharing.n_again)
        kinds["unchanged"] += is_unchanged(plan)
    assert min(kinds.values()) > N_RANDOM / 30, kinds


def layered_case(seed: int) -> tuple[SentGraph, Snapshot]:
    """Draw a graph of layers, whose tasks are alike and read several others: many decisions are ties."""
    rng = random.Random(seed)
    first = [f"outside-{i}" for i in range(rng.choice([0, 6]))]
    tasks, before = dict[Any, Any](), first
    for layer in range(rng.randint(2, 6)):
        keys = [(f"{rng.choice('abc')}-0a1b2c3d", layer, i) for i in range(rng.choice([1, 8, 30]))]
        for key in keys:
            read = list(map(TaskRef, rng.sample(before, min(len(before), rng.randint(1, 4)))))
            tasks[key] = Task(key, sum, List(*read)) if rng.random() < 0.5 else Task(key, combine, 1, *read)
        before = keys + rng.choice([before, []])
    facts = {key: TaskFacts(nbytes=rng.random() * 1e6, holders=rng.sample("abc", 2)) for key in first}
    learned = {prefix: random_averages(rng) for prefix in "abc" if rng.random() < 0.9}
    cluster = ClusterProfile((1,) * rng.choice([1, 4, 8]), memory_nbytes=rng.choice([0, 10**8]))
    return sent(tasks, *rng.sample([*tasks], 2)), Snapshot(cluster, learned, facts, has_idle_threads=True)


@pytest.mark.parametrize(("n", "n_pieces"), [(20, 400), (40, 0)])
def test_a_shuffle_of_too_many_pieces_has_no_keys_for_them(n: int, n_pieces: int) -> None:
    rows = dd.from_pandas(pd.DataFrame({"key": range(n)}), npartitions=n, sort=False)
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        graph, keys = graph_of(rows.shuffle("key"))
    found = keys_read(SentGraph(graph, frozenset(keys)))
    assert sum("shuffle-shard" in str(key) for key in found) == n_pieces
    assert any("shuffle-gather" in str(key) for key in found)


def print_plans() -> None:
    """Print a hash of each of 200 random plans."""
    for seed in range(100):
        for case in (random_case(seed), layered_case(seed)):
            print(zlib.crc32(as_text(rewrite(*case, "1")).encode()))


def test_plans_are_the_same_in_every_process() -> None:
    folders = [*sys.path, str(Path(__file__).parent)]
    code = f"import sys; sys.path[:] = {folders}; import test_rewrite; test_rewrite.print_plans()"
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(4)
    ]
    texts = [run.communicate(timeout=300)[0].split() for run in runs]
    assert [len(text) for text in texts] == [200] * 4
    differing = [i for i, hashes in enumerate(zip(*texts, strict=True)) if len({*hashes}) > 1]
    assert not differing


def test_a_plan_is_refused_if_a_premise_has_changed_and_only_then() -> None:
    n_changes = 0
    for seed in range(N_RANDOM):
        plan = rewrite(*(case := random_case(seed)), "1")
        assert revalidate(plan, case[1]), seed
        # Sizes and places of results, and tasks of other graphs, may change.
        facts = {key: replace(facts, nbytes=77, holders=["z"]) for key, facts in case[1].tasks.items()}
        assert revalidate(plan, has("other", snapshot=replace(case[1], tasks=facts, learned={}))), seed
        for what, snapshot in changed(plan, case[1]) if plan.premises is not None else ():
            assert not revalidate(plan, snapshot), (seed, what)
            n_changes += 1
    assert n_changes > 10 * N_RANDOM
