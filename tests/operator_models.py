"""Models of random operators, made node by node: a node joins the model if onnxruntime computes it."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, defs, helper

OPSETS = tuple(range(7, 27))
#: Drawn at random, without tensors, or rewritten by `_wrapped`.
LEFT_OUT = {
    *("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    *("Dropout", "If", "Loop", "Scan", "SequenceMap", "Constant", "ImageDecoder", "Optional"),
    # Division by zero ends the process of onnxruntime; `tests/kernels/test_deviations.py` has these.
    *("Div", "Mod"),
}
DTYPES = ("float32",) * 8 + (
    *("int64",) * 3,
    *("float64", "float16", "int32", "bool", "uint8", "int8", "uint32", "int16", "uint64", "str"),
)
#: Attributes by name, whatever the operator.
CHOICES: dict[str, tuple[Any, ...]] = {
    "mode": (
        *("linear", "nearest", "cubic", "constant", "edge", "reflect", "wrap", "bilinear"),
        *("DCR", "CRD", "avg"),
    ),
    "coordinate_transformation_mode": (
        *("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel", "half_pixel_symmetric"),
        "output_half_pixel",
    ),
    "nearest_mode": ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
    "auto_pad": ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"),
    "direction": ("LEFT", "RIGHT", "forward", "reverse", "bidirectional"),
    "reduction": ("none", "add", "mul", "max", "min", "mean", "sum"),
    "padding_mode": ("zeros", "border", "reflection"),
    "approximate": ("none", "tanh"),
    "case_change_action": ("LOWER", "UPPER", "NONE"),
    "equation": ("ij->ji", "ij,jk->ik", "...i,...i->...", "ijk->k", "ii->i", "i,j->ij", "...ij,...jk->...ik"),
    "to": (1, 6, 7, 9, 10, 11, 8, 2, 3),
    "dtype": (1, 7, 11, 9),
    "output_datatype": (1, 11),
    "keep_aspect_ratio_policy": ("stretch", "not_larger", "not_smaller"),
    "stash_type": (1,),
    "pattern": ("[a-z]+", ".*1"),
    "delimiter": (" ", "a"),
}
#: Attributes that are 0 or 1; onnxruntime computes nothing with others, and says nothing.
FLAGS = {
    *("saturate", "keepdims", "fmod", "exclusive", "reverse", "largest", "sorted", "onesided", "inverse"),
    *("ceil_mode", "count_include_pad", "transA", "transB", "align_corners", "antialias", "upper", "layout"),
    *("exclude_outside", "storage_order", "select_last_index", "noop_with_empty_axes", "training_mode"),
    *("detect_negative", "detect_positive", "periodic", "linear_before_reset", "input_forget"),
    *("interleaved", "center_point_box", "is_case_sensitive", "allowzero", "new_axis", "is_causal"),
}
_LEAST, _MOST = -4, 5


class Maker:
    """Makes a model, node by node, with the values of all of its tensors.

    Parameters
    ----------
    seed : int
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.opset = self.rng.choice(OPSETS)
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: dict[str, Any] = {}
        self.constants: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        for i in range(self.rng.randint(2, 5)):
            self.inputs[f"x{i}"] = self.draw(self.rng.choice(DTYPES))
        self.values.update(self.inputs)
        names = {s.name for s in defs.get_all_schemas_with_history() if not s.domain} - LEFT_OUT
        self.operators = sorted(name for name in names if self.schema(name))

    def schema(self, name: str) -> Any:
        """Return an operator's schema in the opset of the model; None if there is none."""
        try:
            found = defs.get_schema(name, self.opset, "")
        except defs.SchemaError:
            return None
        return None if found.deprecated else found

    def draw(self, dtype: str, shape: tuple[int, ...] | None = None) -> Any:
        """Return a tensor."""
        if shape is None:
            rank = self.rng.choice((0, 1, 2, 2, 3, 3, 4, 4))
            shape = tuple(self.rng.choice((1, 2, 3, 3, 4)) for _ in range(rank))
        if dtype == "str":
            words = ["", "a", "b1", "a b", "Ä"]
            drawn = [self.rng.choice(words) for _ in range(math.prod(shape))]
            return np.array(drawn, object).reshape(shape)
        if np.dtype(dtype).kind == "f":
            return self.numbers.standard_normal(shape).astype(dtype)
        least = 0 if np.dtype(dtype).kind in "ub" else -2
        return np.asarray(self.numbers.integers(least, 4, shape)).astype(dtype)

    def like(self, name: str) -> str:
        """Return a value that may go with another one: of its type, mostly of its shape."""
        one = self.values[name]
        same = [n for n, v in self.values.items() if dtype_of(v) == dtype_of(one)]
        if self.rng.random() < 0.3 or not isinstance(one, np.ndarray):
            return self.rng.choice(same)
        shapes = [one.shape, one.shape[1:], one.shape[1:2], one.shape[-1:], one.shape[::-1], ()]
        return self.constant(self.draw(dtype_of(one), self.rng.choice(shapes)))

    def constant(self, value: Any) -> str:
        """Add a constant; some are inputs."""
        name = f"c{len(self.values)}"
        (self.constants if self.rng.random() < 0.7 else self.inputs)[name] = value
        self.values[name] = value
        return name

    def operand(self, formal: Any, first: str, bound: dict[str, str]) -> str:
        """Return a value for a formal input."""
        kind = formal.type_str
        if kind in bound:
            return self.like(bound[kind])
        types = {t[7:-1] for t in formal.types if t.startswith("tensor(")}
        numbers = {"int64", "int32"} & types
        if numbers and "float" not in types:
            size = getattr(self.values[first], "ndim", 1)
            length = self.rng.choice((size, size, 2 * size, 1, 1, 2))
            shape = self.rng.choice(((length,), (length,), ()))
            drawn = self.numbers.integers(self.rng.choice((_LEAST, 0, 0, 1, 1)), _MOST, shape)
            return self.constant(np.asarray(drawn, sorted(numbers)[-1]))
        names = [n for n, v in self.values.items() if _type(v) in formal.types]
        if names and self.rng.random() < 0.6:
            return self.rng.choice(names)
        known = sorted({_ONNX[t] for t in types if t in _ONNX})
        return self.constant(self.draw(self.rng.choice(known))) if known else ""

    def attribute(self, entry: Any, first: Any) -> Any:
        """Return a value of an attribute; None to leave it out."""
        rank = max(1, getattr(first, "ndim", 1))
        if not entry.required and self.rng.random() < 0.6:
            return None
        if entry.name == "axis":
            return self.rng.randint(-rank, rank - 1)
        if entry.name == "perm":
            return self.rng.sample(range(rank), rank)
        if entry.name in CHOICES:
            return self.rng.choice(CHOICES[entry.name])
        if entry.name in FLAGS:
            return self.rng.randint(0, 1)
        low = self.rng.randint(0, 1)
        match entry.type:
            case defs.OpSchema.AttrType.INT:
                return self.rng.choice((0, 1, 1, 2, 3, -1))
            case defs.OpSchema.AttrType.FLOAT:
                return self.rng.choice((0.0, 0.5, 1.0, 2.0, -0.75))
            case defs.OpSchema.AttrType.INTS if entry.name == "axes":
                return sorted(self.rng.sample(range(rank), self.rng.randint(1, rank)))
            case defs.OpSchema.AttrType.INTS:
                size = self.rng.choice((max(1, rank - 2), max(1, rank - 2), max(1, 2 * (rank - 2)), rank, 1))
                return [self.rng.randint(low, 3) for _ in range(size)]
        return None

    def step(self) -> bool:
        """Try to add a node; return whether onnxruntime computes it."""
        op = self.rng.choice(self.operators)
        schema = self.schema(op)
        fit = [n for n, v in self.values.items() if schema.inputs and _type(v) in schema.inputs[0].types]
        first = self.rng.choice(fit) if fit else next(iter(self.values))
        names, bound = [], {}
        for i, formal in enumerate(schema.inputs):
            if formal.option == defs.OpSchema.FormalParameterOption.Optional and self.rng.random() < 0.5:
                names.append("")
                continue
            is_many = formal.option == defs.OpSchema.FormalParameterOption.Variadic
            for _ in range(self.rng.randint(1, 3) if is_many else 1):
                names.append(first if not names and fit else self.operand(formal, first, bound))
                if names[-1] and (i == 0 or formal.is_homogeneous):
                    bound.setdefault(formal.type_str, names[-1])
        while names and not names[-1]:
            names.pop()
        value = self.values.get(names[0]) if names else None
        if names and names[0] and self.rng.random() < 0.7:
            self._fit(op, names)
        attributes = {k: self.attribute(entry, value) for k, entry in schema.attributes.items()}
        attributes = {k: v for k, v in attributes.items() if v is not None}
        n = self.rng.randint(schema.min_output, min(schema.max_output, 3))
        outputs = [f"v{len(self.nodes)}_{i}" for i in range(n)]
        made = helper.make_node(op, names, outputs, f"{op}_{len(self.nodes)}", **attributes)
        return self._add(made) and self._wrap(made)

    def _fit(self, op: str, names: list[str]) -> None:
        """Give operands whose shapes depend on each other such shapes."""
        x = self.values[names[0]]
        if not isinstance(x, np.ndarray):
            return
        shapes: dict[int, tuple[int, ...]] = {}
        channels = x.shape[1] if x.ndim > 1 else 1
        match op:
            case "Conv" | "ConvTranspose" | "ConvInteger":
                k = tuple(self.rng.randint(1, 3) for _ in x.shape[2:])
                shapes[1] = (2, channels, *k) if op[-1] != "e" else (channels, 2, *k)
                shapes[2] = () if op == "ConvInteger" else (2,)
            case "Gemm" | "MatMul" | "MatMulInteger":
                shapes[1] = (x.shape[-1] if x.ndim else 1, 3)
            case "BatchNormalization" | "InstanceNormalization" | "GroupNormalization":
                shapes = dict.fromkeys(range(1, 5), (channels,))
            case "LSTM" | "GRU" | "RNN" if x.ndim == 3:
                gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
                shapes = {1: (1, 3 * gates, x.shape[2]), 2: (1, 3 * gates, 3), 3: (1, 6 * gates)}
            case "GridSample" if x.ndim > 2:
                shapes[1] = (x.shape[0], *(3,) * (x.ndim - 2), x.ndim - 2)
            case "GatherElements" | "ScatterElements":
                shapes = {1: x.shape, 2: x.shape}
            case "STFT" | "DFT":
                shapes[1] = ()
        for i, shape in shapes.items():
            if i < len(names) and names[i] and isinstance(self.values[names[i]], np.ndarray):
                names[i] = self.constant(self.draw(dtype_of(self.values[names[i]]), shape))

    def _add(self, made: onnx.NodeProto) -> bool:
        """Add a node if onnxruntime computes it."""
        read = {n: self.values[n] for n in made.input if n}
        found = by_onnxruntime(self.model_of([made], read, list(made.output), {}), read)
        if found is None or any(isinstance(v, np.ndarray) and v.size > 5000 for v in found):
            return False
        self.nodes.append(made)
        self.values.update(zip(made.output, found, strict=True))
        return True

    def _wrap(self, made: onnx.NodeProto) -> bool:
        """Put the last node inside another one, once in a while."""
        outputs = [n for n in made.output if isinstance(self.values[n], np.ndarray)]
        if self.rng.random() > 0.15 or len(outputs) != len(made.output):
            return True
        inner = [f"{name}_in" for name in outputs]
        copy = onnx.NodeProto()
        copy.CopyFrom(made)
        copy.output[:] = inner
        infos = [
            helper.make_tensor_value_info(n, _number(self.values[o]), None)
            for n, o in zip(inner, outputs, strict=True)
        ]
        outer = [f"{name}_out" for name in outputs]
        if self.rng.random() < 0.5:
            condition = self.constant(np.array(self.rng.random() < 0.5))
            body = helper.make_graph([copy], "branch", [], infos)
            node = helper.make_node("If", [condition], outer, then_branch=body, else_branch=body)
        else:
            go = helper.make_tensor_value_info("go_on", TensorProto.BOOL, [])
            trip = helper.make_tensor_value_info("trip", TensorProto.INT64, [])
            same = helper.make_node("Identity", ["go_on"], ["go_out"])
            gone = helper.make_tensor_value_info("go_out", TensorProto.BOOL, [])
            body = helper.make_graph([same, copy], "body", [trip, go], [gone, *infos])
            node = helper.make_node("Loop", [self.constant(np.int64(2)), ""], outer, body=body)
        node.name = f"{node.op_type}_of_{made.name}"
        read = {n: self.values[n] for n in {*made.input, *node.input} if n}
        found = by_onnxruntime(self.model_of([node], read, outer, {}), read)
        if found is not None:
            self.nodes[-1] = node
            for name in made.output:
                del self.values[name]
            self.values.update(zip(outer, found, strict=True))
        return True

    def model_of(
        self, nodes: list[onnx.NodeProto], read: dict[str, Any], outputs: list[str], constants: dict[str, Any]
    ) -> onnx.ModelProto:
        """Return a model of some nodes."""
        inputs = [_info(name, value, self.rng.random() < 0.3) for name, value in read.items()]
        tensors = [onnx.numpy_helper.from_array(v, n) for n, v in constants.items()]
        known = self.values
        told = [
            helper.make_tensor_value_info(n, _number(known[n]), [None] * known[n].ndim)
            if isinstance(known.get(n), np.ndarray)
            else onnx.ValueInfoProto(name=n)
            for n in outputs
        ]
        graph = helper.make_graph(nodes, "g", inputs, told, tensors)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)

    def model(self) -> tuple[onnx.ModelProto, dict[str, Any]]:
        """Return the model, and inputs for it."""
        made = [n for node in self.nodes for n in node.output]
        outputs = [n for n in made if n == made[-1] or self.rng.random() < 0.3]
        used = {n for node in self.nodes for n in names_read(node)}
        inputs = {n: v for n, v in self.inputs.items() if n in used}
        constants = {n: v for n, v in self.constants.items() if n in used}
        return self.model_of(self.nodes, inputs, outputs, constants), inputs


_ONNX = {
    **{name: name for name in ("float16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")},
    "uint64": "uint64",
    "float": "float32",
    "double": "float64",
    "bool": "bool",
    "string": "str",
}


def names_read(node: onnx.NodeProto) -> set[str]:
    """Return what a node and those inside it read."""
    inner = (n for a in node.attribute if a.HasField("g") for one in a.g.node for n in names_read(one))
    return {*node.input, *inner}


def dtype_of(value: Any) -> str:
    """Return the name of a value's dtype; nothing if it has none."""
    dtype = getattr(value, "dtype", None)
    return "" if dtype is None else "str" if dtype.kind in "OU" else dtype.name


def _type(value: Any) -> str:
    """Return a value's type as schemas have it."""
    names = {v: k for k, v in _ONNX.items()}
    if isinstance(value, list):
        return f"seq(tensor({names.get(dtype_of(value[0]), '')}))" if value else ""
    return f"tensor({names.get(dtype_of(value), '')})"


def _number(value: Any) -> int:
    if dtype_of(value) == "str":
        return int(TensorProto.STRING)
    return int(helper.np_dtype_to_tensor_dtype(value.dtype))


def _info(name: str, value: Any, is_open: bool) -> onnx.ValueInfoProto:
    if isinstance(value, list):
        return helper.make_tensor_sequence_value_info(name, _number(value[0]), None)
    shape = [f"{name}_{i}" if is_open else size for i, size in enumerate(value.shape)]
    return helper.make_tensor_value_info(name, _number(value), shape)


def by_onnxruntime(model: onnx.ModelProto, inputs: dict[str, Any]) -> list[Any] | None:
    """Return what onnxruntime computes; None if it does not."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        return list(onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, inputs))
    except Exception:  # noqa: BLE001 -- its errors have no base of their own
        return None
