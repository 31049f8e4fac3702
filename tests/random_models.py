"""Random ONNX models: what onnxruntime runs must run in every granularity and agree.

python tests/random_models.py 1000 [first seed]
"""

from __future__ import annotations

import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import dask
import numpy as np
import onnx
from dask.array import from_array
from onnx import TensorProto, helper
from onnx.helper import make_node as node
from operator_models import by_onnxruntime

from ferroflow_dask import ClusterProfile, Model
from ferroflow_dask.graph import graph_from_onnx

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
TYPES = {"f": FLOAT, "i": INT64, "b": BOOL, "d": TensorProto.DOUBLE, "w": TensorProto.INT32}
DTYPES = {"f": np.float32, "i": np.int64, "b": np.bool_, "d": np.float64, "w": np.int32}
NUMBERS = "fidw"
REAL = "fd"

#: Op types by what they take; results have the type of the first operand.
UNARY = {
    **dict.fromkeys(("Neg", "Abs", "Sign"), NUMBERS),
    **dict.fromkeys(("Exp", "Tanh", "Sigmoid", "Floor", "Sqrt", "Reciprocal"), REAL),
    **dict.fromkeys(("Relu", "Softmax", "LeakyRelu", "Erf"), "f"),
    "Identity": "fidwb",
    "Not": "b",
}
BINARY = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Max", "Min"), NUMBERS),
    **dict.fromkeys(("And", "Or", "Xor"), "b"),
    "Div": REAL,
}
REDUCTIONS = {
    **dict.fromkeys(("ReduceSum", "ReduceMax", "ReduceMin"), "fiw"),
    **dict.fromkeys(("ReduceMean", "ReduceL2"), "f"),
}

#: From this opset on, all reductions have their axes as an input; ReduceSum from an earlier one.
_AXES_INPUT, _AXES_INPUT_OF_SUM = 18, 13
_SPLIT_INPUT = 13


#: Of each axis.
_SIZE = 3


class Maker:
    """Makes the nodes of one graph; values are (name, type, rank), each axis of three elements."""

    def __init__(self, rng: random.Random, opset: int, prefix: str = "") -> None:
        self.rng, self.opset, self.prefix = rng, opset, prefix
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Any] = {}
        self.values: list[tuple[str, str, int]] = []
        self._n = 0

    def name(self) -> str:
        self._n += 1
        return f"{self.prefix}v{self._n}"

    def constant(self, value: Any) -> str:
        name = self.name()
        self.constants[name] = np.asarray(value)
        return name

    def pick(self, types: str, rank: int | None = None) -> tuple[str, str, int] | None:
        fit = [v for v in self.values if v[1] in types and rank in (None, v[2])]
        return self.rng.choice(fit) if fit else None

    def add(self, op: str, inputs: list[str], kind: str, rank: int, **attributes: Any) -> None:
        output = self.name()
        self.nodes.append(node(op, inputs, [output], f"{op}_{output}", **attributes))
        self.values.append((output, kind, rank))

    def step(self, depth: int = 0) -> None:
        """Add a node, or none where nothing fits."""
        choices = [
            self._unary,
            self._binary,
            self._binary,
            self._reduce,
            self._compare,
            self._cast,
            self._shape,
            self._concat,
            self._where,
            self._matmul,
            self._transpose,
            self._gather,
        ]
        if depth == 0:
            choices += [self._if, self._loop]
        self.rng.choice(choices)()

    def _unary(self) -> None:
        op = self.rng.choice(list(UNARY))
        if found := self.pick(UNARY[op]):
            if op == "Softmax" and not found[2]:
                return
            self.add(op, [found[0]], *found[1:])

    def _binary(self) -> None:
        op = self.rng.choice(list(BINARY))
        if (one := self.pick(BINARY[op])) and (other := self.pick(one[1])):
            if op in ("Max", "Min") and self.opset < 12 and one[1] not in "fd":
                return
            self.add(op, [one[0], other[0]], one[1], max(one[2], other[2]))

    def _reduce(self) -> None:
        op = self.rng.choice(list(REDUCTIONS))
        found = self.pick(REDUCTIONS[op])
        if found is None or not found[2]:
            return
        name, kind, rank = found
        axis, keep = self.rng.randrange(rank), self.rng.randint(0, 1)
        first = _AXES_INPUT_OF_SUM if op == "ReduceSum" else _AXES_INPUT
        if self.opset >= first:
            self.add(op, [name, self.constant(np.int64([axis]))], kind, rank - 1 + keep, keepdims=keep)
        else:
            self.add(op, [name], kind, rank - 1 + keep, axes=[axis], keepdims=keep)

    def _compare(self) -> None:
        if (one := self.pick(REAL)) and (other := self.pick(one[1])):
            self.add(self.rng.choice(["Less", "Greater"]), [one[0], other[0]], "b", max(one[2], other[2]))

    def _cast(self) -> None:
        if found := self.pick("fdwib"):
            to = self.rng.choice("fdwi" if found[1] in "wib" else "fd")
            self.add("Cast", [found[0]], to, found[2], to=TYPES[to])

    def _shape(self) -> None:
        # So that the list has as many elements as all axes.
        if (found := self.pick(NUMBERS)) and found[2] == _SIZE:
            self.add("Shape", [found[0]], "i", 1)

    def _concat(self) -> None:
        """Join two values, and take as much of them as there was of one."""
        one = self.pick("fi")
        other = one and self.pick(one[1], one[2])
        if not one or not other or not one[2]:
            return
        axis = self.rng.randrange(one[2])
        self.add("Concat", [one[0], other[0]], one[1], one[2], axis=axis)
        joined = self.values.pop()[0]
        if self.opset >= 10:
            places = [self.constant(np.int64([i])) for i in (1, 4, axis)]
            self.add("Slice", [joined, *places], one[1], one[2])
        else:
            self.add("Slice", [joined], one[1], one[2], starts=[1], ends=[4], axes=[axis])

    def _where(self) -> None:
        condition, one = self.pick("b"), self.pick("fi")
        if self.opset >= 9 and condition and one and (other := self.pick(one[1])):
            rank = max(condition[2], one[2], other[2])
            self.add("Where", [condition[0], one[0], other[0]], one[1], rank)

    def _matmul(self) -> None:
        if (one := self.pick("f", 2)) and (other := self.pick("f", 2)):
            self.add(self.rng.choice(["MatMul", "Gemm"]), [one[0], other[0]], "f", 2)

    def _transpose(self) -> None:
        if (found := self.pick("fib")) and found[2]:
            order = self.rng.sample(range(found[2]), found[2])
            self.add("Transpose", [found[0]], found[1], found[2], perm=order)

    def _gather(self) -> None:
        if (found := self.pick("fi")) and found[2]:
            places = self.constant(np.int64([self.rng.randrange(3) for _ in range(3)]))
            self.add("Gather", [found[0], places], found[1], found[2], axis=self.rng.randrange(found[2]))

    def _body(self, n: int) -> Maker:
        inner = Maker(self.rng, self.opset, f"{self.prefix}{self.name()}_")
        inner.values = list(self.values)
        for _ in range(n):
            inner.step(depth=1)
        return inner

    def _if(self) -> None:
        condition = self.pick("b", 0)
        if condition is None:
            return
        branches, results = [], []
        for _ in range(2):
            inner = self._body(self.rng.randint(1, 4))
            found = inner.pick("f", 1) or inner.pick("f", 2)
            if found is None:
                return
            results.append(found[1:])
            inner.add("Identity", [found[0]], *found[1:])
            branches.append(_graph(inner, [], [inner.values[-1]]))
        if results[0] == results[1]:
            self.add("If", [condition[0]], *results[0], then_branch=branches[0], else_branch=branches[1])

    def _loop(self) -> None:
        found = self.pick("fi")
        if found is None:
            return
        name, kind, rank = found
        inner = self._body(0)
        step, go, carried = (inner.name() for _ in range(3))
        inner.values += [(carried, kind, rank)]
        for _ in range(self.rng.randint(1, 4)):
            inner.step(depth=1)
        last = inner.pick(kind, rank)
        assert last is not None
        inner.add("Identity", [last[0]], kind, rank)
        result = inner.values[-1]
        inner.add("Identity", [go], "b", 0)
        inputs = [(step, "i", 0), (go, "b", 0), (carried, kind, rank)]
        body = _graph(inner, inputs, [inner.values[-1], result])
        trips = self.constant(np.int64(self.rng.randrange(4)))
        self.add("Loop", [trips, "", name], kind, rank, body=body)


def _info(value: tuple[str, str, int], is_open: bool = False) -> onnx.ValueInfoProto:
    name, kind, rank = value
    return helper.make_tensor_value_info(name, TYPES[kind], None if is_open else [3] * rank)


def _graph(maker: Maker, inputs: list[Any], outputs: list[Any]) -> onnx.GraphProto:
    tensors = [onnx.numpy_helper.from_array(value, name) for name, value in maker.constants.items()]
    return helper.make_graph(
        maker.nodes, "g", list(map(_info, inputs)), [_info(value, is_open=True) for value in outputs], tensors
    )


def random_model(seed: int) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """Return a model, and inputs for it."""
    rng = random.Random(seed)
    numbers = np.random.default_rng(seed)
    maker = Maker(rng, rng.choice([7, 9, 11, 13, 15, 17, 18, 20, 21, 22]))
    inputs = [(f"x{i}", rng.choice("fffidwb"), rng.randint(0, 3)) for i in range(rng.randint(1, 4))]
    inputs += [("c", "b", 0), ("m", "f", 2)]
    maker.values = list(inputs)
    for _ in range(rng.randint(1, 30)):
        maker.step()
    made = [value for value in maker.values if value not in inputs] or inputs[:1]
    outputs = [made[-1], *(value for value in made[:-1] if rng.random() < 0.2)]
    if not maker.nodes:
        maker.add("Identity", [inputs[0][0]], *inputs[0][1:])
        outputs = [maker.values[-1]]
    graph = _graph(maker, inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", maker.opset)], ir_version=9)
    values = {}
    for name, kind, rank in inputs:
        shape = [_SIZE] * rank
        drawn = numbers.standard_normal(shape) if kind == "f" else numbers.integers(-3, 4, shape)
        values[name] = np.asarray(drawn).astype(DTYPES[kind])
    return model, values


def granularities(
    model: Model, values: dict[str, Any], outputs: Sequence[str]
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield how a model is computed, at last all rows as one batch."""
    profile = ClusterProfile((1, 1))
    yield "default", lambda: model.bind(values).compute(scheduler="sync")
    for way in ("whole", "bundles", "ops"):
        bound = partial(model.bind, values, granularity=way, profile=profile)
        yield way, lambda bound=bound: bound().compute(scheduler="sync")
    if outputs:
        yield "map_batches", lambda: in_batches(model, values, outputs)


def in_batches(model: Model, values: dict[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
    """Compute all rows as one batch."""
    n = max((value.shape[0] for value in values.values() if value.ndim), default=0)
    rows = {k: from_array(v, chunks=-1) if v.ndim and len(v) == n else v for k, v in values.items()}
    found = model.map_batches(rows, outputs=outputs, check_rows=False)
    found = found if isinstance(found, dict) else {outputs[0]: found}
    return dict(zip(found, dask.compute(*found.values(), scheduler="sync"), strict=True))


def disagreement(seed: int) -> str | None:
    """Return how a result differs from onnxruntime; "" if none does, None if that does not run."""
    model, values = random_model(seed)
    results = by_onnxruntime(model, values)
    if results is None:
        return None
    try:
        graph = graph_from_onnx(model)
    except Exception as error:  # noqa: BLE001 -- an error that is not ours is a finding, too
        return f"load: {error}"
    expected = dict(zip(graph.outputs, results, strict=True))
    # Batches have outputs with as many rows as their inputs.
    of_rows = [name for name, value in expected.items() if value.ndim and len(value) == _SIZE]
    for way, compute in granularities(Model(graph), values, of_rows):
        try:
            found = compute()
        except Exception as error:  # noqa: BLE001
            return f"{way}: {type(error).__name__}: {error}"
        for name, one in found.items():
            value = expected[name]
            if one.dtype != value.dtype or one.shape != value.shape:
                return f"{way}: {name} is {one.dtype}{one.shape}, not {value.dtype}{value.shape}"
            if not np.allclose(one, value, rtol=1e-3, atol=1e-4, equal_nan=True):
                return f"{way}: {name} differs"
        if list(found) != (of_rows if way == "map_batches" else list(expected)):
            return f"{way}: outputs are {', '.join(found)}"
    return ""


def main(n: int, first: int = 0) -> int:
    """Try n models; return how many disagree."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    found = {seed: disagreement(seed) for seed in range(first, first + n)}
    wrong = {seed: told for seed, told in found.items() if told}
    for seed, told in wrong.items():
        print(f"seed {seed}: {' '.join(told.split())[:300]}")
    n_run = sum(told is not None for told in found.values())
    print(f"{n} models, {n_run} of which onnxruntime runs: {len(wrong)} disagree")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(bool(main(*map(int, sys.argv[1:]))))
