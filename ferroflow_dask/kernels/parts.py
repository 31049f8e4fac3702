"""Graphs cut into sessions of onnxruntime, around the ops that onnxruntime must not or cannot compute.

A rule keeps an op from onnxruntime only where onnxruntime computes something else than ONNX describes (see
`deviations`). The ops before and behind it stay in sessions.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx

from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import FERROFLOW_DOMAIN, Op, Source, TensorSpec
from ferroflow_dask.graph.protos import nested_nodes, subgraphs
from ferroflow_dask.graph.to_onnx import to_onnx
from ferroflow_dask.kernels.choice import SESSIONS, candidates, one_line
from ferroflow_dask.kernels.deviations import deviations, differs
from ferroflow_dask.kernels.evaluate import evaluate
from ferroflow_dask.kernels.op_model import is_seeded
from ferroflow_dask.kernels.ort_graph import GraphSession, open_graph
from ferroflow_dask.kernels.ort_values import type_of
from ferroflow_dask.kernels.provider import Part, Runner
from ferroflow_dask.kernels.registry import compile_op
from ferroflow_dask.kernels.session_settings import SessionSettings
from ferroflow_dask.printable import printable

logger = logging.getLogger("ferroflow_dask")

#: How onnxruntime's errors name the node that they are about.
_BLAMED = re.compile(r"""In Node, \("([^"]+)"|node with name '([^']+)'|in node \(([^)]+)\)|Name:'([^']+)'""")


def open_parts(
    graph: Graph,
    constants: Mapping[str, Any],
    settings: SessionSettings,
    providers: tuple[str, ...],
    types: Mapping[str, onnx.TypeProto] | None = None,
) -> GraphSession | Parts | str:
    """Return one session for a graph, or several around some ops, or the reason why there is none.

    Parameters
    ----------
    graph, constants, settings, types
        As in `open_graph`.
    providers : tuple of str
        Compute what is in no session.
    """
    if any(op.domain == FERROFLOW_DOMAIN for op in graph.live_ops):
        return "onnxruntime does not know ferroflow's own operators"
    kept = kept_ops(graph, constants)
    if not kept:
        found = open_graph(graph, constants, settings, types=types)
        if not isinstance(found, str):
            return found
        blamed = _blamed(found, graph)
        if blamed is None:
            return found
        kept = {blamed.id: one_line(found.rpartition(" : ")[2])}
    if len(kept) == len(graph.live_ops):
        return next(iter(kept.values()))
    return Parts(graph, constants, kept, settings, providers)


def kept_ops(graph: Graph, constants: Mapping[str, Any]) -> dict[int, str]:
    """Return the ops that rules keep from onnxruntime, by id, each with the reason."""
    kept = {}
    for op in graph.live_ops:
        if reason := differs(op):
            kept[op.id] = reason
        elif is_seeded(op):
            kept[op.id] = "the numbers of a seed are the same in each run"
    try:
        model = to_onnx(graph)
    except (ValueError, TypeError, KeyError):  # no model can be made of it
        return kept
    by_name = {op.name: op.id for op in graph.live_ops}
    found = deviations(model, {**graph.constants, **constants})
    return {**{by_name[name]: reason for name, reason in found.items()}, **kept}


def _blamed(error: str, graph: Graph) -> Op | None:
    """Return the op that an error of onnxruntime is about, if it names one of several."""
    match = _BLAMED.search(error)
    if match is None or len(graph.live_ops) == 1:
        return None
    name = next(filter(None, match.groups()))
    for op in graph.live_ops:
        inner = (node.name for body in subgraphs(op.attributes) for node in nested_nodes(body.node))
        if op.name == name or name in inner:
            return op
    return None


def rounds_of(graph: Graph, kept: Mapping[int, str]) -> list[tuple[tuple[Op, ...], tuple[Op, ...]]]:
    """Return for each round the ops of one session, then those that are computed by themselves.

    An op is in the first round in which all that it reads exists; O(ops + edges).
    """
    rounds: list[tuple[list[Op], list[Op]]] = []
    at: list[int] = []
    for op, edges in zip(graph.live_ops, graph.live_edges, strict=True):
        is_kept = op.id in kept
        after = [at[i] + (not is_kept and graph.live_ops[i].id in kept) for i in edges]
        at.append(max(after, default=0))
        while len(rounds) <= at[-1]:
            rounds.append(([], []))
        rounds[at[-1]][is_kept].append(op)
    return [(tuple(together), tuple(alone)) for together, alone in rounds]


class Parts:
    """A graph as several sessions, and single ops between them.

    Parameters
    ----------
    graph : Graph
    constants : mapping of str to array
        Those that are inputs of the graph.
    kept : mapping of int to str
        The ops that are in no session, by id, with the reason.
    settings : SessionSettings
    providers : tuple of str
        Compute these ops.
    """

    def __init__(
        self,
        graph: Graph,
        constants: Mapping[str, Any],
        kept: Mapping[int, str],
        settings: SessionSettings,
        providers: tuple[str, ...],
    ) -> None:
        self._graph = graph
        self._constants = {**graph.constants, **constants}
        self._providers = providers
        self._steps: list[_Sessions | Op] = []
        self.report: list[Part] = []
        rounds = rounds_of(graph, kept)
        for together, alone in rounds:
            if together:
                self._steps.append(_Sessions(graph, together, self._constants, settings, providers))
                self.report.append(Part(SESSIONS, tuple(op.name for op in together)))
            for op in alone:
                self._steps.append(op)
                self.report.append(Part(_other(op, graph, providers), (op.name,), kept[op.id]))
        self._reads = Counter(name for step in self._steps for name in _operands(step))
        self._reads.update(graph.outputs)  # read once more, so that they stay

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs by name."""
        values: dict[str, Any] = {**self._constants, **inputs}
        reads = self._reads.copy()
        for step in self._steps:
            if isinstance(step, _Sessions):
                values.update(step(values))
            else:
                kernel = compile_op(step, self._graph.opsets, self._providers)
                results = kernel(*(values[name] if name else None for name in step.inputs + step.captured))
                values.update((n, value) for n, value in zip(step.outputs, results, strict=True) if reads[n])
            for name in _operands(step):
                reads[name] -= 1
                if not reads[name]:
                    del values[name]
        return {name: values[name] for name in self._graph.outputs}


def _operands(step: _Sessions | Op) -> Sequence[str]:
    return step.inputs if isinstance(step, _Sessions) else tuple(dict.fromkeys(step.operands))


def _other(op: Op, graph: Graph, providers: Sequence[str]) -> str:
    """Return the provider that is tried first for an op that is kept from onnxruntime."""
    names = [provider.name for provider in candidates(providers, op, graph.opsets)]
    return next((name for name in names if name != SESSIONS), names[0] if names else "none")


class _Sessions:
    """Some ops of a graph in a session, opened when the types of what they read are known.

    What cannot be opened is cut again, around the op that onnxruntime objects to.
    """

    def __init__(
        self,
        graph: Graph,
        ops: Sequence[Op],
        constants: Mapping[str, Any],
        settings: SessionSettings,
        providers: tuple[str, ...],
    ) -> None:
        made = {name for op in ops for name in op.outputs if name}
        read = dict.fromkeys(name for op in ops for name in op.operands if name not in made)
        wanted = set(graph.outputs)
        inside = {op.id for op in ops}
        wanted.update(name for op in graph.live_ops if op.id not in inside for name in op.operands)
        #: What they read of others; constants are among it.
        self.inputs = tuple(read)
        self._open_names = [name for name in read if not isinstance(constants.get(name), np.ndarray)]
        sources = []
        for i, name in enumerate(read):
            spec, value = graph.inputs.get(name, TensorSpec()), None
            if name not in self._open_names:
                value = constants[name]
                spec = TensorSpec.of(value.dtype, value.shape)
            sources.append(Source(-1 - i, name, spec, value))
        exports = tuple(name for op in ops for name in op.outputs if name in wanted)
        specs = {name: spec for name, spec in graph.specs.items() if name in made}
        self._graph = Graph(graph.name, tuple(sources), tuple(ops), exports, specs, graph.opsets)
        self._settings = settings
        self._providers = providers
        self._runners: dict[Hashable, Runner] = {}
        self._lock = threading.Lock()

    def __call__(self, values: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: values[name] for name in self._open_names}
        try:
            types = {name: type_of(value) for name, value in given.items()}
        except (AttributeError, KeyError, TypeError, IndexError):  # no tensor, and no list of some
            return evaluate(self._graph, given, providers=self._providers)
        key = tuple(proto.SerializeToString() for proto in types.values())
        with self._lock:
            if key not in self._runners:
                self._runners[key] = self._open(types)
            runner = self._runners[key]
        return runner(given)

    def _open(self, types: Mapping[str, onnx.TypeProto]) -> Runner:
        # The graph tells more of its own inputs than their rank.
        unknown = {name: proto for name, proto in types.items() if self._graph.inputs[name].dtype is None}
        found = open_parts(self._graph, {}, self._settings, self._providers, unknown)
        if isinstance(found, str):
            name, n_ops = self._graph.name, len(self._graph.ops)
            logger.warning("%d ops of model %r have no session: %s", n_ops, name, printable(found))
            return partial(evaluate, self._graph, providers=self._providers)
        return found
