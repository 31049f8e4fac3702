"""Ratios of paired runs, with intervals that assume nothing about the distribution of durations."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median

#: A ratio and the ends of its interval, which are null from one run.
Ratio = tuple[float, float | None, float | None]
#: Coverage of an interval, at least, if there are `ENOUGH` pairs.
LEVEL, ENOUGH = 0.95, 6


def paired_ratio(top: Sequence[float], bottom: Sequence[float]) -> Ratio:
    """Return the median ratio of pairs and an interval for it.

    The interval has two of the ratios as ends, equally far from the median in their order. How often it
    covers the true median follows from the binomial distribution (W. J. Conover, *Practical Nonparametric
    Statistics*, 3rd edition, 1999, section 3.2). From fewer than six pairs, it is their range.

    Parameters
    ----------
    top, bottom : sequence of float
        Of each pair, in the same order; above 0.

    Examples
    --------
    >>> paired_ratio([2.0, 3.0, 4.0], [1.0, 1.0, 1.0])
    (3.0, 2.0, 4.0)
    """
    ratios = sorted(above / below for above, below in zip(top, bottom, strict=True))
    n = len(ratios)
    if n == 1:
        return ratios[0], None, None
    outside = 0
    while coverage(n, outside + 1) >= LEVEL:
        outside += 1
    return median(ratios), ratios[outside], ratios[n - 1 - outside]


def coverage(n: int, outside: int) -> float:
    """Return how often an interval of ordered values covers the median, if some values are outside of it.

    Parameters
    ----------
    n : int
        Number of values.
    outside : int
        Values below the interval, and as many above.
    """
    return float(1 - 2 * sum(comb(n, k) for k in range(outside + 1)) / 2**n)


def is_above(ratio: Ratio | None) -> bool:
    """Return whether the whole interval of a ratio is above 1."""
    return ratio is not None and ratio[1] is not None and ratio[1] > 1


def is_below(ratio: Ratio | None) -> bool:
    """Return whether the whole interval of a ratio is below 1."""
    return ratio is not None and ratio[2] is not None and ratio[2] < 1
