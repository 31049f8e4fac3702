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
from ferroflow_dask.bench.public.tasks import SmallTasks, small_tasks

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
    small = [replace(program, n=7 if kind == "tree" else 250) for kind, program in KINDS.items()]
    for is_advised in (False, True):
        pool = Pool()
        results = [*peers._run(pool, small, 2, is_advised, rounds=2)]
        pool.stop()
        assert [one["digest"] for one in results] == [peers.digest(one.expected(one.n)) for one in small]
        assert all(len(one["seconds"]) == len(one["cpu_s"]) == 2 for one in results)


@pytest.mark.parametrize(
    ("name", "kinds", "is_advised"),
    [
        ("process-pool", ["tree"], False),
        ("ray", ["readers", "one-by-one"], True),
        ("parsl", ["tree"], True),
        ("parsl", ["first"], False),  # Parsl's own end would wait for all its tasks
        ("hyperqueue", ["sleep"], True),
    ],
)
def test_a_peer_runs_programs(name: str, kinds: list[str], is_advised: bool, sessions: list[int]) -> None:
    pytest.importorskip(PEERS[name].package or "concurrent.futures")
    programs = [KINDS[kind] for kind in kinds]
    results = [*run_peer(name, programs, is_advised, OPTIONS)]
    assert [one.program for one in results] == [program.name for program in programs]
    for result in results:
        assert (result.by, result.status) == (name, OK)
        assert result.way == (ADVISED if is_advised else USUAL)
        assert result.seconds > 0
        assert result.cpu_s > 0
    assert len(sessions) == 1
    until(lambda: _is_over(sessions[0]))


@pytest.mark.parametrize(
    ("change", "status"),
    [
        pytest.param({"expected": lambda n: n}, "wrong answer", id="a wrong answer"),
        pytest.param({"kind": "no such program"}, "failed: .*invalid choice.*", id="a failure"),
    ],
)
def test_a_broken_program_has_a_status_and_no_seconds(change: dict[str, Any], status: str) -> None:
    broken = replace(KINDS["one-by-one"], **change)
    (result,) = run_peer("process-pool", [broken], False, OPTIONS)
    assert (result.seconds, result.cpu_s) == (0, 0)
    assert re.fullmatch(status, result.status)


def test_programs_after_one_that_fails_have_another_session(
    monkeypatch: pytest.MonkeyPatch, sessions: list[int]
) -> None:
    found = iter([([{"seconds": [1.0], "cpu_s": [2.0], "digest": None}], "failed: a"), ([], "failed: b")])
    monkeypatch.setattr(peers, "_output", lambda *_: next(found))
    results = run_peer("process-pool", [*KINDS.values()][:3], False, OPTIONS)
    assert [(one.status, one.seconds) for one in results] == [
        (OK, 1.0),
        ("failed: a", 0.0),
        ("failed: b", 0.0),
    ]


def test_a_program_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, sessions: list[int]) -> None:
    monkeypatch.setattr(peers, "_TIMEOUT_S", 0.1)
    (result,) = run_peer("process-pool", [KINDS["sleep"]], False, OPTIONS)
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
        "list(peers.run_peer('process-pool', tasks.small_tasks(False)[2:3], False, peers.Options()))\n"
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


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, bool]]:
    """Peers, programs and ways that are asked for, of which none runs."""
    found = []

    def run(name: str, programs: list[SmallTasks], is_advised: bool, _: Options) -> tuple[()]:
        found.extend((name, program.name, is_advised) for program in programs)
        return ()

    monkeypatch.setattr(peers, "run_peer", run)
    return found


@pytest.mark.parametrize("is_full", [False, True])
def test_peers_that_are_not_installed_are_left_out(
    is_full: bool, asked: list[tuple[str, str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda _: None)
    list(peer_rows(replace(OPTIONS, is_full=is_full)))
    assert {name for name, *_ in asked} == {"process-pool"}
    advised = [program for _, program, is_advised in asked if is_advised]
    assert advised == ["empty-10000"] * is_full  # the quick form has the usual way only


def test_hyperqueue_runs_sleeps_and_empty_tasks_only(
    asked: list[tuple[str, str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: name)
    list(peer_rows(OPTIONS))
    assert [program for name, program, _ in asked if name == "hyperqueue"] == ["sleep-1000", "empty-1000"]
