"""Importing ONNX models: what becomes of each part, and what is said of those that are damaged."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import light_models, mlp, model_of, randomize, reference
from onnx import TensorProto, helper, numpy_helper

from ferroflow_dask.exceptions import FerroflowError, ModelError
from ferroflow_dask.graph import Graph, TensorSpec, from_onnx
from ferroflow_dask.graph.from_onnx import load_onnx
from ferroflow_dask.kernels import evaluate

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
node, info = helper.make_node, helper.make_tensor_value_info


def assert_equal_to_reference(model: onnx.ModelProto, graph: Graph, **inputs: Any) -> None:
    actual, expected = evaluate(graph, inputs), reference(model, inputs)
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        np.testing.assert_allclose(actual[name], value, rtol=1e-4, atol=1e-5)


def kinds(graph: Graph) -> dict[str, int]:
    return dict(Counter(op.kind for op in graph.ops))


# ---------------------------------------------------------------- whole models

#: Ops of each architecture as the files have them, apart from the `ConstantOfShape` nodes that stand for
#: weights; counted by hand from the published networks (layers) and checked with `onnx.load` (glue).
ARCHITECTURES = {
    "light_bvlc_alexnet": {"Conv": 5, "Gemm": 3, "LRN": 2, "MaxPool": 3, "Relu": 7, "Dropout": 2},
    "light_densenet121": {
        "Conv": 121,
        "BatchNormalization": 121,
        "Relu": 121,
        "Concat": 58,
        "AveragePool": 3,
    },
    "light_inception_v1": {"Conv": 57, "Gemm": 1, "Concat": 9, "MaxPool": 13, "Relu": 57, "LRN": 2},
    "light_inception_v2": {"Conv": 69, "BatchNormalization": 69, "Concat": 10, "AveragePool": 8, "Gemm": 1},
    "light_resnet50": {"Conv": 53, "BatchNormalization": 53, "Relu": 49, "Sum": 16, "Gemm": 1, "Softmax": 1},
    "light_shufflenet": {"Conv": 49, "BatchNormalization": 49, "Transpose": 16, "Sum": 13, "Concat": 3},
    "light_squeezenet": {"Conv": 26, "Relu": 26, "Concat": 8, "MaxPool": 3, "GlobalAveragePool": 1},
    "light_vgg19": {"Conv": 16, "Gemm": 3, "MaxPool": 5, "Relu": 18, "Softmax": 1},
    "light_zfnet512": {"Conv": 5, "Gemm": 3, "LRN": 2, "MaxPool": 3, "Softmax": 1},
}


@pytest.mark.parametrize("path", light_models(), ids=lambda path: path.stem)
def test_published_architectures_have_their_layers(path):
    graph = load_onnx(path)
    assert graph.name == path.stem
    assert len(graph.ops) == len(onnx.load(path).graph.node)
    assert {kind: kinds(graph)[kind] for kind in ARCHITECTURES[path.stem]} == ARCHITECTURES[path.stem]
    (data,) = graph.inputs.values()
    assert data == TensorSpec.of("float32", (1, 3, 224, 224))
    (output,) = graph.outputs
    assert graph.spec(output).shape in [(1, 1000), (1, 1000, 1, 1)]
    assert all(graph.spec(value).is_static for op in graph.ops for value in op.outputs if op.kind == "Conv")


def test_every_architecture_is_covered():
    assert {path.stem for path in light_models()} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", ["light_squeezenet", "light_shufflenet"])
def test_an_architecture_with_random_weights_tells_inputs_apart_as_onnx_reference_does(name):
    (path,) = (path for path in light_models() if path.stem == name)
    model = randomize(onnx.load(path), seed=1)
    graph = load_onnx(model)
    (data,) = graph.inputs
    outputs = []
    for seed in (0, 1):
        x = np.random.default_rng(seed).standard_normal((1, 3, 224, 224), np.float32)
        (actual,) = evaluate(graph, {data: x}).values()
        (expected,) = evaluate(graph, {data: x}, providers=["reference"]).values()
        np.testing.assert_allclose(actual, expected, rtol=1e-2, atol=1e-6)
        outputs.append(actual)
    assert np.abs(outputs[0] - outputs[1]).max() > 0.05 * outputs[0].max()
    assert outputs[0].max() < 0.9


def test_a_perceptron_from_its_file(tmp_path):
    model = mlp(seed=2)
    onnx.save(model, tmp_path / "mlp.onnx")
    graph = load_onnx(tmp_path / "mlp.onnx")
    assert (graph.name, graph.outputs, kinds(graph)) == ("mlp", ("y",), {"Gemm": 3, "Relu": 2})
    assert graph.inputs == {"x": TensorSpec.of("float32", ("batch", 784))}
    assert graph.spec("y") == TensorSpec.of("float32", ("batch", 10))
    assert set(graph.constants) == {"w0", "b0", "w1", "b1", "w2", "b2"}
    for batch in (1, 5):
        assert_equal_to_reference(model, graph, x=np.full((batch, 784), 0.1, np.float32))


@pytest.mark.parametrize("form", ["path", "text", "bytes", "message"])
def test_a_model_is_a_path_or_bytes_or_a_message(tmp_path, form):
    model = mlp()
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    given = {"path": path, "text": str(path), "bytes": path.read_bytes(), "message": model}[form]
    before = model.SerializeToString(deterministic=True)
    assert len(load_onnx(given).ops) == 5
    assert load_onnx(given, name="mine").name == "mine"
    assert model.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("limit", [0, 64, 10**9])
def test_weights_withheld_from_checker_and_inference_are_all_there(monkeypatch, limit):
    monkeypatch.setattr(from_onnx, "_LARGE", limit)
    checked = []
    check = onnx.checker.check_model
    monkeypatch.setattr(
        onnx.checker, "check_model", lambda model: (checked.append(model.ByteSize()), check(model))
    )
    model = mlp()
    graph = load_onnx(model)
    assert graph.spec("h1").shape == ("batch", 32)
    assert_equal_to_reference(model, graph, x=np.ones((2, 784), np.float32))
    assert (checked[0] > 100_000) == (limit == 10**9)


def test_shapes_that_small_weights_decide_are_inferred():
    weight = np.zeros((8, 512), np.float32)  # large: withheld
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Reshape", ["h", "shape"], ["y"])]
    model = model_of(
        nodes, {"x": (FLOAT, [6, 8])}, ["y"], initializers={"w": weight, "shape": np.int64([3, -1])}
    )
    assert load_onnx(model).spec("y").shape == (3, 1024)


def test_a_weight_larger_than_the_limit_of_messages_is_no_obstacle(monkeypatch):
    model = mlp()
    monkeypatch.setattr(onnx.checker, "MAXIMUM_PROTOBUF", 10_000)
    assert len(load_onnx(model).ops) == 5
    monkeypatch.setattr(onnx.checker, "MAXIMUM_PROTOBUF", 100)
    with pytest.raises(ModelError, match="more than 2 GiB of weights inside functions or sub-graphs"):
        load_onnx(model)


# ---------------------------------------------------------------- sources


def test_initializers_that_are_also_listed_as_inputs_are_no_inputs():
    model = model_of(
        [node("Add", ["x", "w"], ["y"])],
        {"x": (FLOAT, [2]), "w": (FLOAT, [2])},
        ["y"],
        initializers={"w": np.float32([1, 2])},
        opset=8,
        ir_version=3,
    )
    graph = load_onnx(model)
    assert list(graph.inputs) == ["x"]
    assert graph.constants["w"].tolist() == [1, 2]


def test_dimensions_keep_their_names_or_stay_unknown():
    model = model_of([node("Relu", ["x"], ["y"])], {"x": (FLOAT, ["batch", None, 3])}, ["y"])
    graph = load_onnx(model)
    assert graph.inputs["x"].shape == ("batch", None, 3)
    assert graph.spec("y").shape[::2] == ("batch", 3)


def sparse(values: Any, indices: Any, dims: list[int], name: str = "") -> onnx.SparseTensorProto:
    return helper.make_sparse_tensor(
        numpy_helper.from_array(np.float32(values), name), numpy_helper.from_array(np.int64(indices)), dims
    )


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        pytest.param(
            {"value": numpy_helper.from_array(np.float64([[1.5]]))}, np.float64([[1.5]]), id="tensor"
        ),
        pytest.param({"value_float": 1.5}, np.float32(1.5), id="float"),
        pytest.param({"value_floats": [1.5, 2]}, np.float32([1.5, 2]), id="floats"),
        pytest.param({"value_int": 3}, np.int64(3), id="int"),
        pytest.param({"value_ints": [3, 4]}, np.int64([3, 4]), id="ints"),
        pytest.param({"value_string": "é"}, np.array("é", object), id="string"),
        pytest.param({"value_strings": ["a", "é"]}, np.array(["a", "é"], object), id="strings"),
        pytest.param({"sparse_value": sparse([5, 6], [0, 2], [3])}, np.float32([5, 0, 6]), id="sparse"),
        pytest.param(
            {"value": numpy_helper.from_array(np.arange(9999, dtype=np.float32))},
            np.arange(9999, dtype=np.float32),
            id="a large tensor",
        ),
    ],
)
def test_constant_nodes_become_sources(attribute, expected):
    model = model_of([node("Constant", [], ["c"], **attribute), node("Identity", ["c"], ["y"])], {}, ["y"])
    graph = load_onnx(model)
    assert kinds(graph) == {"Identity": 1}
    value = graph.constants["c"]
    assert value.dtype == expected.dtype
    assert value.tolist() == expected.tolist()
    assert graph.spec("c").shape == expected.shape


@pytest.mark.parametrize(
    "indices", [pytest.param([1, 3], id="flat indices"), pytest.param([[0, 1], [1, 1]], id="coordinates")]
)
def test_sparse_initializers_become_dense(indices):
    model = model_of([node("Add", ["x", "s"], ["y"])], {"x": (FLOAT, [2, 2])}, ["y"])
    model.graph.sparse_initializer.append(sparse([7, 8], indices, [2, 2], "s"))
    model.graph.output[0].CopyFrom(info("y", FLOAT, [2, 2]))
    graph = load_onnx(model)
    assert graph.constants["s"].tolist() == [[0, 7], [0, 8]]
    assert evaluate(graph, {"x": np.ones((2, 2), np.float32)})["y"].tolist() == [[1, 8], [1, 9]]


@pytest.mark.parametrize(
    "element", [TensorProto.BFLOAT16, TensorProto.FLOAT8E5M2, TensorProto.INT4, TensorProto.FLOAT16, BOOL]
)
def test_weights_keep_their_dtype(element):
    dtype = helper.tensor_dtype_to_np_dtype(element)
    model = model_of([node("Identity", ["w"], ["y"])], {}, ["y"], opset=21, ir_version=10)
    model.graph.initializer.append(helper.make_tensor("w", element, [3], [1, 0, 1]))
    model.graph.output[0].CopyFrom(info("y", element, [3]))
    graph = load_onnx(model)
    assert graph.constants["w"].dtype == dtype == graph.spec("y").dtype
    assert evaluate(graph)["y"].astype(int).tolist() == [1, 0, 1]


def test_strings_are_objects():
    model = model_of([node("Identity", ["w"], ["y"])], {}, ["y"])
    model.graph.initializer.append(helper.make_tensor("w", TensorProto.STRING, [2], [b"a", "é".encode()]))
    model.graph.output[0].CopyFrom(info("y", TensorProto.STRING, [2]))
    assert evaluate(load_onnx(model))["y"].tolist() == ["a", "é"]


def test_outputs_may_be_inputs_or_initializers_and_inputs_may_be_unused():
    model = model_of(
        [node("Relu", ["x"], ["r"])],
        {"x": (FLOAT, [2]), "unused": (FLOAT, [1])},
        ["x", "w", "r"],
        initializers={"w": np.float32([3])},
    )
    model.graph.output[0].CopyFrom(info("x", FLOAT, [2]))
    model.graph.output[1].CopyFrom(info("w", FLOAT, [1]))
    graph = load_onnx(model)
    assert graph.outputs == ("x", "w", "r")
    result = evaluate(graph, {"x": np.float32([-1, 1]), "unused": np.float32([0])})
    assert {name: value.tolist() for name, value in result.items()} == {"x": [-1, 1], "w": [3], "r": [0, 1]}


def test_sequences_may_enter_and_leave():
    sequence = helper.make_sequence_type_proto(helper.make_tensor_type_proto(FLOAT, [2]))
    graph = helper.make_graph(
        [node("SequenceInsert", ["s", "x"], ["t"])],
        "g",
        [helper.make_value_info("s", sequence), info("x", FLOAT, [2])],
        [helper.make_value_info("t", sequence)],
    )
    imported = load_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))
    assert imported.inputs["s"] == TensorSpec()
    one = np.float32([1, 2])
    assert [v.tolist() for v in evaluate(imported, {"s": [one], "x": one + 2})["t"]] == [[1, 2], [3, 4]]


# ---------------------------------------------------------------- ops


def test_ops_without_a_name_get_one_and_equal_names_are_told_apart():
    nodes = [
        node("Relu", ["x"], ["a"]),
        node("Relu", ["a"], ["b"], name="act"),
        node("Relu", ["b"], ["c"], name="act"),
        node("Relu", ["c"], ["y"], name="relu_1"),
    ]
    graph = load_onnx(model_of(nodes, {"x": (FLOAT, [2])}, ["y"]))
    assert [op.name for op in graph.ops] == ["relu_1_2", "act", "act_2", "relu_1"]
    assert [op.id for op in graph.ops] == [1, 2, 3, 4]


def test_optional_inputs_and_outputs_left_out_stay_empty():
    nodes = [node("Clip", ["x", "", "high"], ["c"]), node("Dropout", ["c"], ["y", ""])]
    graph = load_onnx(model_of(nodes, {"x": (FLOAT, [2])}, ["y"], initializers={"high": np.float32(1)}))
    assert graph.ops[0].inputs == ("x", "", "high")
    assert graph.ops[1].outputs == ("y", "")
    assert evaluate(graph, {"x": np.float32([-5, 5])})["y"].tolist() == [-5, 1]


def test_the_long_name_of_the_default_domain_is_the_short_one():
    model = model_of([node("Relu", ["x"], ["y"])], {"x": (FLOAT, [1])}, ["y"])
    model.graph.node[0].domain = model.opset_import[0].domain = "ai.onnx"
    graph = load_onnx(model)
    assert graph.opsets == {"": 18}
    assert evaluate(graph, {"x": np.float32([-1])})["y"] == 0


def test_functions_are_expanded_with_their_attributes_and_constants():
    inner = helper.make_function(
        "acme", "Double", ["a"], ["b"], [node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 18)]
    )
    constant = node("Constant", [], ["k"])
    constant.attribute.append(onnx.AttributeProto(name="value_float", ref_attr_name="k", type=1))
    outer = helper.make_function(
        "acme", "Scale", ["a"], ["c"],
        [node("Double", ["a"], ["d"], domain="acme"), constant, node("Mul", ["d", "k"], ["c"])],
        [helper.make_opsetid("", 18), helper.make_opsetid("acme", 1)], attributes=["k"],
    )  # fmt: skip
    model = model_of(
        [node("Scale", ["x"], ["h"], domain="acme", k=3.0),
         node("Scale", ["h"], ["y"], domain="acme", k=0.5)],
        {"x": (FLOAT, [2])}, ["y"], domains={"acme": 1}, functions=[inner, outer],
    )  # fmt: skip
    model.graph.output[0].CopyFrom(info("y", FLOAT, [2]))
    graph = load_onnx(model)
    assert kinds(graph) == {"Add": 2, "Mul": 2}
    assert sorted(float(value) for value in graph.constants.values()) == [0.5, 3.0]
    assert_equal_to_reference(model, graph, x=np.float32([1, -2]))


def if_model() -> onnx.ModelProto:
    """Return y = a + w if c, else a - b; w is an initializer of the branch, a is captured at depth two."""

    def branch(name: str, *nodes: onnx.NodeProto, **extra: Any) -> onnx.GraphProto:
        return helper.make_graph(list(nodes), name, [], [info(f"{name}_out", FLOAT, [2])], **extra)

    weight = numpy_helper.from_array(np.float32([10, 20]), "w")
    deep = branch("deep", node("Add", ["a", "w"], ["deep_out"]))
    other = branch("other", node("Identity", ["b"], ["other_out"]))
    nested = node("If", ["c"], ["then_out"], then_branch=deep, else_branch=other)
    then = branch("then", nested, initializer=[weight])
    otherwise = branch("otherwise", node("Sub", ["a", "b"], ["otherwise_out"]))
    nodes = [
        node("Relu", ["x"], ["a"]),
        node("Neg", ["x"], ["b"]),
        node("If", ["c"], ["y"], then_branch=then, else_branch=otherwise),
    ]
    return model_of(nodes, {"x": (FLOAT, [2]), "c": (BOOL, [])}, ["y"])


def test_values_that_sub_graphs_capture_are_operands():
    model = if_model()
    graph = load_onnx(model)
    (op,) = (op for op in graph.ops if op.op_type == "If")
    assert op.inputs == ("c",)
    assert sorted(op.captured) == ["a", "b", "c"]
    assert {before.op_type for before in graph.predecessors[op.id]} == {"Relu", "Neg"}
    for c in (True, False):
        assert_equal_to_reference(model, graph, x=np.float32([-1, 2]), c=np.array(c))


def test_a_loop_reads_its_captured_weight():
    body = helper.make_graph(
        [node("MatMul", ["v", "w"], ["v_out"]), node("Identity", ["go"], ["go_out"])],
        "body",
        [info("i", INT64, []), info("go", BOOL, []), info("v", FLOAT, [1, 2])],
        [info("go_out", BOOL, []), info("v_out", FLOAT, [1, 2])],
    )
    weight = np.float32([[0, 1], [1, 1]])
    loop = node("Loop", ["n", "", "x"], ["y"], body=body)
    initializers = {"n": np.int64(6), "w": weight}
    model = model_of([loop], {"x": (FLOAT, [1, 2])}, ["y"], initializers=initializers)
    model.graph.output[0].CopyFrom(info("y", FLOAT, [1, 2]))
    graph = load_onnx(model)
    assert graph.ops[0].captured == ("w",)
    assert evaluate(graph, {"x": np.float32([[0, 1]])})["y"].tolist() == [[8, 13]]


# ---------------------------------------------------------------- external data


@pytest.fixture
def external(tmp_path):
    """Save and return the folder of a model whose weights are in `weights.bin` beside it."""
    folder = tmp_path / "model"
    folder.mkdir()
    onnx.save(mlp(), folder / "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=64)
    assert (folder / "m.onnx").stat().st_size < 10_000
    return folder


def relocate(path: Path, **entries: str) -> None:
    """Change where the first external weight is said to be."""
    model = onnx.load(path, load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL)
    for entry in tensor.external_data:
        entry.value = entries.get(entry.key, entry.value)
    path.write_bytes(model.SerializeToString())


def test_weights_in_other_files_are_read(external):
    graph = load_onnx(external / "m.onnx")
    assert graph.constants["w0"].shape == (32, 784)
    assert_equal_to_reference(mlp(), graph, x=np.ones((2, 784), np.float32))


def test_weights_in_a_folder_below_are_read(external):
    (external / "data").mkdir()
    shutil.copy(external / "weights.bin", external / "data" / "w")
    relocate(external / "m.onnx", location="data/w")
    assert len(load_onnx(external / "m.onnx").constants) == 6


def test_a_path_relative_to_the_current_folder_is_enough(external, monkeypatch):
    monkeypatch.chdir(external)
    assert len(load_onnx("m.onnx").constants) == 6


def test_external_tensors_inside_nodes_and_sub_graphs_are_read(tmp_path):
    def tensor(name: str) -> onnx.TensorProto:
        (tmp_path / name).write_bytes(np.float32([3, 4]).tobytes())
        result = TensorProto(name=name, data_type=FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
        result.external_data.add(key="location", value=name)
        return result

    def branch(name: str, *nodes: onnx.NodeProto, **extra: Any) -> onnx.GraphProto:
        return helper.make_graph(list(nodes), name, [], [info("r", FLOAT, [2])], **extra)

    then = branch("t", node("Identity", ["w"], ["r"]), initializer=[tensor("w")])
    otherwise = branch("e", node("Constant", [], ["r"], value=tensor("k")))
    nodes = [node("If", ["c"], ["i"], then_branch=then, else_branch=otherwise)]
    nodes += [node("Constant", [], ["d"], value=tensor("q")), node("Add", ["i", "d"], ["y"])]
    graph = helper.make_graph(nodes, "g", [info("c", BOOL, [])], [info("y", FLOAT, [2])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    imported = load_onnx(tmp_path / "m.onnx")
    for c in (True, False):
        assert evaluate(imported, {"c": np.array(c)})["y"].tolist() == [6, 8]


@pytest.mark.parametrize(
    "location",
    [
        pytest.param("../secret.bin", id="a file in the folder above"),
        pytest.param("../model2/secret.bin", id="a folder whose name begins with the model's"),
        pytest.param("{outside}", id="an absolute path"),
        pytest.param("{inside}", id="an absolute path even if it is inside"),
        pytest.param("link.bin", id="a link to a file outside"),
        pytest.param("folder/secret.bin", id="a link to a folder outside"),
        pytest.param(".", id="the folder itself"),
        pytest.param("", id="nothing"),
    ],
)
def test_no_file_outside_the_model_folder_is_read(external, location):
    secret = external.parent / "secret.bin"
    shutil.copy(external / "weights.bin", secret)
    (external.parent / "model2").mkdir()
    shutil.copy(secret, external.parent / "model2")
    (external / "link.bin").symlink_to(secret)
    (external / "folder").symlink_to(external.parent)
    relocate(external / "m.onnx", location=location.format(outside=secret, inside=external / "weights.bin"))
    with pytest.raises(
        ModelError, match=r"m\.onnx: weight 'w0' .*outside the model's folder; it is not read"
    ):
        load_onnx(external / "m.onnx")


def test_a_link_that_stays_inside_the_folder_is_followed(external):
    (external / "link.bin").symlink_to("weights.bin")
    relocate(external / "m.onnx", location="link.bin")
    assert len(load_onnx(external / "m.onnx").constants) == 6


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(
            lambda f: (f / "weights.bin").unlink(), "'weights.bin', and there is no such file", id="gone"
        ),
        pytest.param(lambda f: os.truncate(f / "weights.bin", 9), "beyond the 9 bytes", id="cut off"),
        pytest.param(lambda f: relocate(f / "m.onnx", offset="-4"), "beyond", id="a negative offset"),
        pytest.param(lambda f: relocate(f / "m.onnx", offset="x"), "damaged external data", id="no number"),
        pytest.param(
            lambda f: relocate(f / "m.onnx", location="a\0b"), "damaged external data", id="no path"
        ),
        pytest.param(
            lambda f: relocate(f / "m.onnx", length="8"), "'w0' is damaged", id="a length that does not fit"
        ),
        pytest.param(
            lambda f: (os.remove(f / "weights.bin"), os.mkfifo(f / "weights.bin")), "no such", id="a pipe"
        ),
    ],
)
def test_damaged_external_data(external, damage, message):
    damage(external)
    with pytest.raises(ModelError, match=message) as error:
        load_onnx(external / "m.onnx")
    assert "\n" not in str(error.value)


def test_external_data_needs_a_path(external):
    content = (external / "m.onnx").read_bytes()
    with pytest.raises(
        ModelError, match=r"^model: weight 'w0' is in the file 'weights.bin'; give the model by its path"
    ):
        load_onnx(content)


# ---------------------------------------------------------------- bad input


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


def twice_the_same(model: onnx.ModelProto) -> None:
    model.graph.initializer.extend([numpy_helper.from_array(np.zeros(9999, np.float32), "w")] * 2)


BAD = {
    "an empty file": (b"", "is empty"),
    "a text": (b"This is no model, but it is long enough.", "is no ONNX model"),
    "half a model": (mlp().SerializeToString()[:50_000], "is no ONNX model, or is truncated"),
    "a message without a graph": (onnx.ModelProto(ir_version=8).SerializeToString(), "has no graph"),
    "no outputs": (changed(lambda m: m.graph.ClearField("output")), "has no outputs"),
    "no opset": (changed(lambda m: m.ClearField("opset_import")), "is not valid ONNX"),
    "no IR version": (changed(lambda m: m.ClearField("ir_version")), "is not valid ONNX"),
    "an IR version of the future": (changed(lambda m: setattr(m, "ir_version", 999)), "is not valid ONNX"),
    "an operator that does not exist": (
        changed(lambda m: setattr(m.graph.node[0], "op_type", "Rlu")),
        "is not valid ONNX: No Op registered for Rlu",
    ),
    "a value that nothing produces": (
        two_relus("x", "h", "nope", "y").SerializeToString(),
        "is not valid ONNX",
    ),
    "nodes in a cycle": (two_relus("y", "h", "h", "y").SerializeToString(), "is not valid ONNX"),
    "two nodes with one output": (two_relus("x", "y", "x", "y").SerializeToString(), "is not valid ONNX"),
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
    "two weights of one name": (changed(twice_the_same), "has two initializers named 'w'"),
    "a weight without name": (
        changed(lambda m: m.graph.initializer.append(numpy_helper.from_array(np.float32([1])))),
        "has an initializer without name",
    ),
    "a sparse weight beyond its shape": (
        changed(lambda m: m.graph.sparse_initializer.append(sparse([1], [9], [2, 2], "s"))),
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
        load_onnx(path)
    text = str(error.value)
    assert text.startswith(f"{path}: ")
    assert message in text
    assert "\n" not in text
    with pytest.raises(ModelError, match=r"^model: "):
        load_onnx(content)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ModelError, match=r"nope\.onnx: there is no such file$"):
        load_onnx(tmp_path / "nope.onnx")


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ModelError, match=r"is a folder; give the \.onnx file in it$"):
        load_onnx(tmp_path)


def test_a_file_below_a_file(tmp_path):
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(ModelError, match="cannot be read: Not a directory"):
        load_onnx(tmp_path / "f" / "m.onnx")


@pytest.mark.parametrize("seed", range(40))
def test_flipped_bytes_give_a_graph_or_an_error_of_ours(seed):
    rng = np.random.default_rng(seed)
    content = bytearray(if_model().SerializeToString())
    for position in rng.integers(len(content), size=3):
        content[position] = rng.integers(256)
    with contextlib.suppress(FerroflowError):
        assert isinstance(load_onnx(bytes(content)), Graph)
