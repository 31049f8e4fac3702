"""Programs in which tasks wait for other tasks of their graph: they end although the tasks are in bundles."""

from __future__ import annotations

from pathlib import Path

import pytest
from partner_programs import N_TASKS, PROGRAMS, WAYS, Program, cluster, run, run_all, selected
from partners import PARTNERS
from waiting import until

from ferroflow_dask.bundling.run import Run
from ferroflow_dask.scheduler.graphs.graphs import Graphs

pytestmark = pytest.mark.cluster

#: Programs that run here; `python tests/partner_programs.py` runs all. Each partner and each way is in one.
SELECTED = [
    *(f"{partner} map 2ms {at} 1 4x1" for partner in PARTNERS for at in ("first", "last")),
    "file delayed 0.1ms middle 1 4x1",
    "file delayed 0.1ms last 1 4x1",
    "file bag 0ms first 1 4x1",
    "file bag 0ms last 1 4x1",
    "file bag 0.1ms pairs 30 4x1",
    "file map 0ms last 1 2x2",
    "queue delayed 2ms last 1 2x2",
]
#: After this time a program hangs [s]. None takes a second on an idle machine.
_LIMIT_S = 60.0


def test_selected_programs_end_in_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graphs, "learned", Graphs.learned)  # `run_all` replaces it
    programs = [PROGRAMS[name] for name in SELECTED]
    outcomes = {
        program.name: outcome for program, outcome in run_all(programs, _LIMIT_S, with_ferroflow=True)
    }
    assert [*outcomes] == SELECTED
    assert [name for name, outcome in outcomes.items() if not outcome.ends] == []
    assert [name for name, outcome in outcomes.items() if not outcome.n_bundles] == []


def test_threads_that_have_left_their_pools_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Graphs, "learned", Graphs.learned)  # `cluster` replaces it
    left = []

    def leave_pool(bundle: Run) -> bool:
        left.append(bundle.thread)
        return unchanged(bundle)

    unchanged = Run.leave_pool
    monkeypatch.setattr(Run, "leave_pool", leave_pool)
    with cluster(4, 1, with_ferroflow=True) as client:
        assert run(PROGRAMS["file map 0ms pairs 30 4x1"], client, _LIMIT_S, tmp_path).ends
        assert left
        until(lambda: not any(thread.is_alive() for thread in left))


@pytest.mark.parametrize(
    ("at", "n_waiting", "expected"),
    [
        pytest.param("first", 1, {0: range(1, 60)}, id="the first task waits for all others"),
        pytest.param("middle", 1, {30: [*range(30), *range(31, 60)]}, id="a task in the middle waits"),
        pytest.param("last", 3, dict.fromkeys((57, 58, 59), range(57)), id="the last three tasks wait"),
        pytest.param("pairs", 30, {i: [i + 1] for i in range(0, 60, 2)}, id="each even task waits"),
    ],
)
def test_tasks_wait_for_those_that_do_not(at: str, n_waiting: int, expected: dict[int, list[int]]) -> None:
    waits = Program("file", "map", 0, at, n_waiting, 4, 1).waits
    assert N_TASKS == 60
    assert {i: [*partners] for i, partners in waits.items()} == {i: [*some] for i, some in expected.items()}


def test_programs_are_selected_by_words() -> None:
    assert len(PROGRAMS) == len(selected("")) == len(PARTNERS) * len(WAYS) * 3 * 7 * 2
    assert [program.name for program in selected("2x2 bag 2ms lock pairs")] == ["lock bag 2ms pairs 30 2x2"]


def test_a_program_that_hangs_has_its_row_and_the_next_one_runs() -> None:
    # One thread: the first task waits for those behind it.
    hanging = Program("file", "map", 0, "first", 1, 1, 1)
    ending = Program("file", "map", 0, "last", 1, 1, 1)
    outcomes = [outcome.ends for _, outcome in run_all([hanging, ending], 0.5, with_ferroflow=False)]
    assert outcomes == [False, True]
