"""What importing makes of a model's functions, compared with onnxruntime, which expands them itself.

onnxruntime refuses functions whose output is an input; for them it is `onnx.reference`, which in turn has no
attributes of functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from agreement import assert_same
from onnx import AttributeProto, FunctionProto, TensorProto, helper, numpy_helper
from onnx.helper import make_node as node
from onnx.helper import make_opsetid as opset
from onnx.helper import make_tensor_value_info as info
from onnx.reference import ReferenceEvaluator

from ferroflow_dask.exceptions import ModelError
from ferroflow_dask.graph import graph_from_onnx
from ferroflow_dask.kernels import evaluate

FLOAT, BOOL = TensorProto.FLOAT, TensorProto.BOOL
X = np.float32([-2, -1, 0, 3])


def call(name: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return node(name, inputs, outputs, domain="acme", **attributes)


def referring(made: onnx.NodeProto, kind: int = AttributeProto.FLOAT, **names: str) -> onnx.NodeProto:
    """Return a node with attributes that refer to those of its function."""
    for name, of_function in names.items():
        made.attribute.add(name=name, ref_attr_name=of_function, type=kind)
    return made


def function(
    name: str,
    nodes: list[onnx.NodeProto],
    outputs: tuple[str, ...] = ("b",),
    imports: dict[str, int] | None = None,
    attributes: tuple[str, ...] = (),
    **defaults: Any,
) -> FunctionProto:
    """Return a function of the input a."""
    imports = {"": 21, "acme": 1} if imports is None else imports
    return helper.make_function(
        *("acme", name, ["a"], list(outputs), nodes, [opset(*entry) for entry in imports.items()]),
        attributes=list(attributes),
        attribute_protos=[helper.make_attribute(key, value) for key, value in defaults.items()],
    )


def leaky(slope: str) -> onnx.NodeProto:
    """Return b = LeakyRelu(a), with the slope that an attribute of the function gives."""
    return referring(node("LeakyRelu", ["a"], ["b"]), alpha=slope)


def model_of(
    nodes: list[onnx.NodeProto],
    *functions: FunctionProto,
    outputs: tuple[str, ...] = ("y",),
    imports: dict[str, int] | None = None,
) -> onnx.ModelProto:
    """Return a model of the input x, whose nodes may call functions."""
    graph = helper.make_graph(
        nodes, "test", [info("x", FLOAT, [4])], [info(name, FLOAT, [4]) for name in outputs]
    )
    imports = {"": 21, "acme": 1} if imports is None else imports
    model = helper.make_model(
        graph,
        functions=functions,
        opset_imports=[opset(*entry) for entry in imports.items()],
        ir_version=10,
    )
    onnx.checker.check_model(model)
    return model


def assert_equal_to_onnxruntime(model: onnx.ModelProto) -> dict[str, Any]:
    """The outputs are those of onnxruntime; return them."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = dict(
        zip((out.name for out in session.get_outputs()), session.run(None, {"x": X}), strict=True)
    )
    graph = graph_from_onnx(model)
    for providers in (None, ["reference"]):
        actual = evaluate(graph, {"x": X}, providers=providers)
        assert list(actual) == list(expected)
        for name, value in expected.items():
            assert_same(actual[name], value)
    return actual


def branches(then: onnx.NodeProto, otherwise: onnx.NodeProto, condition: str) -> list[onnx.NodeProto]:
    """Return an If of two nodes that yield `out`."""
    graphs = [helper.make_graph([one], "branch", [], [info("out", FLOAT, [4])]) for one in (then, otherwise)]
    value = numpy_helper.from_array(np.array(True))
    return [
        node("Constant", [], [condition], value=value),
        node("If", [condition], ["y"], then_branch=graphs[0], else_branch=graphs[1]),
    ]


ACT = function("Act", [leaky("slope")], slope=0.5)


DEFAULTS = {
    "left out": ([call("Act", ["x"], ["y"])], [ACT], 0.5),
    "given": ([call("Act", ["x"], ["y"], slope=0.25)], [ACT], 0.25),
    "left out by another function": (
        [call("Outer", ["x"], ["y"])],
        [ACT, function("Outer", [call("Act", ["a"], ["b"])])],
        0.5,
    ),
    "left out in a sub-graph": (
        branches(call("Act", ["x"], ["out"]), node("Neg", ["x"], ["out"]), "c"),
        [ACT],
        0.5,
    ),
    "handed on by a function with a default of its own": (
        [call("Outer", ["x"], ["y"])],
        [ACT, function("Outer", [referring(call("Act", ["a"], ["b"]), slope="s")], s=0.75)],
        0.75,
    ),
}


@pytest.mark.parametrize(("nodes", "functions", "slope"), DEFAULTS.values(), ids=DEFAULTS)
def test_an_attribute_has_the_functions_default(nodes, functions, slope):
    found = assert_equal_to_onnxruntime(model_of(nodes, *functions))
    assert found["y"].tolist() == [-2 * slope, -slope, 0, 3]


def test_each_call_has_its_own_defaults():
    middle = function("Middle", [referring(call("Act", ["a"], ["b"]), slope="s")], attributes=("s", "unused"))
    outer = function("Outer", [referring(call("Middle", ["a"], ["b"]), s="t")], attributes=("t",))
    nodes = [
        call("Outer", ["x"], ["h"], t=2.0),
        call("Outer", ["h"], ["i"]),
        call("Middle", ["i"], ["j"]),
        call("Middle", ["j"], ["k"], s=4.0),
        call("Outer", ["k"], ["y"]),
    ]
    others = [function("Middle", [node("Neg", ["a"], ["b"])]) for _ in range(9)]
    for number, other in enumerate(others):
        other.overload = f"without_{number}"
    found = assert_equal_to_onnxruntime(model_of(nodes, ACT, middle, outer, *others))
    assert found["y"].tolist() == [-2, -1, 0, 3]  # 2 · ½ · ½ · 4 · ½ of the negative


def test_a_default_may_be_a_tensor_in_another_file(tmp_path):
    value = np.float32([1, 2, 3, 4])
    (tmp_path / "weights").write_bytes(value.tobytes())
    tensor = TensorProto(dims=[4], data_type=FLOAT, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="weights")
    constant = referring(node("Constant", [], ["c"]), AttributeProto.TENSOR, value="offset")
    shift = function("Shift", [constant, node("Add", ["a", "c"], ["b"])], offset=tensor)
    onnx.save(model_of([call("Shift", ["x"], ["y"])], shift), tmp_path / "model.onnx")
    graph = graph_from_onnx(tmp_path / "model.onnx")
    assert evaluate(graph, {"x": X})["y"].tolist() == [-1, 1, 3, 7]


def test_a_damaged_default_is_refused():
    act = function("Act", [leaky("slope")], slope=0.5)
    model = model_of([call("Act", ["x"], ["y"])], act)
    model.functions[0].attribute_proto[0].i = 3  # a float and an integer at once
    with pytest.raises(ModelError, match="is not valid ONNX"):
        graph_from_onnx(model)


def scale(name: str, version: int, domain: str = "ai.onnx.ml") -> FunctionProto:
    scaler = node("Scaler", ["a"], ["b"], domain=domain, scale=[2.0], offset=[1.0])
    return function(name, [scaler], imports={domain: version})


def test_a_function_may_use_operators_of_a_domain_that_the_model_does_not_import():
    model = model_of([call("Scale", ["x"], ["y"])], scale("Scale", 3))
    assert assert_equal_to_onnxruntime(model)["y"].tolist() == [-6, -4, -2, 4]
    assert graph_from_onnx(model).opsets == {"": 21, "acme": 1, "ai.onnx.ml": 3}


def test_a_function_may_use_onnx_operators_where_the_model_imports_functions_only():
    model = model_of([call("Act", ["x"], ["y"])], ACT, imports={"acme": 1})
    assert assert_equal_to_onnxruntime(model)["y"].tolist() == [-1, -0.5, 0, 3]
    assert graph_from_onnx(model).opsets == {"": 21, "acme": 1}


@pytest.mark.parametrize(
    ("imports", "versions"),
    [
        pytest.param({"": 21, "acme": 1}, (3, 2), id="of each other"),
        pytest.param({"": 21, "acme": 1, "ai.onnx.ml": 4}, (3, 2), id="of the model"),
        pytest.param({"": 21, "acme": 2}, (3, 3), id="of the functions' own domain"),
    ],
)
def test_functions_may_import_other_versions_where_the_operators_are_the_same(imports, versions):
    first, second = scale("First", versions[0]), scale("Second", versions[1])
    both = function("Both", [call("First", ["a"], ["h"]), call("Second", ["h"], ["b"])], imports={"acme": 1})
    model = model_of([call("Both", ["x"], ["y"])], first, second, both, imports=imports)
    expected = 2 * (2 * (X - 1) - 1)
    assert evaluate(graph_from_onnx(model), {"x": X})["y"].tolist() == expected.tolist()


def test_operators_that_nobody_can_compare_are_not_taken_for_those_of_another_version():
    other = scale("Scale", 2, domain="other")
    nodes = branches(call("Scale", ["x"], ["out"]), node("Neg", ["x"], ["out"]), "c")
    model = model_of(nodes, other, imports={"": 21, "acme": 1, "other": 1})
    message = (
        "function 'Scale' of domain 'acme' cannot be expanded: it takes version 2 of the operators of domain "
        "'other', the model version 1"
    )
    with pytest.raises(ModelError, match=message):
        graph_from_onnx(model)


PASS = function("Pass", [node("Neg", ["a"], ["b"])], ("a", "b"))


PASSED = {
    "an output of the model": ([call("Pass", ["x"], ["y", "z"])], [PASS], ("y", "z")),
    "read": ([call("Pass", ["x"], ["p", "q"]), node("Sub", ["p", "q"], ["y"])], [PASS], ("y",)),
    "not wanted": ([call("Pass", ["x"], ["", "y"])], [PASS], ("y",)),
    "by another function": (
        [call("Twice", ["x"], ["y", "z"])],
        [PASS, function("Twice", [call("Pass", ["a"], ["a_copy", "b"])], ("a", "a_copy"))],
        ("y", "z"),
    ),
    "beside operators of another domain": (
        [call("Scaled", ["x"], ["y", "z"])],
        [function("Scaled", list(scale("S", 3).node), ("a", "b"), imports={"ai.onnx.ml": 3})],
        ("y", "z"),
    ),
}


@pytest.mark.parametrize(("nodes", "functions", "outputs"), PASSED.values(), ids=PASSED)
def test_an_input_of_a_function_may_be_its_output(nodes, functions, outputs):
    model = model_of(nodes, *functions, outputs=outputs)
    for imports in ({}, {"": 18}):
        for changed in (model, *model.functions):
            for entry in changed.opset_import:
                entry.version = imports.get(entry.domain, entry.version)
        graph = graph_from_onnx(model)
        expected = ReferenceEvaluator(model).run(None, {"x": X})
        for name, value in zip(outputs, expected, strict=True):
            assert_same(evaluate(graph, {"x": X})[name], value)


def test_an_input_of_a_function_may_be_its_output_where_nobody_imports_onnx_operators():
    scaled = function("Scaled", list(scale("S", 3).node), ("a", "b"), imports={"ai.onnx.ml": 3})
    model = model_of([call("Scaled", ["x"], ["y", "z"])], scaled, outputs=("y", "z"), imports={"acme": 1})
    graph = graph_from_onnx(model)
    found = evaluate(graph, {"x": X})
    for name, value in zip(("y", "z"), ReferenceEvaluator(model).run(None, {"x": X}), strict=True):
        assert_same(found[name], value)
    assert graph.opsets[""] > 0
