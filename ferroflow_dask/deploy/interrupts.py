"""Ctrl-C while a cluster starts: a cluster that is half there cannot be closed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.resource_tracker import ensure_running

_SIGINT = frozenset({signal.SIGINT})


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Raise `KeyboardInterrupt` of a Ctrl-C meanwhile only when the context ends; a second one at once.

    Processes and threads that are started meanwhile never see one: a terminal sends it to all processes, and
    those of workers would show a traceback. In other threads than the main one, and where threads have no
    signals of their own (Windows), nothing is deferred.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    found: list[int] = []

    def note(number: int, _: object) -> None:
        if found:
            raise KeyboardInterrupt  # who asks twice does not want to wait
        found.append(number)

    ensure_running()  # which would unblock it while workers' processes start
    # Blocked for what starts now, and noted, since older threads may receive it for the process.
    before = signal.signal(signal.SIGINT, note)
    is_blocked = _SIGINT & signal.pthread_sigmask(signal.SIG_BLOCK, _SIGINT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGINT - is_blocked)
        signal.signal(signal.SIGINT, before)
    if found:
        raise KeyboardInterrupt
