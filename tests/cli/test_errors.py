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


MLP = "run --model mlp.onnx --policy sequential"
TEMPLATE = Path(__file__).parents[2] / "jobqueue.yaml"
#: Messages by command lines with wrong input.
WRONG_USAGE = {
    "run --dag wied": r"unknown DAG 'wied'; did you mean 'wide'\? Choose one of: .*wide",
    "run": "give either --dag NAME or --model FILE",
    f"{MLP} --dag wide": "give either --dag",
    "run --dag wide --workers 0": "--workers must be from 1 to 1,024 .*, got 0$",
    "run --dag wide --workers 1000000000000": (
        r"--workers .* to 1,024 \(they share this host.*\), got 1,000,000,000,000$"
    ),
    "calibrate --threads 9999": "--threads must be from 1 to 4,096 .*, got 9,999$",
    "bench run wide --workers 999 --threads 9": (
        "--workers × --threads must be at most 4,096 .*, got 999 × 9$"
    ),
    "run --dag wide --cluster slurm --jobs 200000": (
        r"--jobs must be from 0 to 100,000 \(.*MaxJobCount.*\), got 200,000$"
    ),
    "bench run wide --cluster slurm --gpu-jobs 200000": (
        "--gpu-jobs must be from 0 to 100,000 .*, got 200,000$"
    ),
    "run --dag wide --threads -1": "--threads must be from 1 to 4,096 .*, got -1$",
    "run --dag wide --width -3": "--width is -3; it must",
    "run --dag wide --width x": "'x' is not a valid integer",
    "run --dag wide --channels 3": "no argument '--channels'; it takes: --width, --depth",
    "info --dag matmul-chain --matrix-size 0": "--matrix-size is 0; it must be a whole number",
    f"{MLP} --matrix-size 3": "takes no sizes, but --matrix-size was",
    "run wide": "'wide' belongs to no .* like --dag wide$",
    "info m.onnx": "'m.onnx' belongs to no .* like --model m.onnx$",
    f"{MLP} more": "'more' belongs to no option; --help",
    "run --dag wide --policy greedy": "unknown policy 'greedy'; .*static",
    "run --dag wide --device tpu": "'tpu' is not available",
    "run --dag wide --scheduler work-stealing": "give --policy ring",
    "run --dag wide --scheduler static": "give --policy static",
    "run --dag wide --colour": "No such option.*--colour",
    "--colour": "No such option.*--colour",
    "run --dag wide --seed -1": "'--seed': -1 is not",
    "run --dag wide --timeout nan": "nan is no number of seconds",
    "explain k --connect tcp://127.0.0.1:1 --connect-timeout inf": "inf is no number of seconds",
    "calibrate --connect tcp://127.0.0.1:1 --connect-timeout inf": "inf is no number of seconds",
    "top --connect tcp://127.0.0.1:1 --for inf": "inf is no number of seconds",
    "run --dag wide --cluster slurm --job-timeout inf": "inf is no number of seconds",
    "run --dag wide --device emulated --no-processes": "with --device each worker is a process",
    "run --dag wide --batch 4 --device emulated --gpu-matmul-threshold 4": (
        "--gpu-matmul-threshold is for ops"
    ),
    "info --dag transformer --seq-len 1000000000000": (
        "memory of .* GiB, got sizes that need .* GiB; give smaller --seq-len$"
    ),
    "run --dag imbalanced --n-heavy 0 --n-fast 0": "has no ops",
    "top": "which scheduler.* or set DASK_SCHEDULER_ADDRESS; the option is --connect ADDRESS$",
    "explain k": "which scheduler.* or set DASK_SCHEDULER_ADDRESS; the option is --connect ADDRESS$",
    "walk": "unknown command 'walk'; choose one of: bench, .*, top",
    "rn": r"unknown command 'rn'; did you mean 'run'\? Choose",
    "slurm state": (
        r"unknown command 'state'; did you mean 'status'\? Choose one of: cancel, status, template"
    ),
    "run program.py": r"program.py' is a Python program; add `ferroflow_dask.install\(client\)` to it",
    "run --dag net.onnx": "'net.onnx' is a model; give --model net.onnx",
    "run --dag wide --policy random --steal-threshold 3": "need the policy 'ring', got 'random'; add",
    "run --dag wide --policy random --no-adaptive-threshold": "need the policy 'ring', got 'random'; add",
    "run --dag wide --policy static --steal-threshold 2": "need the policy 'ring', got 'static'; add",
    "run --dag wide --steal-threshold 2": "need the policy 'ring', got 'ferroflow'; add --policy ring$",
    f"{MLP} --input z=x.npy": "no input 'z'; it takes x",
    f"{MLP} --input narrow.npy": r"shape \[5, 7\]",
    "run --model mlp.onnx --workers 1 --input narrow.npy": "shape",  # before a cluster sees it
    f"{MLP} --input double.npy": r"'x' has dtype float64.* save array.astype\('float32'\) in 'double.npy'$",
    f"{MLP} --input nowhere.npy": "'nowhere.npy' cannot be read",
    f"{MLP} --input text.npy": "'text.npy' is no .npy or",
    f"{MLP} --input x=x.csv": (
        "--policy must be of a cluster for a batch job, got 'sequential'; leave it out$"
    ),
    f"{MLP} --input pickled.npy": r"'pickled.npy' cannot be read .*; save texts as array.astype\(str\)",
    f"{MLP} --input header.npy": "'header.npy' cannot be read",
    f"{MLP} --input huge.npy": "'huge.npy' says that it is larger than",
    f"{MLP} --input method.npz": "'method.npz' cannot be read",
    "run --model texts.onnx --policy sequential": (
        r"input 'a' \(string\[n\]\) cannot be drawn .* on the command line by --input a=FILE$"
    ),
    "run --model mlp.onnx --batch 1000000000000": (
        "random inputs of 16,000,000,000,000 rows must fit into .* or a smaller --batch$"
    ),
    "run --dag wide --input x.npy": "has no inputs; leave --input 'x.npy'",
    f"{MLP} --input cut.npz": "'cut.npz' cannot be read",
    f"{MLP} --input damaged.npz": "'damaged.npz' cannot be",
    f"{MLP} --input objects.npz": "'objects.npz' cannot be",
    f"{MLP} --input x=whole.npz": "has its own names",
    f"{MLP} --batch 0": "'--batch': 0 is not",
    "run --dag wide --batch 4": "has no inputs",
    "run --model mlp.onnx --batch 4 --input narrow.npy": r"shape \[5, 7\]",
    f"{MLP} --batch 4 --policy sequential": "sequential has none",
    "run --dag wide --connect-timeout 3": (
        "--connect-timeout would do nothing without --connect; leave it out"
    ),
    "calibrate --connect-timeout 3": "--connect-timeout would do nothing without --connect; leave it out",
    "run --dag wide --precision tf32": "--precision tf32 needs GPUs; give --device auto or",
    "info --dag wide --dot no/g.svg": "--dot 'no/g.svg' cannot be",
    "run --dag wide --report .": "--report '.*it is a folder",
    f"{MLP} --output y.txt": "must end in .npz",
    f"{MLP} --output no/y.npz": "'no/y.npz' cannot be written",
    "run --dag wide --policy sequential --dashboard": "--policy sequential has none",
    "run --dag wide --trace no/t.json": "--trace 'no/t.json' cannot be written",
    # Devices
    "run --dag wide --device cuda:x": "--device 'cuda:x' is not available",
    "run --dag wide --device emulated --precision fp8": "unknown precision 'fp8'; choose one of: bf16",
    "run --dag wide --gpu-matmul-threshold 9": "--gpu-matmul-threshold needs GPUs",
    "run --dag wide --device emulated --policy sequential": "leave --device out",
    # Clusters of jobs
    "run --dag wide --jobs 2": "--jobs and --gpu-jobs need --cluster slurm",
    "run --dag wide --tls": "--tls would do nothing without --cluster slurm; leave it out",
    "run --dag wide --connect tcp://127.0.0.1:1 --tls": "--tls would do nothing without --cluster slurm",
    "run --dag wide --config q.yaml --section cpu --gpu-section g --job-timeout 9": (
        "--config and --section and --gpu-section and --job-timeout would do nothing .* leave them out"
    ),
    "run --dag wide --cluster slurm --workers 4 --no-processes": (
        "--workers and --processes/--no-processes would start a local cluster; --cluster slurm names"
    ),
    "run --dag wide --job-script": "--job-script needs --cluster slurm",
    "run --dag wide --cluster pbs": "unknown cluster 'pbs'; choose one of: local, slurm",
    "run --dag wide --cluster slurm --jobs 0": "needs jobs; give --jobs N or --gpu-jobs N",
    "run --dag wide --cluster slurm --connect tcp://x:1": "--connect and --cluster slurm are two clusters",
    # Simulations and searches
    "simulate": "give one of --dag NAME, --model FILE, --record FILE and --standard",
    "simulate --standard --dag wide": "give one of --dag NAME",
    "simulate --standard --width 3": "--standard takes no sizes, but --width",
    "simulate --standard --html x.html": "leave out --html",
    "simulate --dag wide --record x": "give one of --dag NAME",
    "simulate --dag wide --topology narwal": "did you mean 'narval'",
    "simulate --dag wide --workers 2,x": "must be numbers like 2,4,8",
    "simulate --dag wide --workers 0": "workers must be a whole number",
    "simulate --dag wide --policy dusk": "unknown policy of the exact",
    "simulate --record none.json": "a record must be a file",
    "simulate --record x --width 3": "--record takes no sizes",
    "simulate --dag wide --html none/x.html": "there is no folder",
    "search --dag wide --resume /none.json": "a strategy must be a JSON file",
    "search --dag wide --processes 0": "0 is not in the range x>=1",
    "search --dag wide --steps 0": "0 is not in the range x>=1",
    "search --dag wide --seconds=": "'' is no duration",
    "search --dag wide --seconds 10parsecs": "'10parsecs' is no duration; write it like 60, 60s or 5m",
    "search --dag wide --seconds 0": "0.0 is not in the range x>0",
    "search --dag wide --topology mars": "unknown topology 'mars'",
    "search --dag wide -o /none/s.json": "there is no folder '/none'",
    # Numbers that no command can use
    "info --dag wide --workers 9999999": r"--workers must be from 1 to 100,000 \(as in a topology\)",
    "search --dag wide --workers 9999999": r"--workers must be from 1 to 100,000 \(as in a topology\)",
    "simulate --dag wide --workers-per-host 9999999": "--workers-per-host must be from 1 to 100,000",
    "simulate --dag wide --workers 9999999": "workers must be a whole number from 1 to 100,000",
    **{
        f"{command} --repeat 9999999": "--repeat must be from"
        for command in (*("run --dag wide", "simulate --dag wide", "bench run wide"),)
    },
    **{
        f"run --dag wide {option} --cluster slurm --config {TEMPLATE} --job-script": message
        for option, message in (
            ("--policy bogus", "unknown policy 'bogus'"),
            ("--output nofile.txt", "'nofile.txt' must end in .npz"),
            ("--batch 4", "has no inputs"),
            ("--report no/r.html", "--report 'no/r.html' cannot be"),
        )
    },
    # Options that contradict each other
    **{
        f"{command} --connect tcp://127.0.0.1:1 {option}": (
            f"{option.split()[0]}.* would start a local cluster; --connect names another one; leave it out"
        )
        for command in ("run --dag wide", "calibrate")
        for option in ("--workers 4", "--threads 1", "--no-processes")
    },
    **{
        f"{MLP} {option}": (
            f"{option.split()[0]}.* would do nothing: --policy sequential runs in this process; leave it out"
        )
        for option in (
            *("--connect tcp://127.0.0.1:1", "--cluster slurm", "--workers 4", "--threads 2"),
            *("--no-processes", "--connect-timeout 3"),
        )
    },
    **{
        f"{MLP} --input {one} --input {two}": f"--input '{one}' and --input '{two}' both give input 'x'"
        for one in ("x=x.npy", "whole.npz")
        for two in ("x=x.npy", "x.npy", "whole.npz")
    },
}
#: Messages by command lines that fail later.
FAILURES = {
    "run --model nowhere.onnx": "nowhere.onnx",
    "run --model .": "is a folder|directory",
    "info --model text.onnx": "text.onnx",
    "run --model empty.onnx": "empty.onnx",
    "run --model truncated.onnx": "truncated.onnx",
    "run --model missing.onnx": "weights.bin",
    "run --model outside.onnx": "secret.bin",
    "run --model absolute.onnx": "/etc/hostname",
    "run --model odd.onnx": "no kernel for op 'odd'",
    "run --dag wide --connect nonsense://x": "'nonsense://x'",
}


@pytest.mark.parametrize(
    ("line", "message", "status"),
    [
        *((line, message, USAGE) for line, message in WRONG_USAGE.items()),
        *((line, message, FAILURE) for line, message in FAILURES.items()),
    ],
)
def test_wrong_input_is_told_in_one_line(
    line: str, message: str, status: int, bad_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bad_files)
    result = ferroflow(*line.split())
    assert_one_line(result.exit_code, result.stderr, status, message)
    assert result.stdout == ""


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
