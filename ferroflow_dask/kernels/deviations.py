"""Where onnxruntime computes something else than ONNX describes, or ends the process: others do it then.

Some of that shows in an operator's attributes, some in operands. Of ops in a session with others only a model
is there to look at: there, an op is taken for what it should not be until types, ranks or constants say
otherwise. Seen in onnxruntime 1.20 to 1.23.

Left as they are, since other kernels would be slower: ReduceMax, ReduceMin, ArgMax, ArgMin and Hardmax where
operands have NaN, and Sign of NaN in half precision. There, a result may depend on who computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.graph.protos import domain_from_name, nested_nodes, subgraphs, subgraphs_of_node
from ferroflow_dask.kernels.provider import DeclinedError, WrongOperandsError
from ferroflow_dask.kernels.types import Types, infer, pin_ranks

#: Values of `auto_pad` that leave the padding to the operator.
_SAME = ("SAME_UPPER", b"SAME_UPPER", "SAME_LOWER", b"SAME_LOWER")

#: Dividing the least integer of these by -1 is a signal that ends the process; smaller ones are widened.
_TRAPS = frozenset(map(np.dtype, ("int32", "int64")))

#: Done in double precision, and cut to the range of the integers instead of wrapped around.
_IN_DOUBLE = frozenset(("ReduceSum", "ReduceL1", "ReduceMean", "ReduceProd", "ReduceSumSquare"))

#: Operators whose results follow ONNX for some types, ranks or constants only.
_DEPENDS = _IN_DOUBLE | {"Div", "Mod", "Pow", "Concat", "Gemm", "Squeeze", "NonZero", "Unique"}

#: What they make are sizes and places.
_COUNTS = ("Shape", "Size", "ArgMax", "ArgMin", "NonZero")
#: What they make are elements of their first operand.
_SAME_ELEMENTS = frozenset(
    ("Slice", "Gather", "Squeeze", "Unsqueeze", "Identity", "Reshape", "Transpose", "Split", "Expand")
)

#: What tells the rank of their results are values, or their operands' dimensions.
_OPEN_RANK = frozenset(
    ("Reshape", "Expand", "Squeeze", "Unsqueeze", "ConstantOfShape", "GatherND", "SequenceAt", "AffineGrid")
)

#: Constants below this are no larger than sizes are.
_COUNT_MOST = 2**31 - 1

#: No tensor has as many axes.
_RANK_MOST = 64

#: Ranks that follow from ranks that were pinned before, one after another.
_PASSES = 16


def differs(op: Op) -> bool:
    """Return whether an op's attributes, or those of an op in its sub-graphs, show that results differ."""
    return _differs(op) or any(
        _differs(_op_of(node)) for graph in subgraphs(op.attributes) for node in nested_nodes(graph.node)
    )


def _differs(op: Op) -> bool:
    if op.domain:
        return False
    match op.op_type:
        case "BatchNormalization":
            return any(op.outputs[1:])  # training: may write what it learns over what it was given
        case "DFT" | "STFT":
            return True  # errors of 1e-4 where zeros belong
        case "Dropout":
            return len(op.inputs) > 2  # training: another generator of random numbers
        case "MaxPool" | "AveragePool" | "LpPool":
            # Pads as if there were no dilation.
            pads_by_itself = op.attributes.get("auto_pad") in _SAME
            return pads_by_itself and any(step > 1 for step in op.attributes.get("dilations", ()))
        case "MaxUnpool":
            return len(op.inputs) > 2  # takes indices in the shape before padding
        case "Resize":
            # Aligns the rounded, not the exact size.
            return op.attributes.get("coordinate_transformation_mode") in ("align_corners", b"align_corners")
        case "Attention":
            return len(op.outputs) > 3 and bool(op.outputs[3])  # masks the products at another stage
    return False


def _op_of(node: onnx.NodeProto) -> Op:
    attributes = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
    domain = domain_from_name(node.domain)
    return Op(0, node.name, node.op_type, tuple(node.input), tuple(node.output), domain, attributes)


def check_operands(op: Op, feeds: Mapping[str, np.ndarray[Any, np.dtype[Any]]]) -> None:
    """Raise for operands of an op that is computed by itself.

    Raises
    ------
    WrongOperandsError
        ONNX does not know such an op, but a session whose shapes are not declared takes it for another.
    DeclinedError
        Another provider has the result.
    """
    if op.domain or op.op_type not in _DEPENDS:
        return
    given = [feeds.get(name) for name in op.inputs]
    dtypes = [np.dtype("?") if value is None else value.dtype for value in given]
    match op.op_type:
        case "Gemm" if any(feeds[name].ndim != 2 for name in op.inputs[:2]):
            raise WrongOperandsError("Gemm takes matrices")  # vectors would pass
        case "Concat" if len({array.ndim for array in feeds.values()}) > 1:
            raise WrongOperandsError(
                "Concat takes operands of one rank"
            )  # where one is empty, it ends the process
        case "Squeeze" if len(given) > 1 and given[1] is not None and not given[1].size:
            raise DeclinedError("an empty list of axes means all to onnxruntime")
        case "Div" | "Mod" if dtypes[0] in _TRAPS:
            raise DeclinedError("onnxruntime ends the process where the least integer is divided by -1")
        case "Pow" if all(dtype.kind in "iu" for dtype in dtypes):
            raise DeclinedError("onnxruntime computes powers of integers in double precision")
        case "NonZero" if given[0] is not None and not given[0].ndim:
            raise DeclinedError("onnxruntime takes a scalar for a list of one")
        case "Unique" if given[0] is not None and dtypes[0].kind == "f" and np.isnan(given[0]).any():
            raise DeclinedError("onnxruntime takes NaN for a number")
        case kind if kind in _IN_DOUBLE and dtypes[0].kind in "iu":
            raise DeclinedError("onnxruntime reduces integers in double precision")


def reads_ranks(op: Op) -> bool:
    """Return whether `deviation` must know the ranks of an op's operands."""
    return not op.domain and op.op_type in ("Concat", "NonZero")


def rank_of_results(op: Op) -> str:
    """Return where the rank of an op's results comes from, as in `segments.Member`."""
    if op.op_type in _OPEN_RANK:
        return "follows" if "axes" in op.attributes else "open"
    is_given = op.op_type in ("Conv", "ConvTranspose", "Flatten") or "perm" in op.attributes
    return "given" if is_given else "follows"


def deviation(model: onnx.ModelProto, constants: Mapping[str, Any] | None = None) -> str:
    """Return the operator of an op whose result may not be what ONNX describes; nothing if all are right.

    Parameters
    ----------
    model : ModelProto
        Its sub-graphs are looked at, too.
    constants : mapping of str to array, optional
        Values that the model has as inputs, or as initializers without data.
    """
    if not any(_depends(node) for node in nested_nodes(model.graph.node)):
        return ""
    found = ""
    # Of what comes after them nothing can be inferred: a model with such operators is taken for a valid one
    # of floating-point numbers, unless something is known.
    hides_types = any(domain_from_name(node.domain) for node in nested_nodes(model.graph.node))
    for _ in range(_PASSES):
        model = infer(model)
        types = Types.of(model.graph, constants or {})
        found = _first_deviation(model.graph, types, hides_types)
        if not found or not pin_ranks(model.graph, types):
            break
    return found


def _depends(node: onnx.NodeProto) -> bool:
    return not domain_from_name(node.domain) and node.op_type in _DEPENDS


def _first_deviation(graph: onnx.GraphProto, types: Types, hides_types: bool) -> str:
    for node in graph.node:
        if _depends(node) and _deviates(node, types, hides_types):
            return str(node.op_type)
        for inner in subgraphs_of_node(node):
            if found := _first_deviation(inner, types.within(inner), hides_types):
                return found
    return ""


def _deviates(node: onnx.NodeProto, types: Types, hides_types: bool) -> bool:
    """Return whether a node may not compute what ONNX describes, by what is known of its operands."""
    operands = list(node.input)
    first, second = (*operands, "", "")[:2]
    usual = np.dtype(np.float32) if hides_types else None
    dtype = types.dtype(first) or usual
    ranks = {types.rank(name) for name in operands}
    if hides_types:
        ranks.discard(None)
    match node.op_type:
        case "Gemm":
            return not {types.rank(name) for name in operands[:2]} <= ({2, None} if hides_types else {2})
        case "Concat":
            return len(operands) > 1 and (None in ranks or len(ranks) > 1)
        case "Squeeze":
            return bool(second) and not types.length(second)
        case "Div" | "Mod":
            if dtype is not None and dtype not in _TRAPS:
                return False
            divisor = types.constant(second)
            is_safe = divisor is not None and not (divisor == -1).any()
            return not (is_safe or _is_count(first, types))
        case "Pow":
            known = [types.dtype(name) or usual for name in operands]
            return all(one is None or one.kind in "iu" for one in known)
        case "NonZero":
            return not ranks <= {*range(1, _RANK_MOST)}
        case "Unique":
            return dtype is None or dtype.kind == "f"
    # A reduction: what is no larger than sizes are, double precision holds exactly.
    return (dtype is None or dtype.kind in "iu") and not _is_count(first, types)


def _is_count(value: str, types: Types) -> bool:
    """Return whether integers are sizes, places, truth values or constants of that magnitude."""
    todo, seen = [value], set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        known = types.constant(name)
        if known is not None:
            is_large = known.dtype.kind not in "iu" or (np.abs(known.astype(np.float64)) >= _COUNT_MOST).any()
            if is_large:
                return False
            continue
        node = types.producer(name)
        if node is None or domain_from_name(node.domain):
            return False
        if node.op_type in _COUNTS:
            continue
        if node.op_type == "Concat":
            todo += node.input
        elif node.op_type in _SAME_ELEMENTS:
            todo.append(node.input[0])
        elif node.op_type == "Cast":
            dtype = types.dtype(node.input[0])
            if dtype is None or dtype.kind not in "biu":
                return False
            if dtype.kind != "b":
                todo.append(node.input[0])
        else:
            return False
    return True
