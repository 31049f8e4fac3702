"""The provider `array`: every kernel in every version, on NumPy's arrays and on some that hide values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from agreement import assert_same
from array_cases import all_cases
from kernel_cases import expected_of, normal_from, op_of
from models import light_models, randomize
from strict_arrays import StrictArray, values_of

from ferroflow_dask.devices.emulated import EmulatedDevice
from ferroflow_dask.devices.runner import DeviceRunner
from ferroflow_dask.exceptions import KernelError, KernelNotFoundError
from ferroflow_dask.graph import Graph, graph_from_onnx
from ferroflow_dask.kernels import compile_op, evaluate, make_plan
from ferroflow_dask.kernels.array import ArrayProvider
from ferroflow_dask.kernels.array.libraries import erf, sliding_windows
from ferroflow_dask.kernels.array.provider import _TABLE

CASES = list(all_cases())

normal = normal_from(seed=0)
provider = ArrayProvider()


#: Operators whose results are on the host wherever their operands are: others need them there.
STEERING = ("Shape", "Size", "Constant", "ConstantOfShape")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kernel_agrees_with_onnx_and_never_looks_at_values_that_may_be_on_a_device(case):
    op = op_of(case.op_type, case.values, case.n_outputs, **case.attributes)
    on_host = provider.host_operands(op)
    strict = [
        value if value is None or i in on_host else StrictArray(value) for i, value in enumerate(case.values)
    ]
    n_checked = 0
    for version in case.versions:
        kernel = compile_op(op, {"": version}, ["array"])
        actual = kernel(*case.values)
        for one, other in zip(kernel(*strict), actual, strict=True):
            assert isinstance(one, np.ndarray if case.op_type in STEERING else StrictArray)
            assert_same(values_of(one), other, 0, 0)
        try:
            with np.errstate(all="ignore"):
                if case.truth == "onnxruntime":
                    expected = compile_op(op, {"": version}, ["onnxruntime"])(*case.values)
                else:
                    expected = expected_of(op, {"": version}, case.values)
        except KernelNotFoundError:
            continue  # older releases of onnxruntime lack the newest versions
        n_checked += 1
        half = any(getattr(value, "dtype", None) == np.float16 for value in (*case.values, *actual))
        assert_same(list(actual), list(expected), *((5e-3, 5e-3) if half else ()))
    assert n_checked


def test_there_is_a_case_of_every_operator_in_every_version():
    there_is = {(case.op_type, version) for case in CASES for version in case.versions}
    missing = [
        (op_type, version)
        for (domain, op_type), versions in _TABLE.items()
        for version in versions
        if not domain and (op_type, version) not in there_is
    ]
    assert not missing


FLOAT, INT = np.float32([1, 2]), np.int64([1, 2])


LEFT = {
    "a power of integers that is no integer": ("Pow", (INT, FLOAT), {}),
    "ONNX sums up no integers": ("Sum", (INT, INT), {}),
    "booleans have no sum": ("Add", (np.array([True]),) * 2, {}),
    "texts have no sum": ("Add", (np.array(["a"], object),) * 2, {}),
    "ONNX multiplies no bytes": ("MatMul", (np.ones((2, 2), np.int8),) * 2, {}),
    "a mean of nothing": ("ReduceMean", (INT[:0],), {}),
    "an axis of a scalar": ("ReduceSum", (FLOAT[0, ...], np.int64([0])), {}),
    "an axis of a scalar's extreme": ("ReduceMax", (FLOAT[0, ...], np.int64([0])), {}),
    "a place in a scalar": ("ArgMax", (FLOAT[0, ...],), {}),
    "logic of numbers": ("And", (INT, INT), {}),
    "a condition that is a number": ("Where", (INT, FLOAT, FLOAT), {}),
    "a bound for each": ("Clip", (FLOAT, FLOAT), {}),
    "a slope larger than x": ("PRelu", (FLOAT, np.ones((2, 2), np.float32)), {}),
    "places that are no integers": ("Gather", (FLOAT, FLOAT), {}),
    "a sequence": ("Identity", ([FLOAT],), {}),
    "a sequence of numbers": ("Relu", ([FLOAT],), {}),
    "text": ("Equal", (np.array(["a"], object),) * 2, {}),
    "training": ("Dropout", (FLOAT, np.float32(0.5), np.array(True)), {}),
    "a shape that is on a device": ("Reshape", (FLOAT, StrictArray(INT)), {}),
    "two ways to say how large": (
        "MaxPool",
        (np.ones((1, 1, 4), np.float32),),
        {"kernel_shape": [2], "auto_pad": "SAME_UPPER", "ceil_mode": 1},
    ),
    "four spatial axes": ("Conv", (np.ones((1, 1, 2, 2, 2, 2), np.float32),) * 2, {}),
    "cut edges": ("Pad", (np.ones((2, 2), np.float32), np.int64([-1, 0, 0, 0])), {"mode": "edge"}),
}


@pytest.mark.parametrize(("op_type", "values", "attributes"), LEFT.values(), ids=LEFT)
def test_values_that_it_is_not_right_for_are_left_to_others(op_type, values, attributes):
    kernel = compile_op(op_of(op_type, values, **attributes), {"": 22}, ["array"])
    with pytest.raises(KernelNotFoundError, match="'it'"):
        kernel(*values)


SENSELESS = {
    "weights of other channels": ("Conv", (normal(1, 3, 4, 4), normal(2, 2, 3, 3)), {}),
    "a window larger than the image": ("Conv", (normal(1, 3, 2, 2), normal(2, 3, 3, 3)), {}),
    "C larger than the product": ("Gemm", (normal(2, 3), normal(3, 4), normal(2, 2, 4)), {}),
    "an axis that is not one": ("Squeeze", (normal(2, 3), np.int64([0])), {}),
    "parts that are not all": ("Split", (normal(5), np.int64([2, 2])), {"n_outputs": 2}),
    "parts that are not equal": ("Split", (normal(5),), {"n_outputs": 2}),
    "an axis that is not there": ("Softmax", (normal(2, 3),), {"axis": 2}),
}


@pytest.mark.parametrize(("op_type", "values", "attributes"), SENSELESS.values(), ids=SENSELESS)
def test_values_that_make_no_sense_are_failures(op_type, values, attributes):
    op = op_of(op_type, values, **attributes)
    with pytest.raises(KernelError, match=f"'it' \\({op_type}\\) failed"):
        compile_op(op, {"": 13}, ["array"])(*values)


# ---------------------------------------------------------------- whole graphs


def architectures(*names: str) -> Any:
    paths = [path for path in light_models() if path.stem.removeprefix("light_") in names]
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


def with_an_image(path: Path) -> tuple[Graph, dict[str, Any]]:
    graph = graph_from_onnx(randomize(onnx.load(path), seed=1))
    (name,) = graph.inputs
    return graph, {name: np.random.default_rng(1).standard_normal((1, 3, 224, 224), np.float32)}


def assert_near(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


@architectures("squeezenet", "shufflenet", "inception_v1")
def test_an_architecture_runs_without_a_look_at_values(path):
    graph, image = with_an_image(path)
    values = {**graph.constants, **image}
    for op in graph.live_ops:
        on_host = provider.host_operands(op)
        operands = [
            values[name]
            if i in on_host or isinstance(values[name], StrictArray)
            else StrictArray(values[name])
            for i, name in enumerate(op.inputs)
        ]
        results = compile_op(op, graph.opsets, ["array"])(*operands)
        values.update(zip(op.outputs, results, strict=True))
    (expected,) = evaluate(graph, image, providers=["onnxruntime"]).values()
    assert_near(values_of(values[graph.outputs[0]]), expected)


@architectures("resnet50", "squeezenet")
def test_an_architecture_runs_on_a_device_alone(path):
    graph, image = with_an_image(path)
    given = {**graph.constants, **image}
    plan = make_plan(graph, list(graph.live_ops), list(given), list(graph.outputs))
    runner = DeviceRunner(EmulatedDevice(sleep=lambda seconds: None))
    (actual,) = runner.run(plan, list(given.values()), ["onnxruntime"], lambda *ended: None)
    (expected,) = evaluate(graph, image, providers=["onnxruntime"]).values()
    assert_near(actual.to_host(), expected)
    assert (runner.usage().host_ops, runner.usage().to_host) == (0, 1)


# ---------------------------------------------------------------- details


@pytest.mark.parametrize(("opset", "dtype"), [(7, np.float32), (10, bool), (12, bool)])
def test_in_inference_dropout_masks_nothing(opset, dtype):
    x = normal(2, 3)
    y, mask = compile_op(op_of("Dropout", [x], 2), {"": opset}, ["array"])(x)
    assert_same(y, x)
    assert_same(mask, np.ones((2, 3), dtype))


def test_samples_are_unrolled_a_few_at_a_time(monkeypatch):
    x, w = normal(5, 3, 6, 6), normal(4, 3, 3, 3)
    kernel = compile_op(op_of("Conv", [x, w]), {"": 22}, ["array"])
    (whole,) = kernel(x, w)
    per_sample = 3 * 9 * 16 * 4
    monkeypatch.setattr("ferroflow_dask.kernels.array.convolution._COLUMNS_MOST", 2 * per_sample)
    assert_same(kernel(x, w)[0], whole)
    assert kernel(x[:0], w)[0].shape == (0, 4, 4, 4)


def test_erf_is_exact_to_the_last_digits():
    # From Abramowitz and Stegun, "Handbook of Mathematical Functions", 1964, table 7.1.
    assert_same(
        erf(np.float64([0, 0.5, 1, -2])), np.float64([0, 0.5204998778, 0.8427007929, -0.9953222650]), 1e-10, 0
    )
    assert erf(np.zeros((0, 2), np.float32)).shape == (0, 2)


def test_the_windows_of_cupy_are_those_of_numpy(monkeypatch):
    import sys
    from types import ModuleType

    class ndarray(np.ndarray[Any, Any]):  # noqa: N801 - it stands for CuPy's
        __module__ = "cupy"

    tricks = ModuleType("cupy.lib.stride_tricks")
    tricks.as_strided = np.lib.stride_tricks.as_strided  # type: ignore[attr-defined]
    for name in ("cupy", "cupy.lib"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "cupy.lib.stride_tricks", tricks)
    x = normal(2, 3, 5, 6)
    expected = sliding_windows(x, (2, 3))
    assert expected.shape == (2, 3, 4, 4, 2, 3)
    assert_same(np.asarray(sliding_windows(x.view(ndarray), (2, 3))), np.asarray(expected), 0, 0)
