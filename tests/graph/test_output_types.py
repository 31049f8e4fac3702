"""Outputs of types that NumPy's files do not have are written with the same values, or refused at once."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from command_line import USAGE, answer, assert_one_line, ferroflow
from models import model_of
from onnx import TensorProto, helper

from ferroflow_dask.array_files import write_outputs


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("bfloat16", "float32"),
        ("float8_e4m3fn", "float32"),
        ("float8_e5m2", "float32"),
        ("int4", "int8"),
        ("uint4", "uint8"),
        *((name, name) for name in ("float16", "float64", "int8", "complex64")),
    ],
)
def test_what_only_ml_dtypes_has_is_written_wider(tmp_path: Path, written: str, read: str) -> None:
    values = np.float32([[0, 1, 3], [2, 7, 4]])
    write_outputs(str(tmp_path / "y.npz"), {"y": values.astype(getattr(ml_dtypes, written, written))})
    with np.load(tmp_path / "y.npz") as file:
        assert file["y"].dtype == read
        np.testing.assert_array_equal(file["y"], values)


SEQUENCE = helper.make_node("SequenceConstruct", ["x", "x"], ["parts"])


def model_with(folder: Path, *nodes: onnx.NodeProto) -> Path:
    """Write a model of some nodes, whose output is that of the last one."""
    inputs = {"x": (TensorProto.FLOAT, [4])}
    onnx.save(model_of(nodes, inputs, [nodes[-1].output[0]]), folder / "m.onnx")
    return folder / "m.onnx"


@pytest.mark.parametrize("placing", [(), ("--policy", "sequential"), ("--batch", "2")], ids=" ".join)
@pytest.mark.parametrize(
    "nodes",
    [(SEQUENCE,), (SEQUENCE, helper.make_node("Optional", ["parts"], ["perhaps"]))],
    ids=["a sequence", "perhaps a sequence"],
)
def test_a_sequence_is_refused_before_anything_runs(
    tmp_path: Path, nodes: tuple[onnx.NodeProto, ...], placing: tuple[str, ...]
) -> None:
    model, output = model_with(tmp_path, *nodes), nodes[-1].output[0]
    told = ferroflow("run", "--model", model, "--output", tmp_path / "y.npz", *placing)
    message = rf"y.npz' takes arrays, and output '{output}' .* is a sequence; leave --output out, or .*bind"
    assert_one_line(told.exit_code, told.stderr, USAGE, message)
    assert told.stdout == ""


def test_where_to_write_is_looked_at_before_the_model(tmp_path: Path) -> None:
    lost = ("run", "--model", tmp_path / "lost.onnx", "--output")
    for output, message in (("y.npy", r"y\.npy' must end in \.npz"), ("no/y.npz", "--output .*no")):
        told = ferroflow(*lost, tmp_path / output)
        assert_one_line(told.exit_code, told.stderr, USAGE, message)


def test_a_sequence_that_would_be_drawn_is_to_be_given_in_python(tmp_path: Path) -> None:
    sequence = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None)
    y = helper.make_tensor_value_info("y", TensorProto.INT64, [])
    graph = helper.make_graph([helper.make_node("SequenceLength", ["s"], ["y"])], "g", [sequence], [y])
    opsets = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "m.onnx")
    told = ferroflow("run", "--model", tmp_path / "m.onnx")
    message = r"'s' .* cannot be drawn at random; .*: load_onnx\(file\)\.bind\(s=\[…\]\)$"
    assert_one_line(told.exit_code, told.stderr, USAGE, message)


def test_an_optional_that_holds_an_array_is_written(tmp_path: Path) -> None:
    model = model_with(tmp_path, helper.make_node("Optional", ["x"], ["perhaps"]))
    np.save(tmp_path / "x.npy", np.float32([1, 2, 3, 4]))
    files = ("--input", tmp_path / "x.npy", "--output", tmp_path / "y.npz")
    answer("run", "--model", model, *files, "--policy", "sequential")
    with np.load(tmp_path / "y.npz") as file:
        np.testing.assert_array_equal(file["perhaps"], np.float32([1, 2, 3, 4]))
