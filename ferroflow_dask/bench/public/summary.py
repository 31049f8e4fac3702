"""Summary of public runs: the numbers of the page, as JSON that is committed beside it.

All ratios are stock Dask divided by the other side, so above 1 the other side is faster, or needs less.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ferroflow_dask.bench.comparison import ratio_of_medians
from ferroflow_dask.bench.public import NAMES, get_suite
from ferroflow_dask.bench.schema import OK, BenchRecord, written
from ferroflow_dask.documents import check_format, read_document
from ferroflow_dask.exceptions import UsageError

#: Name and version of the document.
_FORMAT, _VERSION = "ferroflow-benchmarks", 1
#: The sides.
STOCK, AGAIN, OURS = "dask", "dask-again", "ferroflow"
#: Measures that are compared as ratios.
MEASURES = (
    *("created_s", "started_s", "first_result_s"),
    *("client_cpu_s", "scheduler_cpu_s", "worker_cpu_s"),
    *("peak_worker_memory", "peak_client_memory", "bytes_moved", "p2p_bytes", "messages"),
)
#: An interval that lies below this is a loss.
LOSS = 0.95
_SEED = 0
_DIGITS = 4

#: A ratio and the ends of its interval, which are null from one run.
Ratio = tuple[float, float | None, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSummary:
    """One program on all sides.

    Parameters
    ----------
    suite, program, source : str
    sizes : str
        As in `written`.
    runs : int
        Rounds of each side.
    stock_s : float or None
        Median duration under stock Dask [s].
    tasks : tuple of int
        Tasks that Dask saw under stock Dask, and under the plugin.
    again, ours, first : Ratio or None
        Of stock Dask again, of the plugin, and of the plugin's first run.
    measures : mapping of str to float
        Stock Dask's median of each measure divided by the plugin's.
    anchors : mapping of str to float
        Stock Dask's duration divided by that of the same computation by other means.
    idle : float or None
        CPU time of the sides that had no turn, as a part of that of the side that had.
    bundled : bool or None
        Whether bundles were on.
    broken : mapping of str to str
        The first failure of each side that has one.
    """

    suite: str
    program: str
    source: str
    sizes: str
    runs: int = 0
    stock_s: float | None = None
    tasks: tuple[int, int] = (0, 0)
    again: Ratio | None = None
    ours: Ratio | None = None
    first: Ratio | None = None
    measures: Mapping[str, float] = field(default_factory=dict)
    anchors: Mapping[str, float] = field(default_factory=dict)
    idle: float | None = None
    bundled: bool | None = None
    broken: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_loss(self) -> bool:
        """Whether the plugin is slower beyond its interval."""
        return self.ours is not None and self.ours[2] is not None and self.ours[2] < LOSS


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All programs, and where they ran.

    Parameters
    ----------
    machine, commit, cluster, date : str
    versions : mapping of str to str
    workers : int
    sources : mapping of str to str
        Authors, versions and licences, by suite.
    programs : sequence of ProgramSummary
    others : sequence of dict
        Durations of runs without a side: peers, and makespans in virtual time.
    """

    machine: str
    commit: str
    cluster: str
    date: str
    versions: Mapping[str, str]
    workers: int
    sources: Mapping[str, str]
    programs: Sequence[ProgramSummary]
    others: Sequence[Mapping[str, Any]] = ()

    def text(self) -> str:
        """Return the JSON document."""
        head = {"format": _FORMAT, "version": _VERSION}
        return json.dumps({**head, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"


def read_summary(path: Path) -> Summary:
    """Read a summary.

    Raises
    ------
    UsageError
        The file cannot be read, or is no summary of this version.
    """
    content = dict(check_format(read_document(path, "a summary"), _FORMAT, _VERSION))
    try:
        programs = [ProgramSummary(**_tuples(program)) for program in content.pop("programs")]
        fields = {name: value for name, value in content.items() if name not in ("format", "version")}
        return Summary(**{**fields, "programs": programs})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"a summary must be one that 'ferroflow report --page' wrote ({error})") from error


def _tuples(program: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in program.items()}


def summarize(rows: Sequence[BenchRecord], date: str) -> Summary:
    """Return the summary of rows that `ferroflow bench public` wrote on one machine.

    Parameters
    ----------
    rows : sequence of BenchRecord
    date : str
        Of the runs, such as ``2026-11``.

    Raises
    ------
    UsageError
        There are no rows, or they are of several machines, versions, commits or sizes of clusters.
    """
    sided = [row for row in rows if row.policy in (STOCK, AGAIN, OURS) and row.cluster != "virtual"]
    places = {(row.machine, row.commit, written(row.versions), row.cluster, row.workers) for row in sided}
    if len(places) != 1:
        raise UsageError(
            f"rows must be of one machine, commit, set of versions and cluster, got {len(places)} of them; "
            "run: ferroflow bench public --rows FILE"
        )
    groups: dict[tuple[str, str, str], list[BenchRecord]] = {}
    for row in rows:
        if row.cluster != "virtual" and not row.lowering:
            groups.setdefault((row.suite, row.workload, written(row.arguments)), []).append(row)
    first = sided[0]
    return Summary(
        machine=first.machine,
        commit=first.commit,
        cluster=first.cluster,
        date=date,
        versions=first.versions,
        workers=first.workers,
        sources={suite: get_suite(suite).source for suite in NAMES if suite in {row.suite for row in rows}},
        programs=[_program(own) for own in groups.values()],
        others=[_other(row) for row in rows if row.cluster == "virtual" or row.lowering],
    )


def _other(row: BenchRecord) -> dict[str, Any]:
    return {
        "suite": row.suite,
        "program": row.workload,
        "by": row.policy,
        "way": row.lowering,
        "workers": row.workers,
        "cluster": row.cluster,
        "seconds": _rounded(row.makespan_s),
        "status": row.status,
    }


def _program(rows: Sequence[BenchRecord]) -> ProgramSummary:
    first = rows[0]
    broken = {row.policy: row.status for row in reversed(rows) if row.status != OK}
    sides = {name: _of(rows, name) for name in (STOCK, AGAIN, OURS)}
    stock, again, ours = sides.values()
    firsts = [_of(rows, name, is_first=True) for name in (STOCK, OURS)]
    stock_s = median(row.makespan_s for row in stock) if stock and STOCK not in broken else None
    is_compared = stock_s is not None
    anchors = {
        row.policy: _of(rows, row.policy, is_any=True)
        for row in rows
        if row.policy not in sides and not row.lowering and row.policy not in broken
    }
    return ProgramSummary(
        suite=first.suite,
        program=first.workload,
        source=first.source,
        sizes=written(first.arguments),
        runs=len(stock),
        stock_s=_rounded(stock_s),
        tasks=(_tasks(stock), _tasks(ours)),
        again=_ratio(stock, again) if is_compared and AGAIN not in broken else None,
        ours=_ratio(stock, ours) if is_compared and OURS not in broken else None,
        first=_ratio(*firsts) if not {STOCK, OURS} & broken.keys() else None,
        measures=_measures(stock, ours) if is_compared and OURS not in broken else {},
        anchors={name: _rounded(stock_s / _middle(own)) for name, own in anchors.items() if stock_s},
        idle=_idle(rows),
        bundled=ours[0].bundled if ours else None,
        broken=dict(sorted(broken.items())),
    )


def _of(
    rows: Iterable[BenchRecord], name: str, *, is_first: bool = False, is_any: bool = False
) -> list[BenchRecord]:
    own = [row for row in rows if row.policy == name and (is_any or bool(row.fresh) == is_first)]
    return sorted(own, key=lambda row: row.repetition)


def _middle(rows: Sequence[BenchRecord]) -> float:
    return median(row.makespan_s for row in rows)


def _tasks(rows: Sequence[BenchRecord]) -> int:
    return int(median(row.tasks for row in rows)) if rows else 0


def _ratio(stock: Sequence[BenchRecord], other: Sequence[BenchRecord]) -> Ratio | None:
    """Return the ratio over the rounds that both sides have."""
    rounds = {row.repetition for row in stock} & {row.repetition for row in other}
    if not rounds:
        return None
    top, bottom = ([row.makespan_s for row in side if row.repetition in rounds] for side in (stock, other))
    estimate = ratio_of_medians(top, bottom, np.random.default_rng(_SEED), is_paired=True)
    return (_rounded(estimate.value), _rounded(estimate.low), _rounded(estimate.high))


def _measures(stock: Sequence[BenchRecord], ours: Sequence[BenchRecord]) -> dict[str, float]:
    found = {}
    for name in MEASURES:
        values = [[value for row in side if (value := getattr(row, name))] for side in (stock, ours)]
        if all(values):
            found[name] = _rounded(median(values[0]) / median(values[1]))
    return found


def _idle(rows: Iterable[BenchRecord]) -> float | None:
    """Return the CPU time of idle sides as a part of that of the side in turn."""
    counted = [row for row in rows if row.others_cpu_s is not None and row.worker_cpu_s is not None]
    spent_s = sum((row.client_cpu_s or 0) + row.scheduler_cpu_s + (row.worker_cpu_s or 0) for row in counted)
    return _rounded(sum(row.others_cpu_s or 0 for row in counted) / spent_s) if spent_s else None


def _rounded(value: float | None) -> Any:
    return None if value is None else float(f"{value:.{_DIGITS}g}")
