"""Ops that share a session: the same bits as one by one, and the same errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import light_models, randomize

from ferroflow_dask.exceptions import KernelError
from ferroflow_dask.graph import Builder, Graph, graph_from_onnx
from ferroflow_dask.kernels import Plan, make_plan
from ferroflow_dask.kernels.segments import Member, Segment, plans, segments_of

PROVIDERS = ("synthetic", "array", "onnxruntime", "reference")
#: What sums, products and roots of numbers can go wrong with.
SPECIAL = np.float32([0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3e38])
#: Of the others random weights take seconds to make.
FEW_WEIGHTS = ("resnet50", "densenet121", "inception_v2", "shufflenet", "squeezenet")
KINDS = ("Relu", "Neg", "Abs", "Sqrt", "Exp", "Sigmoid", "Tanh", "Reciprocal", "Floor", "Add")


@pytest.fixture(autouse=True)
def nothing_was_run_before() -> None:
    plans.clear()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the ops that are run one by one, by name, as they come."""
    names: list[str] = []
    run_step: Callable[..., None] = Plan._run_step

    def note(plan: Plan, at: int, *args: Any) -> None:
        names.append(plan.names[at])
        run_step(plan, at, *args)

    monkeypatch.setattr(Plan, "_run_step", note)
    return names


def planned(graph: Graph) -> tuple[Plan, list[Any]]:
    """Return the plan of a whole graph, and its arguments apart from the inputs, which come first."""
    plan = make_plan(graph, graph.live_ops, [*graph.inputs, *graph.constants], list(graph.outputs))
    return plan, list(graph.constants.values())


def run(plan: Plan, *arguments: Any) -> list[Any]:
    spent_s: list[float] = []
    found = plan.run(arguments, PROVIDERS, time.perf_counter, spent_s)
    assert len(spent_s) == len(plan.steps)
    assert min(spent_s) >= 0
    return found


def bits(values: list[Any]) -> list[tuple[Any, ...]]:
    """Return what tells values apart: all bits, but which of its many NaN a processor has chosen."""
    values = [np.where(np.isnan(value), value.dtype.type(np.nan), value) for value in values]
    return [(value.dtype, value.shape, value.tobytes()) for value in values]


def chain(*kinds: str, dtype: str = "float32") -> Graph:
    builder = Builder("chain")
    value = builder.input("x", dtype, ("n",))
    for i, kind in enumerate(kinds):
        value = builder.op(kind, value, name=f"{kind.lower()}-{i}")
    builder.output(y=value)
    return builder.to_graph()


@pytest.mark.parametrize(
    "path", [p for p in light_models() if p.stem.endswith(FEW_WEIGHTS)], ids=lambda p: p.stem
)
def test_an_architecture_gives_the_same_bits(path: Any, alone: list[str]) -> None:
    graph = graph_from_onnx(randomize(onnx.load(path)))
    plan, constants = planned(graph)
    x = np.random.default_rng(0).standard_normal((1, 3, 224, 224), dtype=np.float32)
    first = run(plan, x, *constants)
    assert len(alone) == len(plan.steps)
    for _ in range(2):
        alone.clear()
        assert bits(run(plan, x, *constants)) == bits(first)
        assert len(alone) <= 2  # Gemm, and the softmax behind it


@settings(max_examples=60)
@given(
    st.lists(
        st.sampled_from(KINDS),
        min_size=2,
        max_size=8,
    ),
    st.sampled_from(("float32", "float64")),
)
def test_any_values_give_the_same_bits(kinds: list[str], dtype: str) -> None:
    plans.clear()
    builder = Builder("any")
    values = [builder.input("x", dtype, ("n",))]
    for i, kind in enumerate(kinds):
        operands = values[-1:] if kind != "Add" else [values[-1], values[i // 2]]
        values.append(builder.op(kind, *operands))
    builder.output(**{f"y{i}": value for i, value in enumerate(values[1:])})
    plan, _ = planned(builder.to_graph())
    x = np.tile(SPECIAL, 7).astype(dtype)
    first = bits(run(plan, x))
    assert bits(run(plan, x)) == first


def test_one_that_fails_is_named_in_later_runs_too(alone: list[str]) -> None:
    builder = Builder("reshape")
    shape = builder.constant(np.int64([2, 2]), "shape")
    value = builder.op("Abs", builder.input("x", "float32", ("n",)), name="first")
    builder.output(y=builder.op("Sqrt", builder.op("Reshape", value, shape, name="fold"), name="last"))
    plan, constants = planned(builder.to_graph())
    for _ in range(2):
        run(plan, np.ones(4, np.float32), *constants)
    alone.clear()
    with pytest.raises(KernelError, match=r"op 'fold' \(Reshape\) failed on \(float32\[3\]"):
        run(plan, np.ones(3, np.float32), *constants)
    assert alone == ["first", "fold"]
    alone.clear()
    assert run(plan, np.ones(4, np.float32), *constants)[0].shape == (2, 2)
    assert not alone


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("Gemm", (np.eye(3, dtype=np.float32),) * 2, (np.ones(3, np.float32), np.eye(3, dtype=np.float32))),
        # onnxruntime would end the process.
        ("Concat", (np.ones(2, np.float32),) * 2, (np.ones(0, np.float32), np.ones((1, 1), np.float32))),
    ],
)
def test_operands_of_another_rank_are_refused_in_later_runs_too(kind: str, good: Any, bad: Any) -> None:
    builder = Builder("ranks")
    a, b = (builder.op("Abs", builder.input(name, "float32", ("n",) * good[0].ndim)) for name in "ab")
    attributes = {"axis": 0} if kind == "Concat" else {}
    builder.output(y=builder.op("Sqrt", builder.op(kind, a, b, name="both", **attributes)))
    plan, _ = planned(builder.to_graph())
    for _ in range(2):
        run(plan, *good)
    with pytest.raises(KernelError, match="op 'both'"):
        run(plan, *bad)


def test_half_precision_is_rounded_after_each_op(alone: list[str]) -> None:
    builder = Builder("half")
    value = builder.input("x", "float32", ("n",))
    value = builder.op("Cast", value, to=onnx.TensorProto.FLOAT16, name="down")
    for i in range(3):
        value = builder.op("Exp", value, name=f"exp-{i}")
    builder.output(y=builder.op("Cast", value, to=onnx.TensorProto.FLOAT, name="up"))
    plan, _ = planned(builder.to_graph())
    x = np.random.default_rng(0).random(100, dtype=np.float32)
    first = bits(run(plan, x))
    alone.clear()
    assert bits(run(plan, x)) == first
    assert alone == list(plan.names)


def test_a_type_that_onnxruntime_lacks_runs_one_by_one(alone: list[str]) -> None:
    plan, _ = planned(chain("Neg", "Abs", dtype="float64"))
    x = np.float64([1.5, -2.5])
    for _ in range(2):
        run(plan, x)
    alone.clear()
    assert run(plan, x)[0].tolist() == [1.5, 2.5]
    assert not alone
    assert run(plan, np.float16(x))[0].dtype == np.float16
    assert alone == list(plan.names)


def test_threads_share_a_plan() -> None:
    plan, _ = planned(chain("Abs", "Sqrt", "Exp", "Tanh"))
    x = np.abs(np.random.default_rng(0).standard_normal(1000, dtype=np.float32))
    first = bits(run(plan, x))
    with ThreadPoolExecutor(8) as pool:
        assert all(bits(found) == first for found in pool.map(lambda _: run(plan, x), range(200)))


def test_equal_plans_share_what_was_learned_and_others_do_not(alone: list[str]) -> None:
    x = np.float32([0.25])
    for value in (0.25, 0.5):
        run(planned(chain("Abs", "Sqrt", "Exp"))[0], x)
        assert len(alone) == 3  # the second plan is another object
        x = np.float32([value])
    run(planned(chain("Abs", "Sqrt", "Tanh"))[0], x)
    assert len(alone) == 6


#: onnxruntime's, another provider's, and one that is the same elsewhere.
SESSION, OTHER, SAME = Member(True, True), Member(False, False), Member(True, False)


def test_segments_are_the_longest_runs_that_need_a_session() -> None:
    steps = [
        (0, (0,), (1,), (0,)),
        (2, (1, 1), (2,), ()),
        (0, (2, -1), (3,), (1,)),
        (1, (3,), (4,), ()),
        (2, (4,), (5,), (4,)),
        (2, (5,), (6,), (5,)),
        (1, (6,), (7,), (6,)),
        (0, (7, 2), (8, -1), (7,)),
    ]
    members = [(SESSION, OTHER, SAME)[kernel] for kernel, *_ in steps]
    assert segments_of(steps, members) == [Segment(0, 3, (0,), (2, 3))]
    assert segments_of(steps[4:6], members[4:6]) == []
    assert segments_of(steps[:1], members[:1]) == []
