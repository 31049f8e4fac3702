"""Every kernel provider against `onnx.reference`: one contract for all of them, to full precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from agreement import assert_same
from kernel_cases import expected_of, normal_from, op_of
from onnx import TensorProto, helper

from ferroflow_dask.exceptions import KernelError, KernelNotFoundError
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
#: Of what the node tests of onnx lack, or have results that are no arrays: op_type, values, attributes,
#: number of outputs, opset.
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
    "SplitToSequence": ("SplitToSequence", [normal(4, 3)], {"axis": 0}),
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


@pytest.mark.parametrize("provider", ["array", "onnxruntime", "reference"])
def test_infinities_and_nan_are_results_without_a_warning(provider):
    big = np.float32([3e38, np.inf, np.nan, -0.0])
    (actual,) = compile_op(op_of("Add", [big, big]), {"": 21}, [provider])(big, big)
    np.testing.assert_array_equal(actual, np.float32([np.inf, np.inf, np.nan, 0.0]))


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
