"""Samples of the large runs with faults, mutated files and growth; docs/reliability.md has the commands."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_runs import MISSED, PER_SCENARIO, Runs
from mutated_files import Reader
from virtual_faults import MODES

#: Faults of each virtual scenario, and files, of a run of the tests.
N_FAULTS, N_FILES = 8, 400


@pytest.fixture
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.cluster
@pytest.mark.usefixtures("_quiet")
def test_faults_in_varied_scenarios_change_no_result() -> None:
    runs = Runs(seed=1, checks_time=False)
    # Which functions a feature calls depends on time, so features are left to the script.
    numbers = [
        *(PER_SCENARIO * mode + 1 + i for mode in range(len(MODES)) for i in range(N_FAULTS)),
    ]
    found = {fault: problems for _, fault, problems in runs.run(numbers) if {*problems} - {MISSED}}
    assert found == {}
    assert {f"virtual time, {mode}" for mode in MODES} <= {*runs.counts}


@pytest.mark.filterwarnings("ignore")
def test_mutated_files_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    assert [problem for number in range(N_FILES) if (problem := reader.read(number))] == []
    for name in (
        "model",
        "record",
        "topology",
        "strategy",
        "graph",
        "profile",
        "jobqueue",
        "learned",
        "report",
    ):
        assert any(outcome.startswith(name) for outcome in reader.counts)
    assert {outcome.split()[-1] for outcome in reader.counts} == {"read", "refused"}
