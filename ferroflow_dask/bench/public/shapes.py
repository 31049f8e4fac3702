"""Suite of shapes: programs written here after descriptions by others, for readers without a checkout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ferroflow_dask.bench.public import geospatial
from ferroflow_dask.bench.public.base import Options, Program, Suite
from ferroflow_dask.bench.public.workloads import program_of
from ferroflow_dask.bench.workloads.arrays import ARRAYS
from ferroflow_dask.bench.workloads.base import Workload
from ferroflow_dask.bench.workloads.frames import FRAMES
from ferroflow_dask.bench.workloads.rsds import RSDS
from ferroflow_dask.bench.workloads.scenarios import SCENARIOS

#: Sizes of the quick form, of which a run takes about a second; of other workloads the small ones.
_QUICK: Mapping[str, Mapping[str, Any]] = {
    "merge": {"n": 500},
    "groupby": {"days": 1},
    "tensordot": {},
    "lognormal": {"n": 50},
    "straggler": {"n": 200},
}


def _program(workload: Workload, is_full: bool) -> Program:
    sizes = workload.arguments({} if is_full else _QUICK.get(workload.name, {}))
    if not is_full and workload.name not in _QUICK:
        sizes = workload.arguments({}, is_small=True)
    return program_of(workload, sizes, suite="shapes")


def programs(options: Options) -> Sequence[Program]:
    """Return the programs: RSDS, stealing, arrays, frames and geospatial."""
    workloads = (*RSDS, *SCENARIOS, *ARRAYS, *FRAMES)
    return [
        *(_program(workload, options.is_full) for workload in workloads),
        *geospatial.programs(options.is_full),
    ]


SUITE = Suite(
    "shapes",
    "Written here (MIT) after RSDS (Böhm and Beránek, WORKS'20) and after coiled/benchmarks (BSD-3).",
    programs,
)
