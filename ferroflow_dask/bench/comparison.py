"""Statistics of rows: which runs belong together, and ratios of medians with their intervals.

Only runs of one setting (machine, kind of cluster, versions, commit) and one cluster shape are ever
compared. Within these, a *case* is a workload with its sizes and what was known of its costs; a *sample* is
the repetitions of a case under one policy, written in one way.

Intervals of ratios are percentile bootstrap intervals: B. Efron, "Bootstrap methods: another look at the
jackknife", Annals of Statistics 7 (1979); B. Efron and R. J. Tibshirani, "An Introduction to the
Bootstrap" (1993), section 13.3. They assume no distribution, which times of runs do not have, and no
equal spread. What they cannot do is make much of little: resamples of n runs never leave the range of
these runs, and the range of n runs covers the true median with probability 1 − 2 · 0.5ⁿ only (75 % for
3 runs, 94 % for 5). So an interval from fewer than `ENOUGH` runs is narrower than it claims.

Geometric means are of few workloads, where that would matter most. Theirs are Student's t intervals of the
mean logarithm, which are exact for any number of ratios that are log-normal, and from fewer than `ENOUGH`,
where it is unknown whether they are, there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median
from typing import Any, TypeVar

import numpy as np

from ferroflow_dask.bench.schema import OK, BenchRecord, Shape, written

#: The policy that all others are measured by, and the same once more.
STOCK, AGAIN = "dask", "dask-again"
#: What the names of our own policies begin with; all others are baselines.
_OURS = "ferroflow"
#: Every interval starts from this seed, so that it does not depend on what else is in a report.
SEED = 0

#: Sizes of each workload by default.
Defaults = Mapping[str, Mapping[str, Any]]

K = TypeVar("K")
V = TypeVar("V")


#: Part of intervals that covers the true value, if there are enough repetitions.
LEVEL = 0.95
#: Resamples of an interval. Efron and Tibshirani, section 14.3, advise 1,000 and more for percentiles.
RESAMPLES = 10_000
#: Repetitions from which on the range of a sample covers its median in nine of ten cases and more; workloads
#: from which on a mean of theirs has an interval.
ENOUGH = 5


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its 95 % interval.

    Parameters
    ----------
    value : float
    low, high : float or None
        Ends of the interval; None where one sample says nothing about spread.
    n : int
        Of the samples that it was made from, the size of the smaller.
    is_paired : bool
        Whether it was made from pairs.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    is_paired: bool = False

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def is_below(self, bound: float) -> bool:
        """Return whether the whole interval lies below `bound`; False without an interval."""
        return self.high is not None and self.high < bound

    def is_above(self, bound: float) -> bool:
        """Return whether the whole interval lies above `bound`; False without an interval."""
        return self.low is not None and self.low > bound


def ratio_of_medians(
    numerator: Sequence[float],
    denominator: Sequence[float],
    rng: np.random.Generator,
    *,
    is_paired: bool = False,
) -> Estimate:
    """Return the ratio of two medians and its interval.

    Parameters
    ----------
    numerator, denominator : sequence of float
        Above 0; the speed-up of B over A has the times of A on top.
    rng : numpy.random.Generator
    is_paired : bool, optional
        The i-th values of both were measured one right after the other. Then pairs are resampled, so
        that what disturbed both of a pair, a busy machine, does not widen the interval.

    Returns
    -------
    Estimate
        Without an interval if either sample has one value.

    Examples
    --------
    >>> ratio_of_medians([2.0, 4.0, 6.0], [1.0, 2.0, 3.0], np.random.default_rng(0), is_paired=True)
    Estimate(value=2.0, low=2.0, high=2.0, n=3, is_paired=True)
    """
    top, bottom = np.array(numerator), np.array(denominator)
    n, m = len(top), len(bottom)
    value = float(np.median(top) / np.median(bottom))
    if min(n, m) < 2:
        return Estimate(value, None, None, min(n, m), is_paired)
    chosen = rng.integers(0, n, (RESAMPLES, n))
    chosen_below = chosen if is_paired else rng.integers(0, m, (RESAMPLES, m))
    ratios = np.median(top[chosen], axis=1) / np.median(bottom[chosen_below], axis=1)
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return Estimate(value, float(low), float(high), min(n, m), is_paired)


def geometric_mean(values: Sequence[float]) -> Estimate:
    """Return the geometric mean and its interval.

    The geometric mean is the mean of ratios that does not depend on which side is the reference:
    P. J. Fleming and J. J. Wallace, "How not to lie with statistics: the correct way to summarize
    benchmark results", Communications of the ACM 29 (1986). The interval is over the choice of
    workloads: it says what other workloads of this kind would do, not how exact each ratio is.

    Parameters
    ----------
    values : sequence of float
        Above 0.

    Returns
    -------
    Estimate
        Without an interval if there are fewer than `ENOUGH` values.
    """
    logs = np.log(values)
    n, middle = len(logs), float(logs.mean())
    value = float(np.exp(middle))
    if n < ENOUGH:
        return Estimate(value, None, None, n)
    reach = _t_quantile(n - 1) * float(logs.std(ddof=1)) / math.sqrt(n)
    return Estimate(value, math.exp(middle - reach), math.exp(middle + reach), n)


def _t_quantile(df: int) -> float:
    """Return how many standard errors Student's t interval reaches to each side; for `df` from 4 on.

    M. Abramowitz and I. A. Stegun, "Handbook of Mathematical Functions" (1964), 26.7.5; at 4 degrees of
    freedom it is 0.03 % too low, and less at more.
    """
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / float(df**power) for power, term in enumerate(terms, start=1))


@dataclass(frozen=True, slots=True)
class Sample:
    """The repetitions of one case under one policy.

    Parameters
    ----------
    policy, lowering, costs : str
    runs : tuple of BenchRecord
    """

    policy: str
    lowering: str
    costs: str
    runs: tuple[BenchRecord, ...]

    @property
    def is_broken(self) -> bool:
        """Whether any run failed: a policy that is right in four runs of five is not fast, it is wrong."""
        return any(run.status != OK for run in self.runs)

    @property
    def times_s(self) -> list[float]:
        """Makespans [s]."""
        return [run.makespan_s for run in self.runs]

    @property
    def median_s(self) -> float:
        """Median makespan [s]."""
        return median(self.times_s)

    @property
    def range_s(self) -> tuple[float, float]:
        """Shortest and longest makespan [s]."""
        return min(self.times_s), max(self.times_s)

    def median_of(self, name: str) -> float | None:
        """Return the median of a numeric field of the rows; None if it is null in any."""
        values = [getattr(run, name) for run in self.runs]
        return None if None in values else median(values)

    @property
    def ops_per_s(self) -> float:
        """Throughput at the median makespan [1/s]."""
        return self.runs[0].ops / self.median_s

    def by_repetition(self) -> dict[tuple[str, int, int], float] | None:
        """Return the makespan of each repetition [s], by what the runs beside it have too.

        None if it is unknown which those are: they are of the same invocation, seed and number.
        """
        times = {
            (run.invocation, run.seed, run.repetition): run.makespan_s
            for run in self.runs
            if run.invocation is not None
        }
        return times if len(times) == len(self.runs) else None


@dataclass(frozen=True, slots=True)
class Case:
    """A workload of one size, with what was known of its costs, under several policies.

    Parameters
    ----------
    shape : Shape
    workload, suite, costs : str
    arguments : mapping
    samples : tuple of Sample
        All of these costs; of stock Dask, which reads no declared costs, those of other costs where
        there are none of these.
    """

    shape: Shape
    workload: str
    suite: str
    arguments: Mapping[str, Any]
    costs: str
    samples: tuple[Sample, ...]

    def best(self, policy: str) -> Sample | None:
        """Return a policy's sample of the shortest median over all lowerings, leaving out broken ones."""
        usable = [sample for sample in self.samples if sample.policy == policy and not sample.is_broken]
        return min(usable, key=lambda sample: sample.median_s, default=None)

    @property
    def stock(self) -> Sample | None:
        """Stock Dask, written in the way that suits it best."""
        return self.best(STOCK)

    def of(self, policy: str) -> Sample | None:
        """Return the sample that stands for a policy in tables.

        It is the best one, but stock Dask once more is shown as stock Dask itself is written: what they
        differ by is noise only if they did the same.
        """
        stock = self.stock
        if policy != AGAIN or stock is None:
            return self.best(policy)
        written = (stock.lowering, stock.costs)
        same = [
            sample
            for sample in self.samples
            if sample.policy == AGAIN and not sample.is_broken and (sample.lowering, sample.costs) == written
        ]
        return same[0] if same else None

    def way(self, policy: str) -> str:
        """Return how a policy's sample is written, if stock Dask's is written in another way; else ""."""
        stock, sample = self.stock, self.of(policy)
        if sample is None or (stock is not None and sample.lowering == stock.lowering):
            return ""
        return sample.lowering

    def is_broken(self, policy: str) -> bool:
        """Return whether a policy has runs here, and none that count."""
        own = [sample for sample in self.samples if sample.policy == policy]
        return bool(own) and all(sample.is_broken for sample in own)

    def speed_up(self, policy: str) -> Estimate | None:
        """Return how many times faster than the best stock Dask a policy is, if both ran."""
        stock, sample = self.stock, self.of(policy)
        if stock is None or sample is None or policy == STOCK:
            return None
        return speed_up(stock, sample)


def speed_up(reference: Sample, sample: Sample) -> Estimate:
    """Return the median time of a reference over that of a sample, with its interval.

    Their repetitions are pairs only where one invocation made both, one right after the other.
    """
    rng = np.random.default_rng(SEED)
    ours, theirs = sample.by_repetition(), reference.by_repetition()
    if ours is not None and theirs is not None and ours.keys() == theirs.keys():
        pairs = sorted(ours)
        times = [theirs[pair] for pair in pairs], [ours[pair] for pair in pairs]
        return ratio_of_medians(*times, rng, is_paired=True)
    return ratio_of_medians(reference.times_s, sample.times_s, rng)


def sizes_told(arguments: Mapping[str, Any], usual: Mapping[str, Any]) -> list[str]:
    """Return ``name=value`` of the sizes that are not default."""
    return [
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in arguments.items()
        if not (name in usual and bool(usual[name] == value))
    ]


def named(case: Case, defaults: Defaults) -> str:
    """Return the name of a case: the workload, its sizes that are not default, its costs if not learned."""
    sizes = sizes_told(case.arguments, defaults.get(case.workload, {}))
    words = [case.workload, *sizes, *([f"(costs {case.costs})"] if case.costs != "learned" else [])]
    return " ".join(words)


def is_ours(policy: str) -> bool:
    """Return whether a policy is one of ours, not a baseline."""
    return policy.startswith(_OURS)


def policies_of(cases: Iterable[Case]) -> tuple[str, ...]:
    """Return all policies but stock Dask: once more first, then baselines, then ours."""
    names = {sample.policy for case in cases for sample in case.samples} - {STOCK}
    return tuple(sorted(names, key=lambda name: (name != AGAIN, is_ours(name), name)))


def by_setting(rows: Iterable[BenchRecord]) -> list[list[BenchRecord]]:
    """Return the rows of each setting, in the order in which settings first appear."""
    names = ("machine", "cluster", "section", "tls", "fresh", "commit")
    groups = _grouped(rows, lambda row: (*(getattr(row, name) for name in names), written(row.versions)))
    return list(groups.values())


def cases_of(rows: Iterable[BenchRecord]) -> list[Case]:
    """Return the cases of rows of one setting: by shape, then in the order in which they first appear."""
    groups = _grouped(rows, lambda row: (_shape_of(row), row.workload, written(row.arguments)))
    cases = [case for group in groups.values() for case in _cases_of_workload(group)]
    return sorted(cases, key=lambda case: case.shape)


def by_shape(cases: Iterable[Case]) -> dict[Shape, list[Case]]:
    """Return the cases of each shape."""
    return _grouped(cases, lambda case: case.shape)


def _cases_of_workload(rows: Sequence[BenchRecord]) -> list[Case]:
    groups = _grouped(rows, lambda row: (row.policy, row.lowering, row.costs))
    samples = [Sample(*names, tuple(runs)) for names, runs in groups.items()]
    first = rows[0]
    return [
        Case(
            _shape_of(first),
            first.workload,
            first.suite,
            first.arguments,
            costs,
            _samples_for(costs, samples),
        )
        for costs in dict.fromkeys(sample.costs for sample in samples)
    ]


def _samples_for(costs: str, samples: Sequence[Sample]) -> tuple[Sample, ...]:
    own = tuple(sample for sample in samples if sample.costs == costs)
    borrowed = tuple(
        sample
        for name in (STOCK, AGAIN)
        if not any(sample.policy == name for sample in own)
        for sample in samples
        if sample.policy == name
    )
    return borrowed + own


def _grouped(items: Iterable[V], key: Callable[[V], K]) -> dict[K, list[V]]:
    groups: dict[K, list[V]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _shape_of(row: BenchRecord) -> Shape:
    return Shape(row.workers, row.threads_per_worker, row.processes)
