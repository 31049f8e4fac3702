"""Ablation: each feature of the plugin switched off alone, and one table of what that costs.

A ratio is a measure without the feature divided by the same measure with it. Above 1, the feature gains. Real
runs are those of `bench`: the plugin, the plugin again and the plugin without each feature take turns on one
cluster. `ablation_virtual` has the exact runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ferroflow_dask.bench.ablation_virtual import Ratio
from ferroflow_dask.bench.baselines import AGAIN, OURS, WITHOUT
from ferroflow_dask.bench.comparison import SEED, Case, Sample, cases_of, named, ratio_of_medians, speed_up
from ferroflow_dask.bench.markdown import NOTHING, table
from ferroflow_dask.bench.schema import BenchRecord
from ferroflow_dask.bench.workloads import default_sizes
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
    """A program of the ablation: a workload of some size, and whether its durations are known."""

    workload: str
    sizes: Mapping[str, Any]
    costs: str = "learned"


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
    "first runs": (Program("mapped", {}, "unknown"), Program("tensordot", {}, "unknown")),
    "live graphs": (Program("live_pair", {}),),
}


def real_ratios(rows: Iterable[BenchRecord], feature_names: Sequence[str]) -> Iterator[Ratio]:
    """Yield the ratios of each feature, and under the name "" those of the plugin again, by program."""
    for case in cases_of(rows):
        samples = {sample.policy: sample for sample in case.samples if not sample.is_broken}
        if (ours := samples.get(OURS)) is None:
            continue
        for name in ("", *feature_names):
            less = samples.get(WITHOUT + name if name else AGAIN)
            if less is not None:
                yield from _ratios(name, case, less, ours)


def _ratios(name: str, case: Case, less: Sample, ours: Sample) -> Iterator[Ratio]:
    group = named(case, default_sizes())
    found = speed_up(less, ours)
    yield Ratio(name, group, _TIME, found.value, found.low, found.high)
    for measure, field in _FIELDS.items():
        without, with_it = (
            [float(getattr(run, field) or 0) for run in sample.runs] for sample in (less, ours)
        )
        if min(*without, *with_it) > 0:
            estimate = ratio_of_medians(without, with_it, np.random.default_rng(SEED))
            yield Ratio(name, group, measure, estimate.value, estimate.low, estimate.high)


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
