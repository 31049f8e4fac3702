"""The operators of ferroflow's own domain against what they stand for in ONNX."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from agreement import assert_same
from kernel_cases import normal_from, op_of
from models import model_of, reference
from onnx import helper

from ferroflow_dask.exceptions import KernelError
from ferroflow_dask.graph import FERROFLOW_DOMAIN
from ferroflow_dask.kernels import compile_op

normal = normal_from(seed=0)


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
