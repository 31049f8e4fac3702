"""Every built-in graph under every policy on real worker processes, against plain NumPy."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from ferroflow_dask import Model, install, uninstall
from ferroflow_dask.bench import Run, machine, run_on_cluster, run_sequentially
from ferroflow_dask.bench.runner import counting_fetches
from ferroflow_dask.graph import FERROFLOW_DOMAIN, TOPOLOGIES, Graph, Op, generate_graph
from ferroflow_dask.lowering import scatter

#: Small enough for all pairs to take a minute, large enough for every worker to get work.
SIZES: dict[str, dict[str, Any]] = {
    "imbalanced": {"n_heavy": 2, "heavy_ms": 20, "n_fast": 20},
    "wide": {"width": 4, "depth": 3},
    "large-wide": {"width": 40},
    "xlarge-wide": {"width": 60, "skew": 0.05},
    "skewed": {"n": 20, "factor": 4},
    "transformer": {"seq_len": 16, "d_model": 32, "n_heads": 4},
    "large-transformer": {"seq_len": 16, "d_model": 32, "n_heads": 4},
    "xlarge-transformer": {"layers": 4, "seq_len": 16, "d_model": 32, "n_heads": 4},
    "resnet": {"channels": 32},
    "matmul-chain": {"n_ops": 10, "m": 64},
    "matmul-parallel": {"n_branches": 6, "ops_per_branch": 4, "m": 64},
    "uniform": {"n": 8, "dim": 32},
}
#: Differences of summation order stay below this; TF32's ten bits of mantissa do not (test_kernel_providers).
TOLERANCE = 1e-4


def numpy_outputs(graph: Graph) -> dict[str, np.ndarray]:
    """Compute a built-in graph in NumPy, written anew from what its operators mean."""
    values = dict(graph.constants)
    for op in graph.topological_order:
        values[op.outputs[0]] = numpy_op(op, [values[name] for name in op.inputs])
    return {name: values[name] for name in graph.outputs}


def numpy_op(op: Op, x: list[np.ndarray]) -> np.ndarray:
    if op.op_type == "Slow":
        return x[0]
    if op.op_type == "Relu":
        return np.maximum(x[0], 0)
    if op.op_type == "LayerNorm":
        mean = x[0].mean(-1, keepdims=True)
        return (x[0] - mean) / np.sqrt(x[0].var(-1, keepdims=True) + np.float32(op.attributes["epsilon"]))
    assert op.op_type == "MatMul"
    if op.domain != FERROFLOW_DOMAIN:
        return x[0] @ x[1]
    heads = op.attributes["heads"]
    b = np.stack(np.split(x[1], heads, axis=1))
    if op.attributes["trans_b"]:
        return np.stack(np.split(x[0], heads, axis=1)) @ b.transpose(0, 2, 1)
    return np.concatenate(list(x[0] @ b), axis=1)


def check(graph: Graph, run: Run, policy: str) -> None:
    record = run.record
    assert record.executed_ops == record.compute_ops == len(graph.ops)
    assert (record.dag, record.policy) == (graph.name, policy)
    assert record.ops_per_s == pytest.approx(record.compute_ops / record.makespan_s)
    assert record.efficiency == pytest.approx(record.ops_per_s / record.bound_ops_per_s)
    assert 0 < record.efficiency <= 1
    assert 0 <= record.idle_fraction < 1
    expected = numpy_outputs(graph)
    assert run.outputs.keys() == expected.keys()
    for name, value in expected.items():
        assert value.dtype == run.outputs[name].dtype == np.float32
        scale = np.abs(value).max()
        assert scale > 1e-3, "a result that vanishes would check nothing"
        np.testing.assert_allclose(run.outputs[name], value, rtol=0, atol=TOLERANCE * scale)


def test_every_built_in_graph_is_run() -> None:
    assert SIZES.keys() == TOPOLOGIES.keys()


@pytest.mark.parametrize("dag", sorted(SIZES))
def test_sequential_gives_numpys_result(dag: str) -> None:
    graph = generate_graph(dag, seed=3, **SIZES[dag])
    check(graph, run_sequentially(graph, {}), "sequential")


@pytest.fixture(scope="module", params=["dask", "static", "random", "ferroflow"])
def policy_client(request: pytest.FixtureRequest, process_client: Client) -> Iterator[tuple[str, Client]]:
    if request.param != "dask":
        install(process_client, request.param)
    yield request.param, process_client
    uninstall(process_client)


@pytest.mark.cluster
@pytest.mark.parametrize("dag", sorted(SIZES))
def test_policies_on_processes_give_numpys_result(dag: str, policy_client: tuple[str, Client]) -> None:
    policy, client = policy_client
    graph = generate_graph(dag, seed=3, **SIZES[dag])
    run = run_on_cluster(scatter(graph, client), {}, client, policy=policy, processes=True)
    check(graph, run, policy)
    assert run.record.dask_tasks == len(graph.ops)
    assert run.record.workers == 2


@pytest.mark.cluster
def test_static_uses_every_worker_in_turn(process_client: Client) -> None:
    install(process_client, "static")
    graph = generate_graph("wide", width=6, depth=1)
    persisted = process_client.persist(Model(scatter(graph, process_client)).bind())
    holders = process_client.who_has(list(persisted.__dask_graph__().to_dict().values()))
    process_client.gather(list(persisted.__dask_graph__().to_dict().values()))
    holders = process_client.who_has(list(persisted.__dask_graph__().to_dict().values()))
    workers = [worker for _, (worker, *_) in sorted(holders.items(), key=lambda item: item[0][1])]
    assert workers[0] != workers[1]
    assert workers == workers[:2] * 3
    uninstall(process_client)


@pytest.mark.parametrize(
    ("dag", "sizes", "granularity", "is_known"),
    [
        pytest.param(
            "matmul-chain", {"n_ops": 3, "m": 8}, "whole", False, id="whole: no op has its own time"
        ),
        pytest.param("matmul-chain", {"n_ops": 1, "m": 8}, "whole", True, id="whole, of one op"),
        pytest.param("wide", {"width": 2, "depth": 2}, "whole", True, id="whole, of declared durations"),
        pytest.param("matmul-chain", {"n_ops": 3, "m": 8}, "ops", True, id="op by op"),
    ],
)
def test_a_bound_is_told_only_where_the_ops_have_times(
    dag: str, sizes: dict[str, Any], granularity: str, is_known: bool, thread_client: Client
) -> None:
    graph = generate_graph(dag, **sizes)
    run = run_on_cluster(graph, {}, thread_client, policy="dask", processes=False, granularity=granularity)
    assert run.record.granularity == granularity
    assert (run.record.efficiency is not None) == (run.record.bound_ops_per_s is not None) == is_known
    if is_known:
        assert run.record.efficiency == pytest.approx(run.record.ops_per_s / run.record.bound_ops_per_s)


def test_all_that_workers_fetch_from_each_other_is_counted_and_nothing_else(thread_client: Client) -> None:
    holder, reader, _ = thread_client.nthreads()
    data = thread_client.map(bytes, [1000] * 5, workers=[holder], pure=False)
    with counting_fetches(thread_client) as fetched:
        for value in data:  # one transfer for each
            assert thread_client.submit(len, value, workers=[reader]).result() == 1000
        thread_client.gather(data)
        assert fetched() == 5 * 1000


# What records say of where they were made


@pytest.mark.parametrize("installed", [{"onnxruntime", "onnxruntime-gpu"}, {"onnxruntime-gpu"}, set()])
def test_versions_are_those_of_what_is_installed(
    installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name.startswith("onnxruntime") and name not in installed:
            raise PackageNotFoundError(name)
        return "1.2.3"

    monkeypatch.setattr(machine, "version", version)
    assert [name for name in machine.versions() if name.startswith("onnxruntime")] == sorted(installed)[:1]


@pytest.mark.parametrize("is_tracked", [True, False], ids=["part of a working tree", "beside its files"])
def test_a_commit_is_that_of_the_tree_that_has_this_package(
    is_tracked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        author = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        subprocess.run(["git", *author, *arguments], cwd=tmp_path, check=True, capture_output=True)

    module = tmp_path / "machine.py"
    module.touch()
    git("init")
    if is_tracked:
        git("add", module.name)
    git("commit", "--allow-empty", "--message", "first")
    monkeypatch.setattr(machine, "__file__", str(module))
    assert bool(machine.commit.__wrapped__()) is is_tracked
