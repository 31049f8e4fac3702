"""A markdown report of benchmark rows.

Everything is relative to stock Dask in the same file, on the same cluster shape: a speed-up is stock
Dask's median makespan over the other's, so above 1 is faster. Where a computation can be written for
Dask in several ways, stock Dask is the one of the shortest median, chosen from the very runs that it is
compared by; that errs in Dask's favour. Every other is likewise the best of the ways in which it ran, which
errs in its own; a way that is not stock Dask's is named. What we lose is printed like what we win.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ferroflow_dask.bench.comparison import (
    AGAIN,
    ENOUGH,
    STOCK,
    Case,
    Defaults,
    Estimate,
    Sample,
    by_setting,
    by_shape,
    cases_of,
    geometric_mean,
    is_ours,
    named,
    policies_of,
)
from ferroflow_dask.bench.markdown import BROKEN, NOTHING, count, number, percent, table, text
from ferroflow_dask.bench.metg import metg_from_rows, metg_table
from ferroflow_dask.bench.rows import Rows
from ferroflow_dask.bench.schema import OK, BenchRecord
from ferroflow_dask.exceptions import UsageError

#: Signs of an interval that lies wholly above or below 1; not told by colour.
_FASTER, _SLOWER = "▲", "▼"
_MEGABYTE = 1e6

_MEANS = (
    "Each line is over the cases in which all policies with a mean in it have a speed-up. A workload of "
    "several sizes counts once. The interval is over the choice of workloads (Student's t, of the "
    f"logarithms); from fewer than {ENOUGH} workloads there is none. A policy without a speed-up in a suite "
    "has no mean over all."
)

#: What a setting says of its clusters.
_CLUSTERS = {"local": "on a local cluster", "slurm": "on a cluster of SLURM jobs"}


def report(rows: Sequence[BenchRecord], *, defaults: Defaults | None = None) -> str:
    """Return a report of rows, in markdown.

    Rows of different settings (machine, kind of cluster, versions, commit) are never compared: each setting
    has a part of its own. Within a part each cluster shape has tables of its own.

    Parameters
    ----------
    rows : sequence of BenchRecord
        If they are `Rows`, their notes are printed at the top.
    defaults : mapping, optional
        Sizes of each workload by default; those are not named in the report.

    Returns
    -------
    str
        Ends in a newline.

    Raises
    ------
    UsageError
        There are no rows.
    """
    if not rows:
        raise UsageError("no rows to report; 'ferroflow bench' writes some")
    settings = by_setting(rows)
    parts = ["# Benchmark", *(rows.notes if isinstance(rows, Rows) else ())]
    if len(settings) > 1:
        parts.append(
            f"The rows come from {len(settings)} settings, which differ in machine, cluster, versions or "
            "commit. They are reported one by one and not compared with each other."
        )
    for n, own in enumerate(settings, start=1):
        parts += [f"# Setting {n} of {len(settings)}"] if len(settings) > 1 else []
        parts += _part(own, defaults or {})
    return "\n\n".join(parts) + "\n"


def _part(rows: Sequence[BenchRecord], defaults: Defaults) -> Iterator[str]:
    cases = cases_of(rows)
    yield _description(rows)
    if any(row.status != OK for row in rows):
        yield from _broken(rows, defaults)
    for shape, own in by_shape(cases).items():
        yield f"## {shape}"
        yield "Speed-up over stock Dask, with its 95 % interval:"
        yield _speed_ups(own, defaults)
        if noise := _noise(own):
            yield noise
        yield "All samples, as medians (and the range of times):"
        yield _samples(own, defaults)
    yield from _means_of(cases, defaults)
    yield from _verdicts(cases, defaults)
    if curves := metg_from_rows(rows, defaults):
        yield "## METG(50 %)"
        yield metg_table(curves)


def _description(rows: Sequence[BenchRecord]) -> str:
    setting = rows[0]
    found = sorted(setting.versions.items())
    versions = ", ".join(f"{name} {version}" for name, version in found) or "unknown versions"
    commit = f"commit {setting.commit}" if setting.commit else "no commit"
    places = [text(setting.machine) or "an unknown machine"]
    places += [_CLUSTERS[setting.cluster]] if setting.cluster in _CLUSTERS else []
    places += [f"section {text(setting.section)}"] if setting.section else []
    places += ["encrypted"] if setting.tls else []
    places += ["a new one for each run"] if setting.fresh else []
    lines = [
        f"{count(len(rows), 'run')} on {', '.join(places)}; {text(versions)}; {text(commit)}.",
        f"A speed-up is stock Dask's median time over the other's: above 1 is faster. {_FASTER} and "
        f"{_SLOWER} mark those whose 95 % bootstrap interval lies wholly above or below 1. Stock Dask is "
        "the best of the ways in which a computation can be written for it, and each of the others the best "
        "of those in which it ran, named where stock Dask's is another. The bound is max(T1/P, T∞). Costs "
        "are learned where nothing else is said; arguments are those that are not default.",
    ]
    fewest = min(len(sample.runs) for case in cases_of(rows) for sample in case.samples)
    if fewest < ENOUGH:
        lines.append(
            f"Some samples have {count(fewest, 'repetition')} only: an interval from fewer than {ENOUGH} is "
            "narrower than 95 %, and from one there is none."
        )
    return "\n\n".join(lines)


def _broken(rows: Sequence[BenchRecord], defaults: Defaults) -> Iterator[str]:
    broken = [row for row in rows if row.status != OK]
    yield f"## {BROKEN}: {count(len(broken), 'run')} of {len(rows):,}"
    yield "What is broken is not fast: repetitions of which one is broken count for nothing below."
    header = ("workload", "policy", "lowering", "costs", "cluster", "repetition", "what is wrong")
    lines = []
    for case in cases_of(broken):
        name = named(case, defaults)
        for sample in case.samples:
            for run in sample.runs if sample.costs == case.costs else ():
                where = (sample.lowering or NOTHING, sample.costs, str(case.shape), str(run.repetition))
                lines.append((name, sample.policy, *where, run.status))
    yield table(header, lines, right=("repetition",))


def _speed_ups(cases: Sequence[Case], defaults: Defaults) -> str:
    policies = policies_of(cases)
    titles = tuple(f"{policy} (noise)" if policy == AGAIN else policy for policy in policies)
    header = ("workload", "bound [s]", "stock dask [s]", *titles)
    lines = [
        (
            named(case, defaults),
            number(_bound_s(case)),
            _stock(case),
            *(_speed_up(case, policy) for policy in policies),
        )
        for case in cases
    ]
    return table(header, lines, right=header[1:])


def _bound_s(case: Case) -> float | None:
    # A bound by measured durations differs from run to run; stock Dask's is the one of its time beside it.
    samples = [case.stock, *(sample for sample in case.samples if not sample.is_broken)]
    return next((sample.median_of("bound_s") for sample in samples if sample is not None), None)


def _stock(case: Case) -> str:
    stock = case.stock
    if stock is None:
        return BROKEN if case.is_broken(STOCK) else NOTHING
    words = [stock.lowering] if stock.lowering else []
    words += [f"costs {stock.costs}"] if stock.costs != case.costs else []
    return ", ".join([_time(stock), *words])


def _time(sample: Sample) -> str:
    middle = number(sample.median_s)
    low, high = sample.range_s
    return middle if len(sample.runs) == 1 else f"{middle} ({number(low)}–{number(high)})"


def _speed_up(case: Case, policy: str) -> str:
    if case.is_broken(policy):
        return BROKEN
    estimate = case.speed_up(policy)
    if estimate is None:
        return NOTHING
    sign = _FASTER if estimate.is_above(1) else _SLOWER if estimate.is_below(1) else ""
    return f"{sign} {estimate}{_way(case, policy)}".strip()


def _way(case: Case, policy: str) -> str:
    return f", {way}" if (way := case.way(policy)) else ""


def _noise(cases: Sequence[Case]) -> str:
    # Cases of known costs have the stock Dask of others beside them: its noise counts once.
    own = [case for case in cases if (stock := case.stock) is not None and stock.costs == case.costs]
    ratios = [ratio for case in own if (ratio := case.speed_up(AGAIN)) is not None]
    if not ratios:
        return ""
    values = [ratio.value for ratio in ratios]
    false = sum(ratio.is_above(1) or ratio.is_below(1) for ratio in ratios)
    return (
        f"Noise: stock Dask against itself gives {min(values):.2f}–{max(values):.2f} on "
        f"{count(len(ratios), 'workload')}; {false} of these intervals leave out 1{_by_chance(ratios)}."
    )


def _by_chance(ratios: Sequence[Estimate]) -> str:
    """Return how many of the intervals leave out 1 by chance; "" where that is not known."""
    told = [ratio for ratio in ratios if ratio.low is not None]
    fewest = min((ratio.n for ratio in told), default=0)
    # An interval from so few is the range of what it was made of, and has no 1 where all are on one side. Of
    # what are no pairs it is wider.
    if not (2 <= fewest <= ENOUGH and all(ratio.is_paired for ratio in told)):
        return ""
    return f"; with {fewest} repetitions, about 1 in {2 ** (fewest - 1)} would by chance"


def _samples(cases: Sequence[Case], defaults: Defaults) -> str:
    numbers = (
        *("runs", "time [s]", "ops/s", "efficiency", "predicted", "tasks (predicted)"),
        *("steals", "moved [MB] (predicted)", "idle", "scheduler CPU [s]"),
    )
    lines = [
        (named(case, defaults), *_sample(sample))
        for case in cases
        for sample in sorted(case.samples, key=_by_policy)
        if sample.costs == case.costs
    ]
    return table(("workload", "policy", "lowering", *numbers), lines, right=numbers)


def _by_policy(sample: Sample) -> tuple[bool, bool, bool, str]:
    name = sample.policy
    return (name != STOCK, name != AGAIN, is_ours(name), name)


def _sample(sample: Sample) -> tuple[str, ...]:
    head = (sample.policy, sample.lowering or NOTHING, str(len(sample.runs)))
    if sample.is_broken:
        return (*head, BROKEN, *(NOTHING,) * 8)
    return (
        *head,
        _time(sample),
        number(sample.ops_per_s),
        percent(sample.median_of("efficiency")),
        percent(_predicted(sample)),
        _beside(sample, "tasks", "predicted_tasks", "{:,.0f}".format),
        f"{sample.median_of('steals_confirmed') or 0:,.0f}",
        _beside(sample, "bytes_moved", "predicted_bytes", lambda nbytes: number(nbytes / _MEGABYTE)),
        percent(sample.median_of("idle_fraction")),
        number(sample.median_of("scheduler_cpu_s")),
    )


def _beside(sample: Sample, name: str, expected: str, written: Callable[[float], str]) -> str:
    """Return what came, and in brackets what was expected, if anything was, as medians."""
    came, told = written(sample.median_of(name) or 0.0), sample.median_of(expected)
    return came if told is None else f"{came} ({written(told)})"


def _predicted(sample: Sample) -> float | None:
    """Return the makespan that was expected over the one that came, as medians."""
    predicted_s = sample.median_of("predicted_s")
    return None if predicted_s is None else predicted_s / sample.median_s


def _verdicts(cases: Sequence[Case], defaults: Defaults) -> Iterator[str]:
    ours = [policy for policy in policies_of(cases) if is_ours(policy)]
    found = [
        (case, policy, estimate)
        for case in cases
        for policy in ours
        if (estimate := case.speed_up(policy)) is not None
    ]
    if not found:
        return
    for title, below in (("Regressions", True), ("Gains", False)):
        lines = [
            f"- {text(named(case, defaults))}, {policy}{_way(case, policy)}, {case.shape}: "
            f"{estimate}{_few(estimate)}"
            for case, policy, estimate in found
            if (estimate.is_below(1) if below else estimate.is_above(1))
        ]
        yield f"## {title}: {len(lines)} of {len(found)}"
        yield "\n".join(lines) or "None."


def _few(estimate: Estimate) -> str:
    return f" (from {count(estimate.n, 'repetition')})" if estimate.n < ENOUGH else ""


# Geometric means of the speed-ups, of all policies over the same cases

#: A case with the speed-up of each policy that has one in it.
_Rated = tuple[Case, Mapping[str, float]]


def _means_of(cases: Sequence[Case], defaults: Defaults) -> Iterator[str]:
    """Yield the parts on geometric means; none if nothing has a speed-up."""
    policies = policies_of(cases)
    rated = [(case, _ratios(case, policies)) for case in cases]
    if not any(one[1] for one in rated):
        return
    lines: list[tuple[str, ...]] = []
    left_out: list[str] = []
    for shape, costs in dict.fromkeys((case.shape, case.costs) for case in cases):
        own = [one for one in rated if (one[0].shape, one[0].costs) == (shape, costs)]
        suites = list(dict.fromkeys(one[0].suite for one in own))
        for suite in suites:
            members = [one for one in own if one[0].suite == suite]
            compared = _compared(members, policies)
            lines += [(str(shape), costs, suite, *cells) for cells in _cells(members, compared, policies)]
            left_out += [
                f"- {text(named(one[0], defaults))}, {shape}, {costs}: {', '.join(reasons)}"
                for one in members
                if (reasons := _reasons(one, compared))
            ]
        if len(suites) > 1:
            compared = _compared(own, policies)
            lines += [(str(shape), costs, "all", *cells) for cells in _cells(own, compared, policies)]
    numbers = ("workloads", *policies)
    yield "## Geometric means of the speed-ups"
    yield _MEANS
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
        if one[1]:
            by_suite.setdefault(one[0].suite, set()).update(one[1])
    return [policy for policy in policies if by_suite and all(policy in own for own in by_suite.values())]


def _cells(
    rated: Sequence[_Rated], compared: Sequence[str], policies: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    """Yield how many workloads are shared, and each policy's mean over them; nothing if none is shared."""
    shared = [one for one in rated if one[1] and all(policy in one[1] for policy in compared)]
    if not (compared and shared):
        return
    means_of = {policy: str(_mean(shared, policy)) for policy in compared}
    broken = {policy: BROKEN for policy in policies if any(one[0].is_broken(policy) for one in rated)}
    n_workloads = len({one[0].workload for one in shared})
    yield (str(n_workloads), *({**broken, **means_of}.get(policy, NOTHING) for policy in policies))


def _mean(rated: Sequence[_Rated], policy: str) -> Estimate:
    by_workload: dict[str, list[float]] = {}
    for one in rated:
        by_workload.setdefault(one[0].workload, []).append(one[1][policy])
    return geometric_mean([float(np.exp(np.log(ratios).mean())) for ratios in by_workload.values()])


def _reasons(one: _Rated, compared: Sequence[str]) -> list[str]:
    """Return why a case is left out; nothing if it is not."""
    missing = [policy for policy in compared if policy not in one[1]]
    return [_reason(one[0], policy) for policy in ([STOCK] if one[0].stock is None else missing)]


def _reason(case: Case, policy: str) -> str:
    is_broken = any(sample.is_broken for sample in case.samples if sample.policy == policy)
    return f"{policy} {'is broken' if is_broken else 'did not run'}"
