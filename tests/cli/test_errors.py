"""The command line on wrong input: one line that says what, no traceback, the right exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import FAILURE, SMALL, USAGE, assert_one_line, command, ferroflow, with_unknown_operator
from models import mlp, model_of
from onnx import TensorProto, helper


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
    (mlp_files / "x.csv").write_text("1.0,2.0\n3.0,4.0\n")
    onnx.save(with_unknown_operator(), mlp_files / "odd.onnx")
    texts = {"a": (TensorProto.STRING, ("n",))}
    onnx.save(model_of([helper.make_node("Identity", ["a"], ["s"])], texts, ["s"]), mlp_files / "texts.onnx")
    (mlp_files / "missing.onnx").write_bytes(with_external_weights("weights.bin").SerializeToString())
    (mlp_files / "outside.onnx").write_bytes(with_external_weights("../secret.bin").SerializeToString())
    (mlp_files / "absolute.onnx").write_bytes(with_external_weights("/etc/hostname").SerializeToString())
    np.savez(mlp_files / "whole.npz", x=np.zeros((5, 784), "float32"))
    (mlp_files / "cut.npz").write_bytes((mlp_files / "whole.npz").read_bytes()[:-100])
    header = (mlp_files / "x.npy").read_bytes()
    (mlp_files / "header.npy").write_bytes(header.replace(b"(5, 784)", b"(5, 784("))
    (mlp_files / "huge.npy").write_bytes(
        header.replace(b"(5, 784), }           ", b"(5000000000000, 784), }")
    )
    # Byte 10 of an entry in the directory is the method of compression.
    method = (mlp_files / "whole.npz").read_bytes()
    entry = method.rindex(b"PK\x01\x02")
    (mlp_files / "method.npz").write_bytes(method[: entry + 10] + b"\x63" + method[entry + 11 :])
    damaged = bytearray((mlp_files / "whole.npz").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (mlp_files / "damaged.npz").write_bytes(damaged)
    np.savez(mlp_files / "objects.npz", x=np.array([{"a": 1}], dtype=object))
    np.save(mlp_files / "narrow.npy", np.zeros((5, 7), "float32"))
    np.save(mlp_files / "double.npy", np.zeros((5, 784)))
    np.save(mlp_files / "pickled.npy", np.array([{"a": 1}], dtype=object))
    return mlp_files


MLP = ("run", "--model", "mlp.onnx", "--policy", "sequential")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        pytest.param(
            ("run", "--dag", "wied"),
            USAGE,
            r"unknown DAG 'wied'; did you mean 'wide'\? Choose one of: .*wide",
            id="unknown DAG",
        ),
        pytest.param(("run",), USAGE, "give either --dag NAME or --model FILE", id="neither DAG nor model"),
        pytest.param((*MLP, "--dag", "wide"), USAGE, "give either --dag", id="both DAG and model"),
        pytest.param(
            ("run", *SMALL, "--workers", "0"),
            USAGE,
            "--workers must be from 1 to 1,024 .*, got 0$",
            id="workers 0",
        ),
        *(
            pytest.param(arguments, USAGE, message, id=f"too many: {' '.join(arguments)}")
            for arguments, message in [
                (
                    ("run", *SMALL, "--workers", "1000000000000"),
                    r"--workers must be from 1 to 1,024 \(they share this host.*\), got 1,000,000,000,000$",
                ),
                (("calibrate", "--threads", "9999"), "--threads must be from 1 to 4,096 .*, got 9,999$"),
                (
                    ("bench", "run", "wide", "--workers", "999", "--threads", "9"),
                    "--workers × --threads must be at most 4,096 .*, got 999 × 9$",
                ),
                (
                    ("run", *SMALL, "--cluster", "slurm", "--jobs", "200000"),
                    r"--jobs must be from 0 to 100,000 \(.*MaxJobCount.*\), got 200,000$",
                ),
                (
                    ("bench", "run", "wide", "--cluster", "slurm", "--gpu-jobs", "200000"),
                    "--gpu-jobs must be from 0 to 100,000 .*, got 200,000$",
                ),
            ]
        ),
        pytest.param(
            ("run", *SMALL, "--threads", "-1"),
            USAGE,
            "--threads must be from 1 to 4,096 .*, got -1$",
            id="negative threads",
        ),
        pytest.param(
            ("run", "--dag", "wide", "--width", "-3"), USAGE, "--width is -3; it must", id="negative width"
        ),
        pytest.param(
            ("run", "--dag", "wide", "--width", "x"), USAGE, "'x' is not a valid integer", id="no number"
        ),
        pytest.param(
            ("run", "--dag", "wide", "--channels", "3"),
            USAGE,
            "no argument '--channels'; it takes: --width, --depth",
            id="foreign size",
        ),
        pytest.param(
            ("info", "--dag", "matmul-chain", "--matrix-size", "0"),
            USAGE,
            "--matrix-size is 0; it must be a whole number",
            id="a size that is called otherwise in Python",
        ),
        pytest.param(
            (*MLP, "--matrix-size", "3"),
            USAGE,
            "takes no sizes, but --matrix-size was",
            id="size for a model",
        ),
        pytest.param(
            ("run", "wide"), USAGE, "'wide' belongs to no .* like --dag wide$", id="DAG without --dag"
        ),
        pytest.param(
            ("info", "m.onnx"),
            USAGE,
            "'m.onnx' belongs to no .* like --model m.onnx$",
            id="model without --model",
        ),
        pytest.param(
            (*MLP, "more"), USAGE, "'more' belongs to no option; --help", id="one argument too many"
        ),
        pytest.param(
            ("run", *SMALL, "--policy", "greedy"), USAGE, "unknown policy 'greedy'; .*static", id="policy"
        ),
        pytest.param(("run", *SMALL, "--device", "tpu"), USAGE, "'tpu' is not available", id="device"),
        pytest.param(
            ("run", *SMALL, "--scheduler", "work-stealing"), USAGE, "give --policy ring", id="scheduler"
        ),
        pytest.param(
            ("run", *SMALL, "--scheduler", "static"), USAGE, "give --policy static", id="another scheduler"
        ),
        pytest.param(("run", *SMALL, "--colour"), USAGE, "No such option.*--colour", id="unknown flag"),
        pytest.param(("--colour",), USAGE, "No such option.*--colour", id="unknown flag of the whole"),
        pytest.param(("run", *SMALL, "--seed", "-1"), USAGE, "'--seed': -1 is not", id="negative seed"),
        pytest.param(
            ("run", *SMALL, "--timeout", "nan"),
            USAGE,
            "nan is no number of seconds",
            id="timeout that is no number",
        ),
        *(
            pytest.param((*arguments, "inf"), USAGE, "inf is no number of seconds", id=" ".join(arguments))
            for arguments in (
                ("explain", "k", "--connect", "tcp://127.0.0.1:1", "--connect-timeout"),
                ("calibrate", "--connect", "tcp://127.0.0.1:1", "--connect-timeout"),
                ("top", "--connect", "tcp://127.0.0.1:1", "--for"),
                ("run", *SMALL, "--cluster", "slurm", "--job-timeout"),
            )
        ),
        *(
            pytest.param(
                (*command, "--connect", "tcp://127.0.0.1:1", *given),
                USAGE,
                f"{given[0]}.* would start a local cluster; --connect names another one; leave it out",
                id=f"{command[0]} with two clusters by {given[0]}",
            )
            for command in (("run", *SMALL), ("calibrate",))
            for given in (("--workers", "4"), ("--threads", "1"), ("--no-processes",))
        ),
        pytest.param(
            ("run", *SMALL, "--device", "emulated", "--no-processes"),
            USAGE,
            "with --device each worker is a process",
            id="devices in one process",
        ),
        pytest.param(
            ("run", *SMALL, "--batch", "4", "--device", "emulated", "--gpu-matmul-threshold", "4"),
            USAGE,
            "--gpu-matmul-threshold is for ops",
            id="threshold for batches",
        ),
        pytest.param(
            ("info", "--dag", "transformer", "--seq-len", "1000000000000"),
            USAGE,
            r"DAG 'transformer' must fit into this machine's memory of .* GiB, got sizes that need .* GiB; "
            "give smaller --seq-len$",
            id="size beyond memory",
        ),
        pytest.param(
            ("run", "--dag", "imbalanced", "--n-heavy", "0", "--n-fast", "0"),
            USAGE,
            "has no ops",
            id="no ops",
        ),
        *(
            pytest.param(
                command,
                USAGE,
                "which scheduler.* or set DASK_SCHEDULER_ADDRESS; the option is --connect ADDRESS$",
                id=f"{command[0]} without a scheduler",
            )
            for command in (("top",), ("explain", "k"))
        ),
        pytest.param(
            ("walk",), USAGE, "unknown command 'walk'; choose one of: bench, .*, top", id="unknown command"
        ),
        pytest.param(
            ("rn",), USAGE, r"unknown command 'rn'; did you mean 'run'\? Choose", id="misspelt command"
        ),
        pytest.param(
            ("slurm", "state"),
            USAGE,
            r"unknown command 'state'; did you mean 'status'\? Choose one of: cancel, status, template",
            id="misspelt subcommand",
        ),
        pytest.param(
            ("run", "program.py"),
            USAGE,
            r"program.py' is a Python program; add `ferroflow_dask.install\(client\)` to it",
            id="a Python program in place of a graph",
        ),
        pytest.param(
            ("run", "--dag", "net.onnx"),
            USAGE,
            "'net.onnx' is a model; give --model net.onnx",
            id="model as DAG",
        ),
        pytest.param(
            ("run", *SMALL, "--policy", "random", "--steal-threshold", "3"),
            USAGE,
            "need the policy 'ring', got 'random'; add --policy ring$",
            id="threshold of a policy with a seed",
        ),
        pytest.param(
            ("run", *SMALL, "--policy", "random", "--no-adaptive-threshold"),
            USAGE,
            "need the policy 'ring', got 'random'; add --policy ring$",
            id="fixed threshold of a policy with a seed",
        ),
        pytest.param(
            ("run", *SMALL, "--policy", "static", "--steal-threshold", "2"),
            USAGE,
            "need the policy 'ring', got 'static'; add --policy ring$",
            id="threshold without stealing",
        ),
        pytest.param(
            ("run", *SMALL, "--steal-threshold", "2"),
            USAGE,
            "need the policy 'ring', got 'ferroflow'; add --policy ring$",
            id="threshold of our own policy",
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
        pytest.param(
            (*MLP, "--input", "double.npy"),
            USAGE,
            r"'x' has dtype float64.* save array.astype\('float32'\) in 'double.npy'$",
            id="wrong input dtype",
        ),
        pytest.param(
            (*MLP, "--input", "nowhere.npy"), USAGE, "'nowhere.npy' cannot be read", id="no input file"
        ),
        pytest.param((*MLP, "--input", "text.npy"), USAGE, "'text.npy' is no .npy or", id="no array"),
        pytest.param(
            (*MLP, "--input", "x=x.csv"),
            USAGE,
            "--policy must be of a cluster for a batch job, got 'sequential'; leave it out$",
            id="a table of text",
        ),
        pytest.param(
            (*MLP, "--input", "pickled.npy"),
            USAGE,
            r"'pickled.npy' cannot be read .*; save texts as array.astype\(str\)",
            id="pickled",
        ),
        pytest.param(
            (*MLP, "--input", "header.npy"), USAGE, "'header.npy' cannot be read", id="a damaged header"
        ),
        pytest.param(
            (*MLP, "--input", "huge.npy"), USAGE, "'huge.npy' says that it is larger than", id="a huge array"
        ),
        pytest.param(
            (*MLP, "--input", "method.npz"), USAGE, "'method.npz' cannot be read", id="unknown compression"
        ),
        pytest.param(
            ("run", "--model", "texts.onnx", "--policy", "sequential"),
            USAGE,
            r"input 'a' \(string\[n\]\) cannot be drawn .* on the command line by --input a=FILE$",
            id="random texts",
        ),
        pytest.param(
            ("run", "--model", "mlp.onnx", "--batch", "1000000000000"),
            USAGE,
            "random inputs of 16,000,000,000,000 rows must fit into .* or a smaller --batch$",
            id="huge batches",
        ),
        pytest.param(
            ("run", *SMALL, "--input", "x.npy"), USAGE, "has no inputs; leave --input 'x.npy'", id="no inputs"
        ),
        pytest.param((*MLP, "--input", "cut.npz"), USAGE, "'cut.npz' cannot be read", id="truncated archive"),
        pytest.param(
            (*MLP, "--input", "damaged.npz"), USAGE, "'damaged.npz' cannot be", id="damaged archive"
        ),
        pytest.param(
            (*MLP, "--input", "objects.npz"), USAGE, "'objects.npz' cannot be", id="objects in archive"
        ),
        pytest.param(
            (*MLP, "--input", "x=whole.npz"), USAGE, "has its own names", id="a name for an archive"
        ),
        *(
            pytest.param(
                (*MLP, "--input", first, "--input", second),
                USAGE,
                f"--input '{first}' and --input '{second}' both give input 'x'",
                id=f"one input by {first} and {second}",
            )
            for first in ("x=x.npy", "whole.npz")
            for second in ("x=x.npy", "x.npy", "whole.npz")
        ),
        pytest.param((*MLP, "--batch", "0"), USAGE, "'--batch': 0 is not", id="empty batches"),
        pytest.param(("run", *SMALL, "--batch", "4"), USAGE, "has no inputs", id="batches of nothing"),
        pytest.param(
            ("run", "--model", "mlp.onnx", "--batch", "4", "--input", "narrow.npy"),
            USAGE,
            r"shape \[5, 7\]",
            id="batches of wrong shape",
        ),
        pytest.param(
            (*MLP, "--batch", "4", "--policy", "sequential"), USAGE, "sequential has none", id="no workers"
        ),
        *(
            pytest.param(
                (*MLP, *given),
                USAGE,
                f"{given[0]}.* would do nothing: --policy sequential runs in this process; leave it out",
                id=f"a cluster for nobody by {given[0]}",
            )
            for given in (
                ("--connect", "tcp://127.0.0.1:1"),
                ("--cluster", "slurm"),
                ("--workers", "4"),
                ("--threads", "2"),
                ("--no-processes",),
                ("--connect-timeout", "3"),
            )
        ),
        *(
            pytest.param(
                (*arguments, "--connect-timeout", "3"),
                USAGE,
                "--connect-timeout would do nothing without --connect; leave it out",
                id=f"{arguments[0]} waits for no address",
            )
            for arguments in (("run", *SMALL), ("calibrate",))
        ),
        pytest.param(
            ("run", *SMALL, "--precision", "tf32"),
            USAGE,
            "--precision tf32 needs GPUs; give --device auto or",
            id="precision of CPUs",
        ),
        pytest.param(
            ("info", *SMALL, "--dot", "no/g.svg"), USAGE, "--dot 'no/g.svg' cannot be", id="drawing's folder"
        ),
        pytest.param(
            ("run", *SMALL, "--report", "."), USAGE, "--report '.*it is a folder", id="report folder"
        ),
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


@pytest.mark.cluster
def test_wrong_input_is_refused_before_a_cluster_sees_it(
    bad_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bad_files)
    result = ferroflow("run", "--model", "mlp.onnx", "--workers", "1", "--input", "narrow.npy")
    assert_one_line(result.exit_code, result.stderr, USAGE, "shape")


@pytest.mark.parametrize("arguments", [("bench", "list"), ("info", *SMALL), ("info", *SMALL, "--json")])
def test_a_full_disk_is_told_in_one_line(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        program = Path(sys.executable).with_name("ferroflow")
        done = subprocess.run(
            [program, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    assert_one_line(done.returncode, done.stderr, FAILURE, "No space left on device")


@pytest.mark.parametrize("group", [(), ("bench",), ("slurm",)])
def test_a_group_without_a_command_shows_its_help(group: tuple[str, ...]) -> None:
    shown = ferroflow(*group, "-h")
    assert shown.exit_code == 0
    assert ferroflow(*group).output.split("Commands:")[1] == shown.stdout.split("Commands:")[1]


@pytest.mark.parametrize(
    ("variable", "value", "status", "message"),
    [
        ("DASK_FERROFLOW__LATENCY", "blah", USAGE, "ferroflow.latency is 'blah', which is no time"),
        ("DASK_FERROFLOW__KERNELS__PROVIDERS", "nope", USAGE, "must be a list of names"),
        ("DASK_TEMPORARY_DIRECTORY", "/proc/nowhere", FAILURE, "the cluster failed"),
    ],
)
def test_a_wrong_environment_is_told_in_one_line(
    variable: str, value: str, status: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    done = command("run", *SMALL, "--workers", "1", "--no-processes")
    assert_one_line(done.returncode, done.stderr, status, message)
