"""Whether a model is valid: by ONNX's checker, or because onnxruntime loads it.

Users compare with onnxruntime, which takes much that the checker refuses: its own operators in ONNX's domain,
operators older than the model's opset, outputs without a shape, domains that are not declared, nodes out of
order. Such a model is brought into the form that the rest of the import expects.
"""

from __future__ import annotations

import graphlib
import warnings

import onnx
import onnx.checker

from ferroflow_dask.exceptions import ModelError
from ferroflow_dask.graph import custom_ops
from ferroflow_dask.graph.protos import captured, domain_from_name, nested_nodes, subgraphs_of_node
from ferroflow_dask.graph.weights import first_line, in_one_line

#: What the checker wants of outputs, and no library needs.
_HARMLESS = ("Field 'shape' of 'type' is required", "Field 'type' of 'value_info' is required")

_LOG_FATAL = 4


def check(model: onnx.ModelProto) -> None:
    """Raise for a model that neither ONNX's checker nor onnxruntime takes; warn if only onnxruntime does.

    Parameters
    ----------
    model : ModelProto
        Without its large weights. Nodes out of order are sorted, and domains without version get version 1.

    Raises
    ------
    ModelError
        The message is what the checker objects to.
    """
    complaint = _complaint(model)
    if not complaint:
        return
    if why_not := why_not_loaded(model):
        told = "" if why_not == complaint else f" (onnxruntime: {why_not})"
        raise ModelError(f"is not valid ONNX: {complaint}{told}")
    mend(model)
    if not complaint.startswith(_HARMLESS):
        name = model.graph.name
        warnings.warn(
            f"model {name!r} is not valid ONNX, but onnxruntime loads it: {complaint}", stacklevel=2
        )


def infer(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with the types of all values that ONNX can infer.

    Raises
    ------
    ModelError
        Types contradict each other, and onnxruntime does not load the model either.
    """
    try:
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
        if why_not_loaded(model):
            raise ModelError(f"has types that contradict each other: {first_line(error)}") from error
        warnings.warn(
            f"types of model {model.graph.name!r} are unknown, but onnxruntime loads it: {first_line(error)}",
            stacklevel=2,
        )
        return model


def _complaint(model: onnx.ModelProto) -> str:
    try:
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, ValueError) as error:
        return in_one_line(error)
    return ""


def why_not_loaded(model: onnx.ModelProto) -> str:
    """Return why onnxruntime does not load a model; nothing if it does."""
    try:
        import onnxruntime
    except ImportError:
        return "not installed"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _LOG_FATAL
    options.intra_op_num_threads = 1
    custom_ops.register(options)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 -- its errors have no base of their own
        return " ".join(str(error).rpartition(" : ")[2].split()) or type(error).__name__
    return ""


def mend(model: onnx.ModelProto) -> None:
    """Sort the nodes of a model, and declare the domains of its operators; it is changed."""
    declared = {entry.domain for entry in model.opset_import}
    functions = {function.domain for function in model.functions}
    for domain in {domain_from_name(node.domain) for node in nested_nodes(model.graph.node)}:
        if domain not in declared and domain not in functions:
            model.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    nodes = list(model.graph.node)
    producers = {value: i for i, node in enumerate(nodes) for value in node.output if value}
    sorter: graphlib.TopologicalSorter[int] = graphlib.TopologicalSorter()
    for i, node in enumerate(nodes):
        read = (*node.input, *captured(subgraphs_of_node(node)))
        sorter.add(i, *(producers[value] for value in read if value in producers))
    try:
        order = list(sorter.static_order())
    except graphlib.CycleError as error:
        raise ModelError("is not valid ONNX: its nodes form a cycle") from error
    del model.graph.node[:]
    model.graph.node.extend(nodes[i] for i in order)
