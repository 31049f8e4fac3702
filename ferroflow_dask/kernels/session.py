"""Whole graphs as one piece of work: an onnxruntime session that is kept, or op by op where there is none."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
from zict import LRU

from ferroflow_dask.exceptions import FerroflowError, KernelError
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.kernels.choice import SESSIONS, find_provider, one_line, provider_names
from ferroflow_dask.kernels.evaluate import evaluate
from ferroflow_dask.kernels.provider import ExecutionProvider, Part, Runner
from ferroflow_dask.kernels.session_settings import DEFAULT, SessionSettings
from ferroflow_dask.printable import printable

logger = logging.getLogger("ferroflow_dask")

#: Models that a process keeps open. Each holds its weights, unless they are very large.
_KEPT = 4

#: Ops that a log message names.
_KEPT_SHOWN = 3


def token_for(name: str, n_parts: int = 1) -> str:
    """Return the token of a graph that is one of so many parts of a model."""
    return f"{name}/{n_parts}"


def share_of(token: str) -> float:
    """Return which part of a model a graph is, by its token; see `token_for`."""
    n_parts = token.rpartition("/")[2]
    return 1 / int(n_parts) if n_parts.isdecimal() else 1.0


#: A graph, and where it is computed: by kernels of these providers, or on a device with these options.
_Key = tuple[str, tuple[Hashable, ...]]
_runners: LRU[_Key, Runner | None] = LRU(_KEPT, {}, weight=lambda key, _: share_of(key[0]))
_opening: dict[_Key, threading.Lock] = {}


def runner_of(
    graph: Graph,
    token: str,
    constants: Mapping[str, Any],
    providers: Sequence[str] | None = None,
    settings: SessionSettings = DEFAULT,
) -> Runner:
    """Return what computes a whole graph; it is kept in this process, and threads may share it.

    Parameters
    ----------
    graph : Graph
        Its inputs may include constants that come beside it.
    token : str
        The same for equal graphs with equal constants only.
    constants : mapping of str to array
        Those that the graph itself lacks.
    providers : sequence of str, optional
        As in `compile_op`.
    settings : SessionSettings, optional
    """
    names = provider_names(providers)

    def open_it() -> Runner:
        found = _sessions(graph, constants, names, settings) if SESSIONS in names else None
        op_by_op = partial(evaluate, graph, providers=names)
        return op_by_op if found is None else _Runner(found, op_by_op, graph.name)

    found = _kept((token, (*names, settings)), open_it)
    assert found is not None
    return found


def session_of(
    graph: Graph,
    token: str,
    constants: Mapping[str, Any],
    execution: ExecutionProvider,
    settings: SessionSettings = DEFAULT,
) -> Runner | None:
    """Return a session of a whole graph that is not computed by the CPU; None where onnxruntime has none.

    Parameters
    ----------
    graph, token, constants
        As in `runner_of`.
    execution : ExecutionProvider
        Computes what it can of the graph; the CPU computes the rest.
    """
    name, options = execution
    key = (token, (name, *sorted(options.items()), settings))
    return _kept(key, lambda: _session(graph, constants, execution, settings))


def _kept(key: _Key, open_it: Callable[[], Runner | None]) -> Runner | None:
    with _runners.lock:
        if key in _runners:
            return _runners[key]
        opening = _opening.setdefault(key, threading.Lock())
    with opening:  # several threads need it at once, and opening it may take seconds
        with _runners.lock:
            if key in _runners:
                return _runners[key]
        try:
            found = open_it()
            with _runners.lock:
                _runners[key] = found
        finally:
            with _runners.lock:
                _opening.pop(key, None)
        return found


def in_session(token: str) -> bool:
    """Return whether this process has a graph open that is computed in one session of a provider."""
    with _runners.lock:
        runners = [runner for key, runner in _runners.items() if key[0] == token]
    return any(not (runner is None or isinstance(runner, partial) or _parts_of(runner)) for runner in runners)


def parts_of(graph: Graph, providers: Sequence[str] | None = None) -> list[Part]:
    """Return which parts of a graph run where if it is computed as a whole; see `Model.providers`."""
    names = provider_names(providers)
    found = _opened(graph, {}, names, DEFAULT) if SESSIONS in names else ""
    if isinstance(found, str):
        # Op by op; neighbours of one provider are a part.
        runs = groupby(graph.live_ops, lambda op: find_provider(op, graph.opsets, names))
        return [Part(provider, tuple(op.name for op in ops), found) for provider, ops in runs]
    report: list[Part] | None = getattr(found, "report", None)
    return report or [Part(SESSIONS, tuple(op.name for op in graph.live_ops))]


class _Runner:
    """A graph in sessions, or op by op for values that these refuse."""

    def __init__(self, sessions: Runner, op_by_op: Runner, name: str) -> None:
        self.sessions = sessions
        self._op_by_op = op_by_op
        self._name = name
        self._has_logged = False

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self.sessions(inputs)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 -- onnxruntime's errors have no base of their own
            try:
                found = self._op_by_op(inputs)
            except FerroflowError as of_op:
                # Who has called this knows of which inputs the model was given.
                raise RuntimeError(str(of_op)) from of_op
            if not self._has_logged:
                self._has_logged = True
                told = one_line(error)
                logger.warning("model %r is computed op by op: its session failed: %s", self._name, told)
            return found


def _parts_of(runner: Runner | None) -> Sequence[Any]:
    """Return the parts that a graph was cut into; none where it is one session, or none."""
    parts: Sequence[Any] = getattr(getattr(runner, "sessions", None), "report", ())
    return parts


def _opened(
    graph: Graph, constants: Mapping[str, Any], providers: tuple[str, ...], settings: SessionSettings
) -> Runner | str:
    """Return a graph in one session, or in several, or the reason why it is computed op by op."""
    try:
        from ferroflow_dask.kernels.parts import open_parts
    except ImportError:
        return "onnxruntime is not installed"
    return open_parts(graph, constants, settings, providers)


def _sessions(
    graph: Graph, constants: Mapping[str, Any], providers: tuple[str, ...], settings: SessionSettings
) -> Runner | None:
    found = _opened(graph, constants, providers, settings)
    if isinstance(found, str):
        logger.warning("model %r is computed op by op: %s", graph.name, printable(found))
        return None
    report: Sequence[Part] = getattr(found, "report", ())
    if report:
        kept = [str(part) for part in report if part.reason]
        told = "; ".join(kept[:_KEPT_SHOWN]) + ("; …" if len(kept) > _KEPT_SHOWN else "")
        n_parts = len(report) - len(kept)
        logger.warning("model %r is cut into %d sessions around: %s", graph.name, n_parts, printable(told))
    return found


def _session(
    graph: Graph, constants: Mapping[str, Any], execution: ExecutionProvider, settings: SessionSettings
) -> Runner | None:
    try:
        from ferroflow_dask.kernels.ort_graph import open_graph
        from ferroflow_dask.kernels.parts import kept_ops
    except ImportError:
        return None
    # Between sessions, values would cross from the device and back.
    kept = kept_ops(graph, constants)
    session = next(iter(kept.values())) if kept else open_graph(graph, constants, settings, execution)
    if isinstance(session, str):
        logger.info("model %r has no session of its own: %s", graph.name, printable(session))
        return None
    return session


def failed(graph: Graph, inputs: Mapping[str, Any], error: Exception) -> KernelError:
    """Return the error to raise where a whole graph has failed."""
    told = ", ".join(f"{name}: {np.asarray(value).dtype}{np.shape(value)}" for name, value in inputs.items())
    return KernelError(f"model {graph.name!r} failed on ({told}): {one_line(error)}")
