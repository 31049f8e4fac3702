"""The command line: what it prints, and that wrong input ends with one line and the right status."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from models import mlp
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from ferroflow_dask.bench import RunRecord
from ferroflow_dask.cli import main

FIELDS = [
    *(
        "dag",
        "policy",
        "workers",
        "threads_per_worker",
        "processes",
        "compute_ops",
        "executed_ops",
        "dask_tasks",
    ),
    *("makespan_s", "ops_per_s", "bound_ops_per_s", "efficiency", "idle_fraction", "steals", "steals_per_s"),
    *("seed", "versions"),
]
SMALL = ("--dag", "wide", "--width", "4", "--depth", "2")


def ferroflow(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def answer(*arguments: str | Path) -> Result:
    result = ferroflow(*arguments)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def mlp_files(tmp_path: Path) -> Path:
    onnx.save(mlp(), tmp_path / "mlp.onnx")
    np.save(tmp_path / "x.npy", np.random.default_rng(1).standard_normal((5, 784), dtype=np.float32))
    return tmp_path


# What it prints


@pytest.mark.parametrize("policy", ["sequential", "dask", "static", "random", "ferroflow"])
def test_json_is_one_object_with_the_documented_fields(policy: str) -> None:
    result = answer(
        "run", *SMALL, "--policy", policy, "--workers", "2", "--no-processes", "--seed", "5", "--json"
    )
    record = json.loads(result.stdout)
    assert list(record) == FIELDS == list(RunRecord.__dataclass_fields__)
    expected = {"dag": "wide", "policy": policy, "compute_ops": 8, "executed_ops": 8, "seed": 5}
    assert expected.items() <= record.items()
    assert record["workers"] == (1 if policy == "sequential" else 2)
    assert record["dask_tasks"] == (0 if policy == "sequential" else 8)
    assert set(record["versions"]) >= {"python", "ferroflow-dask", "dask", "distributed", "onnxruntime"}


def test_a_run_ends_with_one_line() -> None:
    result = answer("run", *SMALL, "--workers", "2", "--no-processes")
    assert re.fullmatch(
        r"wide · ferroflow · 2 × 1 in one process: 8 ops in \d+\.\d{3} s = [\d,]+ ops/s, "
        r"\d+% of the bound [\d,]+; \d+ steals?, \d+% idle\n",
        result.output,
    )


def test_repeated_runs_show_the_median_and_the_range() -> None:
    result = answer("run", *SMALL, "--policy", "sequential", "--repeat", "3")
    assert re.search(r"median of 3 \(\d\.\d{3}–\d\.\d{3} s\)", result.output)
    as_json = answer("run", *SMALL, "--policy", "sequential", "--repeat", "3", "--json")
    record = json.loads(as_json.stdout)
    assert record["makespan_s"] == sorted(record["makespans_s"])[1]


@pytest.mark.cluster
def test_processes_and_threads_are_as_asked() -> None:
    arguments = (
        "--workers",
        "2",
        "--threads",
        "2",
        "--json",
        "--steal-threshold",
        "2",
        "--no-adaptive-threshold",
    )
    record = json.loads(answer("run", *SMALL, *arguments).stdout)
    assert (record["workers"], record["threads_per_worker"], record["processes"]) == (2, 2, True)


def test_info_counts_what_the_graph_has() -> None:
    facts = json.loads(answer("info", "--dag", "transformer", "--json").stdout)
    expected = {"ops": 18, "sources": 6, "compute_ops": 12, "edges": 19, "levels": 10, "gpu_sized_matmuls": 0}
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


def test_info_lists_operators_without_kernel(tmp_path: Path) -> None:
    path = tmp_path / "odd.onnx"
    onnx.save(with_unknown_operator(), path)
    facts = json.loads(answer("info", "--model", path, "--json").stdout)
    assert facts["unsupported"] == {"my.domain.Frobnicate": 1}


@pytest.mark.cluster
def test_a_model_runs_end_to_end_on_processes(mlp_files: Path) -> None:
    output = mlp_files / "y.npz"
    files = ("--model", mlp_files / "mlp.onnx", "--input", mlp_files / "x.npy", "--output", output)
    record = json.loads(answer("run", *files, "--workers", "2", "--json").stdout)
    assert record["executed_ops"] == record["compute_ops"] == record["dask_tasks"] == 5
    (expected,) = ReferenceEvaluator(mlp()).run(None, {"x": np.load(mlp_files / "x.npy")})
    with np.load(output) as written:
        (name,) = written
        np.testing.assert_allclose(written[name], expected, rtol=1e-4, atol=1e-5)


def test_inputs_may_be_named_or_come_in_one_file(mlp_files: Path) -> None:
    x = np.load(mlp_files / "x.npy")
    np.savez(mlp_files / "all.npz", x=x)
    results = []
    for given in (f"x={mlp_files / 'x.npy'}", mlp_files / "all.npz"):
        output = mlp_files / "y.npz"
        files = ("--model", mlp_files / "mlp.onnx", "--input", given, "--output", output)
        answer("run", *files, "--policy", "sequential")
        with np.load(output) as written:
            results.append(written[next(iter(written))])
    np.testing.assert_array_equal(*results)


def test_without_inputs_they_are_drawn_and_that_is_said(mlp_files: Path) -> None:
    result = answer("run", "--model", mlp_files / "mlp.onnx", "--policy", "sequential", "--seed", "7")
    assert "drawn at random (seed 7)" in result.stderr


# Wrong input: one line on stderr that says what, no traceback, status 2 or 1


def with_unknown_operator() -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    graph = helper.make_graph(
        [helper.make_node("Frobnicate", ["x"], ["y"], "odd", domain="my.domain")], "g", [x], [y]
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("my.domain", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def with_external_weights(location: str) -> onnx.ModelProto:
    model = mlp()
    for tensor in model.graph.initializer:
        onnx.external_data_helper.set_external_data(tensor, location)
        tensor.ClearField("raw_data")
    return model


@pytest.fixture
def bad_files(mlp_files: Path) -> Path:
    whole = (mlp_files / "mlp.onnx").read_bytes()
    (mlp_files / "truncated.onnx").write_bytes(whole[: len(whole) // 2])
    (mlp_files / "text.onnx").write_text("this is no model")
    (mlp_files / "empty.onnx").write_bytes(b"")
    (mlp_files / "text.npy").write_text("this is no array")
    onnx.save(with_unknown_operator(), mlp_files / "odd.onnx")
    (mlp_files / "missing.onnx").write_bytes(with_external_weights("weights.bin").SerializeToString())
    (mlp_files / "outside.onnx").write_bytes(with_external_weights("../secret.bin").SerializeToString())
    (mlp_files / "absolute.onnx").write_bytes(with_external_weights("/etc/hostname").SerializeToString())
    np.save(mlp_files / "narrow.npy", np.zeros((5, 7), "float32"))
    np.save(mlp_files / "double.npy", np.zeros((5, 784)))
    np.save(mlp_files / "pickled.npy", np.array([{"a": 1}], dtype=object))
    return mlp_files


MLP = ("run", "--model", "mlp.onnx", "--policy", "sequential")
USAGE, FAILURE = 2, 1


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        pytest.param(
            ("run", "--dag", "wied"), USAGE, "unknown DAG 'wied'; choose one of: .*wide", id="unknown DAG"
        ),
        pytest.param(("run",), USAGE, "give either --dag NAME or --model FILE", id="neither DAG nor model"),
        pytest.param((*MLP, "--dag", "wide"), USAGE, "give either --dag", id="both DAG and model"),
        pytest.param(
            ("run", *SMALL, "--workers", "0"), USAGE, "'--workers': 0 is not in the range", id="workers 0"
        ),
        pytest.param(
            ("run", *SMALL, "--threads", "-1"), USAGE, "'--threads': -1 is not", id="negative threads"
        ),
        pytest.param(
            ("run", "--dag", "wide", "--width", "-3"), USAGE, "width is -3; it must", id="negative width"
        ),
        pytest.param(
            ("run", "--dag", "wide", "--width", "x"), USAGE, "'x' is not a valid integer", id="no number"
        ),
        pytest.param(
            ("run", "--dag", "wide", "--channels", "3"), USAGE, "no argument 'channels'", id="foreign size"
        ),
        pytest.param((*MLP, "--width", "3"), USAGE, "--model takes no sizes", id="size for a model"),
        pytest.param(
            ("run", *SMALL, "--policy", "greedy"), USAGE, "unknown policy 'greedy'; .*static", id="policy"
        ),
        pytest.param(("run", *SMALL, "--device", "cuda"), USAGE, "'cuda' is not available", id="device"),
        pytest.param(("run", *SMALL, "--colour"), USAGE, "No such option.*--colour", id="unknown flag"),
        pytest.param(("walk",), USAGE, "No such command 'walk'", id="unknown command"),
        pytest.param(
            ("run", *SMALL, "--policy", "static", "--steal-threshold", "2"),
            USAGE,
            "are of policy 'ferroflow', not 'static'",
            id="threshold without stealing",
        ),
        pytest.param(("run", "--model", "nowhere.onnx"), FAILURE, "nowhere.onnx", id="no such file"),
        pytest.param(("run", "--model", "."), FAILURE, "is a folder|directory", id="a folder"),
        pytest.param(("info", "--model", "text.onnx"), FAILURE, "text.onnx", id="a file that is no ONNX"),
        pytest.param(("run", "--model", "empty.onnx"), FAILURE, "empty.onnx", id="an empty file"),
        pytest.param(("run", "--model", "truncated.onnx"), FAILURE, "truncated.onnx", id="a truncated model"),
        pytest.param(("run", "--model", "missing.onnx"), FAILURE, "weights.bin", id="external data missing"),
        pytest.param(("run", "--model", "outside.onnx"), FAILURE, "secret.bin", id="external data outside"),
        pytest.param(
            ("run", "--model", "absolute.onnx"), FAILURE, "/etc/hostname", id="external data absolute"
        ),
        pytest.param(
            ("run", "--model", "odd.onnx"), FAILURE, "no kernel for op 'odd'", id="an op no kernel has"
        ),
        pytest.param((*MLP, "--input", "z=x.npy"), USAGE, "no input 'z'; it takes x", id="wrong input name"),
        pytest.param((*MLP, "--input", "narrow.npy"), USAGE, r"shape \[5, 7\]", id="wrong input shape"),
        pytest.param((*MLP, "--input", "double.npy"), USAGE, "dtype float64.*astype", id="wrong input dtype"),
        pytest.param(
            (*MLP, "--input", "nowhere.npy"), USAGE, "'nowhere.npy' cannot be read", id="no input file"
        ),
        pytest.param((*MLP, "--input", "text.npy"), USAGE, "'text.npy' cannot be read", id="no array"),
        pytest.param((*MLP, "--input", "pickled.npy"), USAGE, "'pickled.npy' cannot be read", id="pickled"),
        pytest.param((*MLP, "--output", "y.txt"), USAGE, "must end in .npz", id="output format"),
        pytest.param(
            (*MLP, "--output", "no/y.npz"), USAGE, "'no/y.npz' cannot be written", id="output folder"
        ),
        pytest.param(
            ("run", *SMALL, "--connect", "nonsense://x"), FAILURE, "'nonsense://x'", id="odd address"
        ),
    ],
)
def test_wrong_input_is_told_in_one_line(
    arguments: tuple[str, ...], status: int, message: str, bad_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bad_files)
    result = ferroflow(*arguments)
    assert_one_line(result.exit_code, result.stderr, status, message)
    assert result.stdout == ""


def assert_one_line(exit_code: int, stderr: str, status: int, message: str) -> None:
    assert re.search(message, stderr), stderr
    assert stderr.startswith("ferroflow: ")
    assert stderr.count("\n") == 1
    assert exit_code == status


@pytest.mark.cluster
def test_wrong_input_is_refused_before_a_cluster_sees_it(
    bad_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bad_files)
    result = ferroflow("run", "--model", "mlp.onnx", "--workers", "1", "--input", "narrow.npy")
    assert_one_line(result.exit_code, result.stderr, USAGE, "shape")


def command(*arguments: str, **more: object) -> subprocess.CompletedProcess[str]:
    """Run the installed command as a shell would."""
    program = Path(sys.executable).with_name("ferroflow")
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, check=False, timeout=60, **more
    )  # type: ignore[call-overload,no-any-return]


@pytest.mark.cluster
def test_an_unreachable_scheduler_is_told_in_one_line() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but nobody listens
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        done = command("run", *SMALL, "--connect", address, "--timeout", "1")
    assert_one_line(done.returncode, done.stderr, FAILURE, f"no scheduler answers at '{address}' within 1 s")


class Cluster:
    """A scheduler and a worker started from the shell, and the interpreter that runs them."""

    def __init__(self, folder: Path, environment: dict[str, str], with_worker: bool = True) -> None:
        file = folder / "scheduler.json"
        options = {
            "env": environment,
            "cwd": folder,
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
        }
        distributed = [sys.executable, *environment.get("ISOLATED", "").split(), "-m", "distributed.cli"]
        scheduler = ["dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
        self.processes = [
            subprocess.Popen(
                [
                    *distributed[:-1],
                    f"distributed.cli.{scheduler[0]}",
                    *scheduler[1:],
                    "--scheduler-file",
                    str(file),
                ],
                **options,
            )  # type: ignore[call-overload]
        ]
        if with_worker:
            self.processes.append(
                subprocess.Popen(
                    [
                        *distributed[:-1],
                        "distributed.cli.dask_worker",
                        "--no-nanny",
                        "--nthreads",
                        "1",
                        "--scheduler-file",
                        str(file),
                    ],
                    **options,  # type: ignore[call-overload]
                )
            )
        self.file = file

    def address(self) -> str:
        from distributed import Client

        with Client(scheduler_file=str(self.file), set_as_default=False, timeout=30) as client:
            if len(self.processes) > 1:
                client.wait_for_workers(1, timeout=30)
            return str(client.scheduler.address)

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
            process.wait(timeout=30)


@pytest.fixture
def bare_environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which everything is installed but this package: links to all but its files."""
    site = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    bare = tmp_path / "site"
    bare.mkdir()
    for entry in site.iterdir():
        if not entry.name.startswith(("ferroflow", "_ferroflow", "_editable", "__editable__")):
            (bare / entry.name).symlink_to(entry)
    # -S leaves out the real site-packages, -s and -E whatever else could bring the package in.
    return {"PYTHONPATH": str(bare), "ISOLATED": "-S", "HOME": str(tmp_path), "PATH": os.environ["PATH"]}


@pytest.fixture
def bare_cluster(bare_environment: dict[str, str], tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, bare_environment)
    yield cluster
    cluster.close()


@pytest.fixture
def empty_cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, dict(os.environ), with_worker=False)
    yield cluster
    cluster.close()


@pytest.fixture
def whole_cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, dict(os.environ))
    yield cluster
    cluster.close()


@pytest.mark.cluster
def test_a_running_cluster_is_used_and_left_as_it_was(whole_cluster: Cluster) -> None:
    address = whole_cluster.address()
    for policy in ("ferroflow", "dask"):
        done = command("run", *SMALL, "--connect", address, "--policy", policy, "--json")
        record = json.loads(done.stdout)
        assert (record["workers"], record["processes"], record["executed_ops"]) == (1, None, 8)
        assert done.stderr == ""
    from distributed import Client

    def extension(dask_scheduler: object) -> str:
        return type(dask_scheduler.extensions["stealing"]).__name__  # type: ignore[attr-defined]

    with Client(address, set_as_default=False) as client:
        assert client.run_on_scheduler(extension) == "WorkStealing"
        assert client.submit(sum, [1, 2]).result() == 3


@pytest.mark.cluster
@pytest.mark.parametrize("policy", ["ferroflow", "dask"])
def test_a_cluster_without_the_package_is_told_in_one_line(bare_cluster: Cluster, policy: str) -> None:
    address = bare_cluster.address()
    done = command("run", *SMALL, "--connect", address, "--policy", policy)
    assert_one_line(
        done.returncode, done.stderr, FAILURE, "has no package ferroflow-dask; run there: pip install"
    )
    assert bare_cluster.address() == address  # it lives on


@pytest.mark.cluster
def test_workers_without_the_package_are_told_in_one_line(
    empty_cluster: Cluster, bare_environment: dict[str, str], tmp_path: Path
) -> None:
    worker = subprocess.Popen(
        [
            sys.executable,
            "-S",
            "-m",
            "distributed.cli.dask_worker",
            "--no-nanny",
            "--scheduler-file",
            str(empty_cluster.file),
        ],
        env=bare_environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    empty_cluster.processes.append(worker)
    done = command("run", *SMALL, "--connect", empty_cluster.address())
    assert_one_line(
        done.returncode, done.stderr, FAILURE, "the worker at tcp://.* has no package ferroflow-dask"
    )


@pytest.mark.cluster
def test_a_cluster_without_workers_is_told_in_one_line(empty_cluster: Cluster) -> None:
    done = command("run", *SMALL, "--connect", empty_cluster.address())
    assert_one_line(done.returncode, done.stderr, FAILURE, "has no workers; start some")
