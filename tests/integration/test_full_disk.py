"""Full disks: the old file stays, and there is one line. Home folders that cannot be written."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from command_line import USAGE, assert_one_line, ferroflow
from distributed import Client

from ferroflow_dask import record
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.deploy import load_profile, save_profile
from ferroflow_dask.deploy.calibration import profiles_file
from ferroflow_dask.exceptions import FerroflowError

LOCAL = ("--workers", "1", "--no-processes")
DAG = ("--dag", "matmul-chain", "--n-ops", "3", "--matrix-size", "64")
OLD = "the old content"


@contextmanager
def full_disk() -> Iterator[None]:
    """Let all writes to files fail after the first bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


#: Commands that write a file, which is the last argument.
COMMANDS: dict[str, tuple[str, ...]] = {
    "outputs": ("run", *DAG, *LOCAL, "--policy", "sequential", "--output", "out.npz"),
    "a report": ("run", *DAG, *LOCAL, "--report", "out.html"),
    "a trace": ("run", *DAG, *LOCAL, "--trace", "out.json"),
    "a graph": ("info", *DAG, "--output", "out.json"),
    "a drawing": ("info", *DAG, "--dot", "out.dot"),
    "a simulated page": ("simulate", *DAG, "--repeat", "1", "--html", "out.html"),
    "a simulated trace": ("simulate", *DAG, "--repeat", "1", "--trace", "out.json"),
    "a strategy": ("search", *DAG, "--costs", "analytic", "--steps", "2", "-o", "out.json"),
}


@pytest.mark.cluster
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_full_disk_leaves_the_old_file(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "--policy" in command:  # sequential takes no cluster
        command = tuple(one for one in command if one not in LOCAL)
    file = Path(command[-1])
    file.write_text(OLD)
    with full_disk():
        done = ferroflow(*command)
    assert done.exit_code == 1, done.output
    lines = [line for line in done.stderr.splitlines() if line.startswith("ferroflow: ")]
    assert len(lines) == 1, done.stderr
    assert "File too large" in lines[0]
    assert "Traceback" not in done.output
    assert file.read_text() == OLD
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_full_disk_keeps_the_rows_of_a_benchmark(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    command = ("bench", "run", "merge", "--n", "10", "--policy", "dask", "--repeat", "1", "--workers", "1")
    assert ferroflow(*command, "--rows", file).exit_code == 0
    before = file.read_bytes()
    with full_disk():
        done = ferroflow(*command, "--seed", "1", "--rows", file)
    assert_one_line(done.exit_code, done.stderr.splitlines(keepends=True)[-1], USAGE, "File too large")
    assert file.read_bytes().startswith(before)
    assert ferroflow("report", file).exit_code == 0


@pytest.mark.cluster
def test_a_record_on_a_full_disk(thread_client: Client, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(OLD)

    def recorded() -> None:
        with record(thread_client, path):
            thread_client.gather(thread_client.map(abs, range(20)))

    with (
        full_disk(),
        pytest.raises(FerroflowError, match=r"a record must be written to a file.*File too large"),
    ):
        recorded()
    assert path.read_text() == OLD
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.cluster
def test_a_profile_on_a_full_disk(
    thread_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = ClusterProfile((1,), task_s=0.001), ClusterProfile((2,), task_s=0.001)
    assert save_profile(thread_client, first)
    with full_disk():
        assert not save_profile(thread_client, second)
    assert load_profile(thread_client) == first
    assert json.loads(profiles_file().read_text())


RUN = ("run", "--dag", "wide", "--width", "4", "--depth", "2", *LOCAL, "--output", "out.npz")


@pytest.mark.cluster
def test_a_run_with_a_read_only_home_folder(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XDG", "DASK"))}
    done = subprocess.run(
        [sys.executable, "-m", "ferroflow_dask", *RUN],
        cwd=tmp_path,
        env={**environment, "HOME": "/proc"},  # not even root can write there
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "it could not be kept in /proc/.cache/" in done.stderr
    assert np.load(tmp_path / "out.npz").files


@pytest.mark.cluster
def test_a_run_without_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", str)  # a user without an entry in the list of users
    done = ferroflow(*RUN)
    assert done.exit_code == 0, done.output
    assert "it could not be kept in ~/.cache/" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"out.npz"}
