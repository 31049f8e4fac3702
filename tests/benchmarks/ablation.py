"""Ablation: each feature of the plugin switched off alone, and one table of the cost.

A ratio is a measure without the feature divided by the same measure with it. Above 1, the feature gains. Real
runs are those of `bench`: the plugin, the plugin again and the plugin without each feature are sides with a
cluster each, which take turns. `ablation_virtual` has the exact runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ablation_virtual import Ratio

from ferroflow_dask.bench.markdown import NOTHING, table
from ferroflow_dask.bench.public.policies import OURS, OURS_AGAIN, WITHOUT
from ferroflow_dask.bench.public.ratios import paired_ratio
from ferroflow_dask.bench.schema import OK, BenchRecord
from ferroflow_dask.scheduler.features import found_features
from ferroflow_dask.scheduler.features.base import Feature

#: A feature stays if its removal costs so much in one class and measure, or for a reason.
LEAST_GAIN = 1.05
#: Lines of a document between which the table stands.
BEGIN, END = "<!-- ablation: begin -->", "<!-- ablation: end -->"

_TIME = "time"
#: Other measures of real runs, by name.
_FIELDS = {
    "first result": "first_result_s",
    "CPU time": "scheduler_cpu_s",
    "messages": "messages",
    "tasks": "tasks",
    "bytes moved": "bytes_moved",
    "memory": "peak_worker_memory",
}


class Program(NamedTuple):
    """A program of the ablation: a workload of some size, and whether its first runs count."""

    workload: str
    sizes: Mapping[str, Any]
    is_first: bool = False


#: Rows of 16 bytes in a million bytes.
_ROWS = 62_500
#: Programs by class. With `--quick` the first of each class runs.
CLASSES: Mapping[str, Sequence[Program]] = {
    "dags": (Program("imbalanced", {}), Program("large-wide", {}), Program("transformer", {})),
    "task-bench": (Program("stencil_1d", {"steps": 10}), Program("fft", {"steps": 10})),
    "scenarios": (
        Program("one_by_one", {}),
        Program("lognormal", {"n": 100}),
        Program("heavy_tail", {"n": 200, "heavy_factor": 50.0}),
        Program("trivial_fanout", {"n": 2000}),
    ),
    "arrays": (Program("tensordot", {}), Program("quadratic_means", {}), Program("numpy", {})),
    "frames": (Program("groupby", {"days": 1}), Program("join", {"days": 1})),
    "shuffles": tuple(Program("dataframe_shuffle", {"n": mb * _ROWS}) for mb in (1, 8, 32)),
    "maps": (
        Program("mapped", {}),
        Program("mapped", {"task_ms": 0.0}),
        Program("mapped", {"task_ms": 10.0, "n": 400}),
    ),
    "first runs": (Program("mapped", {}, True), Program("tensordot", {}, True)),
    "live graphs": (Program("live_pair", {}),),
}


#: Runs of one program on one side, by seed and repetition.
_Runs = dict[tuple[int, int], BenchRecord]


def real_ratios(rows: Iterable[BenchRecord], feature_names: Sequence[str]) -> Iterator[Ratio]:
    """Yield the ratios of each feature, and under the name "" those of the plugin again, by program."""
    programs: dict[str, dict[str, _Runs]] = {}
    for row in rows:
        name = row.workload if row.costs == "learned" else f"{row.workload} (costs {row.costs})"
        runs = programs.setdefault(name, {}).setdefault(row.policy, {})
        runs[row.seed, row.repetition] = row
    for group, sides in programs.items():
        whole = {side: runs for side, runs in sides.items() if all(run.status == OK for run in runs.values())}
        for name in ("", *feature_names):
            side = WITHOUT + name if name else OURS_AGAIN
            if OURS in whole and side in whole:
                yield from _ratios(name, group, whole[side], whole[OURS])


def _ratios(name: str, group: str, less: _Runs, ours: _Runs) -> Iterator[Ratio]:
    pairs = [(less[run], ours[run]) for run in less if run in ours]
    for measure, field in {_TIME: "makespan_s", **_FIELDS}.items():
        without, with_it = ([float(getattr(pair[i], field) or 0) for pair in pairs] for i in range(2))
        if pairs and min(*without, *with_it) > 0:
            yield Ratio(name, group, measure, *paired_ratio(without, with_it))


def lines_of(kind: type[Feature]) -> int:
    """Return the lines of a feature's own modules: its file, that of its worker end, and its `parts`."""
    file = Path(inspect.getfile(kind))
    root = file.parents[2]
    files = [file, file.with_name(f"{file.stem}_worker.py")]
    files += [found for part in kind.parts for found in [root / f"{part}.py", *(root / part).rglob("*.py")]]
    return sum(len(one.read_bytes().splitlines()) for one in dict.fromkeys(files) if one.exists())


def gains(ratios: Iterable[Ratio]) -> list[Ratio]:
    """Return the ratios above 1 beyond noise, the largest first; exact ones have none."""
    beyond = [ratio for ratio in ratios if (ratio.value if ratio.low is None else ratio.low) > 1]
    return sorted(beyond, key=lambda ratio: -ratio.value)


def pays(kind: type[Feature], ratios: Sequence[Ratio]) -> bool:
    """Return whether a feature stays by the rule: a gain of 5 % in one class and measure, or a reason."""
    return bool(kind.reason) or any(ratio.value >= LEAST_GAIN for ratio in gains(ratios))


def ablation_table(ratios: Sequence[Ratio]) -> str:
    """Return a row for each feature: its largest gain in each measure, its largest loss, and its reason."""
    rows = []
    for kind in found_features():
        own = [ratio for ratio in ratios if ratio.feature == kind.name]
        losses = [
            one for one in own if one.measure == _TIME and (one.value if one.high is None else one.high) < 1
        ]
        rows.append(
            [
                f"`{kind.name}`",
                f"{lines_of(kind):,}",
                *(_first_of(gains(one for one in own if one.measure == name)) for name in (_TIME, *_FIELDS)),
                _first_of(sorted(losses, key=lambda ratio: ratio.value)),
                kind.reason or NOTHING,
            ]
        )
    header = ("feature", "lines", _TIME, *_FIELDS, "largest loss in time", "reason")
    return table(header, rows, right=("lines",))


def noise_line(ratios: Sequence[Ratio]) -> str:
    """Return a sentence about how far the plugin differs from itself; "" if it did not run again."""
    again = [ratio.value for ratio in ratios if not ratio.feature and ratio.measure == _TIME]
    if not again:
        return ""
    return f"The plugin divided by itself in the same runs: {min(again):.2f} to {max(again):.2f}."


def _first_of(ratios: Sequence[Ratio]) -> str:
    """Return the first of some ratios in words."""
    if not ratios:
        return NOTHING
    first = ratios[0]
    interval = "" if first.low is None or first.high is None else f" [{first.low:.2f}, {first.high:.2f}]"
    return f"{first.value:.2f}{interval}: {first.group}"


def put_between(document: str, text: str) -> str:
    """Return a document with another text between the two lines, or raise `ValueError`."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"
