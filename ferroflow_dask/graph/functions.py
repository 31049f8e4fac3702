"""Expand the functions that a model brings along.

ONNX's inliner puts the nodes of functions in place of their calls. What it takes no notice of is written out
first: defaults of attributes, outputs that are inputs, and operator sets that functions alone import.
Domains must have their short names.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnx.inliner

from ferroflow_dask.exceptions import ModelError
from ferroflow_dask.graph.protos import nested_nodes
from ferroflow_dask.graph.weights import first_line

#: Version of ONNX's own operators for Identity nodes that are added where nothing imports any.
_OPSET = 21

#: What tells functions apart: domain, name, overload.
_Id = tuple[str, str, str]


def add_defaults(model: onnx.ModelProto) -> bool:
    """Give every call of a function, wherever it is, the attributes that the function has defaults of.

    Where a function hands an attribute on that its own call leaves out, the callee's default counts: such
    calls get a copy of the function, under another overload, that does not hand it on.

    Parameters
    ----------
    model : ModelProto
        Is changed. Its functions must not call each other in a circle.

    Returns
    -------
    bool
        Whether any function has defaults; nothing was changed if not.
    """
    functions = {_function_id(function): function for function in model.functions}
    if not any(function.attribute_proto for function in model.functions):
        return False
    variants: dict[tuple[_Id, frozenset[str]], str] = {}
    pending = [model.graph.node]
    while pending:
        for node in list(nested_nodes(pending.pop())):
            function = functions.get(_callee_id(node))
            if function is None:
                continue
            given = {entry.name for entry in node.attribute}
            node.attribute.extend(entry for entry in function.attribute_proto if entry.name not in given)
            absent = _handed_on(function, functions).difference(given)
            variant = (_function_id(function), absent)
            if variant not in variants:
                if absent:
                    model.functions.append(_without(function, absent, len(variants), functions))
                    function = model.functions[-1]
                    functions[_function_id(function)] = function
                variants[variant] = function.overload
                pending.append(function.node)
            node.overload = variants[variant]
    return True


def _handed_on(function: onnx.FunctionProto, functions: dict[_Id, onnx.FunctionProto]) -> frozenset[str]:
    """Return the attributes without a default that calls inside the function refer to."""
    return frozenset(
        entry.ref_attr_name
        for node in nested_nodes(function.node)
        if _callee_id(node) in functions
        for entry in node.attribute
        if entry.ref_attr_name
    ).intersection(function.attribute)


def _without(
    function: onnx.FunctionProto,
    absent: frozenset[str],
    number: int,
    functions: dict[_Id, onnx.FunctionProto],
) -> onnx.FunctionProto:
    """Return a copy, under an overload of its own, that does not refer to some attributes."""
    copy = onnx.FunctionProto()
    copy.CopyFrom(function)
    while _function_id(copy) in functions:
        copy.overload = f"{function.overload}without_{number}"
        number += 1
    for node in nested_nodes(copy.node):
        kept = [entry for entry in node.attribute if entry.ref_attr_name not in absent]
        if len(kept) < len(node.attribute):
            del node.attribute[:]
            node.attribute.extend(kept)
    return copy


def expand(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with the nodes of its functions in place of their calls.

    Parameters
    ----------
    model : ModelProto
        Passes ONNX's checker. Is changed.

    Raises
    ------
    ModelError
        A function needs another version of an operator set than the model has, or its nodes cannot be
        brought to the model's version.
    """
    copied = [_copy_inputs(function) for function in model.functions]
    _import(model)
    if any(copied) and all(entry.domain for entry in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid("", _OPSET))
    functions = {_function_id(function): function for function in model.functions}
    try:
        expanded = onnx.inliner.inline_local_functions(model, convert_version=True)
    except RuntimeError as error:
        raise ModelError(f"has functions that cannot be expanded: {first_line(error)}") from error
    for node in nested_nodes(expanded.graph.node):
        if (left := functions.get(_callee_id(node))) is not None:
            raise ModelError(
                f"function {left.name!r} of domain {left.domain!r} cannot be expanded{_why(left, model)}"
            )
    return expanded


def _copy_inputs(function: onnx.FunctionProto) -> bool:
    """Let an Identity node produce each output that is an input: inlined, it would have no producer.

    Return whether there is any.
    """
    inputs = set(function.input)
    if inputs.isdisjoint(function.output):
        return False
    taken = inputs.union(function.output)
    for node in nested_nodes(function.node):
        taken.update(node.input, node.output)
    for i, name in enumerate(function.output):
        if name in inputs:
            copy = f"{name}_copy"
            while copy in taken:
                copy += "_"
            taken.add(copy)
            function.node.append(onnx.helper.make_node("Identity", [name], [copy]))
            function.output[i] = copy
    return True


def _import(model: onnx.ModelProto) -> None:
    """Import what functions alone import, and let all import one version where either means the same.

    Of several versions it is the first: the checker has compared the others with that.
    """
    functions = {_function_id(function) for function in model.functions}
    versions = {entry.domain: entry.version for entry in model.opset_import}
    for function in model.functions:
        nodes = [node for node in nested_nodes(function.node) if _callee_id(node) not in functions]
        for entry in function.opset_import:
            op_types = {node.op_type for node in nodes if node.domain == entry.domain}
            if op_types and entry.domain not in versions:
                versions[entry.domain] = entry.version
                model.opset_import.add().CopyFrom(entry)
            version = versions.get(entry.domain, entry.version)
            if _is_same(op_types, entry.domain, entry.version, version):
                entry.version = version


def _is_same(op_types: Iterable[str], domain: str, version: int, other: int) -> bool:
    """Return whether operators are known to be the same in two versions of their operator set."""

    def since(op_type: str, version: int) -> int | None:
        if not onnx.defs.has(op_type, version, domain):
            return None
        return int(onnx.defs.get_schema(op_type, version, domain).since_version)

    return version == other or all(
        (found := since(op_type, version)) is not None and found == since(op_type, other)
        for op_type in op_types
    )


def _why(function: onnx.FunctionProto, model: onnx.ModelProto) -> str:
    versions = {entry.domain: entry.version for entry in model.opset_import}
    for entry in function.opset_import:
        if entry.version != versions.get(entry.domain, entry.version):
            return (
                f": it takes version {entry.version} of the operators of domain {entry.domain!r}, "
                f"the model version {versions[entry.domain]}"
            )
    return ""


def _function_id(function: onnx.FunctionProto) -> _Id:
    return function.domain, function.name, function.overload


def _callee_id(node: onnx.NodeProto) -> _Id:
    return node.domain, node.op_type, node.overload
