"""What graphs are compared with beyond Dask: plain threads, and Ray where it is installed."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ferroflow_dask.bench import references
from ferroflow_dask.bench.plan import Plan, make_cases
from ferroflow_dask.bench.references import Ray, Threads, make_reference, measure
from ferroflow_dask.bench.schema import Shape
from ferroflow_dask.bench.suite import run_plan
from ferroflow_dask.bench.workloads import Instance, get_workload
from ferroflow_dask.exceptions import KernelError, UsageError
from ferroflow_dask.graph import Builder, Graph, generate_graph
from ferroflow_dask.kernels import evaluate

SHAPE = Shape(2, 1, processes=False)


@pytest.mark.parametrize(
    ("dag", "sizes"), [("wide", {}), ("transformer", {"d_model": 64}), ("matmul-parallel", {"m": 64})]
)
def test_threads_compute_what_one_after_another_gives(dag: str, sizes: dict[str, Any]) -> None:
    graph = generate_graph(dag, seed=3, **sizes)
    with Threads(SHAPE) as threads:
        outputs, seconds = threads.compute(graph, threads.scatter(graph))
    expected = evaluate(graph)
    assert list(outputs) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(outputs[name], value, rtol=0, atol=1e-4 * np.abs(value).max())
    assert set(seconds) == {op.id for op in graph.live_ops}


def test_an_op_that_fails_ends_the_run() -> None:
    builder = Builder("bad")
    x = builder.constant(np.zeros((2, 3), dtype=np.float32))
    builder.output(y=builder.op("Reshape", x, builder.constant(np.array([7], dtype=np.int64))))
    graph = builder.to_graph()
    with Threads(SHAPE) as threads, pytest.raises(KernelError):
        threads.compute(graph, threads.scatter(graph))


@pytest.mark.timeout(60)
def test_an_op_whose_results_cannot_be_taken_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "run_op", lambda *_: ((), 0.0))
    graph = generate_graph("wide", width=2, depth=2)
    with Threads(SHAPE) as threads, pytest.raises(ValueError, match="argument 2 is shorter"):
        threads.compute(graph, threads.scatter(graph))


def test_after_an_op_that_fails_no_other_disturbs_the_run_that_comes_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n_runs = 0

    def failing(*_: Any) -> Any:
        nonlocal n_runs
        n_runs += 1
        raise ArithmeticError("broken on purpose")

    monkeypatch.setattr(references, "run_op", failing)
    graph = generate_graph("wide", width=4, depth=2)
    with Threads(Shape(1, 1, processes=False)) as threads, pytest.raises(ArithmeticError):
        threads.compute(graph, threads.scatter(graph))
    assert n_runs == 1


def test_a_run_that_takes_too_long_is_ended_and_the_next_has_threads_of_its_own() -> None:
    workload = get_workload("imbalanced")
    slow = workload.arguments({"n_heavy": 4, "heavy_ms": 700, "n_fast": 4})
    fast = workload.arguments({"n_heavy": 1, "heavy_ms": 1, "n_fast": 1})
    cases = make_cases([(workload, slow), (workload, fast)], ["threads"], ["learned"])
    rows = list(run_plan(Plan(cases, SHAPE, 1), timeout_s=0.4))
    assert [row.status for row in rows] == ["warm-up: failed: ResultError: no result within 0.4 s", "ok"]


def test_a_check_that_fails_breaks_the_run() -> None:
    def check(results: Any) -> None:
        raise ArithmeticError("broken on purpose")

    instance = Instance(lambda client: [], check, 4, graph=generate_graph("wide", width=2, depth=2))
    with Threads(SHAPE) as threads:
        measurement = measure(threads, instance)
    assert measurement.status == "failed: ArithmeticError: broken on purpose"
    assert measurement.makespan_s > 0


@pytest.mark.parametrize("what", ["wrong", "an op too few"])
def test_a_wrong_run_is_broken(what: str) -> None:
    def check(results: Any) -> None:
        from ferroflow_dask.exceptions import ResultError

        raise ResultError("not this")

    graph = generate_graph("wide", width=2, depth=2)
    n_ops = 5 if what == "an op too few" else 4
    instance = Instance(lambda client: [], check, n_ops=n_ops, graph=graph)
    with Threads(SHAPE) as threads:
        status = measure(threads, instance).status
    assert status == ("executed 4 ops of 5" if n_ops == 5 else "wrong result: not this")


def test_constants_are_placed_before_the_clock_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    class Far(Threads):
        def scatter(self, graph: Graph) -> dict[str, Any]:
            nonlocal now_s
            now_s += 100
            return super().scatter(graph)

        def compute(self, graph: Graph, placed: dict[str, Any]) -> tuple[dict[str, Any], dict[int, float]]:
            nonlocal now_s
            now_s += 1
            return super().compute(graph, placed)

    monkeypatch.setattr(references, "time", SimpleNamespace(perf_counter=lambda: now_s))
    instance = Instance(
        lambda client: [], lambda results: None, 4, graph=generate_graph("wide", width=2, depth=2)
    )
    with Far(SHAPE) as far:
        measurement = measure(far, instance)
    assert (measurement.status, measurement.makespan_s) == ("ok", 1.0)


def test_references_run_beside_policies_and_only_graphs() -> None:
    workloads = [(w, w.arguments({}, is_small=True)) for w in map(get_workload, ("wide", "merge"))]
    cases = make_cases(workloads, ["ferroflow", "threads"], ["learned"])
    assert [(case.workload.name, case.policy, case.lowering) for case in cases] == [
        ("wide", "ferroflow", "root scattered, one name"),
        ("wide", "ferroflow", "bundled"),
        ("wide", "threads", "root scattered, one name"),
        ("merge", "ferroflow", ""),
    ]
    rows = list(run_plan(Plan(cases[:3], SHAPE, 2)))
    assert [row.status for row in rows] == ["ok"] * 6
    predicted = [(row.predicted_s, row.predicted_tasks, row.predicted_bytes) for row in rows]
    for row, told in zip(rows, predicted, strict=True):
        assert {number is not None for number in told} == {row.lowering == "bundled"}
    (first, _) = (row for row in rows if row.policy == "threads")
    assert first.executed == first.tasks == first.ops
    assert 0 < first.efficiency <= 1


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_one_line_says_so() -> None:
    with pytest.raises(UsageError, match=r"needs Ray; run in the clone: pip install '\.\[bench\]'"):
        make_reference("ray", SHAPE)


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_run_that_takes_too_long_on_ray_is_ended() -> None:
    graph = generate_graph("imbalanced", n_heavy=1, heavy_ms=60_000, n_fast=1)
    with Ray(SHAPE, timeout_s=2.0) as ray:
        instance = Instance(lambda client: [], lambda results: None, 3, graph=graph)
        assert measure(ray, instance).status == "failed: ResultError: no result within 2 s"
        ray.renew()
        ray._timeout_s = None  # new processes take long on a busy machine
        fast = generate_graph("wide", width=2, depth=2)
        assert measure(ray, Instance(lambda client: [], lambda results: None, 4, graph=fast)).status == "ok"


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ray_computes_what_one_after_another_gives() -> None:
    graph = generate_graph("transformer", seed=3)
    with Ray(SHAPE) as ray:
        outputs, seconds = ray.compute(graph, ray.scatter(graph))
    for name, value in evaluate(graph).items():
        np.testing.assert_allclose(outputs[name], value, rtol=0, atol=1e-4 * np.abs(value).max())
    assert set(seconds) == {op.id for op in graph.live_ops}
