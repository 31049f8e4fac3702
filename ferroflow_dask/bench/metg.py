"""METG: the smallest tasks that a scheduler runs at half of the machine's speed.

E. Slaughter et al., "Task Bench: A Parameterized Benchmark for Evaluating Parallel Runtime Performance",
SC'20: METG(50 %) is the smallest mean task granularity (makespan × cores / tasks, so overhead included)
at which efficiency is still 50 %. Between the two measured points that it lies between, it is
interpolated as by their own `scripts/chart_metg.py`: linearly in granularity.

Deviations: of repeated runs the median counts, not the mean; and where their script fails, since a curve
does not cross 50 %, the answer here is none, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ferroflow_dask.bench.comparison import Case, Defaults, Sample, cases_of, sizes_told
from ferroflow_dask.bench.markdown import NOTHING, number, table
from ferroflow_dask.bench.schema import BenchRecord, Shape

#: Efficiency that tasks must reach.
THRESHOLD = 0.5
_SUITE = "task-bench"
_MS_PER_S = 1e3
#: The size that a sweep changes: tasks declare how long they take, so that their ideal is known.
_SWEPT = "task_ms"
#: Sizes that are shown by themselves, whatever they are.
_SHOWN = ("width", "steps")


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
    lowering: str
    costs: str
    shape: Shape
    sizes: tuple[float, ...]
    granularity_s: tuple[float, ...]
    efficiency: tuple[float, ...]
    result: Metg

    @property
    def label(self) -> str:
        """What tells the curve from others in a figure."""
        return ", ".join(word for word in (self.policy, self.lowering, self.costs) if word)


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


def metg_from_rows(rows: Iterable[BenchRecord], defaults: Defaults) -> list[Curve]:
    """Return a curve for each Task Bench pattern, policy and cluster shape that has several task sizes.

    Samples with a broken run are left out. The rows are of one setting.

    Parameters
    ----------
    rows : iterable of BenchRecord
    defaults : mapping
        Sizes of each pattern by default.
    """
    groups: dict[tuple[Any, ...], dict[float, tuple[Case, Sample]]] = {}
    swept = [row for row in rows if row.suite == _SUITE and {*_SHOWN, _SWEPT} <= row.arguments.keys()]
    for case in cases_of(swept):
        fixed = json.dumps({name: value for name, value in case.arguments.items() if name != _SWEPT})
        for sample in case.samples:
            if not sample.is_broken and sample.costs == case.costs:
                key = (case.shape, case.workload, fixed, sample.policy, sample.lowering, sample.costs)
                groups.setdefault(key, {})[float(case.arguments[_SWEPT])] = case, sample
    return [_curve(dict(sorted(group.items())), defaults) for group in groups.values() if len(group) > 1]


def metg_table(curves: Sequence[Curve]) -> str:
    """Return a markdown table of curves and their METG."""
    numbers = ("METG [ms]", "task sizes")
    lines = [
        (
            curve.title,
            str(curve.shape),
            curve.label,
            _ms(curve.result),
            str(len(curve.sizes)),
            curve.result.reason or NOTHING,
        )
        for curve in curves
    ]
    return table(("pattern", "cluster", "policy", *numbers, "why none"), lines, right=numbers)


def _ms(result: Metg) -> str:
    return NOTHING if result.granularity_s is None else number(result.granularity_s * _MS_PER_S)


def _curve(group: Mapping[float, tuple[Case, Sample]], defaults: Defaults) -> Curve:
    case, sample = next(iter(group.values()))
    cores, ops, sizes = case.shape.n_threads, sample.runs[0].ops, case.arguments
    granularity_s = tuple(sample.median_s * cores / ops for _, sample in group.values())
    reached = tuple(ms / _MS_PER_S / seconds for ms, seconds in zip(group, granularity_s, strict=True))
    others = {name: value for name, value in sizes.items() if name not in (*_SHOWN, _SWEPT)}
    unusual = sizes_told(others, defaults.get(case.workload, {}))
    return Curve(
        title=" ".join((case.workload, f"{sizes['width']} × {sizes['steps']}", *unusual)),
        policy=sample.policy,
        lowering=sample.lowering,
        costs=sample.costs,
        shape=case.shape,
        sizes=tuple(group),
        granularity_s=granularity_s,
        efficiency=reached,
        result=metg(granularity_s, reached),
    )
