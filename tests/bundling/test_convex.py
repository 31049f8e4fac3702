"""Convex clusters: a partition whose clusters can each start once their inputs exist."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferroflow_dask.bundling.convex import convex_clusters, regions
from ferroflow_dask.bundling.predict import Work


def work_of(edges: list[list[int]], costs_s: list[float] | None = None, **sets: Any) -> Work:
    return Work(edges, costs_s or [1.0] * len(edges), lambda _: 0, **sets)


def clusters(
    edges: list[list[int]], size_s: float = 4.0, most_s: float = inf, **options: Any
) -> list[list[int]]:
    return convex_clusters(work_of(edges, **options), size_s, most_s)


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([{}, {}, {}, {}, {}], [[0, 1, 2, 3, 4]]),
        ([{"a": 1.0}, {"b": 1.0}, {"a": 1.0}, {}, {}], [[0, 2], [1], [3, 4]]),
        ([{"a": 2.0, "b": 1.0}, {"a": 1.0}, {"a": 1.0}, {}, {"b": 1.0}], [[0, 1, 2, 3], [4]]),
    ],
    ids=["nothing held", "two holders", "a follower that reads elsewhere"],
)
def test_pieces_that_read_on_different_workers_share_no_cluster(
    held: list[dict[str, float]], expected: list[list[int]]
) -> None:
    assert clusters([[], [], [], [0, 1, 2], [3]], size_s=9.0, held=held) == expected


def binary_tree(depth: int) -> tuple[list[list[int]], list[int]]:
    """Return the edges of a tree in depth-first order, as Dask orders it, and the levels of its pieces."""
    edges: list[list[int]] = []
    levels: list[int] = []

    def grow(level: int) -> int:
        inputs = [grow(level - 1), grow(level - 1)] if level else []
        edges.append(inputs)
        levels.append(level)
        return len(edges) - 1

    grow(depth)
    return edges, levels


# Cases: edges, options, and the clusters
CASES: dict[str, tuple[list[list[int]], dict[str, Any], list[list[int]]]] = {
    "nothing gives no clusters": ([], {}, []),
    "a chain is one cluster": ([[], [0], [1], [2], [3], [4]], {}, [[0, 1, 2, 3, 4, 5]]),
    "a chain ends when the cluster lasts too long": ([[], [0], [1], [2]], {"most_s": 1.0}, [[0, 1], [2, 3]]),
    "independent pieces fill clusters in order": (
        [[]] * 6,
        {"size_s": 2.0},
        [[0, 1], [2, 3], [4, 5]],
    ),
    "a piece joins even a full cluster": ([[], [], [], [0]], {"size_s": 2.0}, [[0, 1, 3], [2]]),
    "a piece with inputs in two clusters starts one": (
        [[], [], [], [], [1, 2]],
        {"size_s": 2.0},
        [[0, 1], [2, 3], [4]],
    ),
    "pieces of the same level share a cluster": (
        [[], [], [], [0, 1], [1, 2]],
        {"size_s": 1.0},
        [[0], [1], [2], [3], [4]],
    ),
    "a piece that stays alone is single": ([[], [0], [1], [2]], {"alone": {1}}, [[0], [1], [2, 3]]),
    "a wanted piece is single": ([[], [0], [1], [1]], {"last": {2}}, [[0, 1, 3], [2]]),
    "a reader of a wanted piece starts a cluster": ([[], [0], [1], [2]], {"last": {1}}, [[0], [1], [2, 3]]),
    "a long piece is not rounded into a full cluster": (
        [[], [], []],
        {"costs_s": [1.0, 4.0, 1.0], "size_s": 2.0},
        [[0], [1], [2]],
    ),
    "pieces without a duration share one cluster": ([[]] * 5, {"costs_s": [0.0] * 5}, [[0, 1, 2, 3, 4]]),
}


@pytest.mark.parametrize("name", CASES)
def test_pieces_are_grouped_so_that(name: str) -> None:
    edges, options, expected = CASES[name]
    assert clusters(edges, **options) == expected


def test_a_tree_gives_subtrees() -> None:
    edges, levels = binary_tree(5)
    found = clusters(edges, size_s=8.0)
    # Eight leaves each, with the three levels above them; then what reads the four subtrees.
    assert [len(one) for one in found] == [15, 15, 15, 15, 3]
    for one in found[:4]:
        assert {j for i in one for j in edges[i]} < set(one)
        assert sum(levels[i] == 0 for i in one) == 8
    assert found[4][-1] == len(edges) - 1


def test_a_stencil_gives_trapezoids_in_time() -> None:
    width, steps = 16, 4
    edges = [[] for _ in range(width)] + [
        [width * t + x + d for d in (-1, 0, 1) if 0 <= x + d < width]
        for t in range(steps - 1)
        for x in range(width)
    ]
    found = clusters(edges, size_s=8.0)
    assert_convex(work_of(edges), found)
    first = found[0]
    # Each time step of the first cluster is narrower: its right neighbour is in another cluster.
    assert [sum(i // width == t for i in first) for t in range(steps)] == [8, 7, 6, 5]
    assert len(found) < steps * width / 8


# Any graph


def assert_convex(work: Work, found: list[list[int]]) -> None:
    """Check that clusters hold each piece once, and read only from clusters before them."""
    assert sorted(i for one in found for i in one) == list(range(len(work.edges)))
    done: set[int] = set()
    for one in found:
        assert one == sorted(one)
        assert {j for i in one for j in work.edges[i]} <= done.union(one)
        done.update(one)
    for i in {*work.alone, *work.last}:
        assert [i] in found


@st.composite
def works(draw: Callable[..., Any]) -> Work:
    """Draw a graph in an order in which it can run."""
    n = draw(st.integers(0, 40))
    edges = [
        sorted(draw(st.sets(st.integers(max(0, i - 9), i - 1), max_size=3))) if i else [] for i in range(n)
    ]
    costs_s = [draw(st.sampled_from([0.0, 0.01, 1.0, 7.5])) for _ in range(n)]
    some = st.sets(st.integers(0, n - 1), max_size=4) if n else st.just(set())
    return Work(edges, costs_s, lambda _: 0, alone=frozenset(draw(some)), last=frozenset(draw(some)))


@settings(max_examples=200)
@given(works(), st.sampled_from([0.01, 1.0, 4.0, inf]), st.sampled_from([0.5, 3.0, inf]))
def test_clusters_of_any_graph_can_run_one_after_another(work: Work, size_s: float, most_s: float) -> None:
    found = convex_clusters(work, size_s, most_s)
    assert_convex(work, found)
    assert found == convex_clusters(work, size_s, most_s)


@settings(max_examples=100)
@given(works(), st.sampled_from([0.5, 3.0]), st.sampled_from([0.5, 3.0]))
def test_no_cluster_of_any_graph_grows_beyond_what_it_may_last(
    work: Work, size_s: float, most_s: float
) -> None:
    longest_s = max(work.costs_s, default=0.0)
    for one in convex_clusters(work, size_s, most_s):
        # Filling stops half a piece after `size_s`, and joining one piece after `most_s`.
        assert sum(work.costs_s[i] for i in one) <= max(size_s + longest_s, most_s + longest_s)


# Regions

REGIONS: dict[str, tuple[list[list[int]], list[float], list[list[int]]]] = {
    "what one piece leads to is with it": ([[], [0], [0], [1, 2], [3]], [9.0] * 5, [[0, 1, 2, 3, 4]]),
    "each partition has its own": ([[], [], [0], [1], [0, 2]], [9.0] * 5, [[0, 2, 4], [1, 3]]),
    "what reads two partitions starts one": ([[], [], [0, 1], [2]], [9.0] * 4, [[0], [1], [2, 3]]),
    "a light piece is no input": ([[], [], [0, 1], [2]], [9.0, 0.1, 9.0, 9.0], [[1], [0, 2, 3]]),
    "light pieces are read by others": ([[], [], [0], [1]], [0.1] * 4, [[0], [1], [2], [3]]),
}


@pytest.mark.parametrize("name", REGIONS)
def test_regions(name: str) -> None:
    edges, costs_s, expected = REGIONS[name]
    assert regions(work_of(edges, costs_s), 0.5, 0) == expected


@settings(max_examples=300)
@given(works(), st.sampled_from([0.0, 0.01, 1.0]))
def test_regions_of_any_graph_can_run_one_after_another(work: Work, light_s: float) -> None:
    found = regions(work, light_s, 0)
    assert_convex(work, found)
    # A piece that reads one region is in it, unless something else must end there.
    region_of = {i: at for at, pieces in enumerate(found) for i in pieces}
    light = {i for i, needed in enumerate(work.edges) if not needed and work.costs_s[i] <= light_s}
    ends = light.union(work.alone, work.last)
    for i, needed in enumerate(work.edges):
        sources = {region_of[j] for j in needed if j not in light}
        if len(sources) == 1 and i not in ends and ends.isdisjoint(needed):
            assert region_of[i] in sources
