"""Whole graphs as one piece of work: an onnxruntime session that is kept, or op by op where there is none."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from zict import LRU

from ferroflow_dask.exceptions import KernelError
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.kernels.choice import SESSIONS, one_line, provider_names
from ferroflow_dask.kernels.evaluate import evaluate
from ferroflow_dask.kernels.provider import ExecutionProvider

logger = logging.getLogger("ferroflow_dask")

#: Computes a graph: takes its inputs by name, constants among them, and returns its outputs by name.
Runner = Callable[[Mapping[str, Any]], dict[str, Any]]

#: Models that a process keeps open. Each holds its weights, unless they are very large.
_KEPT = 4

#: A graph, and where it is computed: by kernels of these providers, or on a device with these options.
_Key = tuple[str, tuple[Hashable, ...]]
_runners: LRU[_Key, Runner | None] = LRU(_KEPT, {})
_opening: dict[_Key, threading.Lock] = {}


def runner_of(
    graph: Graph, token: str, constants: Mapping[str, Any], providers: Sequence[str] | None = None
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
    """
    names = provider_names(providers)

    def open_it() -> Runner:
        session = _session(graph, constants) if SESSIONS in names else None
        return session or partial(evaluate, graph, providers=names)  # op by op

    found = _kept((token, names), open_it)
    assert found is not None
    return found


def session_of(
    graph: Graph, token: str, constants: Mapping[str, Any], execution: ExecutionProvider
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
    return _kept((token, (name, *sorted(options.items()))), lambda: _session(graph, constants, execution))


def _kept(key: _Key, open_it: Callable[[], Runner | None]) -> Runner | None:
    with _runners.lock:
        if key in _runners:
            return _runners[key]
        opening = _opening.setdefault(key, threading.Lock())
    with opening:  # several threads need it at once, and opening it may take seconds
        with _runners.lock:
            if key in _runners:
                return _runners[key]
        found = open_it()
        with _runners.lock:
            _runners[key] = found
            _opening.pop(key, None)
        return found


def in_session(token: str) -> bool:
    """Return whether this process has a graph open that is computed in one session of a provider."""
    with _runners.lock:
        runners = [runner for key, runner in _runners.items() if key[0] == token]
    return any(runner is not None and not isinstance(runner, partial) for runner in runners)


def n_threads() -> int:
    """Return the threads that one model may use: what numerical libraries are told, which Dask sets to 1."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdecimal() and int(told) > 0 else 1


def _session(
    graph: Graph, constants: Mapping[str, Any], execution: ExecutionProvider | None = None
) -> Runner | None:
    try:
        from ferroflow_dask.kernels.ort_provider import open_graph
    except ImportError:
        return None
    session = open_graph(graph, constants, n_threads(), execution)
    if isinstance(session, str):
        logger.info("model %r has no session of its own: %s", graph.name, session)
        return None
    return session


def failed(graph: Graph, inputs: Mapping[str, Any], error: Exception) -> KernelError:
    """Return the error to raise where a whole graph has failed."""
    told = ", ".join(f"{name}: {np.asarray(value).dtype}{np.shape(value)}" for name, value in inputs.items())
    return KernelError(f"model {graph.name!r} failed on ({told}): {one_line(error)}")
