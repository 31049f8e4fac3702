"""The nine architectures that come with onnx, with random weights, in each granularity on processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from distributed import Client
from models import light_models, randomize
from onnx.reference import ReferenceEvaluator

from ferroflow_dask import ClusterProfile, Model, executed, install, uninstall
from ferroflow_dask.graph import graph_from_onnx
from ferroflow_dask.kernels.corrections import LRN
from ferroflow_dask.lowering import GRANULARITIES, scatter

#: The evaluator takes Softmax and BatchNormalization of old opsets for new ones, so it is given the same
#: model in this one; LRN it does not compute in any (test_kernel_corrections shows that ours is right).
REFERENCE_OPSET = 17


def expected_output(model: onnx.ModelProto, name: str, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    shapes, weights = [], []
    for tensor in model.graph.initializer:
        (weights if tensor.data_type == onnx.TensorProto.FLOAT else shapes).append(tensor)
    converted = onnx.ModelProto()
    converted.CopyFrom(model)
    del converted.graph.initializer[:]
    converted.graph.initializer.extend(shapes)
    # Weights come back when it is done: the converter copies what there is, over and over.
    converted = onnx.version_converter.convert_version(converted, REFERENCE_OPSET)
    converted.graph.initializer.extend(weights)
    (output,) = ReferenceEvaluator(converted, new_ops=[LRN]).run(None, {name: x})
    return output


@pytest.mark.cluster
@pytest.mark.parametrize("path", light_models(), ids=lambda path: path.stem)
def test_an_architecture_on_processes_matches_onnx_reference(path: Path, process_client: Client) -> None:
    model = randomize(onnx.load(path), seed=1)
    graph = graph_from_onnx(model, name=path.stem)
    (name,) = graph.inputs
    one, other = (
        np.random.default_rng(seed).standard_normal((1, 3, 224, 224), np.float32) for seed in (1, 2)
    )
    install(process_client)
    placed = scatter(graph, process_client)
    expected = expected_output(model, name, one)
    scale = np.abs(expected).max()
    for granularity in GRANULARITIES:
        outputs = []
        for x in (one, other):
            bound = Model(placed).bind({name: x}, granularity=granularity, profile=ClusterProfile((1,) * 4))
            assert bound.granularity == granularity
            if granularity == "ops":
                assert bound.n_tasks == len(graph.live_ops) + 1  # the input is a task too
            (output,) = process_client.compute(bound).result().values()
            assert executed(process_client, bound.run).executed_ops == len(graph.live_ops)
            outputs.append(output)
        np.testing.assert_allclose(outputs[0], expected, rtol=0, atol=1e-3 * scale)
        assert np.abs(outputs[0] - outputs[1]).max() > 0.05 * scale
    uninstall(process_client)
