"""Graphs as workers have them: sealed on the way, opened once, and computed as one piece of work."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from zict import LRU

from ferroflow_dask.devices import DeviceRunner, host_value
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import Source
from ferroflow_dask.kernels import SESSIONS, Plan, make_plan
from ferroflow_dask.kernels.provider import Runner
from ferroflow_dask.kernels.session import runner_of, session_of, share_of, token_for
from ferroflow_dask.kernels.session_settings import DEFAULT, SessionSettings
from ferroflow_dask.lowering.execution import device_here, run_session_there, run_there


@dataclass(frozen=True, slots=True, eq=False)
class Sealed:
    """A graph as it travels: in bytes, so that only those who need it take it apart, and once.

    Parameters
    ----------
    token : str
        The same for equal graphs with equal constants only.
    content : bytes
        The graph without its large constants.
    """

    token: str
    content: bytes

    @classmethod
    def of(cls, graph: Graph, token: str) -> Sealed:
        """Return a graph sealed, which is open here already."""
        light = replace(graph, sources=tuple(map(_light, graph.sources)))
        _opened[token] = light
        return cls(token, pickle.dumps(light, protocol=pickle.HIGHEST_PROTOCOL))

    @property
    def graph(self) -> Graph:
        """The graph without its large constants."""
        found: Graph | None = _opened.get(self.token)
        if found is None:
            found = _opened[self.token] = pickle.loads(self.content)
        return found


#: Graphs that this process has open, by their tokens.
_opened: LRU[str, Graph] = LRU(16, {}, weight=lambda token, _: share_of(token))

#: As which workers know a graph, the same as long as it lives.
_known: WeakKeyDictionary[Graph, Sealed] = WeakKeyDictionary()


def sealed_of(graph: Graph, n_parts: int = 1) -> Sealed:
    """Return a graph sealed, under the same name as long as it lives.

    Parameters
    ----------
    graph : Graph
    n_parts : int, optional
        The graph is one of so many parts of a model. Workers keep parts as if all of them were one.
    """
    if graph not in _known:
        _known[graph] = Sealed.of(graph, token_for(uuid.uuid4().hex, n_parts))
    return _known[graph]


def token_of(graph: Graph) -> str:
    """Return the name under which workers have a graph open."""
    return sealed_of(graph).token


def is_large(source: Source) -> bool:
    """Return whether a constant travels beside its graph."""
    return not (source.is_input or source.is_small)


#: Large constants by graph: models have thousands of small ones, which each call would go through.
_large: WeakKeyDictionary[Graph, dict[str, Source]] = WeakKeyDictionary()


def large_constants(graph: Graph) -> Mapping[str, Source]:
    """Return the constants that travel beside a graph, by name."""
    if graph not in _large:
        _large[graph] = {source.name: source for source in graph.sources if is_large(source)}
    return _large[graph]


def _light(source: Source) -> Source:
    """Return the source without its value if that is large; who may give another one is settled by now."""
    if source.is_input:
        return source
    value = None if is_large(source) else source.array
    return replace(source, value=value, is_scattered=False, declared=None)


def runner_here(
    sealed: Sealed,
    weights: Mapping[str, Any],
    providers: tuple[str, ...],
    run: str = "",
    settings: SessionSettings = DEFAULT,
) -> Runner:
    """Return what computes a graph here: this worker's device, if it has one, or a session.

    Parameters
    ----------
    sealed : Sealed
    weights : mapping of str to array
        Its large constants.
    providers : tuple of str
        Kernel providers in the order in which they are asked.
    run : str, optional
        Under which executions on a device are counted; they are not if left out.
    settings : SessionSettings, optional
    """
    device, graph, token = device_here(), sealed.graph, sealed.token
    if device is None:
        return runner_of(graph, token, weights, providers, settings)
    session = _session_there(device, sealed, weights, providers, settings)
    if session is not None:
        ids = [op.id for op in graph.live_ops]

        def in_session(values: Mapping[str, Any]) -> dict[str, Any]:
            inputs = {name: values[name] for name in values if name not in weights}  # it has the others
            return run_session_there(device, session, inputs, ids, run)

        return in_session
    plan, names, constants = _plan_of(graph, token, tuple(weights))

    def compute(values: Mapping[str, Any]) -> dict[str, Any]:
        known = {**constants, **values}
        found = run_there(device, plan, [known[name] for name in names], providers, run)
        return dict(zip(graph.outputs, found, strict=True))

    return compute


def _session_there(
    device: DeviceRunner,
    sealed: Sealed,
    weights: Mapping[str, Any],
    providers: tuple[str, ...],
    settings: SessionSettings,
) -> Runner | None:
    execution = device.device.execution_provider
    if execution is None or SESSIONS not in providers:
        return None
    constants = {name: np.asarray(host_value(value)) for name, value in weights.items()}
    return session_of(sealed.graph, sealed.token, constants, execution, settings)


#: Plans of whole graphs for devices, and the constants in them, which are placed there once.
_PLANS_KEPT = 4
_plans: LRU[str, tuple[Plan, tuple[str, ...], Mapping[str, Any]]] = LRU(_PLANS_KEPT, {})


def _plan_of(
    graph: Graph, token: str, weights: tuple[str, ...]
) -> tuple[Plan, tuple[str, ...], Mapping[str, Any]]:
    known: tuple[Plan, tuple[str, ...], Mapping[str, Any]] | None = _plans.get(token)
    if known is None:
        constants = {name: value for name, value in graph.constants.items() if name not in weights}
        names = tuple(dict.fromkeys((*graph.inputs, *weights, *constants)))
        plan = make_plan(graph, graph.live_ops, names, list(graph.outputs))
        known = _plans[token] = (plan, names, constants)
    return known
