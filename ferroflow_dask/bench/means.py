"""Geometric means of speed-ups, of all policies over the same cases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ferroflow_dask.bench.comparison import STOCK, Case, Defaults, named, policies_of
from ferroflow_dask.bench.estimates import ENOUGH, Estimate, geometric_mean
from ferroflow_dask.bench.markdown import BROKEN, NOTHING, table, text

_WHAT = (
    "Each line is over the cases in which all policies with a mean in it have a speed-up. A workload of "
    "several sizes counts once. The interval is over the choice of workloads (Student's t, of the "
    f"logarithms); from fewer than {ENOUGH} workloads there is none. A policy without a speed-up in a suite "
    "has no mean over all."
)


@dataclass(frozen=True, slots=True)
class _Rated:
    """A case with the speed-up of each policy that has one in it."""

    case: Case
    ratios: Mapping[str, float]


def means(cases: Sequence[Case], defaults: Defaults) -> Iterator[str]:
    """Yield the parts of a report on geometric means; none if nothing has a speed-up.

    Parameters
    ----------
    cases : sequence of Case
        Of one setting.
    defaults : mapping
        Sizes of each workload by default; those are not named.
    """
    policies = policies_of(cases)
    rated = [_Rated(case, _ratios(case, policies)) for case in cases]
    if not any(one.ratios for one in rated):
        return
    lines: list[tuple[str, ...]] = []
    left_out: list[str] = []
    for shape, costs in dict.fromkeys((case.shape, case.costs) for case in cases):
        own = [one for one in rated if (one.case.shape, one.case.costs) == (shape, costs)]
        suites = list(dict.fromkeys(one.case.suite for one in own))
        for suite in suites:
            members = [one for one in own if one.case.suite == suite]
            compared = _compared(members, policies)
            lines += [(str(shape), costs, suite, *cells) for cells in _cells(members, compared, policies)]
            left_out += [
                f"- {text(named(one.case, defaults))}, {shape}, {costs}: {', '.join(reasons)}"
                for one in members
                if (reasons := _reasons(one, compared))
            ]
        if len(suites) > 1:
            compared = _compared(own, policies)
            lines += [(str(shape), costs, "all", *cells) for cells in _cells(own, compared, policies)]
    numbers = ("workloads", *policies)
    yield "## Geometric means of the speed-ups"
    yield _WHAT
    if lines:
        yield table(("cluster", "costs", "suite", *numbers), lines, right=numbers)
    if left_out:
        yield "Left out, of all policies alike:"
        yield "\n".join(left_out)


def _ratios(case: Case, policies: Sequence[str]) -> dict[str, float]:
    # Without their intervals, which take long.
    stock = case.stock
    if stock is None:
        return {}
    return {
        policy: stock.median_s / sample.median_s
        for policy in policies
        if (sample := case.of(policy)) is not None
    }


def _compared(rated: Sequence[_Rated], policies: Sequence[str]) -> list[str]:
    """Return the policies that have a speed-up in each suite in which any has one."""
    by_suite: dict[str, set[str]] = {}
    for one in rated:
        if one.ratios:
            by_suite.setdefault(one.case.suite, set()).update(one.ratios)
    return [policy for policy in policies if by_suite and all(policy in own for own in by_suite.values())]


def _cells(
    rated: Sequence[_Rated], compared: Sequence[str], policies: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    """Yield how many workloads are shared, and each policy's mean over them; nothing if none is shared."""
    shared = [one for one in rated if one.ratios and all(policy in one.ratios for policy in compared)]
    if not (compared and shared):
        return
    means_of = {policy: str(_mean(shared, policy)) for policy in compared}
    broken = {policy: BROKEN for policy in policies if any(one.case.is_broken(policy) for one in rated)}
    n_workloads = len({one.case.workload for one in shared})
    yield (str(n_workloads), *({**broken, **means_of}.get(policy, NOTHING) for policy in policies))


def _mean(rated: Sequence[_Rated], policy: str) -> Estimate:
    by_workload: dict[str, list[float]] = {}
    for one in rated:
        by_workload.setdefault(one.case.workload, []).append(one.ratios[policy])
    return geometric_mean([float(np.exp(np.log(ratios).mean())) for ratios in by_workload.values()])


def _reasons(one: _Rated, compared: Sequence[str]) -> list[str]:
    """Return why a case is left out; nothing if it is not."""
    missing = [policy for policy in compared if policy not in one.ratios]
    return [_reason(one.case, policy) for policy in ([STOCK] if one.case.stock is None else missing)]


def _reason(case: Case, policy: str) -> str:
    is_broken = any(sample.is_broken for sample in case.samples if sample.policy == policy)
    return f"{policy} {'is broken' if is_broken else 'did not run'}"
