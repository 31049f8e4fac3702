"""`ferroflow doctor`: versions, optional parts, limits and a run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import dask
import pytest
from command_line import FAILURE, answer, assert_one_line, ferroflow

from ferroflow_dask.cli import doctor


def test_all_is_well_here() -> None:
    lines = answer("doctor").output.splitlines()
    assert all(line.split()[0] in ("ok", "–") for line in lines)
    shown = {line.split()[1]: line for line in lines}
    assert version("distributed") in shown["distributed"]
    assert f"{len(os.sched_getaffinity(0))} of" in shown["cores"]
    assert re.search(r"ok +self-test +8 outputs of a small cluster are right", lines[-1])


def test_features_are_shown_with_why_they_are_off() -> None:
    with dask.config.set({"ferroflow.features.prefetch": False}):
        shown = answer("doctor").output
    assert re.search(r"ok +feature bundles +on: created \d", shown)
    assert re.search(r"ok +feature queue_depth +on *$", shown, re.MULTILINE)
    assert re.search(r"– +feature prefetch +off: the setting ferroflow\.features\.prefetch is false", shown)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(doctor._MODULES, "no_such_module", "nothing")
    monkeypatch.setattr(doctor, "_PACKAGES", (*doctor._PACKAGES, "no-such-package"))
    monkeypatch.setenv("PATH", str(tmp_path))
    result = ferroflow("doctor")
    assert re.search(r"– +no_such_module +not installed: nothing", result.stdout)
    assert re.search(r"– +sbatch +not found: clusters of SLURM jobs", result.stdout)
    assert re.search(r"FAILS +no-such-package +not installed", result.stdout)
    assert_one_line(result.exit_code, result.stderr, FAILURE, "no-such-package: see the lines marked FAILS")


def test_bash_completes_commands_and_options() -> None:
    def completed(words: str) -> set[str]:
        environment = {
            **os.environ,
            "_FERROFLOW_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        }
        program = Path(sys.executable).with_name("ferroflow")
        done = subprocess.run([program], env=environment, capture_output=True, text=True, check=True)
        return {line.partition(",")[2] for line in done.stdout.splitlines()}

    assert completed("ferroflow sim") == {"simulate"}
    assert {"--dag", "--policy"} <= completed("ferroflow run --")
