"""Ops of one node with operands for them, and what `onnx.reference` makes of such a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from models import reference
from onnx import helper

from ferroflow_dask.graph import Op


def normal_from(seed: int) -> Callable[..., np.ndarray[Any, Any]]:
    """Return a function that draws a float32 array of the given shape, each one different from the last."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return np.asarray(rng.standard_normal(shape), np.float32)

    return normal


def op_of(op_type: str, inputs: Sequence[Any], n_outputs: int = 1, domain: str = "", **attributes: Any) -> Op:
    """An op whose i-th input is left out where the i-th value is None."""
    names = tuple("" if value is None else f"x{i}" for i, value in enumerate(inputs))
    return Op(0, "it", op_type, names, tuple(f"y{i}" for i in range(n_outputs)), domain, attributes)


def expected_of(op: Op, opsets: dict[str, int], values: Sequence[Any]) -> list[Any]:
    """What `onnx.reference` makes of a node, without any code of ours."""
    node = helper.make_node(op.op_type, op.inputs, op.outputs, domain=op.domain, **op.attributes)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.asarray(value).dtype), None)
        if isinstance(value, np.ndarray) and value.dtype.kind != "U"
        else helper.make_empty_tensor_value_info(name)
        for name, value in zip(op.inputs, values, strict=True)
        if name
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in op.outputs]
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    model = helper.make_model(helper.make_graph([node], "g", inputs, outputs), opset_imports=imports)
    feeds = {name: value for name, value in zip(op.inputs, values, strict=True) if name}
    return list(reference(model, feeds).values())
