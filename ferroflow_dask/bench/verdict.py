"""Whether a run counts: what a row's status says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ferroflow_dask.bench.schema import OK
from ferroflow_dask.bench.workloads.base import Instance
from ferroflow_dask.exceptions import ResultError


def hung(timeout_s: float | None) -> ResultError:
    """Return what a run raises that took longer than it may [s]."""
    return ResultError(f"no result within {timeout_s:g} s")


def failure(error: BaseException) -> str:
    """Return the status of a run that raised, in one line."""
    return f"failed: {type(error).__name__}: {error}".split("\n", 1)[0]


def verdict(instance: Instance, results: Sequence[Any], executed_ops: int | None) -> str:
    """Return the status of a run that has results; ops were counted unless None is given."""
    if executed_ops is not None and executed_ops != instance.n_ops:
        return f"executed {executed_ops} ops of {instance.n_ops}"
    try:
        instance.check(results)
    except ResultError as error:
        return f"wrong result: {error}"
    return OK
