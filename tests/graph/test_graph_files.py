"""Graphs in JSON: `info --output` writes what `--dag FILE.json` reads, and bad files get one line."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command_line import answer, assert_one_line, ferroflow
from models import if_model, light_models, mlp

from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph import Graph, generate_graph, graph_from_onnx, random_inputs
from ferroflow_dask.graph.files import read_graph, write_graph
from ferroflow_dask.kernels import evaluate

HEAD = {"format": "ferroflow graph", "version": 1}
A = {"name": "a", "duration_s": 0.001}
B = {"name": "a", "op_type": "Add"}


def write(folder: Path, **fields: Any) -> Path:
    path = folder / "g.json"
    path.write_text(json.dumps({**HEAD, **fields}))
    return path


def assert_same(one: Graph, other: Graph) -> None:
    assert one.name == other.name
    assert one.inputs == other.inputs
    assert one.outputs == other.outputs
    assert {name: one.spec(name) for name in one.producers} == {
        name: other.spec(name) for name in other.producers
    }
    for op, same in zip(one.topological_order, other.topological_order, strict=True):
        assert (op.name, op.kind, op.operands, op.outputs) == (
            same.name,
            same.kind,
            same.operands,
            same.outputs,
        )
    values = random_inputs(one, 1)
    for name, value in evaluate(one, values).items():
        np.testing.assert_array_equal(value, evaluate(other, values)[name])


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("wide", {"width": 2, "depth": 2}), ("transformer", {"seq_len": 8, "d_model": 64, "n_heads": 2})],
)
def test_a_built_in_graph_is_read_as_it_was_written(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    graph = generate_graph(name, **sizes)
    write_graph(graph, tmp_path / "g.json")
    assert (tmp_path / "g.npz").exists() == (name == "transformer")  # its weights are large
    assert_same(graph, read_graph(tmp_path / "g.json"))


def test_a_model_is_read_with_its_attributes_sub_graphs_and_weights(tmp_path: Path) -> None:
    squeezenet = next(path for path in light_models() if "squeezenet" in path.name)
    for at, model in enumerate((mlp(), if_model(), onnx.load(squeezenet))):
        onnx.save(model, tmp_path / f"{at}.onnx")
        graph = graph_from_onnx(tmp_path / f"{at}.onnx")
        write_graph(graph, tmp_path / f"{at}.json", tmp_path / f"{at}.onnx")
        assert_same(graph, read_graph(tmp_path / f"{at}.json"))
    assert not list(tmp_path.glob("*.npz"))  # the models have the weights
    (tmp_path / "moved").mkdir()
    for file in ("0.onnx", "0.json"):
        (tmp_path / file).rename(tmp_path / "moved" / file)
    assert read_graph(tmp_path / "moved" / "0.json").constants.keys() >= {"w0"}


def test_a_file_written_by_hand_needs_little(tmp_path: Path) -> None:
    ops = [
        {"name": "load", "duration_s": 0.001, "nbytes": 1000},
        {"name": "left", "duration_s": 0.001, "inputs": ["load"]},
        {"name": "right", "duration_s": 0, "inputs": ["load"], "nbytes": 8},
        {"name": "join", "duration_s": 0.001, "inputs": ["right", "left"]},
    ]
    graph = read_graph(write(tmp_path, ops=ops))
    assert graph.outputs == ("join",)
    assert [graph.spec(name).nbytes for name in ("load", "left", "right", "join")] == [1000, 1000, 8, 8]
    assert graph.name == "g"
    assert [op.attributes["duration"] for op in graph.ops] == [0.001, 0.001, 0, 0.001]
    assert evaluate(graph, {})["join"].nbytes == 8
    (told,) = [
        json.loads(answer("run", "--dag", tmp_path / "g.json", "--policy", "sequential", "--json").output)
    ]
    assert told["executed_ops"] == 4


def test_operators_of_onnx_get_their_types(tmp_path: Path) -> None:
    w = base64.b64encode(np.eye(3, dtype="float32").tobytes()).decode()
    ops = [
        {"name": "p", "op_type": "MatMul", "inputs": ["x", "w"]},
        {"name": "later", "duration_s": 0, "inputs": ["p"]},
        {"name": "y", "op_type": "LeakyRelu", "inputs": ["p"], "attributes": {"alpha": 0.5}},
    ]
    path = write(
        tmp_path,
        inputs={"x": {"dtype": "float32", "shape": ["n", 3]}},
        constants={"w": {"dtype": "float32", "shape": [3, 3], "base64": w}},
        ops=ops,
    )
    graph = read_graph(path)
    assert str(graph.spec("y")) == "float32[n, 3]"
    assert graph.outputs == ("later", "y")
    np.testing.assert_array_equal(evaluate(graph, {"x": np.float32([[2, -2, 0]])})["y"], [[2, -1, 0]])


def test_info_saves_and_run_takes_it(tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "m.onnx")
    assert answer("info", "--model", tmp_path / "m.onnx", "--output", tmp_path / "g.json").exit_code == 0
    run = ["run", "--policy", "sequential", "--output"]
    answer(*run, tmp_path / "1.npz", "--model", tmp_path / "m.onnx")
    answer(*run, tmp_path / "2.npz", "--dag", tmp_path / "g.json")
    with np.load(tmp_path / "1.npz") as one, np.load(tmp_path / "2.npz") as other:
        assert one.files
        for name in one.files:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "x"}, "format must be 'ferroflow graph', got"),
        ({"version": 2}, "version must be 1, got 2"),
        ({}, "ops must be a list, got None"),
        ({"ops": []}, "outputs must name a value, got none"),
        ({"ops": [A], "colour": 1}, "a field of a graph must be one of .*, got 'colour'"),
        ({"ops": [7]}, "op 0 must be an object, like .*, got 7"),
        ({"ops": [{"duration_s": 1}]}, "name of op 0 must be a text, got None"),
        ({"ops": [{**A, "after": []}]}, "a field of op 'a' must be one of .*inputs.*, got 'after'"),
        ({"ops": [{"name": "a"}]}, "op 'a' must have either duration_s or op_type, got none"),
        ({"ops": [{**A, **B}]}, "op 'a' must have either duration_s or op_type, got both"),
        (
            {"ops": [{"name": "a", "duration_s": -1}]},
            "duration_s of op 'a' must be a finite number",
        ),
        ({"ops": [{**A, "nbytes": "x"}]}, "nbytes of op 'a' must be a finite number"),
        ({"ops": [{**A, "inputs": "b"}]}, "inputs of op 'a' must be a list, got 'b'"),
        ({"ops": [{**A, "inputs": ["b"]}]}, "op 'a' reads 'b', which nothing produces"),
        ({"ops": [{**A, "inputs": ["a"]}]}, "graph 'g' has a cycle"),
        ({"ops": [A, A]}, "two ops are named 'a'"),
        ({"ops": [A], "outputs": ["z"]}, "output 'z' of graph 'g' is produced by nothing"),
        ({"ops": [A], "inputs": {"x": 1}}, "'x' must be an object like .*, got 1"),
        ({"ops": [A], "inputs": {"x": {"dtype": "x"}}}, "ONNX has no dtype 'x'"),
        ({"ops": [A], "inputs": {"x": {"dtype": "int8", "shape": [-1]}}}, "a dimension is -1"),
        ({"ops": [A], "inputs": {"x": {"dtype": "int8", "shape": [2**63]}}}, f"a dimension is {2**63}"),
        ({"ops": [{**A, "nbytes": 1e30}]}, "a dimension is 1"),
        ({"ops": [A], "constants": {"w": {}}}, r"constant 'w' must have base64, got \{\}"),
        ({"ops": [A], "constants": {"w": {"base64": "?"}}}, "constant 'w' must be base64, got"),
        ({"ops": [A], "constants": {"w": {"base64": "aaaa"}}}, "constant 'w' must be a tensor of ONNX"),
        (
            {"ops": [A], "constants": {"w": {"dtype": "int8", "shape": [9], "base64": "aaaa"}}},
            r"constant 'w' must have 9 bytes for int8\[9\], got 3",
        ),
        ({"ops": [A], "opsets": {"": 2**31}}, f"opset '' must be a whole number from 1 to .*, got {2**31}"),
        (
            {"ops": [A], "opsets": {"": 0}},
            r"opset '' must be a whole number from 1 to \d+, got 0",
        ),
        ({"ops": [{"name": "a", "op_type": "Nope"}]}, "No Op registered for Nope"),
        (
            {"ops": [{"name": "a", "op_type": "Add", "attributes": {"b": None}}]},
            "attribute 'b' of op 'a' must be",
        ),
        (
            {"ops": [{"name": "a", "op_type": "Add", "attributes": {"b": {"base64": "/w=="}}}]},
            "attribute of ONNX",
        ),
    ],
)
def test_a_bad_file_gets_one_line(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path, **fields)
    with pytest.raises(UsageError, match=f"is not a valid graph: .*{message}") as raised:
        read_graph(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--dag", "none.json"), "a graph must be a file, got 'none.json': No such file"),
        (("run", "--dag", "damaged.json"), "a graph must be a JSON file, got 'damaged.json'"),
        (("run", "--dag", "g.json", "--width", "8"), "--dag FILE takes no sizes, but --width was given"),
        (("info", "--dag", "g.json", "--output", "none/g.json"), "there is no folder 'none'"),
        (("info", "--dag", "g.json", "--output", "g.txt"), "--output 'g.txt' must end in .json"),
    ],
)
def test_the_command_line_gives_one_line(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, ops=[A])
    (tmp_path / "damaged.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    found = ferroflow(*arguments)
    assert_one_line(found.exit_code, found.stderr, 2, message)
