"""METG: the smallest tasks that a scheduler runs at half of the machine's speed.

E. Slaughter et al., "Task Bench: A Parameterized Benchmark for Evaluating Parallel Runtime Performance",
SC'20: METG(50 %) is the smallest mean task granularity (makespan × cores / tasks, so overhead included)
at which efficiency is still 50 %. Between the two measured points that it lies between, it is
interpolated as by their own `scripts/chart_metg.py`: linearly in granularity.

Deviations: of repeated runs the median counts, not the mean; and where their script fails, since a curve
does not cross 50 %, the answer here is none, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ferroflow_dask.bench.markdown import NOTHING, number, table
from ferroflow_dask.bench.schema import OK, BenchRecord

#: Efficiency that tasks must reach.
THRESHOLD = 0.5
_SUITE = "task-bench"
_MS_PER_S = 1e3
#: The size that a sweep changes: tasks declare how long they take, so that their ideal is known.
_SWEPT = "task_ms"


@dataclass(frozen=True, slots=True)
class Metg:
    """A minimum effective task granularity.

    Parameters
    ----------
    granularity_s : float or None
        [s]; None if the curve does not tell.
    reason : str
        Why it does not; "" if it does.
    """

    granularity_s: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """Efficiency against granularity, of one pattern under one policy.

    `title` has the pattern and its sizes but the swept one. `granularity_s` and `efficiency` are of the
    median run of each size, in ascending order of `sizes`.
    """

    title: str
    policy: str
    cluster: str
    sizes: tuple[float, ...]
    granularity_s: tuple[float, ...]
    efficiency: tuple[float, ...]
    result: Metg


def metg(granularity_s: Sequence[float], efficiency: Sequence[float]) -> Metg:
    """Return the METG(50 %) of a curve.

    Of a curve that crosses that efficiency several times, it is the crossing at the smallest granularity.

    Parameters
    ----------
    granularity_s : sequence of float
        Mean granularity [s] of each run, in the order of the sizes of their tasks, the smallest first.
        It need not ascend: overhead differs from run to run.
    efficiency : sequence of float
        Of the same runs.

    Examples
    --------
    >>> metg([0.010, 0.020, 0.030], [0.25, 0.40, 0.65])
    Metg(granularity_s=0.024, reason='')
    """
    points = list(zip(granularity_s, efficiency, strict=True))
    efficient = [i for i, (_, reached) in enumerate(points) if reached >= THRESHOLD]
    if not efficient:
        return Metg(None, f"no task size reaches {THRESHOLD:.0%} (best: {max(efficiency):.0%})")
    first = min(efficient, key=lambda i: points[i][0])
    if first == 0:
        return Metg(None, f"the smallest tasks still reach {efficiency[0]:.0%}: try smaller ones")
    (above, high), (below, low) = points[first], points[first - 1]
    if below >= above:  # smaller tasks, but more overhead than they save: nothing lies between the two
        return Metg(above)
    return Metg(round(below + (THRESHOLD - low) / (high - low) * (above - below), 12))


def metg_from_rows(rows: Iterable[BenchRecord]) -> list[Curve]:
    """Return a curve for each Task Bench pattern, policy and cluster that has several task sizes.

    Task sizes with a broken run are left out, and first runs are.
    """
    groups: dict[tuple[str, str, str], dict[float, list[BenchRecord]]] = {}
    for row in rows:
        if row.suite == _SUITE and _SWEPT in row.arguments and not row.fresh:
            sizes = {name: value for name, value in row.arguments.items() if name != _SWEPT}
            title = " ".join((row.workload.split()[0], *(f"{name}={size}" for name, size in sizes.items())))
            cluster = f"{row.workers} × {row.threads_per_worker}"
            own = groups.setdefault((title, row.policy, cluster), {})
            own.setdefault(float(row.arguments[_SWEPT]), []).append(row)
    curves = []
    for names, runs in groups.items():
        whole = {ms: own for ms, own in sorted(runs.items()) if all(run.status == OK for run in own)}
        if len(whole) > 1:
            curves.append(_curve(*names, whole))
    return curves


def _curve(title: str, policy: str, cluster: str, runs: Mapping[float, Sequence[BenchRecord]]) -> Curve:
    granularity_s = tuple(
        median(run.makespan_s * run.workers * run.threads_per_worker / run.ops for run in own)
        for own in runs.values()
    )
    reached = tuple(ms / _MS_PER_S / seconds for ms, seconds in zip(runs, granularity_s, strict=True))
    return Curve(title, policy, cluster, tuple(runs), granularity_s, reached, metg(granularity_s, reached))


def metg_table(curves: Sequence[Curve]) -> str:
    """Return a markdown table of curves and their METG."""
    numbers = ("METG [ms]", "task sizes")
    lines = [
        (
            curve.title,
            curve.cluster,
            curve.policy,
            _ms(curve.result),
            str(len(curve.sizes)),
            curve.result.reason or NOTHING,
        )
        for curve in curves
    ]
    return table(("pattern", "workers × threads", "policy", *numbers, "why none"), lines, right=numbers)


def _ms(result: Metg) -> str:
    return NOTHING if result.granularity_s is None else number(result.granularity_s * _MS_PER_S)
