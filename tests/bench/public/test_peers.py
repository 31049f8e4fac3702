"""Peers of Dask: they give the same answers, in processes of which none is left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from ferroflow_dask.bench.public import peers, tasks
from ferroflow_dask.bench.public.base import Options
from ferroflow_dask.bench.public.peers import ADVISED, OK, PEERS, USUAL, Pool, peer_rows, run_peer
from ferroflow_dask.bench.public.tasks import small_tasks

KINDS = {program.kind: program for program in small_tasks(is_full=False)}
OPTIONS = Options(workers=2)


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sessions that are ended, in their order."""
    ended: list[int] = []

    def end(session: int) -> None:
        ended.append(session)
        real(session)

    real = peers.end_session
    monkeypatch.setattr(peers, "end_session", end)
    return ended


def _is_over(session: int) -> bool:
    return not [*peers._members(session)]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_pool_gives_all_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TOTAL_S", 0.05)
    monkeypatch.setattr(peers, "_WARM_S", 0.0)
    for kind, program in KINDS.items():
        small = replace(program, n=7 if kind == "tree" else 250)
        for is_advised in (False, True):
            pool = Pool()
            result = peers._run(pool, small, 2, is_advised, rounds=2)
            pool.stop()
            assert result["digest"] == peers.digest(small.expected(small.n))
            assert len(result["seconds"]) == len(result["cpu_s"]) == 2


@pytest.mark.parametrize(
    ("name", "kind", "is_advised"),
    [
        ("process-pool", "tree", False),
        ("ray", "readers", True),
        ("parsl", "tree", True),
        ("parsl", "first", False),  # Parsl's own end would wait for all its tasks
        ("hyperqueue", "sleep", True),
    ],
)
def test_a_peer_runs_a_program(name: str, kind: str, is_advised: bool, sessions: list[int]) -> None:
    pytest.importorskip(PEERS[name].package or "concurrent.futures")
    program = next(program for program in small_tasks(is_full=False) if program.kind == kind)
    result = run_peer(name, program, is_advised, OPTIONS)
    assert (result.by, result.program, result.status) == (name, program.name, OK)
    assert result.way == (ADVISED if is_advised else USUAL)
    assert result.seconds > 0
    assert result.cpu_s > 0
    until(lambda: _is_over(sessions[0]))


@pytest.mark.parametrize(
    ("change", "status"),
    [
        pytest.param({"expected": lambda n: n}, "wrong answer", id="a wrong answer"),
        pytest.param({"kind": "no such program"}, "failed: .*invalid choice.*", id="a failure"),
    ],
)
def test_a_broken_program_has_a_status_and_no_seconds(change: dict[str, Any], status: str) -> None:
    result = run_peer("process-pool", replace(KINDS["one-by-one"], **change), False, OPTIONS)
    assert (result.seconds, result.cpu_s) == (0, 0)
    assert re.fullmatch(status, result.status)


def test_a_program_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, sessions: list[int]) -> None:
    monkeypatch.setattr(peers, "_TIMEOUT_S", 0.1)
    result = run_peer("process-pool", KINDS["sleep"], False, OPTIONS)
    assert (result.status, result.seconds) == ("no answer within 0.1 s", 0)
    until(lambda: _is_over(sessions[0]))


def test_no_process_is_left_if_the_caller_is_killed(tmp_path: Path) -> None:
    code = (
        "import subprocess\n"
        "from ferroflow_dask.bench.public import peers, tasks\n"
        "class Popen(subprocess.Popen):\n"
        "    def __init__(self, *args, **options):\n"
        "        super().__init__(*args, **options)\n"
        "        print(self.pid, flush=True)\n"
        "subprocess.Popen = Popen\n"
        "peers.run_peer('process-pool', tasks.small_tasks(False)[2], False, peers.Options())\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    ) as caller:
        assert caller.stdout is not None
        session = int(caller.stdout.readline())
        assert os.getsid(session) == session
        caller.kill()
    until(lambda: _is_over(session))


@pytest.mark.parametrize("is_full", [False, True])
def test_peers_that_are_not_installed_are_left_out(is_full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(peers, "find_spec", lambda _: None)
    monkeypatch.setattr(peers, "run_peer", lambda *arguments: asked.append(arguments[:3]))
    list(peer_rows(replace(OPTIONS, is_full=is_full)))
    assert {name for name, *_ in asked} == {"process-pool"}
    advised = [program.name for _, program, is_advised in asked if is_advised]
    assert advised == ["empty-10000"] * is_full  # the quick form has the usual way only


def test_hyperqueue_runs_sleeps_and_empty_tasks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(peers, "find_spec", lambda name: name)
    monkeypatch.setattr(peers, "run_peer", lambda *arguments: asked.append(arguments[:2]))
    list(peer_rows(OPTIONS))
    assert {program.kind for name, program in asked if name == "hyperqueue"} == {"empty", "sleep"}
