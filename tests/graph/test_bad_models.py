"""Damaged and invalid models are answered with one line that names the file and the defect."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from models import mlp, sparse_tensor
from onnx import TensorProto, helper, numpy_helper
from onnx.helper import make_node as node
from onnx.helper import make_tensor_value_info as info

from ferroflow_dask.exceptions import ModelError
from ferroflow_dask.graph import graph_from_onnx

FLOAT = TensorProto.FLOAT


def two_relus(*names: str) -> onnx.ModelProto:
    """Return x → Relu → Relu → y; names of (input, output) pairs may be replaced."""
    first, middle, second, last = names or ("x", "h", "h", "y")
    nodes = [node("Relu", [first], [middle]), node("Relu", [second], [last])]
    graph = helper.make_graph(nodes, "g", [info("x", FLOAT, [2])], [info("y", FLOAT, [2])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def changed(change: Any, model: onnx.ModelProto | None = None) -> bytes:
    model = model or two_relus()
    change(model)
    return model.SerializeToString()


def short_weight(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(TensorProto(name="w", data_type=FLOAT, dims=[9999], raw_data=b"1234"))


def negative_weight(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(TensorProto(name="w", data_type=FLOAT, dims=[-1], raw_data=b"1234"))


def twice_the_same(model: onnx.ModelProto) -> None:
    model.graph.initializer.extend([numpy_helper.from_array(np.zeros(9999, np.float32), "w")] * 2)


BAD = {
    "an empty file": (b"", "is empty"),
    "a text": (b"This is no model, but it is long enough.", "is no ONNX model"),
    "half a model": (mlp().SerializeToString()[:50_000], "is no ONNX model, or is truncated"),
    "a message without a graph": (onnx.ModelProto(ir_version=8).SerializeToString(), "has no graph"),
    "no outputs": (changed(lambda m: m.graph.ClearField("output")), "has no outputs"),
    "no IR version": (changed(lambda m: m.ClearField("ir_version")), "is not valid ONNX"),
    "an operator that does not exist": (
        changed(lambda m: setattr(m.graph.node[0], "op_type", "Rlu")),
        "is not valid ONNX: No Op registered for Rlu",
    ),
    "a value that nothing produces": (
        two_relus("x", "h", "nope", "y").SerializeToString(),
        "however input 'nope' of node: name: OpType: Relu is not output of any previous nodes.",
    ),
    "nodes in a cycle": (two_relus("y", "h", "h", "y").SerializeToString(), "is not valid ONNX"),
    "an output that nothing produces": (two_relus("x", "h", "h", "z").SerializeToString(), "'y'"),
    "a missing attribute": (
        changed(lambda m: setattr(m.graph.node[0], "op_type", "Cast")),
        "is not valid ONNX: Required attribute 'to' is missing",
    ),
    "a Constant without value": (
        changed(lambda m: m.graph.node.append(node("Constant", [], ["c"]))),
        "with the outputs ['c'] has no value",
    ),
    "a weight shorter than its shape": (changed(short_weight), "weight 'w' is damaged"),
    "a weight of negative size": (changed(negative_weight), "weight 'w' is damaged: its shape is [-1]"),
    "two weights of one name": (changed(twice_the_same), "has two initializers named 'w'"),
    "a weight without name": (
        changed(lambda m: m.graph.initializer.append(numpy_helper.from_array(np.float32([1])))),
        "has an initializer without name",
    ),
    "a sparse weight beyond its shape": (
        changed(lambda m: m.graph.sparse_initializer.append(sparse_tensor([1], [9], [2, 2], "s"))),
        "sparse tensor 's' is damaged",
    ),
    "a sparse input": (
        changed(
            lambda m: m.graph.input.add(name="s").type.CopyFrom(helper.make_sparse_tensor_type_proto(1, [2]))
        ),
        "input 's' is a sparse_tensor_type",
    ),
    "an input without type": (changed(lambda m: m.graph.input[0].ClearField("type")), "is not valid ONNX"),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_bad_models_are_answered_with_one_line_that_names_the_file(tmp_path, content, message):
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError) as error:
        graph_from_onnx(path)
    text = str(error.value)
    assert text.startswith(f"{path}: ")
    assert message in text
    assert "\n" not in text
    with pytest.raises(ModelError, match=r"^model: "):
        graph_from_onnx(content)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope.onnx", r"nope\.onnx: there is no such file$"),
        ("", r"is a folder; give the \.onnx file in it$"),
        ("file/m.onnx", "cannot be read: Not a directory"),
    ],
    ids=["nothing", "a folder", "below a file"],
)
def test_what_is_no_file_is_named(tmp_path, name, message):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelError, match=message):
        graph_from_onnx(tmp_path / name)
