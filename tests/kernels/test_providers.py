"""Kernel providers and ferroflow's own operators against `onnx.reference`, or NumPy where that is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from agreement import assert_same
from kernel_cases import expected_of, normal_from, op_of
from models import model_of, reference
from onnx import TensorProto, helper

from ferroflow_dask.exceptions import KernelError, KernelNotFoundError
from ferroflow_dask.graph import FERROFLOW_DOMAIN
from ferroflow_dask.kernels import compile_op

normal = normal_from(seed=0)

SHAPES = {
    "MatMul": {
        "matrix by matrix": ((3, 4), (4, 5)),
        "batch by matrix": ((2, 3, 4), (4, 5)),
        "batches broadcast": ((2, 1, 3, 4), (5, 4, 2)),
        "vector by vector is a scalar": ((4,), (4,)),
        "vector by matrix": ((4,), (4, 3)),
        "batch by vector": ((2, 3, 4), (4,)),
        "no rows": ((0, 4), (4, 3)),
        "nothing to sum is zero": ((3, 0), (0, 2)),
    },
    "Relu": {"a scalar": ((),), "a matrix": ((3, 4),), "an empty one": ((0, 3),)},
    "Add": {
        "equal shapes": ((2, 3), (2, 3)),
        "a row to a matrix": ((2, 3), (3,)),
        "both broadcast": ((2, 1, 3), (4, 1)),
        "a scalar": ((2, 3), ()),
        "two scalars": ((), ()),
        "empty broadcast": ((0, 1), (1, 3)),
    },
}
DTYPES = ("float16", "float32", "float64", "int32", "int64")

#: What a provider has no kernel for; all else it must compute itself.
HAS_NONE = {("onnxruntime", "Relu", "int64")}


@pytest.mark.parametrize("provider", ["array", "onnxruntime", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("op_type", "shapes"),
    [pytest.param(op, s, id=f"{op} of {name}") for op, table in SHAPES.items() for name, s in table.items()],
)
def test_providers_agree_with_onnx(provider, dtype, op_type, shapes):
    rng = np.random.default_rng(5)  # its first numbers are no zeros when they are cut to integers
    values = [np.asarray(4 * rng.standard_normal(shape), dtype) for shape in shapes]
    for value in values:
        value.flags.writeable = False  # as they arrive from another worker
    op = op_of(op_type, values)
    kernel = compile_op(op, {"": 21}, [provider])
    expected = expected_of(op, {"": 21}, values)
    if (provider, op_type, dtype) in HAS_NONE:
        with pytest.raises(KernelNotFoundError):
            kernel(*values)
        kernel = compile_op(op, {"": 21})
    tolerance = 5e-3 if dtype == "float16" else 1e-5
    for _ in range(2):
        (actual,) = kernel(*values)
        assert_same(actual, expected[0], tolerance, tolerance)


BFLOAT16 = helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)
#: Of what the node tests of onnx lack: op_type, values, attributes, number of outputs, opset.
FURTHER: dict[str, tuple[Any, ...]] = {
    "Split of opset 11 by attribute": ("Split", [normal(6, 2)], {"axis": 0, "split": [1, 5]}, 2, 11),
    "Reshape of nothing": ("Reshape", [normal(0, 6), np.int64([2, 0])], {"allowzero": 1}),
    "Cast to bfloat16, which onnxruntime does not hand out": (
        "Cast",
        [normal(3)],
        {"to": TensorProto.BFLOAT16},
    ),
    "Cast to an 8-bit float keeps its dtype": ("Cast", [normal(3)], {"to": TensorProto.FLOAT8E4M3FN}, 1, 21),
    "Unique has as many results as there are values": ("Unique", [np.float32([2, 1, 2])], {}, 4),
    "SequenceConstruct": ("SequenceConstruct", [normal(2), normal(3)], {}),
    "GroupNormalization of bfloat16": (
        "GroupNormalization",
        [normal(1, 4, 2).astype(BFLOAT16), *[np.ones(4, BFLOAT16)] * 2],
        {"num_groups": 2},
        1,
        21,
    ),
    "Relu in an opset newer than onnxruntime": ("Relu", [normal(3)], {}, 1, onnx.defs.onnx_opset_version()),
}


@pytest.mark.parametrize("case", FURTHER.values(), ids=FURTHER)
def test_operators_agree_with_onnx_reference(case):
    op_type, values, attributes, n_outputs, opset = (*case, *(1, 18)[len(case) - 3 :])
    op = op_of(op_type, values, n_outputs, **attributes)
    actual = compile_op(op, {"": opset})(*values)
    expected = expected_of(op, {"": opset}, values)
    assert len(actual) == len(expected) == n_outputs
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("providers", [None, ["array"], ["onnxruntime"], ["reference"]], ids=str)
def test_nothing_is_not_joined_to_what_has_other_axes(providers):
    values = np.zeros(0, np.float32), np.zeros((1, 1), np.float32)
    kernel = compile_op(op_of("Concat", values, axis=0), {"": 21}, providers)
    with pytest.raises(
        KernelError, match=r"^op 'it' \(Concat\) failed on \(float32\[0\], float32\[1, 1\]\): "
    ):
        kernel(*values)


def test_add_of_opset_6_is_left_to_others_since_it_does_not_broadcast():
    op = op_of("Add", [1, 2])
    with pytest.raises(KernelNotFoundError):
        compile_op(op, {"": 6}, ["array"])
    (actual,) = compile_op(op, {"": 6})(np.float32([1]), np.float32([2]))
    assert actual == 3


# ---------------------------------------------------------------- rounding of matrix products


def matmul_tolerance(a: Any, b: Any) -> Any:
    """Error bound of a product in single precision, that holds with a probability near 1 [units of a·b].

    4 √k u |a||b|, after Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019.
    """
    unit_roundoff = 2.0**-24
    wide = np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64))
    return 4 * np.sqrt(a.shape[-1]) * unit_roundoff * (wide[0] @ wide[1])


def as_tf32(x: Any) -> Any:
    """Cut the mantissa to 10 bits, as tensor cores do to their operands."""
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


@pytest.mark.parametrize("k", [16, 64, 512])
@pytest.mark.parametrize("provider", ["array", "onnxruntime", "reference"])
def test_matmul_is_done_in_full_single_precision(provider, k):
    a, b = normal(24, k), normal(k, 20)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    (actual,) = compile_op(op_of("MatMul", [a, b]), {"": 21}, [provider])(a, b)
    assert (np.abs(actual - exact) <= matmul_tolerance(a, b)).all()
    assert not (np.abs(as_tf32(a) @ as_tf32(b) - exact) <= matmul_tolerance(a, b)).all()


# ---------------------------------------------------------------- what onnx.reference gets wrong


def coerced_softmax(x: Any, axis: int) -> Any:
    """Softmax up to opset 12, from its text: coerced to two dimensions, normalised along the second."""
    flat = x.reshape(int(np.prod(x.shape[:axis])), -1).astype(np.float64)
    e = np.exp(flat - flat.max(axis=1, keepdims=True))
    return (e / e.sum(axis=1, keepdims=True)).reshape(x.shape)


@pytest.mark.parametrize("provider", ["array", "onnxruntime", "reference"])
@pytest.mark.parametrize("axis", [None, 1, 2, -1], ids=lambda axis: f"axis {axis}")
@pytest.mark.parametrize("shape", [(2, 3, 2, 2), (1, 5, 1, 1)], ids=str)
@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax", "Hardmax"])
def test_softmax_before_opset_13_works_on_two_dimensions(provider, op_type, shape, axis):
    x = normal(*shape)
    attributes = {} if axis is None else {"axis": axis}
    expected = coerced_softmax(x, 1 if axis is None else axis % len(shape))
    if op_type == "LogSoftmax":
        expected = np.log(expected)
    elif op_type == "Hardmax":
        flat = expected.reshape(int(np.prod(shape[: 1 if axis is None else axis % len(shape)])), -1)
        expected = (flat == flat.max(axis=1, keepdims=True)).reshape(shape)
    # `array` has no Hardmax.
    (actual,) = compile_op(op_of(op_type, [x], **attributes), {"": 9}, [provider, "reference"])(x)
    assert_same(actual, expected.astype(np.float32))


@pytest.mark.parametrize("provider", ["array", "onnxruntime", "reference"])
@pytest.mark.parametrize("opset", [7, 9, 13, 14, 15])
def test_batch_normalization_uses_the_given_statistics(provider, opset):
    x, scale, bias, mean, variance = normal(2, 3, 4), *(np.abs(normal(3)) + 1 for _ in range(4))
    op = op_of("BatchNormalization", [x, scale, bias, mean, variance], epsilon=0.1)
    (actual,) = compile_op(op, {"": opset}, [provider])(x, scale, bias, mean, variance)
    per_channel = (x.transpose(0, 2, 1) - mean) / np.sqrt(variance + 0.1) * scale + bias
    assert_same(actual, per_channel.transpose(0, 2, 1).astype(np.float32))


@pytest.mark.parametrize("provider", ["array", "onnxruntime", "reference"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_lrn_sums_over_neighbouring_channels_of_every_sample(provider, size):
    x = normal(2, 5, 3, 4)
    expected = np.empty_like(x)
    for c in range(5):
        # From the operator's text: max(0, c - floor((size - 1) / 2)) to min(C - 1, c + ceil((size - 1) / 2)).
        near = slice(max(0, c - (size - 1) // 2), min(4, c + -(-(size - 1) // 2)) + 1)
        expected[:, c] = x[:, c] / (2 + 0.5 / size * (x[:, near] ** 2).sum(axis=1)) ** 0.7
    op = op_of("LRN", [x], alpha=0.5, beta=0.7, bias=2.0, size=size)
    (actual,) = compile_op(op, {"": 13}, [provider, "reference"])(x)  # onnxruntime declines even sizes
    assert_same(actual, expected)


@pytest.mark.parametrize("provider", ["array", "onnxruntime", "reference"])
def test_logsoftmax_does_not_underflow(provider):
    (actual,) = compile_op(op_of("LogSoftmax", [1]), {"": 13}, [provider])(np.float32([[0, 200]]))
    np.testing.assert_allclose(actual, [[-200, 0]])


@pytest.mark.parametrize("onesided", [None, 0, 1])
@pytest.mark.parametrize("window", [None, np.hanning(16).astype(np.float32)], ids=["", "with a window"])
@pytest.mark.parametrize("length", [None, np.array(16)], ids=["", "with a length"])
@pytest.mark.parametrize("shape", [(2, 64), (2, 64, 1)], ids=["samples", "samples as columns"])
@pytest.mark.parametrize("providers", [None, ["onnxruntime"], ["reference"]], ids=str)
def test_a_spectrum_is_computed_of_signals_with_or_without_an_axis_of_parts(
    shape, length, window, onesided, providers
):
    if window is None and length is None:
        length = np.array(20)
    signal = normal_from(seed=3)(*shape)
    values = [signal, np.array(8), window, length]
    attributes = {} if onesided is None else {"onesided": onesided}
    (found,) = compile_op(op_of("STFT", values, **attributes), {"": 17}, providers)(*values)
    n = len(window) if length is None else int(length)
    starts = range(0, 64 - n + 1, 8)
    frames = np.stack([signal.reshape(2, 64)[:, at : at + n] for at in starts], axis=1)
    frames = frames if window is None else frames * window
    expected = np.fft.fft(frames) if onesided == 0 else np.fft.rfft(frames)
    np.testing.assert_allclose(found[..., 0] + 1j * found[..., 1], expected, atol=1e-4)
    assert found.dtype == np.float32


def composed(*nodes: onnx.NodeProto, **values: Any) -> Any:
    model = model_of(nodes, {}, ["y"], initializers=values)
    return reference(model, {})["y"]


@pytest.mark.parametrize("shape", [(4,), (3, 5), (2, 3, 8)], ids=str)
def test_layer_norm_is_layer_normalization_with_ones(shape):
    x = normal(*shape)
    node = helper.make_node("LayerNormalization", ["x", "ones"], ["y"], epsilon=1e-3)
    expected = composed(node, x=x, ones=np.ones(shape[-1], np.float32))
    op = op_of("LayerNorm", [x], domain=FERROFLOW_DOMAIN, epsilon=1e-3)
    assert_same(compile_op(op, {FERROFLOW_DOMAIN: 1})(x)[0], expected)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_layer_norm_keeps_its_dtype(dtype):
    x = np.asarray(1000 + normal(2, 64), dtype)
    (y,) = compile_op(op_of("LayerNorm", [x], domain=FERROFLOW_DOMAIN), {})(x)
    assert y.dtype == dtype
    assert np.isfinite(y).all()
    np.testing.assert_allclose(y.astype(np.float64).std(axis=-1), 1, rtol=1e-2)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("seq", "seq2", "heads"), [(3, 3, 1), (3, 5, 2), (4, 2, 8)])
def test_head_matmul_is_reshape_transpose_matmul(dtype, seq, seq2, heads):
    d, tolerance = 8, 1e-2 if dtype == "float16" else 1e-5
    q, k = normal(seq, d).astype(dtype), normal(seq2, d).astype(dtype)
    split = {"q": q, "k": k, "shape": np.int64([0, heads, d // heads]), "merged": np.int64([0, d])}
    make = helper.make_node
    heads_of_k = make("Reshape", ["k", "shape"], ["ks"])
    scores = composed(
        make("Reshape", ["q", "shape"], ["qs"]), heads_of_k,
        make("Transpose", ["qs"], ["qt"], perm=[1, 0, 2]), make("Transpose", ["ks"], ["kt"], perm=[1, 2, 0]),
        make("MatMul", ["qt", "kt"], ["y"]), **split,
    )  # fmt: skip
    op = op_of("MatMul", [q, k], domain=FERROFLOW_DOMAIN, heads=heads, trans_b=1)
    assert_same(compile_op(op, {})(q, k)[0], scores, tolerance, tolerance)

    mixed = composed(
        heads_of_k, make("Transpose", ["ks"], ["kt"], perm=[1, 0, 2]), make("MatMul", ["s", "kt"], ["m"]),
        make("Transpose", ["m"], ["mt"], perm=[1, 0, 2]), make("Reshape", ["mt", "merged"], ["y"]),
        **split, s=scores,
    )  # fmt: skip
    op = op_of("MatMul", [scores, k], domain=FERROFLOW_DOMAIN, heads=heads, trans_b=0)
    assert_same(compile_op(op, {})(scores, k)[0], mixed, tolerance, tolerance)


@pytest.mark.parametrize(
    ("a", "b", "trans_b"),
    [
        pytest.param((3, 7), (3, 7), 1, id="columns that heads cannot share"),
        pytest.param((4, 3, 3), (3, 8), 0, id="scores of other heads"),
        pytest.param((2, 3, 4), (3, 8), 0, id="scores of another length"),
    ],
)
def test_head_matmul_refuses(a, b, trans_b):
    op = op_of("MatMul", [1, 2], domain=FERROFLOW_DOMAIN, heads=2, trans_b=trans_b)
    with pytest.raises(KernelError, match=r"'it' \(ferroflow.MatMul\) failed on \(float32\["):
        compile_op(op, {})(normal(*a), normal(*b))


def test_slow_sleeps_for_its_duration_and_passes_its_input_through(monkeypatch):
    slept = []
    monkeypatch.setattr("ferroflow_dask.kernels.synthetic.time.sleep", slept.append)
    x = normal(16)
    (y,) = compile_op(op_of("Slow", [x], domain=FERROFLOW_DOMAIN, duration=0.25), {})(x)
    assert y is x
    assert slept == [0.25]


def test_slow_returns_zeros_of_a_shape_that_it_is_given(monkeypatch):
    monkeypatch.setattr("ferroflow_dask.kernels.synthetic.time.sleep", lambda _: None)
    x = normal(16)
    op = op_of("Slow", [x, x], domain=FERROFLOW_DOMAIN, duration=0.25, shape=[2, 3], dtype="int64")
    (y,) = compile_op(op, {})(x, x)
    assert (y.shape, y.dtype, y.any()) == ((2, 3), "int64", False)
