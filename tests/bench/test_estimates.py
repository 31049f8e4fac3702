"""Statistics: known samples, and samples that say nothing."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from ferroflow_dask.bench import comparison
from ferroflow_dask.bench.comparison import Estimate, geometric_mean, ratio_of_medians


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_a_ratio_that_each_pair_has_is_certain_when_paired_and_not_otherwise() -> None:
    slow, fast = [2.0, 4.0, 8.0, 16.0, 32.0], [1.0, 2.0, 4.0, 8.0, 16.0]
    assert ratio_of_medians(slow, fast, rng(), is_paired=True) == Estimate(2.0, 2.0, 2.0, 5, True)
    unpaired = ratio_of_medians(slow, fast, rng())
    assert unpaired.value == 2.0
    assert unpaired.low is not None
    assert unpaired.high is not None
    assert unpaired.low < 1
    assert unpaired.high > 4


def test_the_interval_of_three_pairs_is_the_range_of_their_ratios() -> None:
    # One resample in 27 has the slowest pair only, more than the 2.5 % that lie outside on each side.
    found = ratio_of_medians([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], rng(), is_paired=True)
    assert found == Estimate(2.0, 1.0, 3.0, 3, True)


def test_the_interval_is_that_of_all_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "RESAMPLES", 200_000)
    slow, fast = np.array([1.0, 1.3, 1.9, 2.2, 3.1]), np.array([0.9, 1.4, 1.0, 1.2, 1.1])
    chosen = np.array(list(product(range(5), repeat=5)))
    ratios = np.median(slow[chosen], axis=1) / np.median(fast[chosen], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    found = ratio_of_medians(list(slow), list(fast), rng(), is_paired=True)
    assert (found.low, found.high) == (pytest.approx(low, rel=0.01), pytest.approx(high, rel=0.01))


def test_equal_samples_differ_by_nothing() -> None:
    assert ratio_of_medians([0.5] * 4, [0.5] * 4, rng()) == Estimate(1.0, 1.0, 1.0, 4)


@pytest.mark.parametrize(("slow", "fast"), [([2.0], [1.0]), ([2.0], [1.0, 1.0, 1.0])])
def test_one_repetition_has_no_interval(slow: list[float], fast: list[float]) -> None:
    found = ratio_of_medians(slow, fast, rng())
    assert found == Estimate(2.0, None, None, 1)
    assert not found.is_above(1)
    assert not found.is_below(3)
    assert str(found) == "2.00"


def test_an_interval_that_ends_at_a_bound_is_neither_above_nor_below() -> None:
    found = Estimate(1.1, 1.0, 1.2, 5)
    assert not found.is_above(1)
    assert found.is_above(0.99)
    assert not found.is_below(1.2)
    assert found.is_below(1.21)
    assert str(found) == "1.10 [1.00, 1.20]"


def test_the_same_seed_gives_the_same_interval() -> None:
    samples = [1.0, 1.5, 2.5, 2.0], [1.0, 1.1, 1.2, 1.3]
    assert ratio_of_medians(*samples, rng()) == ratio_of_medians(*samples, rng())


def test_geometric_means() -> None:
    assert geometric_mean([2.0]) == Estimate(2.0, None, None, 1)
    assert geometric_mean([1.0, 10.0, 100.0]).value == pytest.approx(10.0)
    assert geometric_mean([0.5, 2.0, 0.5, 2.0]) == Estimate(pytest.approx(1.0), None, None, 4)
    equal = geometric_mean([3.0] * 5)
    assert [equal.value, equal.low, equal.high] == pytest.approx([3.0] * 3)


@pytest.mark.parametrize(("n", "quantile"), [(5, 2.7764), (6, 2.5706), (10, 2.2622), (30, 2.0452)])
def test_the_interval_of_a_geometric_mean_is_students(n: int, quantile: float) -> None:
    logs = np.random.default_rng(n).standard_normal(n)
    found = geometric_mean(list(np.exp(logs)))
    assert found.low is not None
    assert found.high is not None
    reach = quantile * logs.std(ddof=1) / np.sqrt(n)
    assert np.log([found.low, found.high]) == pytest.approx([logs.mean() - reach, logs.mean() + reach], 1e-3)


def test_the_interval_of_a_geometric_mean_leaves_out_the_truth_as_often_as_it_says() -> None:
    draws = np.exp(0.1 * np.random.default_rng(1).standard_normal((2000, 5)))
    found = [geometric_mean(list(values)) for values in draws]
    assert 0.04 < np.mean([mean.is_above(1) or mean.is_below(1) for mean in found]) < 0.06
