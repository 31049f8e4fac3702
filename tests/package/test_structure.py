"""Sizes that keep the plugin readable: files, classes, and the arguments of constructors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SCHEDULER = Path(__file__).parents[2] / "ferroflow_dask" / "scheduler"
MODULES = sorted(SCHEDULER.rglob("*.py"))
#: Lines of a class, and arguments of a constructor. The extension has those of distributed's and its options.
MOST_LINES, MOST_ARGUMENTS = 250, 5
EXTENSION = "FerroflowStealing"


def classes(module: Path) -> Iterator[ast.ClassDef]:
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            yield node


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(SCHEDULER)))
def test_modules_classes_and_constructors_are_small(module: Path) -> None:
    assert len(module.read_text(encoding="utf-8").splitlines()) <= 400
    for one in classes(module):
        assert (one.end_lineno or 0) - one.lineno < MOST_LINES, one.name
        for method in one.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__" and one.name != EXTENSION:
                own = [*method.args.args[1:], *method.args.kwonlyargs]
                assert len(own) <= MOST_ARGUMENTS, one.name


def test_the_extension_only_connects() -> None:
    assert len((SCHEDULER / "extension.py").read_text(encoding="utf-8").splitlines()) <= 200
