"""The command line: what it prints and writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import onnx
import pytest
from command_line import SMALL, answer, with_unknown_operator
from models import mlp, model_of
from onnx.reference import ReferenceEvaluator

from ferroflow_dask.bench import Run, RunRecord
from ferroflow_dask.bench.observe import steals_since
from ferroflow_dask.cli import main
from ferroflow_dask.cli.clusters import PLAIN_POLICIES
from ferroflow_dask.cli.graphs import in_words
from ferroflow_dask.policy import policy_names


@pytest.mark.parametrize("policy", ["sequential", "dask", "static", "random", "ring", "ferroflow"])
def test_json_is_one_object_with_the_documented_fields(policy: str) -> None:
    cluster = () if policy == "sequential" else ("--workers", "2", "--no-processes")
    result = answer("run", *SMALL, "--policy", policy, *cluster, "--seed", "5", "--json")
    record = json.loads(result.stdout)
    assert list(record) == list(RunRecord.__dataclass_fields__)
    expected = {"dag": "wide", "policy": policy, "compute_ops": 8, "executed_ops": 8, "seed": 5}
    assert expected.items() <= record.items()
    assert record["workers"] == (1 if policy == "sequential" else 2)
    is_bundled = policy == "ferroflow"
    assert (record["predicted_s"] is not None) == is_bundled
    # No schedule is shorter than the bound.
    assert (record["stock_s"] or 0.0) >= (8 / record["bound_ops_per_s"] if is_bundled else 0.0)
    # On a busy machine single tasks may be predicted to be faster.
    assert 0 < record["dask_tasks"] <= 8 if is_bundled else record["dask_tasks"] in (0, 8)
    assert set(record["versions"]) >= {"python", "ferroflow-dask", "dask", "distributed", "onnxruntime"}


def test_a_run_ends_with_one_line() -> None:
    result = answer("run", *SMALL, "--workers", "2", "--no-processes")
    assert re.fullmatch(
        r"wide · ferroflow · 2 × 1 in one process: 8 ops in \d+\.\d{3} s = [\d,]+ ops/s, "
        r"\d+% of the bound [\d,]+\n"
        r"in bundles: \d Dask tasks?; predicted 0\.\d{3} s; \d+ B moved between workers \(predicted \d+ B\); "
        r"kernels: synthetic 8\n"
        r"(no steals asked|steals: \d+ asked, \d+ granted \(\d+%\)); "
        r"idle \d\.\d{3} s per worker \(\d\.\d{3}–\d\.\d{3} s\)\n"
        r"as single tasks of Dask: \d\.\d{3} s \(simulated\)\n",
        result.stdout,
    )


def test_a_run_reports_steals_and_the_threshold_of_the_ring() -> None:
    ring = ("--policy", "ring", "--steal-threshold", "3", "--no-adaptive-threshold", "--workers", "2")
    graph = ("--dag", "imbalanced", "--n-heavy", "1", "--heavy-ms", "100", "--n-fast", "1", "--no-processes")
    record = json.loads(answer("run", *graph, *ring, "--json").stdout)
    assert (record["steal_threshold"], record["steal_threshold_changes"]) == (3, 0)
    busy, idle = sorted(record["idle_s"].items(), key=lambda item: item[1])
    assert {busy[0], idle[0]} == {"0", "1"}
    # One worker slept for 0.1 s, and the other one did nothing.
    assert busy[1] <= record["makespan_s"] - 0.1 < idle[1] <= record["makespan_s"]
    told = {"steals": 3, "steals_asked": 4, "steal_hit_rate": 0.75, "steal_threshold_changes": 1}
    run = Run({}, RunRecord(**{**record, **told, "idle_s": {"0": 0.1, "1": 0.2}}), {})
    assert in_words([run])[-1] == (
        "steals: 4 asked, 3 granted (75%); steal threshold 3 at the end, after 1 change; "
        "idle 0.150 s per worker (0.100–0.200 s)"
    )


def test_steals_are_counted_from_the_events_of_stealing() -> None:
    outcomes = [(2.0, (outcome, "a")) for outcome in ("confirm", "already-computing", "confirm")]
    events = [(1.0, ("confirm", "of the run before")), (2.0, ("request", ["a", "b", "c"])), *outcomes]
    scheduler: Any = SimpleNamespace(get_events=lambda topic: events if topic == "stealing" else [])
    assert steals_since(scheduler, 1.0) == {"asked": 3, "confirmed": 2, "refused": 1}


def test_a_graph_that_runs_whole_has_no_bound() -> None:
    whole = ("--dag", "uniform", "--n", "3", "--dim", "8", "--granularity", "whole")
    cluster = ("--workers", "1", "--no-processes")
    first, second = answer("run", *whole, *cluster).stdout.splitlines()
    assert re.search(r" = [\d,]+ ops/s$", first)  # and nothing of steals and idle threads
    assert second.startswith("whole: one Dask task; kernels: ")
    record = json.loads(answer("run", *whole, *cluster, "--json").stdout)
    assert (record["bound_ops_per_s"], record["efficiency"]) == (None, None)


def test_repeated_runs_show_the_median_and_the_range() -> None:
    result = answer("run", *SMALL, "--policy", "sequential", "--repeat", "3")
    assert re.search(r"median of 3 \(\d\.\d{3}–\d\.\d{3} s\)", result.output)
    as_json = answer("run", *SMALL, "--policy", "sequential", "--repeat", "3", "--json")
    record = json.loads(as_json.stdout)
    assert record["makespan_s"] == sorted(record["makespans_s"])[1]


@pytest.mark.cluster
def test_processes_and_threads_are_as_asked() -> None:
    ring = ("--policy", "ring", "--steal-threshold", "2", "--no-adaptive-threshold")
    record = json.loads(answer("run", *SMALL, "--workers", "2", "--threads", "2", *ring, "--json").stdout)
    assert (record["workers"], record["threads_per_worker"], record["processes"]) == (2, 2, True)


def test_info_counts_what_the_graph_has() -> None:
    facts = json.loads(answer("info", "--dag", "transformer", "--json").stdout)
    expected = {"nodes": 18, "sources": 6, "ops": 12, "edges": 19, "levels": 10, "gpu_sized_matmuls": 0}
    assert expected.items() <= facts.items()
    assert facts["kinds"] == {"MatMul": 5, "ferroflow.LayerNorm": 3, "Relu": 2, "ferroflow.MatMul": 2}
    assert facts["routing"] == {"array": 12}
    assert facts["unsupported"] == {}


def test_info_counts_matmuls_worth_a_gpu_by_the_threshold() -> None:
    arguments = ("info", "--dag", "matmul-chain", "--n-ops", "3", "--matrix-size", "64", "--json")
    assert json.loads(answer(*arguments).stdout)["gpu_sized_matmuls"] == 0
    assert json.loads(answer(*arguments, "--gpu-matmul-threshold", "4096").stdout)["gpu_sized_matmuls"] == 3


def test_info_shows_a_table(mlp_files: Path) -> None:
    output = answer("info", "--model", mlp_files / "mlp.onnx").output
    assert re.search(r"kinds +Gemm 3, Relu 2", output)
    assert re.search(r"inputs +x float32\[batch, 784\]", output)
    assert re.search(r"flops +unknown: they depend on the shapes of inputs", output)


def test_help_tells_which_policies_there_are_and_that_info_starts_nothing() -> None:
    shown = answer("run", "--help").output
    assert all(name in shown for name in (*PLAIN_POLICIES, *policy_names()))
    assert "one that an installed package offers" in " ".join(shown.split())
    assert "to start" not in answer("info", "--help").output


def test_help_has_sections_and_the_sizes_of_graphs_come_last() -> None:
    told = {name: answer(name, "--help").output for name in ("run", "info")}
    headings = {name: re.findall(r"^([A-Z].*):$", text, re.MULTILINE) for name, text in told.items()}
    graph, sizes, rest = "Graph", "Sizes of built-in graphs", "Options"
    assert headings["info"] == [graph, "Devices", "Cluster", "Output", sizes, rest]
    assert (headings["run"][0], headings["run"][-2:]) == (graph, [sizes, rest])
    assert "SLURM" in headings["run"]
    assert "--width INTEGER Chains. [default: wide 8, large-wide 320, " in " ".join(told["run"].split())


def test_info_tells_how_much_a_model_holds_and_computes(tmp_path: Path) -> None:
    model = mlp(hidden=32)
    facts = json.loads(
        answer("info", "--dag", "matmul-chain", "--n-ops", "3", "--matrix-size", "64", "--json").stdout
    )
    assert facts["flops"] == 3 * 2 * 64**3
    onnx.save(model, tmp_path / "mlp.onnx")
    facts = json.loads(answer("info", "--model", tmp_path / "mlp.onnx", "--json").stdout)
    assert facts["parameters"] == 784 * 32 + 32 + 32 * 32 + 32 + 32 * 10 + 10
    assert facts["weight_bytes"] == 4 * facts["parameters"]
    assert facts["flops"] is None


def test_info_lists_operators_without_kernel(tmp_path: Path) -> None:
    path = tmp_path / "odd.onnx"
    onnx.save(with_unknown_operator(), path)
    facts = json.loads(answer("info", "--model", path, "--json").stdout)
    assert facts["unsupported"] == {"my.domain.Frobnicate": 1}
    assert facts["predicted_s"] == {}


@pytest.mark.cluster
def test_a_model_runs_end_to_end_on_processes(mlp_files: Path) -> None:
    output = mlp_files / "y.npz"
    files = ("--model", mlp_files / "mlp.onnx", "--input", mlp_files / "x.npy", "--output", output)
    record = json.loads(answer("run", *files, "--workers", "2", "--json").stdout)
    assert record["executed_ops"] == record["compute_ops"] == 5
    assert record["dask_tasks"] == 2  # the input is one, and all ops are another
    (expected,) = ReferenceEvaluator(mlp()).run(None, {"x": np.load(mlp_files / "x.npy")})
    with np.load(output) as written:
        (name,) = written
        np.testing.assert_allclose(written[name], expected, rtol=1e-4, atol=1e-5)


def test_inputs_may_be_named_or_come_in_one_file(mlp_files: Path) -> None:
    x = np.load(mlp_files / "x.npy")
    np.savez(mlp_files / "all.npz", x=x)
    results = []
    (mlp_files / "rate=1.npy").write_bytes((mlp_files / "x.npy").read_bytes())
    for given in (f"x={mlp_files / 'x.npy'}", mlp_files / "all.npz", mlp_files / "rate=1.npy"):
        output = mlp_files / "y.npz"
        files = ("--model", mlp_files / "mlp.onnx", "--input", given, "--output", output)
        answer("run", *files, "--policy", "sequential")
        with np.load(output) as written:
            results.append(written[next(iter(written))])
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_without_inputs_they_are_drawn_and_that_is_said(mlp_files: Path) -> None:
    result = answer("run", "--model", mlp_files / "mlp.onnx", "--policy", "sequential", "--seed", "7")
    assert "drawn at random (seed 7)" in result.stderr


def test_any_name_and_strings_can_be_written(tmp_path: Path) -> None:
    nodes = [onnx.helper.make_node("Identity", ["x"], [name]) for name in ("file", "a/b")]
    model = model_of(nodes, {"x": (onnx.TensorProto.STRING, [2])}, ["file", "a/b"])
    onnx.save(model, tmp_path / "named.onnx")
    words = ["one", "two"]
    np.save(tmp_path / "x.npy", np.array(words))
    files = ("--input", tmp_path / "x.npy", "--output", tmp_path / "y.npz")
    answer("run", "--model", tmp_path / "named.onnx", *files, "--policy", "sequential")
    with np.load(tmp_path / "y.npz") as written:
        assert {name: [*written[name]] for name in written} == {"file": words, "a/b": words}


def test_an_input_dimension_of_minus_one_may_have_any_size(tmp_path: Path) -> None:
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [-1, 3]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, tmp_path / "any.onnx")
    assert "float32[?, 3]" in answer("info", "--model", tmp_path / "any.onnx").output
    answer("run", "--model", tmp_path / "any.onnx", "--policy", "sequential")


# Batches


@pytest.mark.parametrize("policy", ["dask", "ferroflow"])
def test_a_model_is_computed_in_batches(tmp_path: Path, policy: str) -> None:
    onnx.save(mlp(), tmp_path / "mlp.onnx")
    x = np.random.default_rng(0).standard_normal((50, 784), dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    local = ("--workers", "2", "--no-processes", "--policy", policy, "--batch", "8")
    files = ("--input", tmp_path / "x.npy", "--output", tmp_path / "y.npz")
    shown = answer("run", "--model", tmp_path / "mlp.onnx", *local, *files)
    told = (
        r"mlp · whole model in each of 2 workers: 50 rows in 7 batches in [\d.]+ s = [\d,]+ rows/s; takes any"
    )
    assert re.match(told, shown.stdout)
    (expected,) = ReferenceEvaluator(mlp()).run(None, {"x": x})
    np.testing.assert_allclose(np.load(tmp_path / "y.npz")["y"], expected, rtol=1e-4, atol=1e-6)


def test_random_batches_as_json(tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "mlp.onnx")
    local = ("--workers", "2", "--no-processes", "--batch", "3", "--repeat", "3", "--json")
    facts = json.loads(answer("run", "--model", tmp_path / "mlp.onnx", *local).stdout)
    assert (facts["rows"], facts["batches"], facts["batching"]) == (24, 8, "takes any batch")
    assert len(facts["makespans_s"]) == 3
    assert facts["rows_per_s"] == pytest.approx(24 / facts["makespan_s"])


#: Command lines of the original ferroflow, from its README. The matrices of the GPU run are smaller here, and
#: its device is emulated.
COMMANDS = {
    "run --dag imbalanced --workers 8": r"imbalanced · ferroflow · 8 × 1 processes: 204 ops in ",
    "run --dag transformer --layers 2": r"transformer · ferroflow · .*: 24 ops in ",
    "run --dag wide --width 8 --depth 2 --workers 2 --policy ring --steal-threshold 2": "steal threshold ",
    "run --dag skewed --workers 2 --policy ring --no-adaptive-threshold": "after 0 changes",
    "info --dag large-transformer": "ops",
}


@pytest.mark.cluster
@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_line_of_the_original_runs(line: str) -> None:
    assert re.search(COMMANDS[line], answer(*line.split()).stdout)


@pytest.mark.cluster
def test_a_model_and_a_matrix_product_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp(), "mlp.onnx")
    assert "5 ops in" in answer("run", "--model", "mlp.onnx", "--workers", "4").stdout
    sizes = "--n-branches 16 --ops-per-branch 8 --matrix-size 64 --workers 8 --device emulated"
    assert "128 ops in" in answer("run", "--dag", "matmul-parallel", *sizes.split()).stdout


def test_other_packages_may_add_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "commands", {})
    main.add_command(click.Command("greet", callback=lambda: click.echo("hello"), help="Say hello."))
    assert answer("greet").stdout == "hello\n"
    assert "Say hello." in answer("--help").stdout
