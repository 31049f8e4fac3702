"""Intervals of paired ratios cover the median as often as they claim."""

from __future__ import annotations

import numpy as np
import pytest

from ferroflow_dask.bench.public.ratios import ENOUGH, LEVEL, coverage, is_above, is_below, paired_ratio


@pytest.mark.parametrize("n", [3, 5, 6, 9, 20])
def test_intervals_cover_the_median_as_often_as_claimed(n: int) -> None:
    rng = np.random.default_rng(0)
    draws = np.exp(rng.standard_t(2, (4000, n)) / 20)  # durations have far outliers
    covered = 0
    for ratios in draws:
        _, low, high = paired_ratio([float(one) for one in ratios], [1.0] * n)
        assert low is not None
        assert high is not None
        covered += low <= 1 <= high
    least = LEVEL if n >= ENOUGH else coverage(n, 0)
    assert covered / len(draws) >= least - 0.02
    assert coverage(n, 0) == pytest.approx(1 - 2 ** (1 - n))


def test_more_pairs_leave_out_more_of_the_ends() -> None:
    values = [float(i) for i in range(1, 10)]
    assert paired_ratio(values, [1.0] * 9) == (5.0, 2.0, 8.0)
    assert paired_ratio(values[:5], [1.0] * 5) == (3.0, 1.0, 5.0)


def test_one_pair_has_no_interval_and_marks_nothing() -> None:
    ratio = paired_ratio([2.0], [1.0])
    assert ratio == (2.0, None, None)
    assert not is_above(ratio)
    assert not is_below(ratio)


def test_an_interval_with_1_marks_nothing() -> None:
    assert is_above((2.0, 1.1, 3.0))
    assert is_below((0.5, 0.4, 0.9))
    assert not is_above((1.0, 0.9, 1.1))
    assert not is_below((1.0, 0.9, 1.1))
