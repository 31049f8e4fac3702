"""What onnxruntime computes otherwise than ONNX describes: it is left out, however ops are put together."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import models
import numpy as np
import onnx
import pytest
from agreement import assert_same
from kernel_cases import expected_of, op_of
from models import light_models
from onnx import TensorProto, helper

from ferroflow_dask.exceptions import KernelError
from ferroflow_dask.graph import Graph, graph_from_onnx
from ferroflow_dask.kernels import compile_op, evaluate, make_plan
from ferroflow_dask.kernels.choice import provider_names
from ferroflow_dask.kernels.parts import kept_ops, open_parts
from ferroflow_dask.kernels.segments import plans
from ferroflow_dask.kernels.session_settings import SessionSettings
from ferroflow_dask.lowering import bind_graph

Values = Mapping[str, Any]
Way = Callable[[Graph, Values], dict[str, Any]]

#: Longer than a session takes to open, many times over [s].
PATIENCE_S = 120

SMALL, LARGE = np.int64([5, 6]), np.int64([2**53 + 1, 2])
F = np.float32


def model_of(*nodes: onnx.NodeProto, opset: int = 21, constants: Values | None = None, **inputs: Any) -> Any:
    """Return a model whose output is `y`; inputs are given as examples, of which dtype and rank count."""
    types = {
        name: (helper.np_dtype_to_tensor_dtype(value.dtype), [f"{name}{i}" for i in range(value.ndim)])
        for name, value in inputs.items()
    }
    model = models.model_of(
        nodes, types, ["y"], initializers=dict(constants or {}), opset=opset, ir_version=10
    )
    # Outputs of a model have a type with a shape; what is computed from it here is of one axis.
    if not model.graph.output[0].type.tensor_type.HasField("shape"):
        model.graph.output[0].type.tensor_type.shape.dim.add()
    return model


def inside(node: onnx.NodeProto) -> onnx.NodeProto:
    """Return an `If` whose branches are both the node."""
    branch = helper.make_graph([node], "branch", [], [helper.make_empty_tensor_value_info(node.output[0])])
    return helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch)


def op_by_op(graph: Graph, values: Values) -> dict[str, Any]:
    return evaluate(graph, values)


def as_whole(graph: Graph, values: Values) -> dict[str, Any]:
    found: dict[str, Any] = bind_graph(graph, values, granularity="whole").compute(scheduler="sync")
    return found


def session_of(graph: Graph, constants: Values | None = None) -> Any:
    """Return the session of a graph, the sessions that it is cut into, or why there is none."""
    return open_parts(graph, constants or {}, SessionSettings(1), provider_names())


def run(graph: Graph, values: Values) -> dict[str, Any]:
    names = [*graph.inputs, *graph.constants]
    plan = make_plan(graph, graph.live_ops, names, list(graph.outputs))
    known = {**graph.constants, **values}
    found = plan.run([known[name] for name in names], provider_names(), time.perf_counter, [])
    return dict(zip(graph.outputs, found, strict=True))


def in_segments(graph: Graph, values: Values) -> dict[str, Any]:
    plans.clear()
    run(graph, values)
    return run(graph, values)


WAYS = pytest.mark.parametrize("way", [op_by_op, as_whole, in_segments])

CASES = [
    pytest.param("ReduceSum", [LARGE], {}, id="a sum beyond double precision"),
    pytest.param("ReduceSum", [np.int32([2**31 - 1, 9])], {}, id="a sum that wraps around"),
    pytest.param("ReduceL1", [-LARGE], {}, id="magnitudes"),
    pytest.param("ReduceProd", [np.int64([3**20, 3**19])], {}, id="a product"),
    pytest.param("ReduceProd", [np.int32([2**16 + 1, 2**16])], {}, id="a product that wraps around"),
    pytest.param("ReduceSumSquare", [np.int64([2**27 + 1, 1])], {}, id="squares"),
    pytest.param("Pow", [np.int64([3, 2]), np.int64([39, 62])], {}, id="a power"),
    pytest.param("Pow", [np.int32([3, 2]), np.int32([39, 3])], {}, id="a power that wraps around"),
    pytest.param("Unique", [F([2, 1, np.nan, 2])], {}, id="what is not a number is not another one"),
]


@WAYS
@pytest.mark.parametrize(("op_type", "operands", "attributes"), CASES)
@pytest.mark.parametrize("nested", [False, True], ids=["", "in a branch"])
def test_results_are_those_of_onnx(
    op_type: str, operands: list[Any], attributes: dict[str, Any], nested: bool, way: Way
) -> None:
    names = [f"x{i}" for i in range(len(operands))]
    node = helper.make_node(op_type, names, ["z" if nested else "y"], **attributes)
    values = dict(zip(names, operands, strict=True))
    if nested:
        node, values = inside(node), {**values, "yes": np.array(True)}
    graph = graph_from_onnx(model_of(node, **values))
    (expected,) = expected_of(op_of(op_type, operands, **attributes), {"": 21}, operands)
    assert_same(way(graph, values)["y"], expected, 0, 0)
    assert kept_ops(graph, {})


@WAYS
@pytest.mark.parametrize(
    ("op_type", "x", "expected"),
    [
        pytest.param("ReduceMean", np.int64([2**53 + 1, 2]), 2**52 + 1, id="beyond double precision"),
        pytest.param(
            "ReduceMean", np.int64([2**63 - 1] * 2 + [2**63 - 4]), 2**63 - 2, id="a sum beyond 64 bits"
        ),
        pytest.param("ReduceMean", np.int64([-(2**53) - 3, 0]), -(2**52) - 1, id="cut, not rounded down"),
        pytest.param("ReduceMean", np.int64([-7, 0]), -3, id="small"),
        pytest.param("ReduceSumSquare", np.int32([16777217, 2]), 33554437, id="squares wrap around"),
    ],
)
def test_reductions_of_integers_are_exact(op_type: str, x: Any, expected: int, way: Way) -> None:
    graph = graph_from_onnx(model_of(helper.make_node(op_type, ["x"], ["y"], keepdims=0), x=x))
    assert_same(way(graph, {"x": x})["y"], np.array(expected, x.dtype))


@WAYS
def test_the_place_of_a_scalar_has_the_shape_that_onnxruntime_gives_it(way: Way) -> None:
    # ONNX wants [0, 1]. Nodes after it that run in onnxruntime fail with that.
    nodes = [
        helper.make_node("NonZero", ["x"], ["y"]),
        helper.make_node("ReduceMax", ["y"], ["z"], keepdims=0),
    ]
    graph = graph_from_onnx(models.model_of(nodes, {"x": (TensorProto.FLOAT, ())}, ["y", "z"]))
    found = way(graph, {"x": np.array(F(2))})
    assert (found["y"].tolist(), found["z"].tolist()) == ([[0]], 0)


def test_a_negative_power_of_an_integer_is_cut() -> None:
    base, exponent = np.int64([2, 1, -1, -1, -3]), np.int64([-1, -7, -2, -3, -1])
    (found,) = compile_op(op_of("Pow", [base, exponent]), {"": 21})(base, exponent)
    assert found.tolist() == [0, 1, 1, -1, 0]


# ---------------------------------------------------------------- what would end the process


def divided(op_type: str, dtype: str, way: str, nested: bool, fmod: int) -> None:
    """Divide the least integer by -1, in this process."""
    least = np.iinfo(dtype).min
    x, by = np.array([5, -7, least], dtype), np.array([-1, 2, -1], dtype)
    attributes = {"fmod": fmod} if op_type == "Mod" else {}
    node = helper.make_node(op_type, ["x", "by"], ["z" if nested else "y"], **attributes)
    values = {"x": x, "by": by}
    if nested:
        node, values = inside(node), {**values, "yes": np.array(True)}
    graph = graph_from_onnx(model_of(node, **values))
    found = {"op_by_op": op_by_op, "as_whole": as_whole, "in_segments": in_segments}[way](graph, values)["y"]
    (expected,) = expected_of(op_of(op_type, [x, by], **attributes), {"": 21}, [x, by])
    assert_same(found, expected)


@pytest.mark.parametrize("nested", [False, True], ids=["", "in a branch"])
@pytest.mark.parametrize("way", ["op_by_op", "as_whole", "in_segments"])
def test_the_least_integer_is_divided_in_a_process_that_goes_on(way: str, nested: bool) -> None:
    calls = [
        f"divided({op_type!r}, {dtype!r}, {way!r}, {nested}, {fmod})"
        for dtype in ("int32", "int64")
        for op_type, fmod in (("Div", 0), ("Mod", 0), ("Mod", 1))
    ]
    code = "import sys, warnings; sys.path[:0] = sys.argv[1:]; warnings.simplefilter('ignore')\n"
    code += "from test_deviations import divided\n" + "\n".join(calls)
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent), *sys.path],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("operands", "constants", "is_open"),
    [
        pytest.param({"x": SMALL}, {"by": np.int64([2, 3])}, True, id="by constants"),
        pytest.param({"x": SMALL}, {"by": np.int64([2, -1])}, False, id="by -1"),
        pytest.param({"x": SMALL, "by": SMALL}, {}, False, id="by whatever comes"),
        pytest.param({"x": F(SMALL), "by": F(SMALL)}, {}, True, id="floats"),
        pytest.param({"x": np.int8(SMALL), "by": np.int8(SMALL)}, {}, True, id="bytes, which are widened"),
    ],
)
def test_divisions_that_cannot_fail_are_part_of_a_session(
    operands: Values, constants: Values, is_open: bool
) -> None:
    graph = graph_from_onnx(
        model_of(helper.make_node("Div", ["x", "by"], ["y"]), constants=constants, **operands)
    )
    session = session_of(graph)
    assert is_open or session == "the process ends where the least integer is divided by -1"
    assert isinstance(session, str) != is_open
    beside = graph_from_onnx(model_of(helper.make_node("Div", ["x", "by"], ["y"]), x=SMALL, by=SMALL))
    assert isinstance(session_of(beside, constants), str) != (is_open and "by" in constants)


EXACT = {
    "a product of sizes": [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Slice", ["shape", "zero", "one"], ["some"]),
        helper.make_node("Concat", ["some", "one"], ["all"], axis=0),
        helper.make_node("ReduceProd", ["all"], ["y"]),
    ],
    "a count": [
        helper.make_node("IsNaN", ["x"], ["is_nan"]),
        helper.make_node("Cast", ["is_nan"], ["counts"], to=TensorProto.INT64),
        helper.make_node("ReduceSum", ["counts"], ["y"]),
    ],
    "a size by a size": [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Shape", ["x"], ["other"]),
        helper.make_node("Div", ["shape", "other"], ["y"]),
    ],
    "a sum of floats": [helper.make_node("ReduceSum", ["x"], ["y"])],
    "what has the rank of a shape's length, joined": [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Reshape", ["x", "shape"], ["again"]),
        helper.make_node("Transpose", ["again"], ["turned"], perm=[1, 0]),
        helper.make_node("Concat", ["again", "turned"], ["y"], axis=0),
    ],
    "axes that are constants": [
        helper.make_node("Squeeze", ["x", "zero"], ["list"]),
        helper.make_node("Unsqueeze", ["list", "zero"], ["y"]),
    ],
}


@pytest.mark.parametrize("nodes", EXACT.values(), ids=EXACT)
def test_what_is_exact_is_part_of_a_session(nodes: list[onnx.NodeProto]) -> None:
    x = np.ones((1, 1), F)
    constants = {"zero": np.int64([0]), "one": np.int64([1])}
    read = {name for node in nodes for name in node.input}
    graph = graph_from_onnx(
        model_of(*nodes, constants={k: v for k, v in constants.items() if k in read}, x=x)
    )
    session = session_of(graph)
    assert not isinstance(session, str), session
    assert_same(session({**graph.constants, "x": x})["y"], evaluate(graph, {"x": x})["y"])


@pytest.mark.parametrize("path", light_models(), ids=lambda path: path.stem)
def test_a_published_architecture_is_a_session(path: Path) -> None:
    graph = graph_from_onnx(path)
    session = session_of(graph)
    assert not isinstance(session, str), session


# ---------------------------------------------------------------- ranks and axes that only a run tells


def joined() -> Graph:
    """Return a graph that joins [1, 2] and x in a shape that is an input, too."""
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["folded"]),
        helper.make_node("Concat", ["z", "folded"], ["y"], axis=0),
    ]
    x, shape = np.ones((1, 6), F), np.int64([6])
    return graph_from_onnx(model_of(*nodes, constants={"z": F([1, 2])}, x=x, shape=shape))


@WAYS
def test_what_has_other_axes_is_not_joined(way: Way) -> None:
    graph = joined()
    found = way(graph, {"x": np.ones((1, 6), F), "shape": np.int64([6])})
    assert found["y"].tolist() == [1, 2, 1, 1, 1, 1, 1, 1]
    if way is as_whole:
        return  # a session takes what it cannot know before
    with pytest.raises(KernelError, match=r"\(Concat\) failed on \(float32\[2\], float32\[0, 6\]\)"):
        way(graph, {"x": np.ones((0, 6), F), "shape": np.int64([0, 6])})


@WAYS
def test_what_has_other_axes_is_not_joined_in_a_branch_either(way: Way) -> None:
    node = inside(helper.make_node("Concat", ["z", "x"], ["both"], axis=0))
    # The model does not tell of how many axes x is.
    fold = helper.make_node("Reshape", ["any", "shape"], ["x"])
    values = {"z": F([1, 2]), "any": np.ones((0, 6), F), "shape": np.int64([0, 6]), "yes": np.array(True)}
    if way is as_whole:
        return
    with pytest.raises(KernelError, match=r"\(If\) failed"):
        way(graph_from_onnx(model_of(fold, node, **values)), values)


def test_what_has_the_same_axes_is_joined_by_onnxruntime_in_a_branch() -> None:
    values = {"x": np.ones((2, 3), F), "yes": np.array(True)}
    graph = graph_from_onnx(model_of(inside(helper.make_node("Concat", ["x", "x"], ["z"], axis=0)), **values))
    assert evaluate(graph, values, providers=["onnxruntime"])["y"].shape == (4, 3)
    assert not isinstance(session_of(graph), str)


@WAYS
def test_a_vector_is_no_matrix(way: Way) -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["folded"]),
        helper.make_node("Gemm", ["folded", "w"], ["y"]),
    ]
    x = np.ones((1, 6), F)
    graph = graph_from_onnx(model_of(*nodes, constants={"w": np.ones((6, 2), F)}, x=x, shape=np.int64([6])))
    assert way(graph, {"x": x, "shape": np.int64([1, 6])})["y"].tolist() == [[6, 6]]
    if way is as_whole:
        return
    with pytest.raises(KernelError, match=r"\(Gemm\) failed on \(float32\[6\], float32\[6, 2\]"):
        way(graph, {"x": x, "shape": np.int64([6])})


@pytest.mark.parametrize("nested", [False, True], ids=["", "in a branch"])
@WAYS
def test_no_axes_are_none_of_them(way: Way, nested: bool) -> None:
    node = helper.make_node("Squeeze", ["x", "axes"], ["z" if nested else "y"])
    values = {"x": np.ones((1, 2), F), "axes": np.int64([])}
    if nested:
        node, values = inside(node), {**values, "yes": np.array(True)}
    assert way(graph_from_onnx(model_of(node, **values)), values)["y"].shape == (1, 2)


def test_results_of_a_plan_do_not_depend_on_what_it_was_run_on_before() -> None:
    plans.clear()
    nodes = [helper.make_node("Squeeze", ["x", "axes"], ["s"]), helper.make_node("Neg", ["s"], ["y"])]
    x = np.ones((1, 2), F)
    graph = graph_from_onnx(model_of(*nodes, x=x, axes=np.int64([0])))
    for axes, shape in (([0], (2,)), ([0], (2,)), ([], (1, 2))):
        assert run(graph, {"x": x, "axes": np.int64(axes)})["y"].shape == shape


def test_equal_ops_of_other_types_are_left_out_of_segments() -> None:
    plans.clear()
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"]),
        helper.make_node("Abs", ["s"], ["t"]),
        helper.make_node("Neg", ["t"], ["y"]),
    ]
    for dtype in (np.float64, np.float64, np.int64, np.int64):
        x = LARGE.astype(dtype)
        graph = graph_from_onnx(model_of(*nodes, x=x))
        assert run(graph, {"x": x})["y"] == -x.sum()


def resized() -> tuple[onnx.NodeProto, dict[str, Any]]:
    mode = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    x = np.random.default_rng(0).random((1, 1, 7, 7), F)
    return helper.make_node("Resize", ["x", "", "scales"], ["z"], **mode), {
        "x": x,
        "scales": F([1, 1, 1.35, 1.35]),
    }


def transformed() -> tuple[onnx.NodeProto, dict[str, Any]]:
    return helper.make_node("DFT", ["x"], ["z"]), {"x": np.random.default_rng(0).random((1, 1000, 1), F)}


@pytest.mark.parametrize("of", [resized, transformed])
@WAYS
def test_what_attributes_tell_counts_in_a_branch_too(of: Callable[[], Any], way: Way) -> None:
    node, values = of()
    graph = graph_from_onnx(model_of(inside(node), **values, yes=np.array(True)))
    found = way(graph, {**values, "yes": np.array(True)})["y"]
    operands = [values.get(name) for name in node.input]
    attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
    (expected,) = expected_of(op_of(node.op_type, operands, **attributes), {"": 21}, operands)
    assert_same(found, expected)


def test_operators_of_other_domains_leave_a_model_one_session() -> None:
    """Nothing can be inferred of what they make."""
    nodes = [
        helper.make_node("Scaler", ["x"], ["s"], domain="ai.onnx.ml", offset=[0.0], scale=[2.0]),
        helper.make_node("Concat", ["s", "x"], ["both"], axis=1),
        helper.make_node("Gemm", ["both", "w"], ["z"]),
        helper.make_node("ReduceSum", ["z", "axes"], ["y"]),
    ]
    constants = {"w": np.ones((4, 2), F), "axes": np.int64([1])}
    domains = {"ai.onnx.ml": 3}
    model = models.model_of(nodes, {"x": (1, (1, 2))}, ["y"], initializers=constants, domains=domains)
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 1, (1, 1)))
    graph = graph_from_onnx(model)
    session = session_of(graph)
    assert not isinstance(session, str), session
    assert evaluate(graph, {"x": np.float32([[1, 2]])})["y"].tolist() == [[18]]
