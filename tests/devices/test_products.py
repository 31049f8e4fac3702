"""Products on a device: which of them go out together, and that they are what ONNX says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_runs import PROVIDERS, ignore, run

from ferroflow_dask.devices import DeviceRunner
from ferroflow_dask.devices.emulated import EmulatedDevice
from ferroflow_dask.exceptions import KernelError
from ferroflow_dask.graph import Builder, Graph
from ferroflow_dask.kernels import evaluate, make_plan

#: Of a product, and how many of them are alike.
M, K, N, ALIKE = 3, 4, 5, 4


class Drawn:
    """Builds a graph of constants that are all different."""

    def __init__(self) -> None:
        self.builder = Builder("gemms", opset=13)
        self._rng = np.random.default_rng(0)
        self._n = 0

    def value(self, *shape: int, dtype: str = "float32") -> str:
        self._n += 1
        return self.builder.constant(self._rng.standard_normal(shape).astype(dtype), name=f"c{self._n}")

    def operands(self, attributes: dict[str, Any], m: int = M, n: int = N) -> tuple[str, str]:
        a = (K, m) if attributes.get("transA") else (m, K)
        b = (n, K) if attributes.get("transB") else (K, n)
        return self.value(*a), self.value(*b)


def check(graph: Graph, device: EmulatedDevice | None = None) -> list[tuple[int, ...]]:
    """Compare with what ONNX's reference computes; return the ops of each call."""
    calls: list[tuple[int, ...]] = []
    device = device or EmulatedDevice()
    runner = DeviceRunner(device)
    found = run(runner, graph, lambda ids, _seconds, _is_on_device: calls.append(ids))
    runner.drain()
    for name, expected in evaluate(graph, providers=("reference",)).items():
        np.testing.assert_allclose(found[name].to_host(), expected, rtol=1e-4, atol=1e-5)
    assert not device.violations
    assert runner.usage().host_ops == 0
    return calls


def sizes(calls: list[tuple[int, ...]]) -> list[int]:
    return sorted(len(ids) for ids in calls)


@pytest.mark.parametrize("shared", ["", "b", "c", "bc"], ids=["nothing shared", "B", "C", "B and C"])
@pytest.mark.parametrize("c_shape", [None, (), (1,), (N,), (1, N), (M, 1), (M, N)], ids=str)
@pytest.mark.parametrize(
    "attributes",
    [{}, {"transA": 1, "alpha": 0.5}, {"transB": 1, "beta": 2.0}, {"transA": 1, "transB": 1, "alpha": -2.0}],
    ids=str,
)
def test_gemms_that_are_alike_go_out_together(
    attributes: dict[str, Any], c_shape: tuple[int, ...] | None, shared: str
) -> None:
    drawn = Drawn()
    _, same_b = drawn.operands(attributes)
    same_c = None if c_shape is None else drawn.value(*c_shape)
    outputs = {}
    for i in range(ALIKE):
        a, b = drawn.operands(attributes)
        inputs = [a, same_b if "b" in shared else b]
        if c_shape is not None:
            inputs.append(same_c if "c" in shared else drawn.value(*c_shape))
        outputs[f"y{i}"] = drawn.builder.op("Gemm", *inputs, **attributes)
    drawn.builder.output(**outputs)
    assert sizes(check(drawn.builder.to_graph())) == [ALIKE]


@pytest.mark.parametrize(
    "other",
    [{"alpha": 0.25}, {"beta": 3.0}, {"n": N + 1}, {"c": (M, N)}, {"c": None}],
    ids=["another alpha", "another beta", "another shape", "a C of another shape", "no C"],
)
def test_gemms_that_differ_do_not(other: dict[str, Any]) -> None:
    drawn = Drawn()
    outputs = {}
    for i in range(2 * ALIKE):
        more = other if i % 2 else {}
        n, c_shape = more.get("n", N), more.get("c", (more.get("n", N),))
        attributes = {"alpha": more.get("alpha", 0.5), "beta": more.get("beta", 2.0)}
        inputs = [*drawn.operands(attributes, n=n), *([] if c_shape is None else [drawn.value(*c_shape)])]
        outputs[f"y{i}"] = drawn.builder.op("Gemm", *inputs, name=f"{i % 2}-{i}", **attributes)
    drawn.builder.output(**outputs)
    graph = drawn.builder.to_graph()
    name_of = {op.id: op.name for op in graph.live_ops}
    calls = check(graph)
    assert sizes(calls) == [ALIKE, ALIKE]
    assert all(len({name_of[i][0] for i in ids}) == 1 for ids in calls)


def test_layers_side_by_side_are_a_batch_each() -> None:
    drawn = Drawn()
    values = [drawn.value(M, K) for _ in range(ALIKE)]
    weight = drawn.value(K, K)
    for _ in range(3):  # each layer adds the one before, whose results are one stack
        values = [drawn.builder.op("Gemm", value, weight, value, transB=1, beta=0.5) for value in values]
        square = drawn.builder.op("MatMul", weight, weight)  # the same shapes, and no Gemm
    drawn.builder.output(**{f"y{i}": value for i, value in enumerate(values)}, square=square)
    calls = check(drawn.builder.to_graph())
    assert [n for n in sizes(calls) if n == ALIKE] == [ALIKE] * 3


class Multiplies(EmulatedDevice):
    """Notes what it multiplies, for it is there that precisions differ."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.products: list[tuple[Any, Any]] = []

    def product(self, a: Any, b: Any) -> Any:
        self.products.append((a.shape, b.shape))
        return super().product(a, b)


@pytest.mark.parametrize(("n_alike", "shapes"), [(1, ((M, K), (K, N))), (2, ((2, M, K), (2, K, N)))])
def test_the_device_multiplies_for_gemms_as_for_other_products(n_alike: int, shapes: Any) -> None:
    drawn, device = Drawn(), Multiplies()
    attributes = {"transA": 1, "transB": 1}
    given = [drawn.builder.op("Gemm", *drawn.operands(attributes), **attributes) for _ in range(n_alike)]
    drawn.builder.output(**{f"y{i}": value for i, value in enumerate(given)})
    check(drawn.builder.to_graph(), device)
    assert device.products == [shapes]


@pytest.mark.parametrize(
    ("attributes", "m", "n"), [({}, 32, 32), ({"transA": 1, "transB": 1}, 64, 8)], ids=str
)
def test_batches_of_gemms_take_no_more_than_their_part_of_the_memory(
    attributes: dict[str, Any], m: int, n: int
) -> None:
    drawn = Drawn()
    outputs = {
        f"y{i}": drawn.builder.op("Gemm", *drawn.operands(attributes, m, n), drawn.value(m, n), **attributes)
        for i in range(6)
    }
    drawn.builder.output(**outputs)
    graph = drawn.builder.to_graph()
    one = 4 * (K * m + K * n + 4 * m * n)  # operands, C times beta, the product and its sum with that
    assert sizes(check(graph, EmulatedDevice(memory_nbytes=8 * (2 * one + 4)))) == [2, 2, 2]
    assert sizes(check(graph, EmulatedDevice(memory_nbytes=8 * (2 * one - 4)))) == [1] * 6


@pytest.mark.parametrize(
    ("c", "error"),
    [
        pytest.param(
            np.ones((3, N), np.float32),
            r"ops 'g0' to 'g1' \(Gemm, 2 in a batch\) failed on emulated: C of shape \(3, 5\) does not",
            id="too large a C",
        ),
        pytest.param(np.ones((1, N), np.float64), r"op 'g0' \(Gemm\)", id="another type, which ONNX refuses"),
    ],
)
def test_what_is_no_gemm_is_an_error_in_a_batch_too(c: Any, error: str) -> None:
    drawn = Drawn()
    builder = drawn.builder
    given = builder.input("c", "float32", ("m", "n"))
    builder.output(
        **{f"y{i}": builder.op("Gemm", *drawn.operands({}, m=1), given, name=f"g{i}") for i in range(2)}
    )
    graph = builder.to_graph()
    plan = make_plan(graph, graph.live_ops, [*graph.constants, "c"], list(graph.outputs))
    with pytest.raises(KernelError, match=error):
        DeviceRunner(EmulatedDevice()).run(plan, [*graph.constants.values(), c], PROVIDERS, ignore)
