"""Which steps leave a bundle: tables of small graphs, and contracts for any graph."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferroflow_dask.bundling import division

#: What each step reads, with one argument: the number 0 is the argument, the number 1 the first step.
CHAIN = [(0,), (1,), (2,), (3,)]
INDEPENDENT = [(0,), (), (0,), ()]
FORK = [(), (1,), (1,), (1,)]
JOIN = [(), (), (), (1, 2, 3)]
DIAMOND = [(), (1,), (1,), (2, 3)]
TWO_CHAINS = [(), (1,), (2,), (), (4,), (5,)]


@pytest.mark.parametrize(
    ("reads", "running", "free"),
    [
        pytest.param(CHAIN, 0, [], id="all steps of a chain wait"),
        pytest.param(INDEPENDENT, 0, [1, 2, 3], id="no independent step waits"),
        pytest.param(FORK, 0, [], id="all readers of the running step wait"),
        pytest.param(FORK, 1, [2, 3], id="other readers of a finished step do not wait"),
        pytest.param(JOIN, 0, [1, 2, 3], id="a step that reads free steps is free"),
        pytest.param(JOIN, 2, [], id="a step waits for the last of its inputs"),
        pytest.param(DIAMOND, 1, [2, 3], id="the end of a diamond goes with its second branch"),
        pytest.param(DIAMOND, 2, [], id="the end of a diamond waits for its second branch"),
        pytest.param(TWO_CHAINS, 0, [3, 4, 5], id="the other chain does not wait"),
        pytest.param(INDEPENDENT, -1, [0, 1, 2, 3], id="no step waits before the first one starts"),
    ],
)
def test_steps_are_free_that_need_not_wait_for_the_running_one(
    reads: list[tuple[int, ...]], running: int, free: list[int]
) -> None:
    assert division.free_steps(reads, 1, range(running + 1, len(reads)), running) == free


def test_a_step_that_has_left_is_not_awaited() -> None:
    assert division.free_steps(CHAIN, 1, [3], running=0) == [3]


@pytest.mark.parametrize(
    ("reads", "running", "half"),
    [
        pytest.param(CHAIN, 0, [], id="nothing of a chain"),
        pytest.param([()] * 7, 0, [4, 5, 6], id="the last of independent steps"),
        pytest.param([()] * 2, 0, [], id="the next step stays"),
        pytest.param(TWO_CHAINS, 0, [], id="no part of a component, and none that is larger"),
        pytest.param([(), (), (), (3,), (), (5,)], 0, [4, 5], id="whole components"),
        pytest.param([(), (1,), (2,), (3,), ()], 0, [4], id="the only free step, if others wait"),
    ],
)
def test_half_of_the_steps_are_whole_components(
    reads: list[tuple[int, ...]], running: int, half: list[int]
) -> None:
    assert division.last_half(reads, 1, range(running + 1, len(reads)), running) == half


@pytest.mark.parametrize(
    ("reads", "step", "depending"),
    [
        pytest.param(CHAIN, 1, [2, 3], id="the rest of a chain"),
        pytest.param(INDEPENDENT, 1, [], id="no independent step"),
        pytest.param(JOIN, 1, [3], id="the end of a join"),
        pytest.param(DIAMOND, 1, [3], id="the end of a diamond, not its other branch"),
        pytest.param(TWO_CHAINS, 3, [4, 5], id="not the other chain"),
    ],
)
def test_steps_depend_on_a_failed_one(reads: list[tuple[int, ...]], step: int, depending: list[int]) -> None:
    assert division.depending(reads, 1, step) == depending


@pytest.mark.parametrize(
    ("reads", "exports", "needed"),
    [
        pytest.param(CHAIN, [3], {0, 1, 2}, id="the beginning of a chain"),
        pytest.param(INDEPENDENT, [1, 4], {0, 3}, id="independent steps"),
        pytest.param(DIAMOND, [2], {0, 1}, id="one branch"),
        pytest.param(CHAIN, [0], set(), id="no step for an argument"),
        pytest.param(CHAIN, [], set(), id="no step for nothing"),
    ],
)
def test_exports_need_steps(reads: list[tuple[int, ...]], exports: list[int], needed: set[int]) -> None:
    assert division.needed(reads, 1, exports) == needed


def test_components_are_ordered_by_their_first_step() -> None:
    assert division.components(DIAMOND, 1, [1, 2, 3]) == [[1, 2, 3]]
    assert division.components(DIAMOND, 1, [1, 2]) == [[1], [2]]
    assert division.components([(), (), (1,), (2,), ()], 1, range(5)) == [[0, 2], [1, 3], [4]]


@st.composite
def bundles(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    """Draw what each step reads, with two arguments, and the running step."""
    n = draw(st.integers(1, 12))
    reads = [draw(st.lists(st.integers(0, i + 1), max_size=3, unique=True)) for i in range(n)]
    return reads, draw(st.integers(-1, n - 1))


@given(bundles())
def test_what_leaves_waits_for_no_step_that_waits_only(drawn: tuple[list[list[int]], int]) -> None:
    reads, running = drawn
    unstarted = range(running + 1, len(reads))
    free = division.free_steps(reads, 2, unstarted, running)
    for step in set(unstarted) - {*free}:  # it reads the running step, or one that waits
        read = {number - 2 for number in reads[step] if number >= 2}
        assert read & {running, *unstarted}
        assert not read & {*free}
    half = division.last_half(reads, 2, unstarted, running)
    assert {*half} <= {*free}
    assert len(half) <= len(unstarted) / 2
    for step in set(free) - {*half}:  # no component is cut
        assert not {number - 2 for number in reads[step]} & {*half}
    for step in half:
        assert not {number - 2 for number in reads[step]} & ({*free} - {*half})
