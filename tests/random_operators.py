"""Random models of all operators: what onnxruntime runs must run in every granularity and agree.

    python tests/random_operators.py 1000 [first seed] [--each]

Each node has an operator of ONNX's registry, with random attributes, types, ranks and opsets. A node joins
the model if onnxruntime computes it. Some nodes are inside `If` or `Loop`. Results are right if they are
those of onnxruntime. If some are not, each node must agree with onnxruntime or `onnx.reference`; operators
that follow the reference are counted.

`--each` makes models of one node, where failures are easier to read.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from agreement import assert_same
from onnx.reference import ReferenceEvaluator
from operator_models import Maker, by_onnxruntime, dtype_of, names_read

from ferroflow_dask import ClusterProfile
from ferroflow_dask.graph import graph_from_onnx
from ferroflow_dask.kernels import deviations, evaluate
from ferroflow_dask.lowering import bind_graph


def by_reference(model: onnx.ModelProto, inputs: dict[str, Any]) -> list[Any]:
    """Return what `onnx.reference` computes; nothing if it does not."""
    try:
        return list(ReferenceEvaluator(model).run(None, inputs))
    except Exception:  # noqa: BLE001
        return []


def difference(found: list[Any], expected: list[Any]) -> str:
    """Return how results differ; "" if they agree."""
    for i, (one, other) in enumerate(zip(found, expected, strict=False)):
        if is_exact(one, other):
            continue
        is_number = isinstance(other, np.ndarray) and other.size and other.dtype.kind == "f"
        finite = np.abs(other[np.isfinite(other)]) if is_number else np.zeros(1)
        scale = max(1.0, float(finite.max(initial=0)))
        rtol = 2e-2 if is_number and other.dtype == np.float16 else 1e-3
        try:
            assert_same(one, other, rtol, 0.1 * rtol * scale)
        except AssertionError as error:
            kinds = [f"{dtype_of(v)}{getattr(v, 'shape', '')}" for v in (one, other)]
            return f"output {i} is {kinds[0]}, not {kinds[1]}: {' '.join(str(error).split())[:200]}"
    return "" if len(found) == len(expected) else f"{len(found)} outputs, not {len(expected)}"


def is_exact(found: Any, expected: Any) -> bool:
    """Return whether large integers agree with those that onnxruntime has computed in double precision."""
    if not all(isinstance(value, np.ndarray) and value.dtype == np.int64 for value in (found, expected)):
        return False
    wide = found.astype(np.float64), expected.astype(np.float64)
    is_large = found.size and np.abs(wide[0]).max() > 2**53
    return bool(is_large and found.shape == expected.shape and np.allclose(*wide, rtol=1e-12, atol=1))


def explained(
    maker: Maker, inputs: dict[str, Any], names: list[str], values: list[Any]
) -> tuple[str, list[str]]:
    """Compute node by node; return what is wrong, and the operators that follow the reference only.

    Each node must agree with onnxruntime or the reference on what the nodes before have computed. Small
    differences may grow in later nodes: the results of the whole model must be those of its nodes.
    """
    known, followed = {**maker.constants, **inputs}, []
    for node in maker.nodes:
        read = {n: known[n] for n in sorted(names_read(node)) if n in known}
        model = maker.model_of([node], read, list(node.output), {})
        graph = graph_from_onnx(model)
        found = list(evaluate(graph, read).values())
        expected = by_onnxruntime(model, read)
        if expected is None or difference(found, expected):
            op = node.name.rpartition("of_")[2].split("_")[0]
            if differs := difference(found, by_reference(model, read)):
                if not deviations.differs(graph.ops[0]):
                    return f"{node.name}: {differs}", followed
                op = f"{op} (by neither)"  # the reference does not know these attributes either
            followed.append(op)
        known.update(zip(node.output, found, strict=True))
    return difference(values, [known[name] for name in names]), followed


#: What is wrong, how many nodes follow the reference by operator, and whether onnxruntime runs the model.
Outcome = tuple[list[str], Counter[str], bool]


def problems(seed: int, is_each: bool = False, begin: Callable[[str], None] = str) -> Outcome:
    """Try a model; call `begin` with its nodes once onnxruntime has run it."""
    maker = Maker(seed)
    n, tries = (1 if is_each else maker.rng.randint(1, 30)), 0
    while len(maker.nodes) < n and tries < 12 * n:
        maker.step()
        tries += 1
    if not maker.nodes:
        return [], Counter(), False
    model, inputs = maker.model()
    expected = by_onnxruntime(model, inputs)
    if expected is None:
        return [], Counter(), False
    begin(told := f"[opset {maker.opset}: {', '.join(node.name for node in model.graph.node)}]")
    wrong, specified = [], Counter[str]()
    try:
        graph = graph_from_onnx(model)
    except Exception as error:  # noqa: BLE001 -- an error that is not ours is a finding, too
        return [f"load: {type(error).__name__}: {error} {told}"], specified, True
    profile = ClusterProfile((1, 1))
    for way in ("whole", "bundles", "ops"):
        try:
            found = bind_graph(graph, inputs, granularity=way, profile=profile).compute(scheduler="sync")
        except Exception as error:  # noqa: BLE001
            wrong.append(f"{way}: {type(error).__name__}: {error} {told}")
            continue
        values = [found[name] for name in graph.outputs]
        if not difference(values, expected):
            continue
        differs, followed = explained(maker, inputs, list(graph.outputs), values)
        if differs:
            wrong.append(f"{way}: {differs} {told}")
        specified.update(set(followed) or {"rounding"})
    return wrong, specified, True


def in_child(seed: int, is_each: bool) -> Outcome:
    """Try a model in another process, which onnxruntime may end."""
    here, there = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        there.send(problems(seed, is_each, there.send))

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    there.close()
    told, found = "", None
    try:
        while found is None:
            message = here.recv()
            told, found = (message, None) if isinstance(message, str) else (told, message)
    except EOFError:
        wrong = [f"the process ended {told}"] if told else []
        found = wrong, Counter(), bool(told)
    child.join()
    return found


def main(arguments: list[str]) -> int:
    """Try models; return how many are wrong."""
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    logging.disable(logging.CRITICAL)
    n, first = (*map(int, (a for a in arguments if a.isdigit())), 0)[:2]
    n_run = n_wrong = n_specified = 0
    followed: Counter[str] = Counter()
    for seed in range(first, first + n):
        wrong, specified, is_run = in_child(seed, "--each" in arguments)
        n_run += is_run
        n_wrong += bool(wrong)
        n_specified += bool(specified)
        followed += specified
        for line in wrong:
            print(f"seed {seed}: {' '.join(line.split())[:600]}", flush=True)
    print("as the reference: " + ", ".join(f"{op} {n}" for op, n in followed.most_common()))
    print(
        f"{n} models, {n_run} of which onnxruntime runs: {n_wrong} are wrong, {n_specified} as the reference"
    )
    return n_wrong


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
