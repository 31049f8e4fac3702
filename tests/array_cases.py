"""Ops for the kernels of the provider `array`, in all versions and dtypes that it says it is right for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from onnx import TensorProto, helper

from ferroflow_dask.kernels.array.provider import _TABLE

FLOATS = ("float16", "float32", "float64")
INTEGERS = ("int8", "int32", "int64", "uint8", "uint64")
PLAIN = ("float32", "int64", "uint8", "bool")
SHAPES = ((2, 3), (), (0, 3))


class Case(NamedTuple):
    """An op with operands; `truth` is where `onnx.reference` is wrong."""

    name: str
    op_type: str
    values: tuple[Any, ...]
    attributes: dict[str, Any]
    versions: tuple[int, ...]
    n_outputs: int = 1
    truth: str = "reference"


def case(name: str, op_type: str, *values: Any, **attributes: Any) -> Case:
    known = tuple(sorted(_TABLE["", op_type]))
    since, until = attributes.pop("since", 1), attributes.pop("until", 99)
    more = {key: attributes.pop(key) for key in ("n_outputs", "truth") if key in attributes}
    versions = tuple(version for version in known if since <= version <= until)
    return Case(f"{op_type}: {name}", op_type, values, attributes, versions, **more)


def draw(shape: tuple[int, ...], dtype: str, seed: int = 3) -> Any:
    """Values of which some are negative, where the dtype has any, and few are equal."""
    values = 4 * np.random.default_rng(seed).standard_normal(shape)
    if dtype == "bool":
        return np.asarray(values > 0)
    return np.asarray(np.abs(values) if dtype.startswith("u") else values).astype(dtype)


def ints(*values: int) -> Any:
    return np.array(values, np.int64)


def all_cases() -> Iterator[Case]:
    for family in (_functions, _arithmetic, _choices, _reductions, _normalizations, _convolutions):
        yield from family()
    for family in (_pools, _products, _layouts, _slices, _pads, _constants):
        yield from family()


def _functions() -> Iterator[Case]:
    signed = (*FLOATS, "int32", "int64")
    table: dict[str, tuple[str, ...]] = {"Relu": signed, "Neg": signed, "Abs": (*FLOATS, *INTEGERS)}
    table |= dict.fromkeys(("Sqrt", "Exp", "Log", "Reciprocal", "Floor", "Ceil", "Tanh", "Sigmoid"), FLOATS)
    table |= dict.fromkeys(
        ("Erf", "LeakyRelu", "Elu", "HardSigmoid", "HardSwish", "Softplus", "Gelu"), FLOATS
    )
    for op_type, dtypes in table.items():
        for dtype in dtypes:
            for shape in SHAPES:
                yield case(f"{dtype} {shape}", op_type, draw(shape, dtype))
    ties = np.float32([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 2.4, -np.inf])
    for dtype in FLOATS:
        yield case(f"halves to even, {dtype}", "Round", ties.astype(dtype))
    x = draw((3, 4), "float32")
    yield case("far out", "Sigmoid", np.float32([-200, -20, 0, 20, 200]))
    yield case("far out", "Softplus", np.float32([-200, -20, 0, 20, 80]))
    yield case("a slope", "LeakyRelu", x, alpha=0.3)
    yield case("alpha", "Elu", x, alpha=2.5)
    yield case("a slope and an offset", "HardSigmoid", x, alpha=0.6, beta=0.4)
    yield case("by tanh", "Gelu", x, approximate="tanh")


def _arithmetic() -> Iterator[Case]:
    pairs = (((2, 1, 3), (4, 1)), ((), ()), ((2, 3), ()), ((0, 1), (1, 3)))
    for op_type in ("Add", "Sub", "Mul", "Max", "Min"):
        for dtype in (*FLOATS, *INTEGERS):
            for a, b in pairs:
                yield case(f"{dtype} {a} {b}", op_type, draw(a, dtype), draw(b, dtype, 5))
    for dtype in FLOATS:
        for a, b in pairs:
            yield case(f"{dtype} {a} {b}", "Div", draw(a, dtype), draw(b, dtype, 5))
    dividends, divisors = [7, -7, 7, -7, 6, -6, 0], [2, 2, -2, -2, -3, -3, 5]
    for dtype in ("int8", "int32", "int64"):
        yield case(f"cuts {dtype}", "Div", np.array(dividends, dtype), np.array(divisors, dtype))
    yield case("unsigned", "Div", np.uint8([7, 200, 6]), np.uint8([2, 3, 7]))
    yield case("large", "Div", ints(-(2**62) - 1, 2**62 + 1), ints(2, -2))
    for fmod in (0, 1):
        for dtype in ("int8", "int32", "int64"):
            values = np.array(dividends, dtype), np.array(divisors, dtype)
            yield case(f"{dtype}, fmod {fmod}", "Mod", *values, fmod=fmod)
        yield case(f"unsigned, fmod {fmod}", "Mod", np.uint8([7, 200, 6]), np.uint8([2, 3, 7]), fmod=fmod)
    for dtype in ("int32", "int64"):
        yield case(f"{dtype}", "Pow", np.array([3, -2, 0, 7], dtype), np.array([4, 5, 0, 1], dtype))
    yield case("exact", "Pow", ints(3, 2, -2), ints(39, 62, 63))
    yield case("of a byte", "Pow", ints(3, -2), np.uint8([3, 9]), since=12)
    base, x = np.abs(draw((2, 3), "float32")), draw((2, 3), "float32")
    for dtype in FLOATS:
        yield case(f"{dtype}", "Pow", base.astype(dtype), draw((3,), dtype, 5))
    yield case("of an integer exponent", "Pow", x, ints(2, 3, -1), since=12)
    yield case("of a double exponent", "Pow", base, np.float64([0.5, 2, -1]), since=12)
    yield case("a slope for each column", "PRelu", x, np.float32([0.1, 0.2, 0.3]))
    yield case("integers", "PRelu", draw((2, 3), "int32"), np.array(3, np.int32), since=9)
    for op_type in ("Max", "Min", "Sum", "Mean"):
        yield case("three that broadcast", op_type, x, draw((3,), "float32", 5), draw((2, 1), "float32", 7))
        yield case("one", op_type, x)
    yield case("halves", "Mean", draw((3,), "float16"), draw((3,), "float16", 5))
    yield case("NaN", "Max", np.float32([1, np.nan]), np.float32([np.nan, 1]))
    yield case("doubles", "Sum", x.astype(np.float64), x.astype(np.float64))


def _choices() -> Iterator[Case]:
    for op_type in ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"):
        for dtype in ("float32", "int64", "uint8", "float16"):
            yield case(dtype, op_type, draw((2, 3), dtype), draw((3,), dtype, 3))
    a, b = np.array([[True], [False]]), np.array([True, False])
    yield case("booleans", "Equal", a, b)
    for op_type in ("And", "Or", "Xor"):
        yield case("broadcast", op_type, a, b)
    yield case("a matrix", "Not", a)
    for dtype in PLAIN:
        yield case(dtype, "Where", a, draw((3,), dtype), draw((2, 3), dtype, 5))
    x = draw((3, 4), "float32")
    low, high = np.float32(-1), np.float32(2)
    yield case("both bounds", "Clip", x, min=-1.0, max=2.0, until=6)
    yield case("one bound", "Clip", x, max=0.5, until=6)
    yield case("both bounds", "Clip", x, np.asarray(low), np.asarray(high), since=11)
    yield case("crossed bounds", "Clip", x, np.asarray(high), np.asarray(low), since=12)
    yield case("lower", "Clip", x, np.asarray(low), since=11)
    yield case("upper", "Clip", x, None, np.asarray(high), since=11)
    yield case("no bounds", "Clip", x, since=11)
    yield case(
        "infinity is beyond the default", "Clip", np.float32([np.inf, -np.inf]), since=11, truth="onnxruntime"
    )
    yield case("integers", "Clip", draw((5,), "int8"), None, np.array(2, np.int8), since=12)
    for dtype in PLAIN:
        for to in (
            TensorProto.FLOAT,
            TensorProto.FLOAT16,
            TensorProto.DOUBLE,
            TensorProto.INT32,
            TensorProto.BOOL,
        ):
            yield case(f"{dtype} to {to}", "Cast", draw((2, 3), dtype), to=to)
    yield case("narrower", "Cast", ints(300, -1, 127), to=TensorProto.INT8)
    yield case("what is no number is true", "Cast", np.float32([np.nan, 0.1, -0.0]), to=TensorProto.BOOL)


def _reductions() -> Iterator[Case]:
    for op_type in (
        "ReduceSum",
        "ReduceProd",
        "ReduceL1",
        "ReduceSumSquare",
        "ReduceMax",
        "ReduceMin",
        "ReduceMean",
        "ReduceL2",
    ):
        integers = () if op_type == "ReduceL2" else ("int32", "int64")
        for dtype in (*FLOATS, *integers):
            # Of squares of int32, onnx.reference makes int64: see test_deviations.py.
            if (op_type, dtype) != ("ReduceSumSquare", "int32"):
                yield from _reductions_of(op_type, dtype)
        yield case("a scalar", op_type, draw((), "float32"), keepdims=0)
    for op_type in ("ReduceMax", "ReduceMin"):
        yield case("booleans", op_type, np.array([[True, False], [True, True]]), ints(1), since=20)
    few = np.float32([[1, 3, 3], [2, 0, 0]])
    for op_type in ("ArgMax", "ArgMin"):
        for dtype in ("float32", "int64", "uint8"):
            yield case(f"{dtype}", op_type, few.astype(dtype), axis=1)
        yield case("dropped", op_type, few, axis=-1, keepdims=0, since=11)
        yield case("the first axis", op_type, few)
        for keepdims in (0, 1):
            yield case(f"the last of equals {keepdims}", op_type, few, axis=1, keepdims=keepdims,
                       select_last_index=1, since=12)  # fmt: skip


def _reductions_of(op_type: str, dtype: str) -> Iterator[Case]:
    x = draw((2, 3, 4), dtype) / np.array(2, dtype) if dtype in FLOATS else draw((2, 3, 4), dtype) % 3
    yield case(f"{dtype}, all dropped", op_type, x, keepdims=0)
    # From this version on, axes are an operand.
    since = 13 if op_type == "ReduceSum" else 18
    before: dict[str, Any] = {"until": since - 1}
    yield case(f"{dtype}, all", op_type, x, **before)
    yield case(f"{dtype}, two axes", op_type, x, axes=[0, 2], **before)
    yield case(f"{dtype}, one dropped", op_type, x, axes=[-1], keepdims=0, **{**before, "since": 11})
    after: dict[str, Any] = {"since": since}
    yield case(f"{dtype}, two given", op_type, x, ints(-1, 0), **after)
    yield case(f"{dtype}, given and dropped", op_type, x, ints(1), keepdims=0, **after)
    yield case(f"{dtype}, none given are all", op_type, x, ints(), **after)
    yield case(f"{dtype}, none on demand", op_type, x, ints(), noop_with_empty_axes=1, **after)
    if op_type != "ReduceMean":
        empty = draw((2, 0, 3), dtype)
        yield case(f"{dtype}, of nothing", op_type, empty, axes=[1], **before)
        yield case(f"{dtype}, of nothing given", op_type, empty, ints(1), keepdims=0, **after)


def _normalizations() -> Iterator[Case]:
    x = draw((2, 3, 4), "float32")
    for op_type in ("Softmax", "LogSoftmax"):
        for dtype in FLOATS:
            yield case(f"{dtype}", op_type, x.astype(dtype), since=13, truth="onnxruntime")
        yield case("an axis", op_type, x, axis=1, since=13)
        yield case(
            "large numbers", op_type, np.float32([[1e4, 1e4 - 1, -1e4]]), since=13, truth="onnxruntime"
        )
        for axis in (0, 1, 2):
            yield case(f"two dimensions, {axis}", op_type, x, axis=axis, until=11, truth="onnxruntime")
        yield case("by default from the second", op_type, x, until=11, truth="onnxruntime")
        yield case("empty", op_type, draw((0, 3), "float32"), axis=1, truth="onnxruntime")
    statistics = [np.abs(draw((3,), "float32", seed)) + 1 for seed in range(4)]
    for shape in ((2, 3), (2, 3, 4), (2, 3, 4, 5)):
        values = (draw(shape, "float32"), *statistics)
        yield case(f"{shape}", "BatchNormalization", *values, epsilon=0.1, truth="onnxruntime")
    halves = [value.astype(np.float16) for value in (x, *statistics)]
    yield case("halves", "BatchNormalization", *halves, since=14)
    for dtype in FLOATS:
        scale, bias = draw((4,), dtype, 5), draw((4,), dtype, 6)
        yield case(f"{dtype}", "LayerNormalization", x.astype(dtype), scale, bias, epsilon=1e-2)
    yield case("no bias", "LayerNormalization", x, draw((4,), "float32", 5))
    yield case("two axes", "LayerNormalization", x, draw((3, 4), "float32", 5), axis=1)
    channel = draw((3,), "float32", 5), draw((3,), "float32", 6)
    for shape in ((2, 3, 4), (2, 3, 4, 5)):
        yield case(f"{shape}", "InstanceNormalization", draw(shape, "float32"), *channel, epsilon=0.1)
    for size in (1, 3, 9):
        yield case(f"{size}", "LRN", draw((2, 5, 3, 3), "float32"), size=size, alpha=0.5, beta=0.7, bias=2.0,
                   truth="onnxruntime")  # fmt: skip


def _convolutions() -> Iterator[Case]:
    def conv(name: str, shape: tuple[int, ...], weight: tuple[int, ...], **attributes: Any) -> Case:
        values = [draw(shape, "float32"), draw(weight, "float32", 5) / 4]
        if attributes.pop("bias", False):
            values.append(draw(weight[:1], "float32", 6))
        return case(name, "Conv", *values, truth="onnxruntime", **attributes)

    yield conv("one axis", (2, 3, 9), (4, 3, 3), bias=True)
    yield conv("three axes", (1, 2, 5, 6, 7), (3, 2, 2, 3, 2), pads=[0, 1, 0, 1, 0, 1], strides=[1, 2, 2])
    yield conv("a point", (2, 3, 4, 5), (6, 3, 1, 1), bias=True)
    yield conv("points with a stride", (2, 3, 5, 5), (6, 3, 1, 1), strides=[2, 2])
    yield conv("points in groups", (2, 4, 3, 3), (6, 2, 1, 1), group=2)
    yield conv("padding", (2, 3, 6, 7), (4, 3, 3, 3), pads=[1, 1, 1, 1], bias=True, kernel_shape=[3, 3])
    yield conv("uneven padding", (2, 3, 6, 7), (4, 3, 3, 2), pads=[0, 1, 2, 0], strides=[2, 3])
    yield conv("dilation", (1, 2, 9, 9), (4, 2, 3, 3), dilations=[2, 3], pads=[1, 2, 1, 2])
    yield conv("groups", (2, 4, 5, 5), (6, 2, 3, 3), group=2, bias=True)
    yield conv("depthwise", (2, 6, 5, 5), (6, 1, 3, 3), group=6, pads=[1, 1, 1, 1])
    yield conv("depthwise, two maps each", (2, 3, 5, 5), (6, 1, 3, 3), group=3, strides=[2, 2])
    for how in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        for stride in (1, 2, 3):
            yield conv(f"{how} {stride}", (1, 2, 8, 7), (2, 2, 3, 4), auto_pad=how, strides=[stride, stride])
    for dtype in ("float16", "float64"):
        values = draw((1, 2, 5, 5), dtype), draw((3, 2, 3, 3), dtype, 5)
        yield case(dtype, "Conv", *values, pads=[1, 1, 1, 1])


def _pools() -> Iterator[Case]:
    x = draw((2, 3, 8, 7), "float32")
    shared: dict[str, dict[str, Any]] = {
        "plain": {"kernel_shape": [2, 3]},
        "strides": {"kernel_shape": [3, 3], "strides": [2, 2]},
        "padding": {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
        "uneven padding": {"kernel_shape": [3, 2], "strides": [2, 3], "pads": [0, 1, 2, 0]},
        "SAME_UPPER": {"kernel_shape": [3, 4], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
        "SAME_LOWER": {"kernel_shape": [3, 4], "strides": [2, 3], "auto_pad": "SAME_LOWER"},
        "VALID": {"kernel_shape": [3, 4], "strides": [2, 2], "auto_pad": "VALID"},
        "round up": {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1},
        "round up far": {"kernel_shape": [2, 2], "strides": [3, 4], "ceil_mode": 1, "pads": [1, 1, 1, 1]},
    }
    for op_type in ("MaxPool", "AveragePool"):
        for name, attributes in shared.items():
            since = 10 if "ceil_mode" in attributes else 1
            yield case(name, op_type, x, truth="onnxruntime", since=since, **attributes)
        yield case("one axis", op_type, x[:, :, 0], kernel_shape=[3], truth="onnxruntime")
        yield case(
            "three axes", op_type, x.reshape(1, 2, 3, 8, 7), kernel_shape=[2, 3, 2], truth="onnxruntime"
        )
        since = 10 if op_type == "MaxPool" else 19
        yield case(
            "dilation", op_type, x, kernel_shape=[3, 2], dilations=[2, 3], since=since, truth="onnxruntime"
        )
        yield case("halves", op_type, x.astype(np.float16), kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    yield case("bytes", "MaxPool", draw((1, 2, 5), "int8"), kernel_shape=[2], pads=[1, 1], since=12,
               truth="onnxruntime")  # fmt: skip
    yield case("what is no number", "MaxPool", np.float32([[[np.nan, 1, np.nan, 2]]]), kernel_shape=[2])
    for name in ("padding", "uneven padding", "SAME_UPPER"):
        yield case(
            f"{name} counts", "AveragePool", x, truth="onnxruntime", count_include_pad=1, **shared[name]
        )
    for name in ("round up", "round up far"):
        attributes = {"count_include_pad": 1, "since": 19, **shared[name]}
        yield case(f"{name}, padding counts", "AveragePool", x, truth="onnxruntime", **attributes)
    for op_type in ("GlobalAveragePool", "GlobalMaxPool"):
        for dtype in FLOATS:
            yield case(dtype, op_type, x.astype(dtype))
        yield case("one axis", op_type, x[:, :, 0], truth="onnxruntime")


def _products() -> Iterator[Case]:
    for dtype in (*FLOATS, "int32", "uint64"):
        yield case(dtype, "MatMul", draw((2, 1, 3, 4), dtype), draw((5, 4, 2), dtype, 5))
    for dtype in FLOATS:
        a, b, c = draw((3, 4), dtype), draw((4, 5), dtype, 5), draw((5,), dtype, 6)
        yield case(f"{dtype}", "Gemm", a, b, c)
        yield case(
            f"{dtype}, all that there is", "Gemm", a.T, b.T, c, transA=1, transB=1, alpha=0.5, beta=2.0
        )
    yield case("no C", "Gemm", draw((3, 4), "float32"), draw((4, 5), "float32"), alpha=2.0, since=11)
    c = np.full(5, np.nan, np.float32)
    yield case("C does not count", "Gemm", draw((3, 4), "float32"), draw((4, 5), "float32"), c, beta=0.0)
    yield case("C is a scalar", "Gemm", draw((3, 4), "float32"), draw((4, 5), "float32"), draw((), "float32"))
    three = draw((2, 3, 4), "float32"), draw((2, 4, 5), "float32", 5)
    yield case("matrices", "Einsum", *three, equation="bij, bjk -> bik")
    yield case("implicit", "Einsum", *three, equation="bij,bjk")
    yield case("ellipsis", "Einsum", *three, equation="...ij,...jk->...ki")
    yield case("a diagonal", "Einsum", draw((3, 3), "float64"), equation="ii->i")
    yield case("a sum", "Einsum", draw((3, 4), "int64"), equation="ij->i")


def _layouts() -> Iterator[Case]:
    for dtype in PLAIN:
        x = draw((2, 3, 4), dtype)
        yield case(dtype, "Identity", x)
        yield case(dtype, "Reshape", x, ints(0, -1, 2))
        yield case(dtype, "Transpose", x, perm=[2, 0, 1])
        yield case(dtype, "Concat", x, x[:, :1], x, axis=1)
        yield case(dtype, "Gather", x, ints(2, 0, 1, 1), axis=1)
        yield case(dtype, "Expand", x, ints(5, 1, 1, 4))
        yield case(dtype, "Tile", x, ints(1, 2, 3))
    x, ones = draw((2, 3, 4), "float32"), draw((1, 3, 1, 1), "float32")
    yield case("to a scalar", "Reshape", draw((1, 1), "float32"), ints())
    yield case("nothing", "Reshape", draw((0, 3), "float32"), ints(3, 0), allowzero=1, since=14)
    yield case("zeros keep", "Reshape", x, ints(0, 0, 2, 2), allowzero=0, since=14)
    yield case("backwards", "Transpose", x)
    yield case("a scalar", "Transpose", draw((), "float32"))
    for axis in (0, 1, 2, 3):
        yield case(f"{axis}", "Flatten", x, axis=axis)
    yield case("from the end", "Flatten", x, axis=-1, since=11)
    yield case("nothing", "Flatten", draw((0, 3), "float32"), truth="onnxruntime")
    yield case("all", "Squeeze", ones)
    yield case("two", "Squeeze", ones, axes=[0, 2], until=11)
    yield case("from the end", "Squeeze", ones, axes=[-1], since=11, until=11)
    yield case("given", "Squeeze", ones, ints(0, -1), since=13)
    yield case("two", "Unsqueeze", x, axes=[0, 3], until=11)
    yield case("given", "Unsqueeze", x, ints(-1, 0), since=13)
    yield case("a scalar", "Unsqueeze", draw((), "float32"), ints(0), since=13)
    yield case("from the end", "Concat", x, x, axis=-1, since=11)
    yield case("one", "Concat", x, axis=0)
    yield case("equal parts", "Split", x, axis=2, n_outputs=2)
    yield case("sizes", "Split", x, axis=1, split=[1, 2], n_outputs=2, until=11)
    yield case("sizes given", "Split", x, ints(3, 1), axis=-1, n_outputs=2, since=13)
    yield case("a shorter last", "Split", draw((7,), "float32"), num_outputs=3, n_outputs=3, since=18)
    yield case("an empty part", "Split", draw((2,), "float32"), ints(0, 2), n_outputs=2, since=13)
    yield case("a matrix of places", "Gather", x, np.int32([[0, 1], [1, 0]]))
    yield case("a scalar drops the axis", "Gather", x, np.array(1), axis=-1)
    yield case("from the end", "Gather", x, ints(-1, -3), axis=1, since=11)
    yield case("fewer axes", "Expand", x, ints(1))
    yield case("more axes", "Expand", draw((3, 1), "float32"), ints(2, 1, 6))
    yield case("inference", "Dropout", x, truth="onnxruntime")
    yield case("a mask", "Dropout", x, n_outputs=2, since=12)
    yield case("a ratio", "Dropout", x, np.array(0.3, np.float32), np.array(False), since=12, n_outputs=2)


def _slices() -> Iterator[Case]:
    x = draw((5, 6), "float32")
    yield case("attributes", "Slice", x, starts=[1, -4], ends=[4, 1000], axes=[0, 1], until=1)
    yield case("first axes", "Slice", x, starts=[1], ends=[-1], until=1)
    least, most = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    table = {
        "all": ((1, 2), (4, 5), (0, 1), (1, 1)),
        "the second axis from its end": ((-4,), (-1,), (-1,), (1,)),
        "steps": ((0, 5), (5, 0), (0, 1), (2, -2)),
        "backwards beyond both ends": ((most,), (least,), (1,), (-1,)),
        "backwards, not to the first": ((-1,), (-5,), (1,), (-1,)),
        "nothing": ((4,), (2,), (0,), (1,)),
        "beyond the end": ((7,), (most,), (0,), (1,)),
    }
    for name, steering in table.items():
        yield case(name, "Slice", x, *map(np.int64, steering), since=10)
    yield case("short indices", "Slice", x, np.int32([1]), np.int32([4]), since=10)
    yield case("no axes", "Slice", x, ints(1, 1), ints(3, 3), since=10)
    yield case("bytes", "Slice", draw((4,), "uint8"), ints(1), ints(3), since=10)


def _pads() -> Iterator[Case]:
    x = draw((3, 4), "float32")
    for mode in ("constant", "reflect", "edge"):
        yield case(mode, "Pad", x, pads=[1, 2, 0, 1], mode=mode, until=2)
        yield case(mode, "Pad", x, ints(1, 2, 0, 1), mode=mode, since=11)
    yield case("a value", "Pad", x, pads=[0, 1, 1, 0], value=1.5, until=2)
    yield case("a value", "Pad", x, ints(0, 1, 1, 0), np.array(1.5, np.float32), since=11)
    yield case("cuts", "Pad", x, ints(-1, 1, 0, -2), since=11, truth="onnxruntime")
    yield case("axes", "Pad", x, ints(1, 2), None, ints(-1), since=18)
    for dtype in ("int64", "bool", "float64"):
        yield case(dtype, "Pad", draw((2, 2), dtype), ints(1, 0, 0, 1), draw((), dtype), since=13)


def _constants() -> Iterator[Case]:
    for dtype in PLAIN:
        x = draw((2, 0, 3), dtype)
        yield case(dtype, "Shape", x)
        yield case(dtype, "Size", x)
    x = draw((2, 3, 4, 5), "float32")
    for start, end in ((1, 3), (-2, 9), (3, 1), (-9, -1)):
        yield case(f"{start} {end}", "Shape", x, start=start, end=end, since=15)
    yield case("from an axis on", "Shape", x, start=2, since=15)
    tensor = helper.make_tensor("t", TensorProto.INT32, [2], [3, 4])
    yield case("a tensor", "Constant", value=tensor)
    yield case("a float", "Constant", value_float=0.1, since=12)
    yield case("floats", "Constant", value_floats=[0.1, 2.0], since=12)
    yield case("an integer", "Constant", value_int=3, since=12)
    yield case("integers", "Constant", value_ints=[3, 4], since=12)
    yield case("zeros", "ConstantOfShape", ints(2, 3))
    yield case("a scalar", "ConstantOfShape", ints())
    yield case(
        "a value", "ConstantOfShape", ints(2, 0), value=helper.make_tensor("t", TensorProto.INT64, [1], [7])
    )
