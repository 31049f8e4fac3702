"""Programs with tasks that change what they were given: in bundles their values are those without bundles."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from step_state import N_TASKS, PROGRAMS

pytestmark = pytest.mark.cluster

_SCRIPT = Path(__file__).parents[1] / "step_state.py"


@pytest.fixture(scope="module", name="found")
def _found() -> dict[str, dict[str, Any]]:
    """Run all programs as a script, since functions of a test module are found by name."""
    run = subprocess.run(
        [sys.executable, str(_SCRIPT)], capture_output=True, text=True, check=False, timeout=240
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_the_values_that_it_has_without_the_plugin(
    name: str, found: dict[str, dict[str, Any]]
) -> None:
    assert found[name]["plugin"] == found[name]["stock"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_tasks_of_a_program_are_in_bundles(name: str, found: dict[str, dict[str, Any]]) -> None:
    assert found[name]["bundled"] >= N_TASKS
