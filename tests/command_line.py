"""How tests call the command line, and what they expect of its errors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import onnx
from click import Command
from click.testing import CliRunner, Result
from onnx import TensorProto, helper

from ferroflow_dask.cli import main

#: A graph of eight short ops.
SMALL = ("--dag", "wide", "--width", "4", "--depth", "2")
#: Exit statuses: wrong input, later failures, SIGINT (Ctrl-C) and SIGTERM.
USAGE, FAILURE, INTERRUPTED, TERMINATED = 2, 1, 130, 143


def ferroflow(*arguments: str | Path, command: Command = main) -> Result:
    """Run the command, or another one, in this process."""
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def answer(*arguments: str | Path, command: Command = main) -> Result:
    """Run the command, or another one, in this process, and expect that it succeeds."""
    result = ferroflow(*arguments, command=command)
    assert result.exit_code == 0, result.output
    return result


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command as a shell would."""
    program = Path(sys.executable).with_name("ferroflow")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=60)


def assert_one_line(exit_code: int, stderr: str, status: int, message: str) -> None:
    """Expect one line on stderr that matches `message`, and the exit status."""
    assert re.search(message, stderr), stderr
    assert stderr.startswith("ferroflow: ")
    assert stderr.count("\n") == 1
    assert exit_code == status


def with_unknown_operator() -> onnx.ModelProto:
    """Return a model whose one op nobody has a kernel for."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    node = helper.make_node("Frobnicate", ["x"], ["y"], "odd", domain="my.domain")
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("my.domain", 1)]
    return helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=opsets, ir_version=8)
