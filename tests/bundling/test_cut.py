"""Cuts: how pieces are shared out among bundles, and that the best cut is no worse than single tasks."""

from __future__ import annotations

from itertools import product
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferroflow_dask.bundling.coarse import factored, longest_first, runs, tapered
from ferroflow_dask.bundling.cut import best_cut
from ferroflow_dask.bundling.predict import Prediction, Work, predict, values_apart
from ferroflow_dask.cluster_profile import ClusterProfile

COSTS = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 5.0]), min_size=1, max_size=7)


def longest_s(costs_s: list[float], bundles: list[list[int]]) -> float:
    assert sorted(i for bundle in bundles for i in bundle) == list(range(len(costs_s)))
    return max(sum(costs_s[i] for i in bundle) for bundle in bundles)


@settings(max_examples=100)
@given(COSTS, st.integers(1, 3))
def test_longest_first_is_within_four_thirds_of_the_optimum(costs_s: list[float], n: int) -> None:
    optimum_s = min(
        max(sum(c for c, at in zip(costs_s, places, strict=True) if at == bundle) for bundle in range(n))
        for places in product(range(n), repeat=len(costs_s))
    )
    assert longest_s(costs_s, longest_first(costs_s, n)) <= (4 / 3 - 1 / (3 * n)) * optimum_s + 1e-9


@settings(max_examples=100)
@given(COSTS, st.integers(1, 3))
def test_runs_are_neighbours_and_none_is_longer_than_its_share_and_a_piece(
    costs_s: list[float], n: int
) -> None:
    found = runs(costs_s, n)
    assert longest_s(costs_s, found) <= sum(costs_s) / n + max(costs_s) + 1e-9
    assert [i for bundle in found for i in bundle] == list(range(len(costs_s)))


def test_runs_of_equal_pieces_are_equally_long() -> None:
    assert runs([1.0] * 6, 3) == [[0, 1], [2, 3], [4, 5]]


@settings(max_examples=100)
@given(st.integers(0, 300), st.integers(1, 5), st.integers(1, 20))
def test_factored_gives_each_thread_half_of_the_rest_at_a_time(
    n_items: int, n_threads: int, most: int
) -> None:
    found = factored(n_items, n_threads, most)
    assert sorted(i for bundle in found for i in bundle) == list(range(n_items))
    left = n_items
    while found:
        size = min(most, ceil(left / (2 * n_threads)))
        one_round, found = found[:n_threads], found[n_threads:]
        assert max(map(len, one_round)) == min(size, ceil(left / len(one_round)))
        assert max(map(len, one_round)) - min(map(len, one_round)) <= 1
        left -= sum(map(len, one_round))


@pytest.mark.parametrize("is_in_order", [False, True])
@pytest.mark.parametrize(
    ("least_s", "most_s", "sizes"),
    [
        (1.0, 100.0, [8, 4, 2, 1, 1]),  # each half of what is left, as long as that lasts `least_s`
        (2.5, 100.0, [8, 4, 4]),
        (100.0, 6.0, [6, 5, 5]),  # as many as `most_s` asks for
        (100.0, 100.0, [16]),
    ],
)
def test_tapered_halves_the_last_bundle(
    least_s: float, most_s: float, sizes: list[int], is_in_order: bool
) -> None:
    found = tapered([1.0] * 16, [range(16)], least_s, most_s, is_in_order=is_in_order)
    assert sorted(map(len, found), reverse=True) == sizes
    assert sorted(i for bundle in found for i in bundle) == list(range(16))


@st.composite
def works(draw: st.DrawFn) -> Work:
    """Draw layers of pieces with equal costs and sizes in each layer."""
    edges: list[list[int]] = []
    costs_s: list[float] = []
    sizes: list[int] = []
    before: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        n = draw(st.integers(1, 12))
        n_read = draw(st.integers(0, min(3, len(before))))
        cost_s = draw(st.sampled_from([1e-5, 1e-3, 1e-2, 0.3]))
        nbytes = draw(st.sampled_from([8, 10**5, 10**7]))
        layer = list(range(len(edges), len(edges) + n))
        edges += [sorted({before[(i + j) % len(before)] for j in range(n_read)}) for i in range(n)]
        costs_s += [cost_s] * n
        sizes += [nbytes] * n
        before = layer
    last = frozenset(before) if draw(st.booleans()) else frozenset()
    return Work(edges, costs_s, sizes.__getitem__, last=last)


@settings(max_examples=150, deadline=None)
@given(works(), st.integers(1, 5), st.booleans())
def test_best_cut_is_predicted_no_slower_than_single_tasks_with_transfers_in_full(
    work: Work, n_workers: int, is_guess: bool
) -> None:
    cluster = ClusterProfile((1,) * n_workers)
    n = len(work.costs_s)

    def fits(cut: Any) -> bool:
        return all(len(pieces) <= 10 for pieces in cut)

    cut, prediction = best_cut(work, cluster, is_guess, fits)
    assert sorted(i for pieces in cut for i in pieces) == list(range(n))
    assert fits(cut)
    plain = predict(work, [[i] for i in range(n)], cluster)

    def cost_s(found: Prediction) -> float:
        return found.makespan_s + found.nbytes_moved / (cluster.bandwidth * n_workers)

    # Half of the scheduler's time for each task counts once more. Near a bound any cut will do.
    bound_s = max(sum(work.costs_s) / n_workers, *work.costs_s) + cluster.task_s + cluster.submit_s
    most_s = max(cost_s(plain) + cluster.task_s * n / 2, 1.05 * bound_s, bound_s + 2e-5 * n)
    assert cost_s(prediction) <= most_s + 1e-9


@pytest.mark.parametrize(
    ("cut", "fetched"),
    [([[0], [1], [2]], 0), ([[0, 1], [2]], 10), ([[0, 2], [1]], 0), ([[0, 1, 2]], 10)],
)
def test_a_bundle_fetches_what_the_best_worker_lacks(cut: list[list[int]], fetched: int) -> None:
    held = [{"a": 20.0}, {"b": 10.0}, {"a": 5.0, "b": 5.0}]
    work = Work([[], [], []], [1.0] * 3, lambda _: 0, held=held)
    assert predict(work, cut, ClusterProfile((1, 1))).nbytes_moved == fetched


@pytest.mark.parametrize(("cores", "makespan_s"), [(0, 1.0), (2, 2.0)])
def test_no_cut_is_predicted_to_need_less_than_the_cores_allow(cores: int, makespan_s: float) -> None:
    cluster = ClusterProfile((1,) * 4, task_s=1e-6, round_trip_s=1e-6, submit_s=1e-6, cores=cores)
    work = Work([()] * 400, [0.01] * 400, lambda _: 0, cores_s=4.0)
    _, prediction = best_cut(work, cluster, False, lambda _: True)
    assert prediction.makespan_s == pytest.approx(makespan_s, rel=0.01)


def test_tasks_that_sleep_do_not_share_cores() -> None:
    cluster = ClusterProfile((1,) * 4, task_s=1e-6, round_trip_s=1e-6, submit_s=1e-6, cores=2)
    work = Work([()] * 400, [0.01] * 400, lambda _: 0, cores_s=0.04)
    assert best_cut(work, cluster, False, lambda _: True)[1].makespan_s == pytest.approx(1.0, rel=0.01)


# Values with keys of their own

#: Two inputs are each split in two; two outputs read a piece of each.
SPLIT = [[], [], [0], [0], [1], [1], [2, 4], [3, 5]]
SPLIT_CUT = [[0, 2, 3], [1, 4, 5], [6], [7]]


@pytest.mark.parametrize(("nbytes", "moved"), [(10, 20), (10**9, 10**9)])
def test_large_values_of_a_bundle_move_by_themselves(nbytes: int, moved: int) -> None:
    cluster = ClusterProfile((1, 1))
    work = Work(SPLIT, [1.0] * 8, lambda _: nbytes)
    apart = {2, 3, 4, 5} if nbytes > 10**6 else set()
    assert values_apart(work, SPLIT_CUT, cluster) == apart
    # Each output is where one of its inputs is, and fetches the other one's piece, or all of its pieces.
    assert predict(work, SPLIT_CUT, cluster).nbytes_moved == 2 * moved


def test_values_that_all_readers_need_move_together() -> None:
    work = Work([[], [0], [0], [1, 2], [1, 2]], [1.0] * 5, lambda _: 10**9)
    assert not values_apart(work, [[0, 1, 2], [3], [4]], ClusterProfile((1, 1)))


def test_values_that_clients_want_have_keys_anyway() -> None:
    work = Work([[], [0], [0], [1], [2]], [1.0] * 5, lambda _: 10**6, last={1, 2})
    cut, cluster = [[0], [1, 2], [3], [4]], ClusterProfile((1, 1))
    assert not values_apart(work, cut, cluster)
    assert predict(work, cut, cluster).nbytes_moved == 10**6


def test_what_one_large_block_leads_to_is_one_bundle_although_all_pieces_are_short() -> None:
    cluster = ClusterProfile((1,) * 4, bandwidth=4e8)
    n_indices, n_blocks, nbytes = 12, 8, 4_000_000
    edges: list[list[int]] = [[] for _ in range(n_indices)]  # indices that all blocks read
    costs_s, sizes, means = [1e-5] * n_indices, [100] * n_indices, []
    for _ in range(n_blocks):
        block = len(edges)
        edges += [[], *[[index, block] for index in range(n_indices)]]
        edges.append(list(range(block + 1, len(edges))))
        costs_s += [0.005, *[0.003] * (n_indices + 1)]
        sizes += [nbytes, *[nbytes // n_indices] * n_indices, 100]
        means.append(len(edges) - 1)
    edges.append(means)
    work = Work(edges, [*costs_s, 1e-3], [*sizes, 100].__getitem__, last={len(edges) - 1})
    cut, prediction = best_cut(work, cluster, False, lambda _: True)
    assert prediction.nbytes_moved < nbytes / 100
    assert len(cut) < 2 * n_blocks
