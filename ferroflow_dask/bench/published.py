"""What others have published, and ours beside it.

Their machines are not ours: throughput of sleeping ops compares, since it is bound by the sleep;
anything else shows an order of magnitude only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ferroflow_dask.bench.comparison import STOCK, Case, Defaults, cases_of
from ferroflow_dask.bench.markdown import NOTHING, number, percent, table
from ferroflow_dask.bench.metg import Curve, metg_from_rows
from ferroflow_dask.bench.published_products import products_table
from ferroflow_dask.bench.schema import BenchRecord

_MS_PER_S = 1e3


class PublishedRun(NamedTuple):
    """ferroflow's figures of one DAG at so many threads of one process; medians of five runs.

    The bound is what max(T1/P, T∞) allows; None if durations are not declared.
    """

    workers: int
    static_ops_per_s: float
    stealing_ops_per_s: float
    steals_per_s: float
    bound_ops_per_s: float | None


class PublishedDag(NamedTuple):
    """ferroflow's figures of one DAG: the sizes that a row must have to be compared, and where it ran."""

    title: str
    arguments: Mapping[str, Any]
    job: str
    runs: tuple[PublishedRun, ...]


FERROFLOW_SOURCE = "Noah Kostesku, ferroflow, github.com/noahkostesku/ferroflow, docs/benchmarks.md"
_NARVAL = "Narval, AMD EPYC Milan"

#: ferroflow's scaling study, by the name of the workload here. The bounds are not the source's: they are
#: ops / max(T1/P, T∞) by the declared durations.
FERROFLOW: Mapping[str, PublishedDag] = {
    "xlarge-wide": PublishedDag(
        "XLarge Wide DAG (1281 ops, width=1280 depth=1 skew=0.003)",
        {"width": 1280, "depth": 1, "skew": 0.003},
        f"{_NARVAL}, job 59826638",
        (
            PublishedRun(8, 7_387, 7_431, 34.8, 7_901),
            PublishedRun(16, 14_443, 14_777, 92.4, 15_802),
            PublishedRun(32, 27_631, 28_839, 180.2, 31_605),
        ),
    ),
    "large-wide": PublishedDag(
        "Large Wide DAG (321 ops, width=320 depth=1 skew=0.47)",
        {"width": 320, "depth": 1, "skew": 0.47},
        f"{_NARVAL}, job 59544118",
        (
            PublishedRun(8, 2_701, 2_700, 42.2, 2_783),
            PublishedRun(16, 5_219, 5_310, 182.5, 5_565),
            PublishedRun(32, 10_359, 10_364, 808.1, 11_130),
        ),
    ),
    "xlarge-transformer": PublishedDag(
        "XLarge Transformer DAG (545 ops, 32 layers, d=512)",
        {"layers": 32, "d_model": 512},
        f"{_NARVAL}, job 59826638",
        (
            PublishedRun(8, 581, 578, 0.0, None),
            PublishedRun(16, 581, 583, 7.6, None),
            PublishedRun(32, 578, 574, 7.5, None),
        ),
    ),
    "imbalanced": PublishedDag(
        "Imbalanced DAG (205 ops, 4 heavy × 200 ms + 200 fast × 1 ms)",
        {"n_heavy": 4, "heavy_ms": 200.0, "n_fast": 200, "fast_ms": 1.0},
        f"{_NARVAL}, job 59826638",
        (
            PublishedRun(8, 900, 1_014, 477.0, 1_020),
            PublishedRun(16, 958, 1_013, 218.6, 1_020),
            PublishedRun(32, 988, 1_012, 99.3, 1_020),
        ),
    ),
}

TASK_BENCH_SOURCE = (
    "E. Slaughter et al., Task Bench, SC'20: pattern stencil, 1 node of 32 cores (Dask 1.1.5), METG(50 %)"
)
#: METG(50 %) by system [s].
TASK_BENCH_METG_S: Mapping[str, float] = {
    "MPI": 0.005e-3,
    "Charm++": 0.012e-3,
    "PaRSEC": 0.09e-3,
    "StarPU": 0.43e-3,
    "Regent": 0.94e-3,
    "TensorFlow": 3.25e-3,
    "Swift/T": 48e-3,
    "Dask 1.1.5": 186e-3,
    "Spark": 373e-3,
}
#: The workload that those figures are of.
_STENCIL = "stencil_1d"

#: Policies of ours that are laid beside ferroflow's, under the names that columns have.
_POLICIES = {"stock dask": STOCK, "static": "static", "ferroflow-dask": "ferroflow"}


def published_table(rows: Iterable[BenchRecord], defaults: Defaults) -> str:
    """Return the published figures for which there are rows, ours beside them, in markdown; or "".

    Throughput is at equal workers: as many threads in all here as workers there. Curves of Task Bench are of
    default sizes, but for width and steps.

    Parameters
    ----------
    rows : iterable of BenchRecord
        Of one setting.
    defaults : mapping
        Sizes of each workload by default.
    """
    rows = list(rows)
    cases = cases_of(rows)
    tables = [_beside(name, dag, cases) for name, dag in FERROFLOW.items()]
    stencils = [
        curve
        for curve in metg_from_rows(rows, defaults)
        if curve.workload == _STENCIL and not curve.unusual
        if curve.kernel == defaults.get(_STENCIL, {}).get("kernel")
    ]
    metg = _metg_beside(stencils) if stencils else ""
    return "\n\n".join(filter(None, [*tables, products_table(cases), metg]))


def _beside(name: str, dag: PublishedDag, cases: Sequence[Case]) -> str:
    theirs = ("static, published", "stealing, published", "of the bound", "steals/s")
    numbers = (*theirs, *_POLICIES, "of the bound", "steals/s")
    lines = [
        (str(run.workers), *_published(run), *_measured(case), str(case.shape), case.costs)
        for run in dag.runs
        for case in cases
        if case.workload == name and case.shape.n_threads == run.workers
        if dag.arguments.items() <= dict(case.arguments).items()
    ]
    if not lines:
        return ""
    source = f"Throughput in ops/s. Published: {FERROFLOW_SOURCE}, {dag.job}."
    header = ("workers", *numbers, "cluster here", "costs here")
    return f"### {dag.title}\n\n{source}\n\n{table(header, lines, right=('workers', *numbers))}"


def _published(run: PublishedRun) -> tuple[str, ...]:
    bound = run.bound_ops_per_s
    return (
        f"{run.static_ops_per_s:,.0f}",
        f"{run.stealing_ops_per_s:,.0f}",
        percent(None if bound is None else run.stealing_ops_per_s / bound),
        f"{run.steals_per_s:,.1f}",
    )


def _measured(case: Case) -> tuple[str, ...]:
    ours = case.best("ferroflow")
    return (
        *(_throughput(case, policy) for policy in _POLICIES.values()),
        percent(ours.median_of("efficiency") if ours else None),
        f"{ours.steals_per_s:,.1f}" if ours else NOTHING,
    )


def _throughput(case: Case, policy: str) -> str:
    sample, way = case.best(policy), case.way(policy)
    if sample is None:
        return NOTHING
    return f"{sample.ops_per_s:,.0f}, {way}" if way else f"{sample.ops_per_s:,.0f}"


def _metg_beside(curves: Sequence[Curve]) -> str:
    lines = [(system, "published", f"{s * _MS_PER_S:g}") for system, s in TASK_BENCH_METG_S.items()]
    lines += [
        (curve.label, f"here, {curve.title}, {curve.shape}", number(s * _MS_PER_S))
        for curve in curves
        if (s := curve.result.granularity_s) is not None
    ]
    header = ("system", "where", "METG(50 %) [ms]")
    source = f"Published: {TASK_BENCH_SOURCE}."
    return f"### Task Bench, stencil\n\n{source}\n\n{table(header, lines, right=header[2:])}"
