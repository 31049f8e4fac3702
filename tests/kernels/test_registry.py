"""Finding a kernel for an op, sharing it between equal ops, and failing in one line."""

from __future__ import annotations

import pickle
import re
import sys
import threading
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernel_cases import op_of
from models import model_of
from onnx import TensorProto, helper
from zict import LRU

from ferroflow_dask import ClusterProfile, load_onnx
from ferroflow_dask.exceptions import KernelError, KernelNotFoundError, UnknownNameError
from ferroflow_dask.graph import FERROFLOW_DOMAIN, Op, generate_graph
from ferroflow_dask.kernels import choice, compile_op, evaluate, find_provider, registry
from ferroflow_dask.kernels.provider import DeclinedError


def test_an_operator_that_nobody_has_is_named_with_its_opset_and_who_was_asked():
    op = op_of("Frobnicate", [1], domain="acme")
    message = (
        r"^no kernel for op 'it' \(acme.Frobnicate, opset 3\); "
        r"asked: synthetic, array, onnxruntime, reference$"
    )
    with pytest.raises(KernelNotFoundError, match=message):
        compile_op(op, {"acme": 3})
    with pytest.raises(KernelNotFoundError, match=r"asked: array$"):
        compile_op(op_of("Resize", [1, 2]), {"": 18}, ["array"])
    with pytest.raises(KernelNotFoundError, match=r"asked: nobody$"):
        compile_op(op, {}, [])


def test_an_unknown_provider_is_answered_with_those_there_are():
    with pytest.raises(UnknownNameError, match=r"'numpyy'; choose one of: array, onnxruntime"):
        compile_op(op_of("Relu", [1]), {"": 18}, ["numpyy"])


@pytest.mark.parametrize("providers", [None, ["array"], ["onnxruntime"], ["reference"]], ids=str)
@pytest.mark.parametrize(
    ("op_type", "dtypes", "names"),
    [
        ("Add", ("float32", "float64"), "A and B"),
        ("Sub", ("float32", "int64"), "A and B"),
        ("Max", ("float32", "float32", "float64"), "data_0 and data_0"),
        ("Where", ("bool", "int64", "int32"), "X and Y"),
    ],
)
def test_operands_of_two_types_where_onnx_has_one_are_refused_by_all(op_type, dtypes, names, providers):
    values = [np.ones(2, dtype) for dtype in dtypes]
    told, two = ", ".join(f"{dtype}[2]" for dtype in dtypes), " and ".join(dtypes[-2:])
    message = (
        rf"^op 'it' \({op_type}\) failed on \({re.escape(told)}\): "
        rf"ONNX takes one type for {names}, these are {two}$"
    )
    kernel = compile_op(op_of(op_type, values), {"": 18}, providers)
    for _ in range(2):
        with pytest.raises(KernelError, match=message):
            kernel(*values)


def test_bad_attributes_fail_when_the_op_is_compiled():
    with pytest.raises(KernelError, match=r"'it' \(ferroflow.Slow\) cannot be compiled"):
        compile_op(op_of("Slow", [1], domain=FERROFLOW_DOMAIN, duration="long"), {})


class Recording:
    """A provider of `acme` ops that counts what it compiles; declines integers, fails on strings."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.compiled: list[Op] = []

    def supports(self, op: Op, opsets: Any) -> bool:
        return op.domain == "acme"

    def compile(self, op: Op, opsets: Any) -> Any:
        self.compiled.append(op)

        def kernel(x: Any) -> tuple[str, Any]:
            if isinstance(x, int):
                raise DeclinedError("integers are not for me")
            if isinstance(x, str):
                raise DeclinedError("tried in vain", failed=True)
            return (f"{self.name}: {x}",)

        return kernel


@pytest.fixture
def provide(monkeypatch):
    """Add a provider under a name of its own, with an empty cache of kernels."""
    monkeypatch.setattr(registry, "_dispatchers", LRU(2, {}))
    monkeypatch.setattr(choice, "PROVIDERS", dict(choice.PROVIDERS))
    choice.provider_of.cache_clear()

    def add(name: str, factory: Any = Recording) -> Any:
        provider = factory(name)
        choice.PROVIDERS[name] = lambda: provider
        return provider

    yield add
    choice.provider_of.cache_clear()


def test_equal_ops_share_one_kernel_whatever_their_names_and_however_many_threads(provide):
    recording = provide("one")
    barrier = threading.Barrier(8)
    results: list[Any] = []

    def work(index: int) -> None:
        op = Op(
            index, f"op{index}", "Foo", (f"in{index}",), (f"out{index}",), "acme", {"axis": 1, "xs": [1.0]}
        )
        op = pickle.loads(pickle.dumps(op))
        barrier.wait()
        results.append(compile_op(op, {"acme": 1}, ["one"])(1.5))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [("one: 1.5",)] * 8
    assert len(recording.compiled) == 1


AXIS = {"axis": 1}


@pytest.mark.parametrize(
    ("inputs", "n_outputs", "attributes", "opsets"),
    [
        pytest.param([1], 1, {"axis": 2}, {}, id="another attribute"),
        pytest.param([1], 1, {"axis": 1.0}, {}, id="a float instead of an integer"),
        pytest.param([1], 1, {}, {}, id="no attribute"),
        pytest.param([1, 1], 1, AXIS, {}, id="another number of inputs"),
        pytest.param([1, None], 1, AXIS, {}, id="an input left out"),
        pytest.param([1], 2, AXIS, {}, id="another number of outputs"),
        pytest.param([1], 1, AXIS, {"acme": 2}, id="another opset"),
        pytest.param([1], 1, {"axis": helper.make_tensor("t", 1, [1], [1])}, {}, id="a tensor"),
    ],
)
def test_ops_that_differ_have_kernels_of_their_own(provide, inputs, n_outputs, attributes, opsets):
    recording = provide("one")
    compile_op(op_of("Foo", [1], domain="acme", **AXIS), {}, ["one"])
    compile_op(op_of("Foo", inputs, n_outputs, "acme", **attributes), opsets, ["one"])
    assert len(recording.compiled) == 2


def test_kernels_used_least_recently_are_dropped(provide):
    recording = provide("one")  # and room for two kernels
    for axis in (1, 2, 1, 3, 1, 2):
        compile_op(op_of("Foo", [1], domain="acme", axis=axis), {}, ["one"])
    assert [op.attributes["axis"] for op in recording.compiled] == [1, 2, 3, 2]


def test_what_one_provider_declines_the_next_one_does(provide):
    provide("one")
    two = provide("two")
    two.compile = lambda op, opsets: lambda x: ("two",)
    kernel = compile_op(op_of("Foo", [1], domain="acme"), {}, ["one", "two"])
    assert [kernel(x)[0] for x in (1, 1.5, 1, "s")] == ["two", "one: 1.5", "two", "two"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        pytest.param(("polite", "other", "last"), "other", id="it is asked after the one it yields to"),
        pytest.param(("polite", "last"), "polite", id="where that one is not among them, in its own place"),
        pytest.param(("last", "polite", "other"), "last", id="it goes behind nobody else"),
    ],
)
def test_a_provider_may_yield_to_another(provide, names, expected):
    polite, *_ = (provide(name) for name in ("polite", "other", "last"))
    polite.yields_to = lambda op: "other"
    op = op_of("Foo", [1], domain="acme")
    assert find_provider(op, {}, names) == expected
    assert compile_op(op, {}, names)(1.5) == (f"{expected}: 1.5",)


def test_it_is_asked_right_after_the_one_it_yields_to(provide):
    polite, other, _ = (provide(name) for name in ("polite", "other", "last"))
    polite.yields_to = lambda op: "other"
    other.supports = lambda op, opsets: False
    assert find_provider(op_of("Foo", [1], domain="acme"), {}, ["polite", "other", "last"]) == "polite"


def test_what_one_provider_fails_at_the_next_one_does(provide):
    provide("one")
    two = provide("two")

    def fail(x: Any) -> Any:
        raise ValueError(f"{x} is too much")

    two.compile = lambda op, opsets: fail
    three = provide("three")
    three.compile = lambda op, opsets: lambda x: ("three",)
    op = op_of("Foo", [1], domain="acme")
    assert compile_op(op, {"": 18}, ["two", "three"])(7) == ("three",)
    with pytest.raises(KernelError) as error:
        compile_op(op, {}, ["one", "two"])(7)
    assert str(error.value) == (
        "op 'it' (acme.Foo) failed on (int): one: integers are not for me; two: 7 is too much"
    )


def test_what_one_provider_cannot_compile_the_next_one_does(provide):
    one, two = provide("one"), provide("two")

    def fail(op: Op, opsets: Any) -> Any:
        raise ValueError("no such axis")

    one.compile = fail
    op = op_of("Foo", [1], domain="acme")
    assert compile_op(op, {}, ["one", "two"])(1.5) == ("two: 1.5",)
    two.compile = fail
    choice.provider_of.cache_clear()
    with pytest.raises(KernelError, match=r"cannot be compiled: one: no such axis; two: no such axis$"):
        compile_op(op_of("Foo", [1], domain="acme", axis=9), {}, ["one", "two"])


def test_onnxruntime_computes_what_a_rule_keeps_from_it_if_no_other_provider_can(monkeypatch):
    """A rule may prefer another provider; it may not make an op fail."""
    from ferroflow_dask.kernels.array import ArrayProvider
    from ferroflow_dask.kernels.reference import ReferenceProvider

    monkeypatch.setattr(registry, "_dispatchers", LRU(8, {}))
    x = np.int64([[2**53 + 1, 2]])
    op = op_of("ReduceSum", [x], keepdims=0)
    assert compile_op(op, {"": 13}, ["onnxruntime"])(x)[0] != 2**53 + 3  # in double precision
    assert compile_op(op, {"": 13})(x)[0] == 2**53 + 3
    for provider in (ArrayProvider, ReferenceProvider):
        monkeypatch.setattr(provider, "compile", lambda *_: fail)

    def fail(*values: Any) -> Any:
        raise RuntimeError("out of order")

    resized = op_of("Resize", [1, None, 1], mode="linear", coordinate_transformation_mode="align_corners")
    (found,) = compile_op(resized, {"": 13})(
        np.ones((1, 1, 7, 7), np.float32), None, np.float32([1, 1, 1.5, 1.5])
    )
    assert found.shape == (1, 1, 10, 10)


def test_a_slow_provider_is_logged_once(monkeypatch):
    records: list[str] = []
    monkeypatch.setattr(registry.logger, "warning", lambda text, *told: records.append(text % told))
    monkeypatch.setattr(registry, "_dispatchers", LRU(8, {}))
    x = np.float32([[0, 1]])
    kernel = compile_op(op_of("Hardmax", [x]), {"": 13}, ["onnxruntime", "reference"])
    kernel(x)
    assert not records
    for _ in range(2):
        kernel(x.astype(np.float64).astype(ml_dtypes.bfloat16))
    (record,) = records
    assert record.startswith("Hardmax is computed by reference, slowly: ")


def test_when_all_decline_it_is_no_kernel_but_when_one_tried_it_is_a_failure(provide):
    provide("one")
    kernel = compile_op(op_of("Foo", [1], domain="acme"), {}, ["one"])
    with pytest.raises(KernelNotFoundError, match="integers are not for me"):
        kernel(1)
    with pytest.raises(KernelError, match="tried in vain"):
        kernel("s")


def test_a_provider_whose_library_is_missing_is_passed_over(provide):
    provide("one")

    def absent() -> Any:
        raise ImportError("no such library")

    choice.PROVIDERS["absent"] = absent
    kernel = compile_op(op_of("Foo", [1], domain="acme"), {}, ["absent", "one"])
    assert kernel(1.5) == ("one: 1.5",)


def test_a_function_of_onnx_is_written_in_the_operators_of_its_own_opset():
    """In those of opset 13, where the operator was last changed, onnxruntime has no half precision."""
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float16)
    op = op_of("MeanVarianceNormalization", [x], axes=[0])
    (found,) = compile_op(op, {"": 19}, ["onnxruntime"])(x)
    wide = x.astype(np.float64)
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, (wide - wide.mean(0)) / wide.std(0), atol=2e-2)


@pytest.mark.parametrize("granularity", [None, "whole", "bundles", "ops"])
def test_an_op_that_all_providers_fail_at_names_the_answer_of_each(granularity: str | None) -> None:
    x, places = np.ones((2, 3), np.float32), np.int64([7])
    inputs = {"x": (TensorProto.FLOAT, ["n", 3]), "places": (TensorProto.INT64, ["k"])}
    nodes = [
        helper.make_node("Gather", ["x", "places"], ["h"], "pick"),
        helper.make_node("Neg", ["h"], ["y"]),
    ]
    bound = load_onnx(model_of(nodes, inputs, ["y"])).bind(
        x=x, places=places, granularity=granularity, profile=ClusterProfile((1,))
    )
    with pytest.raises(KernelError) as raised:
        bound.compute(scheduler="sync")
    (told,) = str(raised.value).splitlines()
    _, answers = told.split("op 'pick' (Gather) failed on (float32[2, 3], int64[1]): ")
    said = dict(answer.split(": ", 1) for answer in answers.split("; "))
    assert said.keys() == {"array", "onnxruntime", "reference"}
    assert "index 7 is out of bounds" in said["array"]
    assert "idx=7 must be within the inclusive range [-2,1]" in said["onnxruntime"]


def test_values_are_dropped_after_their_last_reader(monkeypatch):
    alive: list[Any] = []
    most = 0

    def recording(op: Op, *rest: Any) -> Any:
        kernel = compile_op(op, *rest)

        def run(*values: Any) -> Any:
            nonlocal most
            (result,) = kernel(*values)
            alive.append(weakref.ref(result))
            most = max(most, sum(ref() is not None for ref in alive))
            return (result,)

        return run

    monkeypatch.setattr(sys.modules["ferroflow_dask.kernels.evaluate"], "compile_op", recording)
    evaluate(generate_graph("matmul-chain", n_ops=10, m=3))
    assert len(alive) == 10
    assert most == 2  # the one being read and the one being made
