"""How graphs are cut into bundles: as the cluster wants it, and so that wrong costs do little harm."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import inf, nan
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferroflow_dask.annotations import COST_ANNOTATION, RANK_ANNOTATION
from ferroflow_dask.bundling.coarse import factored, longest_first, tapered
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.cost import AnalyticCost, estimate
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph import Graph, Op, bounds, generate_graph
from ferroflow_dask.lowering import bind_graph
from ferroflow_dask.lowering.bundles import _peak_nbytes, bundle
from ferroflow_dask.ranks import ranks_of
from ferroflow_dask.virtual import VirtualCluster, VirtualTask

FOUR = ClusterProfile((1,) * 4)
EIGHT = ClusterProfile((1,) * 8)


def sizes(graph: Graph, cluster: ClusterProfile, costs: Any = None) -> list[int]:
    seconds = estimate(graph, costs or AnalyticCost())
    return sorted((len(one) for one in bundle(graph, seconds, cluster).bundles), reverse=True)


def test_short_siblings_are_shared_out_evenly_and_long_ones_travel_alone() -> None:
    # A bundle for each op that is worth a task of its own; other threads share the rest, each in halves.
    assert sizes(generate_graph("imbalanced"), EIGHT) == [25] * 4 + [13] * 4 + [12] * 4 + [1] * 4
    seconds = estimate(generate_graph("xlarge-wide"), AnalyticCost())
    found = bundle(generate_graph("xlarge-wide"), seconds, EIGHT).bundles
    work = sorted((sum(seconds[op.id] for op in one) for one in found), reverse=True)
    rounds = [work[i : i + 8] for i in range(0, len(work), 8)]
    assert len(rounds[-1]) == 8
    for one, following in itertools.pairwise(rounds):
        assert one[0] - one[-1] <= 0.005  # the longest op
        assert sum(following) <= 1.1 * sum(one)


NO_TIME = {"n_heavy": 3, "heavy_ms": 100.0, "n_fast": 60, "fast_ms": 0.0}
SHORT = {"seq_len": 8, "d_model": 16, "n_heads": 4}


@pytest.mark.parametrize(
    ("name", "arguments", "n_threads", "expected"),
    [
        pytest.param("xlarge-transformer", {}, 1, [384], id="one thread gets one"),
        pytest.param("matmul-chain", {"n_ops": 30}, 8, [30], id="a chain is one"),
        pytest.param("matmul-parallel", {"n_branches": 16, "m": 512}, 8, [8] * 16, id="chains are one each"),
        pytest.param("transformer", SHORT, 8, [12], id="what is too short to share"),
        *(pytest.param("imbalanced", NO_TIME, n, [60, 1, 1, 1], id=f"no time, {n}") for n in (1, 2, 8)),
    ],
)
def test_bundles_have_the_sizes(name: str, arguments: Any, n_threads: int, expected: list[int]) -> None:
    assert sizes(generate_graph(name, **arguments), ClusterProfile((1,) * n_threads)) == expected


def test_guesses_give_bundles_of_decreasing_sizes_neighbours_apart() -> None:
    graph = generate_graph("imbalanced")
    cut = bundle(graph, {}, EIGHT)
    found = [len(one) for one in cut.bundles]
    assert found == sorted(found, reverse=True)
    assert found[0] > 4 * found[-1]
    first = {op.id for op in graph.live_ops[:8]}
    assert all(len(first & {op.id for op in one}) <= 1 for one in cut.bundles)


def test_no_bundle_needs_more_memory_than_a_worker_has() -> None:
    graph = generate_graph("matmul-parallel", n_branches=8, ops_per_branch=4, m=256)  # 256 KiB a value
    seconds = dict.fromkeys((op.id for op in graph.ops), 1e-5)
    roomy = replace(FOUR, memory_nbytes=2**34)
    tight = replace(FOUR, memory_nbytes=2**22)
    assert len(bundle(graph, seconds, roomy).bundles) == 1
    for one in bundle(graph, seconds, tight).bundles:
        branches = Counter(op.inputs[1] for op in one)
        assert len(one) == 1 or len(branches) < 8
    assert len(bundle(graph, seconds, tight).bundles) > 1


#: Of each value [B]; `x` and `y` come from elsewhere.
NBYTES = {"x": 100, "y": 1000, "a": 10, "b": 20, "c": 40}


def made(*reads: str) -> list[Op]:
    """Return ops that make `a`, `b` and `c`, one after another, of the values named by letters."""
    return [
        Op(i, out, "f", tuple(read), (out,)) for i, (read, out) in enumerate(zip(reads, "abc", strict=True))
    ]


HELD = {
    "one after another": (made("x", "a", "b"), "", 100 + 20 + 40),  # at the end; `a` is gone by then
    "of two from elsewhere": (made("xy", "a", "b"), "", 100 + 1000 + 20 + 40),
    "what comes from elsewhere stays until the end": (made("x", "a", "bx"), "", 100 + 20 + 40),
    "what is read again stays until then": (made("x", "a", "ab"), "", 100 + 10 + 20 + 40),
    "what others read stays": (made("x", "a", "b"), "a", 100 + 10 + 20 + 40),
    "what one op reads twice goes once": (made("x", "aa", "b"), "", 100 + 20 + 40),
    "of nothing from elsewhere": (made("", "", "a"), "c", 10 + 20 + 40),
}


@pytest.mark.parametrize(("ops", "kept", "expected"), HELD.values(), ids=HELD)
def test_a_bundle_holds_what_is_still_read_and_what_others_read(
    ops: list[Op], kept: Collection[str], expected: int
) -> None:
    assert _peak_nbytes(ops, NBYTES, kept) == expected


def test_the_most_may_be_held_before_the_end() -> None:
    assert _peak_nbytes(made("", "a", "b"), {"a": 10, "b": 500, "c": 1}, "c") == 510
    assert _peak_nbytes(made("", "a", "b"), {"a": 400, "b": 100, "c": 1}, "c") == 500


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50), st.integers(1, 8))
def test_longest_first_is_within_grahams_bound(costs_s: list[float], n: int) -> None:
    bundles = longest_first(costs_s, n)
    assert sorted(i for items in bundles for i in items) == list(range(len(costs_s)))
    best = max(*costs_s, sum(costs_s) / n)
    assert max(sum(costs_s[i] for i in items) for items in bundles) <= (2 - 1 / n) * best + 1e-9


@given(st.integers(1, 500), st.integers(1, 16), st.integers(1, 50))
def test_factoring_halves_what_is_left_each_round(n_items: int, n_threads: int, most: int) -> None:
    bundles = factored(n_items, n_threads, most)
    assert sorted(i for items in bundles for i in items) == list(range(n_items))
    found = [len(items) for items in bundles]
    assert found == sorted(found, reverse=True)
    assert found[0] == min(most, -(-n_items // (2 * n_threads)))


@given(st.lists(st.floats(0, 1), max_size=200), st.integers(1, 16), st.floats(0, 1), st.floats(0.01, 10))
def test_tapering_keeps_shares_apart(
    costs_s: list[float], n_shares: int, least_s: float, most_s: float
) -> None:
    shares = longest_first(costs_s, n_shares)
    bundles = tapered(costs_s, shares, least_s, most_s)
    assert sorted(i for items in bundles for i in items) == list(range(len(costs_s)))
    assert all(any(set(items) <= set(share) for share in shares) for items in bundles)
    lasting_s = [sum(costs_s[i] for i in items) for items in bundles]
    assert max(lasting_s, default=0.0) <= most_s + max(costs_s, default=0.0) + 1e-9
    for share in shares:
        *_, last = (i for i, items in enumerate(bundles) if set(items) <= set(share))
        assert len(bundles[last]) == 1 or lasting_s[last] < 2 * least_s + 1e-9


def test_each_bundle_is_half_of_what_is_left_and_of_each_kind() -> None:
    costs_s = [8.0] * 16 + [1.0] * 16
    bundles = tapered(costs_s, longest_first(costs_s, 2), least_s=9.0, most_s=inf)
    assert [sorted(costs_s[i] for i in items) for items in bundles] == [
        [1.0] * n + [8.0] * n for n in (4, 4, 2, 2, 1, 1, 1, 1)
    ]


def test_long_shares_are_cut_into_bundles_of_the_longest_first() -> None:
    bundles = tapered([1.0] * 64, [range(32), range(32, 64)], least_s=4.0, most_s=8.0)
    assert [len(items) for items in bundles] == [8] * 6 + [4] * 4


#: Ops whose sizes differ little, much, and by level.
MIXED: dict[str, dict[str, Any]] = {
    "imbalanced": {},
    "skewed": {},
    "large-wide": {},
    "wide": {"width": 64, "depth": 5, "skew": 0.25},
}


def makespan_s(
    graph: Graph, seconds: Mapping[int, float], thought: Mapping[int, float], task_s: float
) -> float:
    """Return how long ops take that are cut, ordered and placed by what was thought of them [s]."""
    profile = ClusterProfile((1,) * 8, task_s=task_s)
    bundles = bundle(graph, thought, profile).bundles
    made_by = {value: i for i, one in enumerate(bundles) for op in one for value in op.outputs}
    before = [
        sorted({made_by[v] for op in one for v in op.operands if made_by.get(v, i) != i})
        for i, one in enumerate(bundles)
    ]
    costs_s = [sum(thought[op.id] for op in one) for one in bundles]
    cluster = VirtualCluster(8, service_s=task_s / 2, validate=False)
    cluster.submit(
        {
            i: VirtualTask(
                sum(seconds[op.id] for op in one),
                tuple(before[i]),
                annotations={COST_ANNOTATION: cost_s, RANK_ANNOTATION: rank_s},
            )
            for i, (one, cost_s, rank_s) in enumerate(
                zip(bundles, costs_s, ranks_of(costs_s, before), strict=True)
            )
        }
    )
    return cluster.run()


@pytest.mark.parametrize("task_s", [2e-4, 1e-3, 2e-3])
@pytest.mark.parametrize("name", MIXED)
def test_costs_wrong_by_factors_up_to_ten_cost_little(name: str, task_s: float) -> None:
    graph = generate_graph(name, **MIXED[name])
    seconds = estimate(graph, AnalyticCost())
    best_s = makespan_s(graph, seconds, seconds, task_s)
    found = []
    for seed in range(10):
        rng = random.Random(seed)
        thought = {op: cost_s * 10 ** rng.uniform(-1, 1) for op, cost_s in seconds.items()}
        found.append(makespan_s(graph, seconds, thought, task_s) / best_s)
    assert median(found) <= 1.25
    assert max(found) <= 1.6
    assert best_s <= 1.15 * bounds(graph, seconds).makespan(8) + 0.02


@pytest.mark.parametrize("n_heavy", [0, 4, 6, 7, 8, 15])
def test_what_is_thought_to_be_short_runs_everywhere_if_it_is_not(n_heavy: int) -> None:
    # All ops take 10 ms. Some were thought to take 100 ms, and to keep most threads busy.
    graph = generate_graph("imbalanced", n_heavy=n_heavy, heavy_ms=100.0, n_fast=60, fast_ms=1.0)
    thought = estimate(graph, AnalyticCost())
    seconds = dict.fromkeys(thought, 0.01)
    assert makespan_s(graph, seconds, thought, 1e-3) <= 1.6 * sum(seconds.values()) / 8


def test_a_cost_that_is_no_duration_is_refused() -> None:
    class Wrong:
        def seconds(self, op: Op, graph: Graph) -> float | None:
            return nan

    told = "Wrong says that op 'fast_1' takes nan s; it must be a number, at least 0, or None"
    with pytest.raises(UsageError, match=told):
        bind_graph(generate_graph("wide", width=1, depth=1), {}, costs=Wrong(), profile=EIGHT)
