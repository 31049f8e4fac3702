"""Memory of workloads: estimates from their sizes, before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ferroflow_dask.graph.generate import TOPOLOGIES, needed_nbytes
from ferroflow_dask.memory import TASK_NBYTES

_NUMBER_NBYTES = 8
#: A row of a time series, a person or a text as a Python object [B].
_ROW_NBYTES = 500
_SECONDS_PER_DAY = 86_400
_Nbytes = Callable[..., float]


def _numbers(n: float, tasks: float = 0) -> float:
    return _NUMBER_NBYTES * n + TASK_NBYTES * tasks


def _square(n: int, chunks: int, **_: Any) -> float:
    return _numbers(n**2, chunks**2)


def _climate(times: int, points: int, chunks: int, **_: Any) -> float:
    return _numbers(3 * times * points, chunks)


def _series(days: int, seconds: int, hours: int) -> float:
    n_rows = days * _SECONDS_PER_DAY / max(seconds, 1)
    return _ROW_NBYTES * n_rows + TASK_NBYTES * days * 24 / max(hours, 1)


def _texts(n: int, p: int, features: int = 0, **_: Any) -> float:
    return _ROW_NBYTES * n + _numbers(p * features, p)


#: By the names of workloads; others have `n` tasks.
_OF: Mapping[str, _Nbytes] = {
    "scale_up": lambda n, chunks, **_: _numbers(n**3, 27 * chunks**3),
    "one_by_one": lambda chains, steps, **_: TASK_NBYTES * chains * steps,
    "tree": lambda height: TASK_NBYTES * 2.0 ** min(height, 1000),
    "xarray": lambda **_: 0.0,  # the array has one size, and larger blocks are fewer
    "bag": lambda n, p: _ROW_NBYTES * n**2 / max(p, 1) + TASK_NBYTES * p**2,
    "numpy": lambda n, p: _numbers(n**2, p**2),
    "groupby": _series,
    "join": _series,
    "vectorizer": _texts,
    "wordbag": _texts,
    "tensordot": lambda n, chunks: _numbers(n**3, chunks**3),
    "quadratic_means": _climate,
    "anomaly_mean": _climate,
}
_OF_SUITE: Mapping[str, _Nbytes] = {
    "task-bench": lambda width, steps, **_: TASK_NBYTES * width * steps,
    "array": _square,
    "frame": lambda n, partitions: _numbers(3 * n, partitions**2),
}


def nbytes_of(name: str, suite: str, sizes: Mapping[str, Any]) -> float:
    """Return the memory that a workload of these sizes needs, estimated [B]."""
    if name in TOPOLOGIES:
        return needed_nbytes(name, sizes)
    found = _OF.get(name) or _OF_SUITE.get(suite)
    return TASK_NBYTES * sizes["n"] if found is None else found(**sizes)
