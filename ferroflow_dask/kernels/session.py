"""Whole graphs as one piece of work: an onnxruntime session that is kept, or op by op where there is none."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ferroflow_dask.exceptions import KernelError
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.kernels.evaluate import evaluate
from ferroflow_dask.kernels.registry import one_line, provider_names

#: Computes a graph: takes its inputs by name, constants among them, and returns its outputs by name.
Runner = Callable[[Mapping[str, Any]], dict[str, Any]]

#: The provider that computes a whole graph in one session.
SESSIONS = "onnxruntime"

#: Models that a process keeps open. Each holds its weights, unless they are very large.
_KEPT = 4

_runners: OrderedDict[tuple[str, tuple[str, ...]], Runner] = OrderedDict()
_locks: dict[tuple[str, tuple[str, ...]], threading.Lock] = {}
_lock = threading.Lock()


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
    key = (token, names)
    with _lock:
        found = _runners.get(key)
        if found is not None:
            _runners.move_to_end(key)
            return found
        opening = _locks.setdefault(key, threading.Lock())
    with opening:  # several threads need it at once, and opening it may take seconds
        with _lock:
            found = _runners.get(key)
        if found is None:
            found = _open(graph, constants, names)
            with _lock:
                _runners[key] = found
                _locks.pop(key, None)
                if len(_runners) > _KEPT:
                    _runners.popitem(last=False)
        return found


def in_session(token: str) -> bool:
    """Return whether this process has a graph open that is computed in one session of a provider."""
    with _lock:
        return any(key[0] == token and not isinstance(runner, partial) for key, runner in _runners.items())


def n_threads() -> int:
    """Return the threads that one model may use: what numerical libraries are told, which Dask sets to 1."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdecimal() and int(told) > 0 else 1


def _open(graph: Graph, constants: Mapping[str, Any], providers: tuple[str, ...]) -> Runner:
    if SESSIONS in providers:
        try:
            from ferroflow_dask.kernels.onnxruntime import open_graph
        except ImportError:
            pass
        else:
            session = open_graph(graph, constants, n_threads())
            if not isinstance(session, str):
                return session
    return partial(evaluate, graph, providers=providers)  # op by op


def failed(graph: Graph, inputs: Mapping[str, Any], error: Exception) -> KernelError:
    """Return the error to raise where a whole graph has failed."""
    told = ", ".join(f"{name}: {np.asarray(value).dtype}{np.shape(value)}" for name, value in inputs.items())
    return KernelError(f"model {graph.name!r} failed on ({told}): {one_line(error)}")
