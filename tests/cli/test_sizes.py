"""Sizes that need more memory than there is, or that no command can use, are refused at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from command_line import USAGE

from ferroflow_dask import memory
from ferroflow_dask.bench.workloads import WORKLOADS
from ferroflow_dask.bench.workloads.needs import nbytes_of
from ferroflow_dask.cli import main
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph import TOPOLOGIES, generate_graph

HUGE = 99_999_999
#: The size that makes each built-in graph large.
LARGE = {
    "imbalanced": "n-fast",
    "wide": "width",
    "large-wide": "depth",
    "xlarge-wide": "width",
    "skewed": "n",
    "transformer": "seq-len",
    "large-transformer": "layers",
    "xlarge-transformer": "d-model",
    "resnet": "channels",
    "matmul-chain": "matrix-size",
    "matmul-parallel": "n-branches",
    "uniform": "dim",
}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_needs_of_a_built_in_graph_are_those_of_the_graph(name: str) -> None:
    sizes = {**TOPOLOGIES[name].defaults, **({"layers": 3} if "layers" in TOPOLOGIES[name].defaults else {})}
    n_ops, n_numbers = TOPOLOGIES[name].needs(**sizes)
    graph = generate_graph(name, **sizes)
    assert n_ops == len(graph.ops)
    is_small = {op.op_type for op in graph.ops} == {"Slow"}
    constants = sum(math.prod(value.shape) for value in graph.constants.values())
    results = sum(graph.spec(one).size or 0 for one in graph.outputs)
    largest = max(graph.spec(op.outputs[0]).size or 0 for op in graph.ops)
    assert is_small or max(constants, results, largest) <= n_numbers <= constants + max(results, largest)


@pytest.mark.parametrize("command", ["run", "info", "simulate", "search"])
@pytest.mark.parametrize("dag", LARGE)
def test_a_huge_graph_is_refused_in_one_line(command: str, dag: str) -> None:
    size = f"--{LARGE[dag]}"
    done = CliRunner().invoke(main, [command, "--dag", dag, size, str(HUGE * 8)])
    assert done.exit_code == USAGE
    assert done.output.startswith(f"ferroflow: DAG '{dag}' must fit into this machine's memory of ")
    assert done.output.endswith(f" GiB; give smaller {size}\n")
    assert done.output.count("\n") == 1


@pytest.mark.parametrize("workload", WORKLOADS)
def test_huge_sizes_of_a_workload_are_refused(workload: str) -> None:
    found = WORKLOADS[workload]
    counts = [name for name, value in found.defaults.items() if type(value) is int]
    assert nbytes_of(workload, found.suite, found.defaults) < 2**32
    found.arguments({name: found.defaults[name] for name in counts})
    counts = [name for name in counts if name not in ("seconds", "hours")]  # larger ones are fewer rows
    if workload != "xarray":  # its array has one size
        names = ", ".join(counts)
        with pytest.raises(UsageError, match=f"workload '{workload}' must fit .* give a smaller {names}$"):
            found.arguments(dict.fromkeys(counts, str(HUGE)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1000\n", lambda _: 1000), ("max\n", lambda whole: whole), (None, lambda whole: whole)],
)
def test_a_control_group_limits_the_memory(
    text: str | None, expected: Callable[[int], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_CGROUP_LIMIT", tmp_path / "none")
    whole = memory.memory_nbytes()
    assert whole > 2**27
    if text is not None:
        (tmp_path / "limit").write_text(text)
        monkeypatch.setattr(memory, "_CGROUP_LIMIT", tmp_path / "limit")
    assert memory.memory_nbytes() == expected(whole)


def test_durations_that_no_cluster_waits_for_are_refused() -> None:
    with pytest.raises(UsageError, match=r"heavy_ms is 1e\+300; it must be from 0 to 1e\+09"):
        generate_graph("imbalanced", heavy_ms=1e300)
    assert np.isfinite(generate_graph("imbalanced", heavy_ms=1e9).ops[0].attributes["duration"])
