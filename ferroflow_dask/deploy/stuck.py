"""Stuck commands: end a command by a signal although its main thread runs a kernel, or waits for one.

Python handles signals between two of its own instructions. A kernel that runs for hours in C has none.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

#: How long a command may take to end by itself [s].
PATIENCE_S = 2.0
#: Submits jobs, which must be cancelled.
_JOBS = "ferroflow_dask.deploy.slurm.cluster"


@contextmanager
def ended_if_stuck(endings: Mapping[int, tuple[str, int]]) -> Iterator[None]:
    """End the process some time after a signal, if the context has not ended by then.

    A program with worker processes or jobs is left alone: it has to close them, and kernels run in them.
    In other threads than the main one, this context does nothing.

    Parameters
    ----------
    endings : mapping of int to (str, int)
        The line to print and the exit status for each signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    has_ended = threading.Event()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher = threading.Thread(
        target=_watch, args=(reader, has_ended, endings), name="ferroflow-signals", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        has_ended.set()
        signal.set_wakeup_fd(before)
        os.close(writer)


def _watch(reader: int, has_ended: threading.Event, endings: Mapping[int, tuple[str, int]]) -> None:
    """Wait for a signal, and then for the end of the context."""
    while received := os.read(reader, 1):
        if received[0] not in endings or has_ended.wait(PATIENCE_S) or _has_others():
            continue
        line, status = endings[received[0]]
        with suppress(OSError):
            os.write(2, f"{line}\n".encode())
        os._exit(status)
    os.close(reader)


def _has_others() -> bool:
    return bool(multiprocessing.active_children()) or _JOBS in sys.modules
