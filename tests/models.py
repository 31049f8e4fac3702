"""Models for tests: small ones built here, and those that come with the onnx package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator


def light_models() -> list[Path]:
    """Paths of the published architectures whose weights are `ConstantOfShape` nodes."""
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    return sorted(folder.glob("light_*.onnx"))


def randomize(model: onnx.ModelProto, seed: int = 0) -> onnx.ModelProto:
    """Return a copy with every `ConstantOfShape` weight replaced by a seeded random initializer.

    Weights are scaled as in He et al., "Delving Deep into Rectifiers", 2015. The last layer is then fitted
    to data, as in Mishkin and Matas, "All You Need Is a Good Init", 2015: what all inputs have in common is
    taken out, and what tells two inputs apart gets unit deviation. So no softmax is saturated.
    """
    rng = np.random.default_rng(seed)
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    known = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    scales = _scales(graph)
    values, kept = {}, []
    for node in graph.node:
        if node.op_type == "ConstantOfShape" and node.input[0] in known:
            shape = tuple(known[node.input[0]].tolist())
            values[node.output[0]] = _weight(rng, shape, node.output[0] in scales)
        else:
            kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)
    # First as inputs that are fed: a session is made much faster of a model without them.
    (entry,) = (entry for entry in graph.input if entry.name not in known)
    graph.input.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape) for name, value in values.items()
    )
    _fit_last_layer(result, rng, entry, values)
    if result.ir_version >= 4:  # before, initializers had to be listed as inputs too
        del graph.input[len(graph.input) - len(values) :]
    for name, value in values.items():
        graph.initializer.add(
            name=name, data_type=TensorProto.FLOAT, dims=value.shape, raw_data=value.tobytes()
        )
    return result


def _scales(graph: onnx.GraphProto) -> set[str]:
    """Return the weights that multiply activations one by one, and must not make them vanish."""
    factors = {name for node in graph.node if node.op_type == "Mul" for name in node.input}
    scales = {
        node.input[0] for node in graph.node if node.op_type == "Unsqueeze" and node.output[0] in factors
    }
    for node in graph.node:
        if node.op_type == "BatchNormalization":
            scales.update((node.input[1], node.input[4]))
    return scales


def _fit_last_layer(
    model: onnx.ModelProto,
    rng: np.random.Generator,
    entry: onnx.ValueInfoProto,
    weights: dict[str, np.ndarray[Any, Any]],
) -> None:
    last = [node for node in model.graph.node if node.op_type in ("Gemm", "Conv")][-1]
    shape = [dim.dim_value for dim in entry.type.tensor_type.shape.dim]
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    del probe.graph.output[:]
    probe.graph.output.append(helper.make_empty_tensor_value_info(last.output[0]))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(probe.SerializeToString(), options)
    used = {value.name for value in session.get_inputs()} & set(weights)
    fed = {name: weights[name] for name in used}
    images = [rng.standard_normal(shape, np.float32) for _ in range(2)]
    results = [session.run(None, {**fed, entry.name: image})[0] for image in images]
    scale = 1 / (results[0] - results[1]).std()
    common = np.mean(results, axis=(0, 1, *range(3, results[0].ndim + 1)))
    producers = {node.output[0]: node for node in model.graph.node}
    weight, bias = last.input[1:]
    while weight not in weights:  # one model reshapes its weight first
        weight = producers[weight].input[0]
    for name, shift in ((weight, np.float32(0)), (bias, common)):
        weights[name] = ((weights[name] - shift) * scale).astype(np.float32)


def _weight(rng: np.random.Generator, shape: tuple[int, ...], is_scale: bool) -> np.ndarray[Any, Any]:
    if is_scale:
        return rng.uniform(0.8, 1.2, shape).astype(np.float32)
    if len(shape) < 2:
        return (0.1 * rng.standard_normal(shape)).astype(np.float32)
    fan_in = int(np.prod(shape[1:]))
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(np.sqrt(2 / fan_in))


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, tuple[int, Sequence[int | str | None] | None]],
    outputs: Sequence[str],
    *,
    initializers: dict[str, Any] | None = None,
    opset: int = 18,
    domains: dict[str, int] | None = None,
    ir_version: int = 9,
    **fields: Any,
) -> onnx.ModelProto:
    """Return a model; `inputs` maps names to (element type, shape), outputs are left without type."""
    graph = helper.make_graph(
        list(nodes),
        "test",
        [helper.make_tensor_value_info(name, *entry) for name, entry in inputs.items()],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (initializers or {}).items()],
    )
    imports = [helper.make_opsetid("", opset)]
    imports += [helper.make_opsetid(domain, version) for domain, version in (domains or {}).items()]
    model = helper.make_model(graph, opset_imports=imports, ir_version=ir_version, **fields)
    # The checker wants types of outputs; what ONNX infers saves writing them down.
    inferred = {v.name: v for v in onnx.shape_inference.infer_shapes(model, data_prop=True).graph.output}
    for output in model.graph.output:
        if inferred[output.name].type.WhichOneof("value"):
            output.CopyFrom(inferred[output.name])
    return model


def mlp(seed: int = 0, hidden: int = 32) -> onnx.ModelProto:
    """Return a perceptron of three layers, [batch, 784] → [batch, 10], opset 18."""
    rng = np.random.default_rng(seed)
    sizes = (784, hidden, hidden, 10)
    nodes, initializers, value = [], {}, "x"
    for layer in range(3):
        weight, bias = f"w{layer}", f"b{layer}"
        initializers[weight] = _weight(rng, (sizes[layer + 1], sizes[layer]), is_scale=False)
        initializers[bias] = _weight(rng, (sizes[layer + 1],), is_scale=False)
        result = "y" if layer == 2 else f"h{layer}"
        nodes.append(helper.make_node("Gemm", [value, weight, bias], [result], f"gemm{layer}", transB=1))
        value = result
        if layer < 2:
            nodes.append(helper.make_node("Relu", [value], [f"a{layer}"], f"relu{layer}"))
            value = f"a{layer}"
    return model_of(nodes, {"x": (TensorProto.FLOAT, ("batch", 784))}, ["y"], initializers=initializers)


def if_model() -> onnx.ModelProto:
    """Return y = a + w if c, else a - b; w is an initializer of the branch, a is captured at depth two."""

    def branch(name: str, *nodes: onnx.NodeProto, **extra: Any) -> onnx.GraphProto:
        return helper.make_graph(
            list(nodes),
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, [2])],
            **extra,
        )

    weight = numpy_helper.from_array(np.float32([10, 20]), "w")
    deep = branch("deep", helper.make_node("Add", ["a", "w"], ["deep_out"]))
    other = branch("other", helper.make_node("Identity", ["b"], ["other_out"]))
    nested = helper.make_node("If", ["c"], ["then_out"], then_branch=deep, else_branch=other)
    then = branch("then", nested, initializer=[weight])
    otherwise = branch("otherwise", helper.make_node("Sub", ["a", "b"], ["otherwise_out"]))
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Neg", ["x"], ["b"]),
        helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=otherwise),
    ]
    return model_of(nodes, {"x": (TensorProto.FLOAT, [2]), "c": (TensorProto.BOOL, [])}, ["y"])


def sparse_tensor(values: Any, indices: Any, dims: list[int], name: str = "") -> onnx.SparseTensorProto:
    """Return a tensor that is zero but for `values` at `indices`, flat ones or coordinates."""
    return helper.make_sparse_tensor(
        numpy_helper.from_array(np.float32(values), name), numpy_helper.from_array(np.int64(indices)), dims
    )


def reference(model: onnx.ModelProto, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the outputs of a model by name, as `onnx.reference` computes them."""
    names = [output.name for output in model.graph.output]
    return dict(zip(names, ReferenceEvaluator(model).run(None, inputs), strict=True))


def convolution() -> onnx.ModelProto:
    """Return a small convolutional network, [2, 3, 8, 8] → [2, 5]."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["n"]),
        helper.make_node("Relu", ["n"], ["r"]),
        helper.make_node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "g"], ["y"]),
    ]
    shapes = {"w": (4, 3, 3, 3), "s": (4,), "b": (4,), "m": (4,), "g": (64, 5)}
    weights: dict[str, Any] = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    weights["v"] = rng.random(4, np.float32)
    return model_of(nodes, {"x": (TensorProto.FLOAT, (2, 3, 8, 8))}, ["y"], initializers=weights)
