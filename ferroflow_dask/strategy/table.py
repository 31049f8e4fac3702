"""Table of splits: the rule of each operator that can be split. All others stay whole."""

from __future__ import annotations

from collections.abc import Callable

from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import FERROFLOW_DOMAIN, Op
from ferroflow_dask.strategy import layout, products, windows
from ferroflow_dask.strategy.spaces import Space
from ferroflow_dask.strategy.view import View, WholeError, view_of

# fmt: off
_ELEMENTWISE = (
    "Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BitwiseAnd",
    "BitwiseNot", "BitwiseOr", "BitwiseXor", "BitShift", "Cast", "Ceil", "Celu", "Clip", "Cos",
    "Cosh", "Div", "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater", "GreaterOrEqual",
    "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less", "LessOrEqual",
    "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pow",
    "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus",
    "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tan", "Tanh", "ThresholdedRelu", "Where", "Xor",
)
# fmt: on

_RULES: dict[tuple[str, str], Callable[[View], Space]] = {
    **{("", name): layout.elementwise for name in _ELEMENTWISE},
    ("", "ArgMax"): layout.reduce(None),
    ("", "ArgMin"): layout.reduce(None),
    ("", "Attention"): products.attention,
    ("", "AveragePool"): windows.pool,
    ("", "BatchNormalization"): layout.batch_normalization,
    ("", "Concat"): layout.concat,
    ("", "Conv"): windows.conv,
    ("", "ConvTranspose"): windows.conv_transpose,
    ("", "Dropout"): layout.dropout,
    ("", "Einsum"): products.einsum,
    ("", "Expand"): layout.expand,
    ("", "Flatten"): layout.reshape,
    ("", "GRU"): products.lstm,
    ("", "Gather"): products.embedding,
    ("", "GatherElements"): products.gather_elements,
    ("", "Gemm"): products.gemm,
    ("", "GlobalAveragePool"): windows.global_pool,
    ("", "GlobalLpPool"): windows.global_pool,
    ("", "GlobalMaxPool"): windows.global_pool,
    ("", "InstanceNormalization"): layout.instance_normalization,
    ("", "LRN"): layout.lrn,
    ("", "LSTM"): products.lstm,
    ("", "LayerNormalization"): layout.layer_normalization,
    ("", "LogSoftmax"): layout.softmax,
    ("", "LpNormalization"): layout.along_axis(-1),
    ("", "LpPool"): windows.pool,
    ("", "MatMul"): products.matmul,
    ("", "MaxPool"): windows.pool,
    ("", "Pad"): layout.same_dims,
    ("", "RMSNormalization"): layout.layer_normalization,
    ("", "RNN"): products.lstm,
    ("", "ReduceL1"): layout.reduce("Add"),
    ("", "ReduceL2"): layout.reduce(None),
    ("", "ReduceLogSum"): layout.reduce(None),
    ("", "ReduceLogSumExp"): layout.reduce(None),
    ("", "ReduceMax"): layout.reduce("Max"),
    ("", "ReduceMean"): layout.reduce(None),
    ("", "ReduceMin"): layout.reduce("Min"),
    ("", "ReduceProd"): layout.reduce("Mul"),
    ("", "ReduceSum"): layout.reduce("Add"),
    ("", "ReduceSumSquare"): layout.reduce("Add"),
    ("", "Reshape"): layout.reshape,
    ("", "Slice"): layout.same_dims,
    ("", "Softmax"): layout.softmax,
    ("", "Split"): layout.split,
    ("", "Squeeze"): layout.reshape,
    ("", "Tile"): layout.same_dims,
    ("", "Transpose"): layout.transpose,
    ("", "Unsqueeze"): layout.reshape,
    (FERROFLOW_DOMAIN, "LayerNorm"): layout.along_axis(-1),
    (FERROFLOW_DOMAIN, "MatMul"): products.head_matmul,
}


def splittable() -> list[str]:
    """Return the operators that can be split, as `Op.kind` writes them."""
    return sorted(f"{domain}.{name}" if domain else name for domain, name in _RULES)


def space_of(op: Op, graph: Graph) -> Space | str:
    """Return how an operator can be split, or why it stays whole.

    Parameters
    ----------
    op : Op
    graph : Graph
        Shapes must be known; see `with_shapes`.
    """
    rule = _RULES.get((op.domain, op.op_type))
    if rule is None:
        return f"{op.kind} has no rule"
    try:
        return rule(view_of(op, graph))
    except WholeError as error:
        return str(error)
    except (IndexError, ValueError, TypeError, KeyError):
        return "its shapes do not fit its attributes"  # as running it will tell
