"""Command lines of the original ferroflow run as they are."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest
from command_line import answer
from models import mlp

#: From its README. The matrices of the GPU run are smaller here, and its device is emulated.
COMMANDS = {
    "run --dag imbalanced --workers 8": r"imbalanced · ferroflow · 8 × 1 processes: 204 ops in ",
    "run --dag transformer --layers 2": r"transformer · ferroflow · .*: 24 ops in ",
    "run --dag wide --width 8 --depth 2 --workers 2 --policy ring --steal-threshold 2": "steal threshold ",
    "run --dag skewed --workers 2 --policy ring --no-adaptive-threshold": "after 0 changes",
    "info --dag large-transformer": "ops",
}


@pytest.mark.cluster
@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_line_of_the_original_runs(line: str) -> None:
    assert re.search(COMMANDS[line], answer(*line.split()).stdout)


@pytest.mark.cluster
def test_a_model_and_a_matrix_product_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp(), "mlp.onnx")
    assert "5 ops in" in answer("run", "--model", "mlp.onnx", "--workers", "4").stdout
    sizes = "--n-branches 16 --ops-per-branch 8 --matrix-size 64 --workers 8 --device emulated"
    assert "128 ops in" in answer("run", "--dag", "matmul-parallel", *sizes.split()).stdout
