"""Control flow whose sub-graphs are computed op by op, so that each op may have the provider that suits it.

`If` and `Loop` of all versions, `Scan` from opset 9 on, `SequenceMap`. A body is a plan; see `plan`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from ferroflow_dask.graph.bodies import graph_of_body
from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.graph.protos import subgraphs
from ferroflow_dask.kernels.plan import make_plan
from ferroflow_dask.kernels.provider import Kernel, opset_version

#: From this opset on, Scan has no batch.
_SCAN_WITHOUT_BATCH = 9

#: What comes in front of the values that a loop carries: in its body, and in what this yields.
_LOOP_INPUTS, _LOOP_OUTPUTS = 2, 1


class NestedProvider:
    """Control flow, with any of some providers for the ops inside.

    Parameters
    ----------
    providers : tuple of str
    """

    name = "nested"

    def __init__(self, providers: tuple[str, ...]) -> None:
        self._providers = providers

    def supports(self, op: Op, opsets: Mapping[str, int]) -> bool:
        """Return whether the op is control flow."""
        if op.domain or next(subgraphs(op.attributes), None) is None:
            return False
        return op.op_type in _RUNNERS and (
            op.op_type != "Scan" or opset_version(op, opsets) >= _SCAN_WITHOUT_BATCH
        )

    def compile(self, op: Op, opsets: Mapping[str, int]) -> Kernel:
        """Return a kernel that runs the bodies of the op as often as it must."""
        bodies = {
            name: _Body(value, op, opsets, self._providers)
            for name, value in op.attributes.items()
            if isinstance(value, onnx.GraphProto)
        }
        run, n_inputs = _RUNNERS[op.op_type], len(op.inputs)

        def kernel(*values: Any) -> tuple[Any, ...]:
            outer = dict(zip(op.captured, values[n_inputs:], strict=True))
            found = run(op, bodies, values[:n_inputs], outer)
            return tuple(value if name else None for name, value in zip(op.outputs, found, strict=False))

        return kernel


class _Body:
    """A sub-graph: takes values of its own inputs, and those that it reads from outside by name."""

    def __init__(
        self, body: onnx.GraphProto, op: Op, opsets: Mapping[str, int], providers: tuple[str, ...]
    ) -> None:
        graph = graph_of_body(body, opsets, op.captured)
        self._providers = providers
        self._constants = graph.constants
        self._arguments = tuple(dict.fromkeys((*graph.inputs, *graph.constants)))
        self._plan = make_plan(graph, graph.live_ops, self._arguments, graph.outputs)
        self._names = graph.outputs
        self.inputs = [entry.name for entry in body.input]
        #: With the types that are declared; one value may be several outputs.
        self.outputs = list(body.output)

    def __call__(self, values: Sequence[Any], outer: Mapping[str, Any]) -> list[Any]:
        known = {**outer, **self._constants, **dict(zip(self.inputs, values, strict=True))}
        arguments = [known[name] for name in self._arguments]
        found = self._plan.run(arguments, self._providers, lambda: 0.0, [])
        by_name = dict(zip(self._names, found, strict=True))
        return [by_name[entry.name] for entry in self.outputs]


#: By the names of attributes, and by those of values.
_Bodies = Mapping[str, _Body]
_Values = Mapping[str, Any]
_Run = Callable[[Op, _Bodies, Sequence[Any], _Values], Sequence[Any]]


def _if(_: Op, bodies: _Bodies, values: Sequence[Any], outer: _Values) -> Sequence[Any]:
    chosen = "then_branch" if bool(np.asarray(values[0]).item()) else "else_branch"
    return bodies[chosen]((), outer)


def _loop(_: Op, bodies: _Bodies, values: Sequence[Any], outer: _Values) -> Sequence[Any]:
    body = bodies["body"]
    trips, condition, *carried = (*values, None) if len(values) == 1 else values
    limit = math.inf if trips is None else int(np.asarray(trips).item())
    keep_going = condition is None or bool(np.asarray(condition).item())
    declared = body.outputs[_LOOP_OUTPUTS + len(carried) :]
    scans: list[list[Any]] = [[] for _ in declared]
    iteration = 0
    while keep_going and iteration < limit:
        given = [np.array(iteration, np.int64), np.array(keep_going), *carried]
        again, *results = body(given[: len(body.inputs)], outer)
        carried = results[: len(carried)]
        for scan, value in zip(scans, results[len(carried) :], strict=True):
            scan.append(value)
        keep_going = bool(np.asarray(again).item())
        iteration += 1
    return (*carried, *(_stack(scan, entry.type) for scan, entry in zip(scans, declared, strict=True)))


def _scan(op: Op, bodies: _Bodies, values: Sequence[Any], outer: _Values) -> Sequence[Any]:
    body = bodies["body"]
    n_scanned = op.attributes["num_scan_inputs"]
    state, scanned = list(values[: len(values) - n_scanned]), values[len(values) - n_scanned :]
    axes = _each(op, "scan_input_axes", n_scanned)
    backwards = _each(op, "scan_input_directions", n_scanned)
    rows = [np.moveaxis(value, axis, 0) for value, axis in zip(scanned, axes, strict=True)]
    rows = [value[::-1] if is_back else value for value, is_back in zip(rows, backwards, strict=True)]
    if len(set(map(len, rows))) > 1:
        raise ValueError(f"Scan takes inputs of one length, these have {list(map(len, rows))}")
    declared = body.outputs[len(state) :]
    scans: list[list[Any]] = [[] for _ in declared]
    for at in range(len(rows[0])):
        results = body([*state, *(np.ascontiguousarray(value[at]) for value in rows)], outer)
        state = results[: len(state)]
        for scan, value in zip(scans, results[len(state) :], strict=True):
            scan.append(value)
    stacks = [_stack(scan, entry.type) for scan, entry in zip(scans, declared, strict=True)]
    axes = _each(op, "scan_output_axes", len(stacks))
    backwards = _each(op, "scan_output_directions", len(stacks))
    stacks = [value[::-1] if is_back else value for value, is_back in zip(stacks, backwards, strict=True)]
    moved = [
        np.ascontiguousarray(np.moveaxis(value, 0, axis)) for value, axis in zip(stacks, axes, strict=True)
    ]
    return (*state, *moved)


def _each(op: Op, name: str, n: int) -> list[int]:
    """Return a list that an attribute of Scan gives, or as many zeros."""
    return list(op.attributes.get(name) or [0] * n)


def _sequence_map(_: Op, bodies: _Bodies, values: Sequence[Any], outer: _Values) -> Sequence[Any]:
    body = bodies["body"]
    columns: list[list[Any]] = [[] for _ in body.outputs]
    for at in range(len(values[0])):
        given = [values[0][at], *(value[at] if isinstance(value, list) else value for value in values[1:])]
        for column, result in zip(columns, body(given, outer), strict=True):
            column.append(result)
    return columns


_RUNNERS: Mapping[str, _Run] = {"If": _if, "Loop": _loop, "Scan": _scan, "SequenceMap": _sequence_map}


def _stack(scan: list[Any], declared: onnx.TypeProto) -> Any:
    """Return the values of a scan output along a new first axis, (iterations, …)."""
    if scan:
        return np.stack(scan)
    # Without an iteration only the declaration tells what the values would have been.
    tensor = declared.tensor_type
    shape = [dim.dim_value for dim in tensor.shape.dim]
    element = tensor.elem_type or onnx.TensorProto.FLOAT
    return np.empty((0, *shape), onnx.helper.tensor_dtype_to_np_dtype(element))
