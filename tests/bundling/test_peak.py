"""Peaks of bundles: values are dropped after their last readers, inputs are held until the end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferroflow_dask.bundling.peak import BundleNeed, GraphMemory, held_nbytes, shared_nbytes

CHAIN = [[], [0], [1], [2]]


@pytest.mark.parametrize(
    ("edges", "cut", "wanted", "peaks"),
    [
        pytest.param(CHAIN, [[0, 1, 2, 3]], [3], [2], id="a chain holds a value and the next one"),
        pytest.param(CHAIN, [[0, 1, 2, 3]], range(4), [4], id="values that clients want are kept"),
        pytest.param(CHAIN, [[0, 1], [2, 3]], [3], [2, 3], id="an input is held until the end"),
        pytest.param([[], [0], [0]], [[0, 1], [2]], [1, 2], [2, 3], id="the result of a bundle is one input"),
        pytest.param(
            [[], [], [0, 1]], [[0], [1], [2]], [2], [1, 1, 3], id="single tasks hold what they read"
        ),
        pytest.param([[], [0], [0], [1, 2]], [[0, 1, 2, 3]], [3], [3], id="both sides of a diamond"),
        pytest.param([[], [], [], [0, 1, 2]], [[0, 1, 2, 3]], [3], [4], id="a reduction of three values"),
        pytest.param([[], [], []], [[0, 1, 2]], [0], [2], id="values that no task reads are dropped"),
    ],
)
def test_values_of_one_byte(edges: Any, cut: Any, wanted: Any, peaks: list[int]) -> None:
    memory = GraphMemory(edges, [1.0] * len(edges), wanted, [()] * len(edges), {})
    assert [need.peak_nbytes for need in memory.needs(cut)] == peaks


def test_results_from_outside_count_once_and_until_the_end() -> None:
    outside = [("x",), ("x", "y"), ("unknown",)]
    memory = GraphMemory([[], [0], [1]], [1.0] * 3, [2], outside, {"x": 10.0, "y": 5.0})
    assert memory.total_nbytes() == 18
    assert [need.peak_nbytes for need in memory.needs([[0, 1, 2]])] == [17]
    assert [need.peak_nbytes for need in memory.needs([[0], [1], [2]])] == [11, 17, 2]


@st.composite
def cuts(draw: Any) -> tuple[list[list[int]], list[float], list[int], list[list[int]]]:
    """Draw edges, sizes, wanted tasks, and a cut into runs of tasks."""
    n = draw(st.integers(1, 9))
    edges = [sorted(draw(st.sets(st.integers(0, i - 1)))) if i else [] for i in range(n)]
    sizes = [float(draw(st.integers(0, 9))) for _ in range(n)]
    ends = sorted(draw(st.sets(st.integers(1, n - 1)))) if n > 1 else []
    cut = [list(range(start, stop)) for start, stop in zip([0, *ends], [*ends, n], strict=True)]
    return edges, sizes, sorted(draw(st.sets(st.integers(0, n - 1)))), cut


@given(cuts())
def test_a_value_is_live_while_it_is_computed_and_while_something_needs_it(drawn: Any) -> None:
    edges, sizes, wanted, cut = drawn
    needs = GraphMemory(edges, sizes, wanted, [()] * len(edges), {}).needs(cut)
    readers = {j: [i for i, read in enumerate(edges) if j in read] for j in range(len(edges))}
    for tasks, need in zip(cut, needs, strict=True):

        def live(after: int, tasks: list[int] = tasks) -> set[int]:
            return {j for j in tasks if j <= after and (j in wanted or any(i > after for i in readers[j]))}

        peaks = [sum(sizes[j] for j in live(i - 1) | {i}) for i in tasks]
        assert need.values_nbytes == max(peaks)
        assert need.result_nbytes == sum(sizes[j] for j in live(tasks[-1]))


def need(result: float, *inputs: int, wanted: float = 0.0) -> BundleNeed:
    """Return what a bundle holds that reads results of 10 B and makes values of the size of its result."""
    return BundleNeed(dict.fromkeys(inputs, 10.0), result, wanted, values_nbytes=result)


@pytest.mark.parametrize(
    ("needs", "n_threads", "held"),
    [
        pytest.param([need(10), need(10, 0), need(10, 1)], 1, 30, id="a chain: result, copy and new value"),
        pytest.param([need(10), need(10), need(1, 0, 1)], 1, 41, id="results wait for their reader"),
        pytest.param([need(10), need(1, 0), need(10), need(1, 2)], 1, 21, id="read results are dropped"),
        pytest.param([need(10)] * 4, 2, 20, id="as many bundles as threads at once"),
    ],
)
def test_bundles_in_a_row_hold_results_and_inputs(needs: Any, n_threads: int, held: float) -> None:
    assert held_nbytes(needs, n_threads) == held


def test_graphs_share_what_clients_want_and_what_is_not_made_yet() -> None:
    outside = [("x",), ("x", "y"), ("y", "unknown")]
    sizes = {"x": 10.0, "y": 5.0}
    memory = GraphMemory([[], [0], [1]], [1.0] * 3, [2], outside, sizes, awaited=["y", "unknown"])
    assert [need.shared_nbytes for need in memory.needs([[0], [1], [2]])] == [0, 5, 6]
    assert [need.shared_nbytes for need in memory.needs([[0, 1, 2]])] == [6]


@pytest.mark.parametrize(
    ("n_bundles", "n_threads", "shared"), [(0, 1, 0), (1, 1, 10), (3, 1, 20), (9, 4, 80)]
)
def test_two_bundles_of_each_thread_share_results(n_bundles: int, n_threads: int, shared: float) -> None:
    one = BundleNeed(result_nbytes=10.0, wanted_nbytes=10.0, values_nbytes=10.0, shared_nbytes=10.0)
    assert shared_nbytes([one] * n_bundles, n_threads) == shared
    assert held_nbytes([one] * n_bundles, n_threads) == min(n_bundles, n_threads) * 10
