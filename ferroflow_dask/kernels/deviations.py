"""Where onnxruntime computes something else than ONNX describes, or ends the process: others do it then.

Some of that shows in an operator's attributes, some in operands. Of ops in a session with others only a model
is there to look at: there, an op is taken for what it should not be until types, ranks or constants say
otherwise. Seen in onnxruntime 1.20 to 1.23.

Left as they are, since other kernels would be slower: ReduceMax, ReduceMin, ArgMax, ArgMin and Hardmax where
operands have NaN, and Sign of NaN in half precision. There, a result may depend on who computes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

#: What onnxruntime does where the results of an operator depend on types, ranks or constants.
_REASONS = {
    **dict.fromkeys(_IN_DOUBLE, "integers are reduced in double precision"),
    **dict.fromkeys(("Div", "Mod"), "the process ends where the least integer is divided by -1"),
    **dict.fromkeys(("DFT", "STFT"), "single precision has errors of 1e-4 where zeros belong"),
    "Pow": "powers of integers are computed in double precision",
    "Concat": "operands of several ranks are taken",
    "Gemm": "operands that are no matrices are taken",
    "Squeeze": "an empty list of axes means all",
    "Unique": "NaN is taken for a number",
    "Resize": "align_corners aligns the rounded, not the exact size",
}

#: From this version on, onnxruntime no longer ends the process where operands of two ranks are joined.
_JOINS_RANKS = (1, 32)

#: What they make are sizes and places.
_COUNTS = ("Shape", "Size", "ArgMax", "ArgMin", "NonZero")
#: What they make are elements of their first operand.
_SAME_ELEMENTS = frozenset(
    ("Slice", "Gather", "Squeeze", "Unsqueeze", "Identity", "Reshape", "Transpose", "Split", "Expand")
)

#: What they make is not much larger than their operands.
_OF_ALL = ("Concat", "Add", "Sub", "Div", "Mod", "Min", "Max")

#: What tells the rank of their results are values, or their operands' dimensions.
_OPEN_RANK = frozenset(
    ("Reshape", "Expand", "Squeeze", "Unsqueeze", "ConstantOfShape", "GatherND", "SequenceAt", "AffineGrid")
)

#: Constants below this are no larger than sizes are.
_COUNT_MOST = 2**31 - 1

#: The place of the operand of Resize that has the sizes of the result.
_SIZES = 3

#: Ranks that follow from ranks that were pinned before, one after another.
_PASSES = 16


def differs(op: Op) -> str:
    """Return how results differ by an op's attributes, or by those of an op in its sub-graphs; "" if not."""
    inner = (node for graph in subgraphs(op.attributes) for node in nested_nodes(graph.node))
    found = (f"{node.op_type} inside: {reason}" for node in inner if (reason := _differs(_op_of(node))))
    return _differs(op) or next(found, "")


def _differs(op: Op) -> str:
    if op.domain:
        return ""
    match op.op_type:
        case "BatchNormalization":
            is_training = any(op.outputs[1:])
            return "training may write what it learns over what it was given" if is_training else ""
        case "Dropout" if len(op.inputs) > 2:
            return "training draws other random numbers"
        case "MaxPool" | "AveragePool" | "LpPool":
            pads_by_itself = op.attributes.get("auto_pad") in _SAME
            is_dilated = any(step > 1 for step in op.attributes.get("dilations", ()))
            return "auto_pad pads as if there were no dilation" if pads_by_itself and is_dilated else ""
        case "MaxUnpool" if len(op.inputs) > 2:
            return "indices are taken in the shape before padding"
        case "Attention" if len(op.outputs) > 3 and op.outputs[3]:
            return "products are masked at another stage"
    return ""


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
    if op.domain or op.op_type not in _REASONS:
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
        case "Squeeze":
            deviates = len(given) > 1 and given[1] is not None and not given[1].size
        case "Div" | "Mod":
            deviates = dtypes[0] in _TRAPS
        case "DFT" | "STFT":
            deviates = dtypes[0] != np.float64
        case "Pow":
            deviates = all(dtype.kind in "iu" for dtype in dtypes)
        case "Unique":
            deviates = given[0] is not None and dtypes[0].kind == "f" and bool(np.isnan(given[0]).any())
        case "Resize":
            scales = _scales(list(op.inputs), op.attributes)
            deviates = bool(scales) and not _is_exact(feeds[op.inputs[0]].shape, feeds.get(scales))
        case kind:
            deviates = kind in _IN_DOUBLE and dtypes[0].kind in "iu"
    if deviates:
        raise DeclinedError(f"in onnxruntime, {_REASONS[op.op_type]}")


def _scales(inputs: list[str], attributes: Mapping[str, Any]) -> str:
    """Return the operand that tells a Resize how large its result is, if corners are aligned by it."""
    if attributes.get("coordinate_transformation_mode") not in ("align_corners", b"align_corners"):
        return ""
    if len(inputs) > _SIZES and inputs[_SIZES]:
        return ""
    return inputs[_SIZES - 1] if len(inputs) >= _SIZES else ""


def _is_exact(sizes: Sequence[Any], scales: Any) -> bool:
    """Return whether scaled sizes are integers; sizes that are unknown are no numbers."""
    if scales is None or np.size(scales) != len(sizes):
        return scales is not None and not np.size(scales)
    return all(
        not scale % 1 or (isinstance(size, int) and not size * scale % 1)
        for size, scale in zip(sizes, np.asarray(scales).tolist(), strict=True)
    )


def reads_ranks(op: Op) -> bool:
    """Return whether `deviations` must know the ranks of an op's operands."""
    return not op.domain and op.op_type == "Concat"


def rank_of_results(op: Op) -> str:
    """Return where the rank of an op's results comes from, as in `segments.Member`."""
    if op.op_type in _OPEN_RANK:
        return "follows" if "axes" in op.attributes else "open"
    is_given = op.op_type in ("Conv", "ConvTranspose", "Flatten") or "perm" in op.attributes
    return "given" if is_given else "follows"


def deviations(model: onnx.ModelProto, constants: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the nodes whose results are not what ONNX describes, by name, each with the reason.

    Nodes inside of others count as these. Nothing is said of types and ranks that cannot be inferred, but
    where the process might end: no rule may cost speed on a suspicion.

    Parameters
    ----------
    model : ModelProto
        Its sub-graphs are looked at, too. Nodes have names of their own.
    constants : mapping of str to array, optional
        Values that the model has as inputs, or as initializers without data.
    """
    if not any(_depends(node) for node in nested_nodes(model.graph.node)):
        return {}
    found: dict[str, str] = {}
    for _ in range(_PASSES):
        model = infer(model)
        types = Types.of(model.graph, constants or {})
        found = _deviations(model.graph, types)
        if not found or not pin_ranks(model.graph, types):
            break
    return found


def _depends(node: onnx.NodeProto) -> bool:
    return not domain_from_name(node.domain) and node.op_type in _REASONS


def _deviations(graph: onnx.GraphProto, types: Types) -> dict[str, str]:
    found = {}
    for node in graph.node:
        if _depends(node) and _deviates(node, types):
            found[node.name] = _REASONS[node.op_type]
        for inner in subgraphs_of_node(node):
            for name, reason in _deviations(inner, types.within(inner)).items():
                found.setdefault(node.name, reason if " inside: " in reason else f"{name} inside: {reason}")
    return found


def _deviates(node: onnx.NodeProto, types: Types) -> bool:
    """Return whether a node does not compute what ONNX describes, by what is known of its operands."""
    operands = list(node.input)
    first, second = (*operands, "", "")[:2]
    # Values of which nothing is known are floating-point numbers in nearly all models.
    dtype = types.dtype(first) or np.dtype(np.float32)
    ranks = {types.rank(name) for name in operands}
    match node.op_type:
        case "Gemm":
            return not {types.rank(name) for name in operands[:2]} <= {2, None}
        case "Concat":
            known = ranks - {None}
            is_safe = None not in ranks or _joins_ranks()
            return len(operands) > 1 and (len(known) > 1 or not is_safe)
        case "Squeeze":
            return bool(second) and not types.length(second)
        case "Div" | "Mod":
            if dtype not in _TRAPS:
                return False
            divisor = types.constant(second)
            is_safe = divisor is not None and not (divisor == -1).any()
            return not (is_safe or _is_count(first, types))
        case "DFT" | "STFT":
            return dtype != np.float64
        case "Pow":
            return all((types.dtype(name) or np.dtype(np.float32)).kind in "iu" for name in operands)
        case "Unique":
            return dtype.kind == "f"
        case "Resize":
            attributes = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
            scales = _scales(operands, attributes)
            return bool(scales) and not _is_exact(types.sizes(first), types.constant(scales))
    # A reduction: what is no larger than sizes are, double precision holds exactly.
    return dtype.kind in "iu" and not _is_count(first, types)


def _joins_ranks() -> bool:
    from onnxruntime import __version__

    return tuple(int(number) for number in __version__.split(".")[:2]) >= _JOINS_RANKS


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
        if node.op_type in _OF_ALL:
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
