"""Planted faults: each makes its side broken, with the right reason, in every suite.

The suites share the clusters of sides that go on after a fault. A hang and a crash end their clusters.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from checkouts import COILED, TAPS, write_checkout
from planted import FAULTS, STATUS
from public_suites import chosen_suite

from ferroflow_dask.bench.public import get_suite
from ferroflow_dask.bench.public.base import Options, Suite, missing
from ferroflow_dask.bench.public.host import Place
from ferroflow_dask.bench.public.runner import Runs
from ferroflow_dask.bench.public.sides import Rules, Sides
from ferroflow_dask.bench.schema import OK, BenchRecord

pytestmark = pytest.mark.cluster

#: Programs that are not the first ones of their suites: query 6 of TPC-H reads one table, and TaPS checks the
#: values of no other application.
CHOSEN = {"taps": "mapreduce-33", "tpch": "q06"}
#: Suites whose stand-ins need fewer packages than the real ones.
NEEDS_NOTHING = ("taps",)
ENDING = ("a hang", "a crash")
#: Limits of runs [s]: for those that end, and for those that may hang.
LONG_S, SHORT_S = 60.0, 6.0


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """The smallest sizes, with working trees that stand for the real ones."""
    checkouts = {
        name: write_checkout(files, tmp_path / name) for name, files in (("coiled", COILED), ("taps", TAPS))
    }
    return Options(workers=2, scale=0.01, data=tmp_path / "data", checkouts=checkouts)


def made(
    suites: Sequence[Suite], options: Options, sides: Mapping[str, Any], timeout_s: float
) -> Iterator[BenchRecord]:
    """Yield the rows of one run of each suite's program on each side, all on the same clusters."""
    rules = Rules(place=Place(workers=2), rounds=0, timeout_s=timeout_s, sides=sides)
    with Sides(suites, options, rules) as shared:
        for suite in suites:
            (program,) = suite.programs(options)
            yield from Runs(program, rules, "planted", ()).make(shared, lambda _: None)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("tpch", "coiled", "taps"), id="tpch, coiled and taps"),
        pytest.param(("tasks", "shapes", "workflows"), id="the other suites", marks=pytest.mark.slow),
    ],
)
def test_a_fault_makes_a_side_broken(names: Sequence[str], options: Options) -> None:
    suites = [
        chosen_suite(suite, options, CHOSEN.get(suite.name))
        for suite in map(get_suite, names)
        if suite.name in NEEDS_NOTHING or not missing(suite)
    ]
    lasting = {"dask": None} | {name: fault for name, fault in FAULTS.items() if name not in ENDING}
    rows = list(made(suites, options, lasting, LONG_S))
    ending = {name: FAULTS[name] for name in ENDING}
    for suite in suites:
        rows += made([suite], options, ending, SHORT_S)
    statuses = {(row.suite, row.policy): row.status for row in rows}
    assert len(rows) == len(statuses) == len(suites) * (1 + len(FAULTS))
    expected = {"dask": f"{OK}$", **STATUS}
    assert not {run: status for run, status in statuses.items() if not re.match(expected[run[1]], status)}
    assert not _left(), "processes of sides are left"


def _left() -> list[psutil.Process]:
    """Return processes that sides have started, which have process groups of their own."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if os.getpgid(child.pid) != os.getpgid(0)]
