"""A graph whole, in bundles or op by op: as predicted times or the user choose, with the same results."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command_line import USAGE, answer, assert_one_line, ferroflow
from distributed import Client
from models import light_models, mlp, model_of, randomize
from numpy.testing import assert_allclose
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from ferroflow_dask import GraphBuilder, Model, executed, install, uninstall
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph import Graph, generate_graph, graph_from_onnx, random_inputs
from ferroflow_dask.kernels import evaluate
from ferroflow_dask.kernels.corrections import LRN
from ferroflow_dask.lowering import GRANULARITIES, bind_graph, scatter

FOUR = ClusterProfile((1,) * 4)


def parallel(n: int) -> Graph:
    """Return a model of `n` products that could run side by side, each of a tenth of a second or so."""
    nodes = [onnx.helper.make_node("MatMul", ["x", "w"], [f"y{i}"]) for i in range(n)]
    nodes.append(onnx.helper.make_node("Sum", [f"y{i}" for i in range(n)], ["y"]))
    weights = {"w": np.ones((1024, 1024), np.float32)}
    inputs = {"x": (TensorProto.FLOAT, (1024, 1024))}
    return graph_from_onnx(model_of(nodes, inputs, ["y"], initializers=weights))


#: The evaluator takes Softmax and BatchNormalization of old opsets for new ones, so it is given the same
#: model in this one; LRN it does not compute in any (kernels/test_providers.py shows that ours is right).
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
            bound = Model(placed).bind({name: x}, granularity=granularity, profile=FOUR)
            assert bound.granularity == granularity
            if granularity == "ops":
                assert bound.n_tasks == len(graph.live_ops) + 1  # the input is a task too
            (output,) = process_client.compute(bound).result().values()
            assert executed(process_client, bound.run).executed_ops == len(graph.live_ops)
            outputs.append(output)
        assert_allclose(outputs[0], expected, rtol=0, atol=1e-3 * scale)
        assert np.abs(outputs[0] - outputs[1]).max() > 0.05 * scale
    uninstall(process_client)


def calls_to_run(n_ops: int) -> int:
    """Return how many functions are called to compute a chain of ops once more as one task."""
    builder = GraphBuilder("chain")
    value = builder.input("x", "float32", (2,))
    for i in range(n_ops):
        value = builder.op("Add", value, builder.constant(np.float32(i)))
    builder.output(y=value)
    model, x, n_calls = builder.build(), np.zeros(2, np.float32), 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal n_calls
        n_calls += event in ("call", "c_call")

    for _ in range(2):  # what is known of the graph is kept
        n_calls = 0
        sys.setprofile(count)
        try:
            model.bind(x=x).compute(scheduler="sync")
        finally:
            sys.setprofile(None)
    return n_calls


def test_a_model_in_one_session_costs_few_calls_for_each_op() -> None:
    """A quantised DenseNet has 2,733 ops: at 24 calls for each, `bind` took 8 ms and now takes 3 ms."""
    assert calls_to_run(400) - calls_to_run(200) <= 200 * 14


def test_auto_takes_what_is_predicted_to_be_fastest() -> None:
    chain = graph_from_onnx(mlp())
    x = {"x": np.zeros((2, 784), np.float32)}
    assert bind_graph(chain, x, profile=FOUR, granularity="auto").granularity == "whole"
    wide = parallel(16)
    bound = bind_graph(wide, random_inputs(wide, 0), profile=FOUR, granularity="auto")
    assert bound.granularity == "bundles"
    assert bound.predictions["bundles"].makespan_s < 0.8 * bound.predictions["whole"].makespan_s
    assert bound.prediction == bound.predictions["bundles"]


def test_ferroflows_own_ops_are_whole_only_if_that_is_asked_for() -> None:
    graph = generate_graph("wide", width=2, depth=2)
    assert bind_graph(graph, {}, profile=ClusterProfile((1,)), granularity="auto").granularity == "bundles"
    bound = bind_graph(graph, {}, granularity="whole")
    outputs = bound.compute(scheduler="sync")
    for name, value in evaluate(graph).items():
        assert_allclose(outputs[name], value)


def test_a_model_that_does_not_fit_a_worker_is_not_whole() -> None:
    wide = parallel(16)
    small = ClusterProfile((1,), memory_nbytes=2**24)
    assert (
        bind_graph(wide, random_inputs(wide, 0), profile=small, granularity="auto").granularity == "bundles"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"granularity": "half"}, "unknown granularity 'half'; choose one of: auto, bundles, ops, whole"),
        ({"granularity": "auto"}, "granularity 'auto' needs profile="),
        ({"granularity": "bundles"}, "granularity 'bundles' needs profile="),
    ],
)
def test_granularities_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        bind_graph(generate_graph("uniform", n=2, dim=2), {}, **options)
    assert message in str(caught.value)


# On the command line


@pytest.mark.parametrize(
    ("granularity", "told"), [("whole", "whole: "), ("bundles", "in bundles: "), ("ops", "op by op: ")]
)
def test_run_says_which_and_by_whom(mlp_files: Path, granularity: str, told: str) -> None:
    arguments = ("run", "--model", mlp_files / "mlp.onnx", "--input", mlp_files / "x.npy")
    small = ("--workers", "2", "--no-processes", "--granularity", granularity)
    second = answer(*arguments, *small).stdout.splitlines()[1]
    assert second.startswith(told)
    kernels = "onnxruntime 5 in one session" if granularity == "whole" else "onnxruntime 3, array 2"
    assert second.endswith(f"; kernels: {kernels}")
    record = json.loads(answer(*arguments, *small, "--json").stdout)
    assert record["granularity"] == granularity
    assert sum(record["providers"].values()) == record["compute_ops"]
    assert record["executed_ops"] == 5


def test_run_chooses(mlp_files: Path) -> None:
    told = answer("run", "--model", mlp_files / "mlp.onnx", "--workers", "2", "--no-processes")
    assert told.stdout.splitlines()[1].startswith("whole: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--granularity", "half"), "unknown granularity 'half'"),
        (("--granularity", "ops", "--policy", "sequential"), "--policy sequential has none"),
        (("--granularity", "ops", "--batch", "2"), "no other --granularity than auto or whole goes with it"),
    ],
)
def test_options_that_make_no_sense(arguments: tuple[str, ...], message: str) -> None:
    result = ferroflow("run", "--dag", "uniform", *arguments)
    assert_one_line(result.exit_code, result.stderr, USAGE, message)


def test_info_predicts_and_draws(mlp_files: Path) -> None:
    arguments = ("info", "--model", mlp_files / "mlp.onnx", "--workers", "3", "--threads", "2")
    told = answer(*arguments, "--dot", mlp_files / "g.dot").stdout
    assert "predicted on 3 × 2" in told
    assert (mlp_files / "g.dot").read_text().startswith("digraph")
    assert set(json.loads(answer(*arguments, "--json").stdout)["predicted_s"]) == set(GRANULARITIES)
    if shutil.which("dot"):
        answer(*arguments, "--dot", mlp_files / "g.svg")
        assert "<svg" in (mlp_files / "g.svg").read_text()
