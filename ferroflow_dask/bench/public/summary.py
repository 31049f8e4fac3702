"""Summary of public runs: the numbers of the page, as JSON that is committed beside it.

All ratios are stock Dask divided by the other side, so above 1 the other side is faster, or needs less.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from ferroflow_dask.bench.public import NAMES, get_suite
from ferroflow_dask.bench.public.policies import AGAIN, OURS, STOCK
from ferroflow_dask.bench.public.policies import names as side_names
from ferroflow_dask.bench.public.ratios import Ratio, paired_ratio
from ferroflow_dask.bench.schema import OK, BenchRecord, written
from ferroflow_dask.documents import check_format, read_document
from ferroflow_dask.exceptions import UsageError

#: Name and version of the document.
_FORMAT, _VERSION = "ferroflow-benchmarks", 1
#: Measures that are compared as ratios.
MEASURES = (
    *("created_s", "started_s", "first_result_s"),
    *("client_cpu_s", "scheduler_cpu_s", "worker_cpu_s"),
    *("peak_worker_memory", "peak_client_memory", "bytes_moved", "p2p_bytes", "messages"),
)
#: An interval that lies below this is a loss.
LOSS = 0.95
#: Delays that are planted to test the intervals, as parts of the median duration.
PLANTED, PLANTED_SMALL = 0.25, 0.05
_DIGITS = 4


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
    planted : Ratio or None
        Of stock Dask again, with a delay of `PLANTED` in each run.
    planted_small : float or None
        The same with `PLANTED_SMALL`.
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
    bound_s : float or None
        Duration that no schedule can beat, if tasks declare theirs [s].
    sides : mapping of str to Ratio
        Of other policies, and of the plugin without a feature.
    alone : mapping of str to float
        Median durations of all sides without stock Dask [s].
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
    planted: Ratio | None = None
    planted_small: float | None = None
    measures: Mapping[str, float] = field(default_factory=dict)
    anchors: Mapping[str, float] = field(default_factory=dict)
    idle: float | None = None
    bundled: bool | None = None
    broken: Mapping[str, str] = field(default_factory=dict)
    bound_s: float | None = None
    sides: Mapping[str, Ratio] = field(default_factory=dict)
    alone: Mapping[str, float] = field(default_factory=dict)

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


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    tuples = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return tuples | ({"sides": _tuples(fields["sides"])} if "sides" in fields else {})


def _is_other(row: BenchRecord) -> bool:
    """Return whether a suite has made a run by itself, with another scheduler or in virtual time."""
    return row.cluster == "virtual" or bool(row.lowering and row.policy not in side_names())


def by_setting(rows: Iterable[BenchRecord]) -> list[list[BenchRecord]]:
    """Return the rows of each machine, commit, set of versions and cluster, in the order of the rows."""
    settings: dict[tuple[Any, ...], list[BenchRecord]] = {}
    for row in sorted(rows, key=_is_other):
        where = (row.machine, row.commit, written(row.versions))
        shape = (row.workers, row.threads_per_worker, row.processes)
        place = (where, row.cluster, row.section, row.tls, *shape)
        if _is_other(row):  # they have clusters of their own
            place = next((other for other in settings if other[0] == where), place)
        settings.setdefault(place, []).append(row)
    return list(settings.values())


def summarize(rows: Sequence[BenchRecord], date: str) -> Summary:
    """Return the summary of rows of one setting.

    Parameters
    ----------
    rows : sequence of BenchRecord
    date : str
        Of the runs, such as ``2026-11``.

    Raises
    ------
    UsageError
        There are no rows, or they are of several machines, versions, commits or clusters.
    """
    settings = by_setting(rows)
    if len(settings) != 1:
        raise UsageError(
            f"rows must be of one machine, commit, set of versions and cluster, got {len(settings)} of them; "
            "run: ferroflow bench public --rows FILE"
        )
    groups: dict[tuple[Any, ...], list[BenchRecord]] = {}
    for row in rows:
        if not _is_other(row):
            way = (row.lowering, row.costs == "known")
            groups.setdefault((row.suite, row.workload, written(row.arguments), *way), []).append(row)
    first = settings[0][0]
    return Summary(
        machine=first.machine,
        commit=first.commit,
        cluster=first.cluster,
        date=date,
        versions=first.versions,
        workers=first.workers,
        sources={suite: get_suite(suite).source for suite in NAMES if suite in {row.suite for row in rows}},
        programs=_with_own_names([_program(own) for own in groups.values()]),
        others=[_other(row) for row in rows if _is_other(row)],
    )


def _with_own_names(programs: Sequence[ProgramSummary]) -> list[ProgramSummary]:
    """Add the sizes that differ to the names of programs that have the same name."""
    sizes: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for one in programs:
        sizes.setdefault((one.suite, one.program), []).append(json.loads(one.sizes))

    def name_of(one: ProgramSummary) -> str:
        words = [
            f"{name}={value}"
            for name, value in json.loads(one.sizes).items()
            if any(other.get(name) != value for other in sizes[one.suite, one.program])
        ]
        return " ".join([one.program, *words])

    return [replace(one, program=name_of(one)) for one in programs]


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
    ways = [first.lowering] * bool(first.lowering) + ["costs known"] * (first.costs == "known")
    broken = {row.policy: row.status for row in reversed(rows) if row.status != OK}
    stock, again, ours = (_of(rows, name) for name in (STOCK, AGAIN, OURS))
    policies = [name for name in dict.fromkeys(row.policy for row in rows) if name not in broken]
    others = {name: _of(rows, name, is_any=True) for name in policies if name not in (STOCK, AGAIN, OURS)}
    sides = {name: _of(rows, name) for name in others if name in side_names()}
    first_stock, first_ours = (_of(rows, name, is_first=True) for name in (STOCK, OURS))
    stock_s = median(row.makespan_s for row in stock) if stock and STOCK not in broken else None
    is_compared = stock_s is not None
    has_again = stock_s is not None and AGAIN not in broken
    small = _ratio(stock, again, PLANTED_SMALL) if has_again else None
    return ProgramSummary(
        suite=first.suite,
        program=" ".join([first.workload, *([f"({', '.join(ways)})"] if ways else [])]),
        source=first.source,
        sizes=written(first.arguments),
        runs=len(stock),
        stock_s=_rounded(stock_s),
        tasks=(_tasks(stock), _tasks(ours)),
        again=_ratio(stock, again) if has_again else None,
        ours=_ratio(stock, ours) if is_compared and OURS not in broken else None,
        first=_ratio(first_stock, first_ours) if not {STOCK, OURS} & broken.keys() else None,
        planted=_ratio(stock, again, PLANTED) if has_again else None,
        planted_small=small[0] if small is not None else None,
        measures=_measures(stock, ours) if is_compared and OURS not in broken else {},
        anchors={
            name: _rounded(stock_s / _middle(own))
            for name, own in others.items()
            if stock_s and name not in sides
        },
        idle=_idle(rows),
        bundled=ours[0].bundled if ours else None,
        broken=dict(sorted(broken.items())),
        bound_s=next((row.bound_s for row in rows if row.bound_s and row.status == OK), None),
        sides={name: ratio for name, own in sides.items() if is_compared and (ratio := _ratio(stock, own))},
        alone={name: _rounded(_middle(_of(rows, name, is_any=True))) for name in policies if not stock},
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


def _ratio(stock: Sequence[BenchRecord], other: Sequence[BenchRecord], delay: float = 0.0) -> Ratio | None:
    """Return the ratio over the rounds that both sides have.

    A program that sleeps for a part of its median duration (`delay`) takes longer by that time, so nothing
    has to run for it.
    """
    rounds = [_by_round(side) for side in (stock, other)]
    if rounds[0].keys().isdisjoint(rounds[1]):  # calls are unknown, or other ones
        rounds = [_by_round(side, is_call_known=False) for side in (stock, other)]
    common = [n for n in rounds[0] if n in rounds[1]]
    if not common:
        return None
    top, bottom = ([side[n] for n in common] for side in rounds)
    value, low, high = paired_ratio(top, [each + delay * median(bottom) for each in bottom])
    return (_rounded(value), _rounded(low), _rounded(high))


def _by_round(
    rows: Iterable[BenchRecord], *, is_call_known: bool = True
) -> dict[tuple[str | None, int, int], float]:
    """Return durations [s] by call of the command, seed and repetition."""
    return {
        (row.invocation if is_call_known else None, row.seed, row.repetition): row.makespan_s for row in rows
    }


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
