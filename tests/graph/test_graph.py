"""Graphs: what is refused, what is derived, and every row of the published table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ferroflow_dask import Model, generate
from ferroflow_dask.exceptions import FerroflowError, GraphError, UnknownNameError, UsageError
from ferroflow_dask.graph import (
    TOPOLOGIES,
    Builder,
    Graph,
    Op,
    Source,
    TensorSpec,
    bounds,
    critical_path,
    generate_graph,
    levels,
    random_inputs,
    upward_ranks,
)

X = Source(0, "x", TensorSpec.of("float32", (2,)))


def relu(op_id: int, name: str, source: str, result: str | None = None) -> Op:
    return Op(op_id, name, "Relu", (source,), (result or name,))


def graph_of(*ops: Op, outputs: tuple[str, ...] = ()) -> Graph:
    return Graph("g", (X,), ops, outputs)


MALFORMED = {
    "a cycle is named op by op": ([relu(1, "a", "b"), relu(2, "b", "a")], (), "cycle: .*'a'"),
    "an unknown input names the op": ([relu(1, "a", "nowhere")], (), "'a' reads 'nowhere'"),
    "op names are unique": ([relu(1, "a", "x"), relu(2, "a", "x", "c")], (), "two ops are named 'a'"),
    "values are unique": ([relu(1, "a", "x"), relu(2, "b", "x", "a")], (), "'b' produces 'a'"),
    "an op cannot replace a source": ([relu(1, "a", "x", "x")], (), "'a' produces 'x'"),
    "ids are unique across sources and ops": ([relu(0, "a", "x")], (), "same id 0"),
    "an output must be produced": ([relu(1, "a", "x")], ("y",), "output 'y'"),
}


@pytest.mark.parametrize(("ops", "outputs", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_graphs_are_refused(ops: list[Op], outputs: tuple[str, ...], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        graph_of(*ops, outputs=outputs)


def test_mappings_of_a_graph_are_read_only() -> None:
    graph = generate_graph("resnet", channels=4)
    with pytest.raises(TypeError):
        graph.specs["x"] = TensorSpec()  # type: ignore[index]


# Analysis, on a diamond a → (b, c) → d whose right side is the longer one

DIAMOND = Graph(
    "diamond",
    (X,),
    (
        relu(1, "a", "x"),
        relu(2, "b", "a"),
        relu(3, "c", "a"),
        Op(4, "d", "Add", ("b", "c"), ("d",)),
    ),
    ("d",),
)
COSTS = {1: 1.0, 2: 2.0, 3: 5.0, 4: 1.0}


@pytest.mark.parametrize("has_dead_op", [False, True], ids=["", "and an op that no output needs"])
def test_ranks_paths_levels_and_bounds_of_a_diamond(has_dead_op: bool) -> None:
    dead = (relu(5, "dead", "d"),) if has_dead_op else ()
    graph = Graph("g", (X,), (*DIAMOND.ops, *dead), ("d",))
    costs = {**COSTS, 5: 100.0}
    assert upward_ranks(graph, costs) == {1: 7.0, 2: 3.0, 3: 6.0, 4: 1.0}
    assert [op.name for op in critical_path(graph, costs)] == ["a", "c", "d"]
    assert levels(graph) == {1: 1, 2: 2, 3: 2, 4: 3}
    assert [bounds(graph, costs).makespan(n) for n in (1, 2, 100)] == [9.0, 7.0, 7.0]
    assert bounds(graph_of(outputs=("x",)), {}).makespan(4) == 0.0


def test_generate_tells_the_sizes_of_each_graph() -> None:
    told = {
        line.split("`")[1]: line
        for line in (generate.__doc__ or "").splitlines()
        if line.strip().startswith("- `")
    }
    assert list(told) == list(TOPOLOGIES)
    for name, topology in TOPOLOGIES.items():
        base = told[name.split("-")[-1]] if "the same" in told[name] else ""
        for argument, value in topology.defaults.items():
            assert f"`{argument}={value:g}`" in told[name] + base


# The published table: nodes, ops, edges, levels, work and critical path (ms, or matrix products)

TABLE = [
    ("wide", {"width": 8, "depth": 5, "skew": 0.25}, (41, 40, 40, 5, 80, 25)),
    ("wide", {"width": 16, "depth": 5, "skew": 0.25}, (81, 80, 80, 5, 160, 25)),
    ("large-wide", {"width": 32, "depth": 10, "skew": 0.5}, (321, 320, 320, 10, 960, 50)),
    ("large-wide", {}, (321, 320, 320, 1, 920, 5)),
    ("xlarge-wide", {"width": 64, "depth": 10, "skew": 0.5}, (641, 640, 640, 10, 1920, 50)),
    ("xlarge-wide", {}, (1281, 1280, 1280, 1, 1296, 5)),
    ("imbalanced", {}, (205, 204, 204, 1, 1000, 200)),
    ("transformer", {}, (18, 12, 19, 10, 7, 5)),
    ("large-transformer", {}, (137, 96, 152, 80, 56, 40)),
    ("xlarge-transformer", {}, (545, 384, 608, 320, 224, 160)),
    ("resnet", {}, (8, 5, 8, 5, 3, 3)),
    ("matmul-chain", {}, (52, 50, 100, 50, 50, 50)),
    ("matmul-parallel", {"n_branches": 32, "ops_per_branch": 4}, (130, 128, 256, 4, 128, 4)),
    ("matmul-parallel", {}, (130, 128, 256, 8, 128, 8)),
    ("uniform", {"n": 7, "dim": 8}, (9, 7, 14, 7, 7, 7)),
    ("skewed", {"n": 10, "factor": 4}, (12, 10, 10, 1, 25, 4)),
]


@pytest.mark.parametrize(("name", "arguments", "expected"), TABLE, ids=str)
def test_built_in_graphs_have_the_published_size(
    name: str, arguments: dict[str, int], expected: tuple[int, ...]
) -> None:
    graph = generate_graph(name, **arguments)
    costs = {
        op.id: op.attributes["duration"] * 1e3 if op.op_type == "Slow" else float(op.op_type == "MatMul")
        for op in graph.ops
    }
    limits = bounds(graph, costs)
    depth = max(levels(graph).values())
    found = (graph.n_nodes, len(graph.ops), graph.n_edges, depth, limits.work, limits.critical_path)
    assert found == pytest.approx(expected)


def test_wide_has_the_published_ids_and_edges() -> None:
    graph = generate_graph("wide", width=3, depth=2, skew=0.34)
    assert [(op.id, op.inputs, op.attributes["duration"]) for op in graph.ops] == [
        (1, ("root",), 0.005),
        (2, ("slow_1",), 0.005),
        (3, ("root",), 0.001),
        (4, ("fast_3",), 0.001),
        (5, ("root",), 0.001),
        (6, ("fast_5",), 0.001),
    ]


def test_matmul_parallel_has_the_published_ids_and_edges() -> None:
    graph = generate_graph("matmul-parallel", n_branches=2, ops_per_branch=2, m=4)
    ids = {**{s.name: s.id for s in graph.sources}, **{op.name: op.id for op in graph.ops}}
    assert [(op.id, [ids[v] for v in op.inputs]) for op in graph.ops] == [
        (2, [0, 1]),
        (3, [2, 1]),
        (4, [0, 1]),
        (5, [4, 1]),
    ]


def test_stacked_transformer_layers_read_the_last_norm_of_the_one_before() -> None:
    graph = generate_graph("large-transformer", layers=2, seq_len=4, d_model=8, n_heads=2)
    assert [source.id for source in graph.sources] == [0, 1, 2, 3, 4, 5, 18, 19, 20, 21, 22]
    first_of_second = next(op for op in graph.ops if op.id == 23)
    assert graph.producers[first_of_second.inputs[0]].id == 17


def test_sources_are_seeded_and_differ() -> None:
    one, same, other = (
        generate_graph("transformer", seq_len=4, d_model=8, n_heads=2, seed=s) for s in (0, 0, 1)
    )
    np.testing.assert_array_equal(one.constants["Wq"], same.constants["Wq"])
    assert not np.allclose(one.constants["Wq"], other.constants["Wq"])
    assert not np.allclose(one.constants["Wq"], one.constants["Wk"])


REFUSED = {
    "unknown name": (
        "wied",
        {},
        UnknownNameError,
        r"unknown DAG 'wied'; did you mean 'wide'\? Choose one of: .*wide",
    ),
    "unknown argument": ("wide", {"widht": 3}, UsageError, "no argument 'widht'.*width"),
    "text": ("wide", {"width": "8"}, UsageError, "width is '8'"),
    "too large": ("uniform", {"dim": 10**9}, UsageError, "must fit into this machine's memory"),
    "zero count": ("wide", {"depth": 0}, UsageError, "depth is 0"),
    "skew beyond one": ("wide", {"skew": 1.5}, UsageError, "skew is 1.5"),
    "negative duration": ("imbalanced", {"heavy_ms": -1.0}, UsageError, "heavy_ms is -1"),
    "no number": ("imbalanced", {"heavy_ms": float("nan")}, UsageError, "heavy_ms is nan"),
    "fewer than none": ("imbalanced", {"n_fast": -1}, UsageError, "n_fast is -1; .* at least 0"),
    "a boolean": ("wide", {"width": True}, UsageError, "width is True"),
    "negative seed": ("wide", {"seed": -1}, UsageError, "seed is -1; .* at least 0"),
    "nothing to do": ("imbalanced", {"n_heavy": 0, "n_fast": 0}, UsageError, "has no ops"),
    "uneven heads": ("transformer", {"d_model": 10, "n_heads": 4}, UsageError, "no multiple"),
}


@pytest.mark.parametrize(("name", "arguments", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_generate_refuses(
    name: str, arguments: dict[str, float], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        generate_graph(name, **arguments)


def test_sizes_may_be_numpys() -> None:
    sizes = {"n": np.int64(4), "factor": np.float32(2)}
    assert [op.attributes["duration"] for op in generate_graph("skewed", seed=np.int64(1), **sizes).ops] == [
        *(0.001, 0.001),
        *(0.002, 0.002),
    ]


def test_random_inputs_follow_seed_and_spec() -> None:
    builder = Builder()
    builder.output(builder.op("Identity", builder.input("x", "float32", ("batch", 3))))
    builder.output(builder.op("Identity", builder.input("i", "int64", (2,))))
    graph = builder.to_graph()
    drawn, again, other = random_inputs(graph, 1), random_inputs(graph, 1), random_inputs(graph, 2)
    assert drawn["x"].shape == (1, 3)
    assert drawn["i"].dtype == np.int64
    np.testing.assert_array_equal(drawn["x"], again["x"])
    assert not np.array_equal(drawn["x"], other["x"])
    with pytest.raises(UsageError, match="seed is -1"):
        random_inputs(graph, -1)


# Rendering


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
def test_dot_has_a_line_for_each_node_and_edge(name: str) -> None:
    sizes = {"layers": 2} if "layers" in TOPOLOGIES[name].defaults else {}
    graph = generate_graph(name, **sizes)
    dot = Model(graph).visualize()
    assert dot.count("[shape=box") == len(graph.ops)
    assert dot.count("[shape=ellipse") == len(graph.sources)
    assert dot.count(" -> ") == graph.n_edges


def test_visualize_writes_dot_and_refuses_unknown_suffixes(tmp_path: Path) -> None:
    graph = generate_graph("resnet", channels=2)
    assert Model(graph).visualize(str(tmp_path / "g.dot")) == (tmp_path / "g.dot").read_text(encoding="utf-8")
    with pytest.raises(UsageError, match="choose a suffix"):
        Model(graph).visualize(str(tmp_path / "g.jpeg"))


@pytest.mark.parametrize("suffix", ["dot", "svg"])
def test_a_drawing_that_cannot_be_written_is_told_in_one_line(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dot").write_text("#!/bin/sh\necho drawn\n")
    (tmp_path / "dot").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(FerroflowError, match=r"'.*/nowhere/g\..*' cannot be written: No such file"):
        Model(generate_graph("wide")).visualize(str(tmp_path / "nowhere" / f"g.{suffix}"))


def test_what_graphviz_says_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dot").write_text("#!/bin/sh\necho first >&2\necho second >&2\nexit 3\n")
    (tmp_path / "dot").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(FerroflowError, match=r"g.svg' cannot be drawn: Graphviz's dot says: first second$"):
        Model(generate_graph("wide")).visualize(str(tmp_path / "g.svg"))


def test_html_names_inputs_and_escapes() -> None:
    builder = Builder("<b>")
    builder.output(y=builder.op("Relu", builder.input("x", "float32", ("n", 2))))
    html = Model(builder.to_graph())._repr_html_()
    assert "&lt;b&gt;" in html
    assert "x: float32[n, 2]" in html
    assert "defaults</th><td style='text-align:left'>none<" in html
