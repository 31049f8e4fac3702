"""Functions that worker processes run in tests of memory; workers can import this module."""

from __future__ import annotations

import time

import numpy as np
from distributed import Event, Worker, secede, worker_client
from distributed.core import Status


def pause(dask_worker: Worker) -> None:
    """Pause a worker for good."""
    dask_worker.memory_manager.memory_pause_fraction = False
    dask_worker.status = Status.paused


def resume(dask_worker: Worker) -> None:
    dask_worker.status = Status.running


def double(x: int) -> int:
    return 2 * x


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def take(mb: int) -> int:
    """Take memory for a second."""
    block = np.ones(mb * 2**17)
    time.sleep(1.0)
    return int(block[-1]) * mb


def recurse(n: int) -> int:
    """Wait for a task of the same kind."""
    if not n:
        return 0
    with worker_client() as client:
        return 1 + int(client.submit(recurse, n - 1, pure=False).result())


def wait_for_next(i: int) -> bool:
    """Leave the thread and wait for the next task of the same kind, which is sent before."""
    event = Event("next")
    if i:
        event.set()
    else:
        secede()
    return bool(event.wait(timeout=10))
