"""Mutated models on a cluster: an error of ours in one line, or what another implementation computes.

500 mutants run by default, as many as FERROFLOW_MUTANTS says otherwise.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from typing import Any

import onnx
import onnxruntime
import pytest
from agreement import assert_same
from distributed import Client
from mutants import mutant
from onnx.reference import ReferenceEvaluator

from ferroflow_dask import install
from ferroflow_dask.exceptions import FerroflowError
from ferroflow_dask.graph import graph_from_onnx, random_inputs
from ferroflow_dask.lowering import bind_graph

pytestmark = pytest.mark.cluster
N_MUTANTS = int(os.environ.get("FERROFLOW_MUTANTS", "500"))


def others(content: bytes, inputs: dict[str, Any]) -> list[list[Any]]:
    """Return what onnxruntime and the reference compute, as far as they do."""
    found = []
    for run in (_reference, _onnxruntime):
        try:
            found.append(run(content, inputs))
        except Exception:  # noqa: BLE001 -- it has no answer, whatever the reason
            continue
    return found


def _reference(content: bytes, inputs: dict[str, Any]) -> list[Any]:
    return list(ReferenceEvaluator(onnx.load_from_string(content)).run(None, inputs))


def _onnxruntime(content: bytes, inputs: dict[str, Any]) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return list(onnxruntime.InferenceSession(content, options).run(None, inputs))


def agrees(found: list[Any], expected: list[Any]) -> bool:
    try:
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, 1e-3, 1e-4)
    except AssertionError:
        return False
    return True


@pytest.mark.timeout(max(180, N_MUTANTS))
def test_a_mutant_is_an_error_of_ours_or_a_right_result(process_client: Client) -> None:
    install(process_client)
    workers = process_client.run(os.getpid)
    ended: Counter[str] = Counter()
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(N_MUTANTS):
            content = mutant(seed)
            try:
                graph = graph_from_onnx(content)
                inputs = random_inputs(graph, seed)
                found = list(process_client.compute(bind_graph(graph, inputs)).result(timeout=120).values())
            except FerroflowError as error:
                ended[type(error).__name__] += 1
                ended["long"] += "\n" in str(error)
                continue
            expected = others(content, inputs)
            ended["results"] += 1
            if expected and not any(agrees(found, other) for other in expected):
                wrong.append(seed)
    print(f"{N_MUTANTS} mutants: {dict(ended)}, {len(wrong)} wrong")
    assert wrong == []
    assert ended["long"] == 0
    assert process_client.run(os.getpid) == workers
    assert min(ended["results"], ended["ModelError"], ended["KernelError"]) > N_MUTANTS / 50, ended
