"""Sides of a runner that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.cluster

_CALL = "import sys, public_suites; public_suites.hold(*sys.argv[1:])"
#: What the runner and its sides have printed at each moment.
MOMENTS = {"start": [], "idle": ["ready"], "run": ["ready", "running"]}
#: Time that processes may take to end [s].
_END_S = 30


@pytest.mark.parametrize(
    ("moment", "place"), [("start", "local"), ("idle", "local"), ("run", "local"), ("run", "separate")]
)
def test_no_process_of_a_killed_runner_is_left(moment: str, place: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", _CALL, moment, place], stdout=subprocess.PIPE, text=True, env=environment
    ) as runner:
        assert runner.stdout is not None
        groups = {int(group) for group in runner.stdout.readline().split()}
        assert [runner.stdout.readline().strip() for _ in MOMENTS[moment]] == MOMENTS[moment]
        started = psutil.Process(runner.pid).children(recursive=True)
        runner.kill()
        _, left = psutil.wait_procs(started, timeout=_END_S)
        left += _members(groups)
        for process in left:
            process.kill()
    assert len(groups) == 2
    assert groups <= {process.pid for process in started}
    assert not left


def _members(groups: set[int]) -> list[psutil.Process]:
    """Return the processes of process groups."""
    members = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) in groups:
                members.append(process)
    return members
