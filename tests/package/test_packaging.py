"""What is tested is the installed package, and it is whole."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points, files, version
from pathlib import Path

import ferroflow_dask

REPOSITORY = Path(__file__).parents[2]


def test_the_package_under_test_is_the_installed_one() -> None:
    installed = Path(ferroflow_dask.__file__)
    assert REPOSITORY not in installed.parents
    assert "site-packages" in installed.parts


def test_data_files_are_in_the_wheel() -> None:
    packed = {str(file) for file in files("ferroflow-dask") or ()}
    for name in ("ferroflow.yaml", "ferroflow-schema.yaml", "py.typed"):
        assert f"ferroflow_dask/{name}" in packed


def test_all_modules_are_in_the_wheel() -> None:
    packed = {str(file) for file in files("ferroflow-dask") or ()}
    modules = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "ferroflow_dask").rglob("*.py")}
    assert modules
    assert modules <= packed


def test_versions_agree() -> None:
    assert version("ferroflow-dask") == ferroflow_dask.__version__


def test_the_command_is_also_one_of_dasks() -> None:
    (point,) = entry_points(group="dask_cli", name="ferroflow")
    assert point.load().name == "ferroflow"


def test_importing_the_package_is_silent_and_leaves_heavy_libraries_alone() -> None:
    heavy = {"onnxruntime", "bokeh", "dask_jobqueue", "dask.array", "dask.bag", "pandas", "xarray"}
    code = (
        "import click, sys; from ferroflow_dask.cli import main\n"
        "context = click.Context(main); commands = main.list_commands(context)\n"
        "assert len(commands) == 13 and all(main.get_command(context, name) for name in commands)\n"
        f"print(*{heavy} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
