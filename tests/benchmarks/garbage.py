"""Garbage collection while a scheduler's CPU time is measured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: `dask scheduler` multiplies Python's thresholds by this, see `distributed.cli.dask_scheduler`.
_FACTOR = 3


@contextmanager
def collected_as_by_a_scheduler() -> Iterator[None]:
    """Collect garbage as often as the process of `dask scheduler` does.

    What exists at the start is left alone: a scheduler's process does not hold the state of its workers,
    as a simulation does.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*(threshold * _FACTOR for threshold in thresholds))
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
