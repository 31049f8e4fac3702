"""ONNX's own suite of node tests, imported and run with our default kernels."""

from __future__ import annotations

import fnmatch
import warnings
from typing import Any

import numpy as np
import onnx
import pytest
from agreement import assert_same
from onnx import TensorProto

from ferroflow_dask.exceptions import KernelError, KernelNotFoundError
from ferroflow_dask.graph import graph_from_onnx
from ferroflow_dask.kernels import evaluate

#: Node tests whose expectations our default kernels do not meet, with the reason.
DEVIATIONS = {
    "test_bernoulli*": "random",
    "test_*bf16*": "rounded to bfloat16 at other places",
    "test_*fp16*": "rounded to half precision at other places",
}


def test_onnx_node_tests_pass_but_for_known_deviations():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases are generated, with overflows that they test
        from onnx.backend.test.loader import load_model_tests

        cases = [case for case in load_model_tests(kind="node") if case.model is not None]
    if not cases:
        pytest.skip("this release of onnx keeps its node tests in files")
    failed = []
    for case in cases:
        if any(fnmatch.fnmatch(case.name, pattern) for pattern in DEVIATIONS):
            continue
        try:
            check_node_case(case)
        except (AssertionError, KernelError, KernelNotFoundError) as error:
            failed.append(f"{case.name}: {str(error).strip()[:200]}")
    assert not failed
    assert len(cases) > 1000


def check_node_case(case: Any) -> None:
    def array(value: Any) -> Any:
        return onnx.numpy_helper.to_array(value) if isinstance(value, TensorProto) else value

    names = [entry.name for entry in case.model.graph.input]
    graph = graph_from_onnx(case.model)
    for inputs, outputs in case.data_sets:
        actual = evaluate(graph, dict(zip(names, map(array, inputs), strict=False)))
        for one, other in zip(actual.values(), map(array, outputs), strict=True):
            if isinstance(other, np.ndarray):
                assert_same(one, other, max(case.rtol, 1e-3), max(case.atol, 1e-6))
