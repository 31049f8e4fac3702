"""Gallery: programs of at most 60 lines, notebooks with outputs, and pages that name them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

REPOSITORY = Path(__file__).parents[2]
GALLERY = (REPOSITORY / "docs/gallery.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^Program: \[(examples/\S+)\]\(\.\./\1\)$", GALLERY, re.MULTILINE)
NOTEBOOKS = [program for program in PROGRAMS if program.endswith(".ipynb")]
_MOST_LINES = 60


def cells(notebook: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((REPOSITORY / notebook).read_text(encoding="utf-8"))["cells"]
    return found


def lines(program: str) -> list[str]:
    if program in NOTEBOOKS:
        return "".join("".join(cell["source"]) + "\n" for cell in cells(program)).splitlines()  # type: ignore[arg-type]
    return (REPOSITORY / program).read_text(encoding="utf-8").splitlines()


def test_the_gallery_has_ten_programs_and_two_of_them_are_notebooks() -> None:
    assert len(PROGRAMS) == len(set(PROGRAMS)) >= 10
    assert len(NOTEBOOKS) == 2


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_of_the_gallery_is_short(program: str) -> None:
    assert len(lines(program)) <= _MOST_LINES


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_each_printing_cell_of_a_notebook_has_its_output(notebook: str) -> None:
    code = [cell for cell in cells(notebook) if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in code if "print(" in "".join(cell["source"]))  # type: ignore[arg-type]
    assert not any(output["output_type"] == "error" for cell in code for output in cell["outputs"])  # type: ignore[attr-defined]


def run(program: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / program)],
        cwd=folder,
        env={**os.environ, "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_drawn_timelines_have_a_bar_for_each_task(tmp_path: Path) -> None:
    told = run("timelines.py", tmp_path)
    times_s = dict(re.findall(r"^(\w+): ([\d.]+) s", told, re.MULTILINE))
    assert float(times_s["ferroflow"]) <= float(times_s["dask"])
    drawn = ElementTree.parse(tmp_path / "timelines.svg")
    assert len(drawn.findall(".//{http://www.w3.org/2000/svg}rect")) == 2 * 17


@pytest.mark.cluster
def test_the_explained_decisions_are_about_each_task(tmp_path: Path) -> None:
    told = run("explain_decisions.py", tmp_path)
    assert {f"fit-{i}" for i in range(6)} == set(
        re.findall(r"^(fit-\d) · placed · worker", told, re.MULTILINE)
    )
