"""Ctrl-C and SIGTERM: how they end a program whose cluster must be closed."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from multiprocessing.resource_tracker import ensure_running
from typing import Any, NoReturn

_SIGINT = frozenset({signal.SIGINT})
_ENDING = (signal.SIGINT, signal.SIGTERM)
#: After which a signal is raised again that a destructor has swallowed [s].
_AGAIN_S = 0.05
#: Whether signals end a command, and not a program of the user.
_IS_COMMAND: ContextVar[bool] = ContextVar("_IS_COMMAND", default=False)


class Terminated(KeyboardInterrupt):
    """SIGTERM ended the program; it unwinds the stack as Ctrl-C does, so that clusters are closed."""


def _silence() -> None:
    """Drop log records from now on, if a command ends by the signal.

    A signal to the process group ends workers too. distributed logs each lost connection.
    """
    if _IS_COMMAND.get():
        logging.disable()


def _raise(number: int) -> NoReturn:
    _silence()
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def number_of(error: BaseException) -> int:
    """Return the signal that raised this."""
    return signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def signals_raised() -> Iterator[None]:
    """Raise `KeyboardInterrupt` on SIGINT and `Terminated` on SIGTERM in the main thread.

    A signal that the process ignores, as background jobs of a shell do, stays ignored. In other threads this
    context does nothing. Python swallows exceptions of destructors and of callbacks of the garbage collector:
    if the signal comes while one runs, it is raised again.
    """
    if not _is_main_thread():
        yield
        return
    before, level = sys.unraisablehook, logging.root.manager.disable

    def raise_again(ignored: Any) -> None:
        if isinstance(ignored.exc_value, KeyboardInterrupt):
            main = threading.main_thread().ident  # a signal to another thread would not wake this one
            again = threading.Timer(_AGAIN_S, signal.pthread_kill, [main, number_of(ignored.exc_value)])
            again.daemon = True
            again.start()
        else:
            before(ignored)

    with handlers_restored():
        for number in _ENDING:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, _: _raise(number))
        sys.unraisablehook = raise_again
        token = _IS_COMMAND.set(True)
        try:
            yield
        finally:
            _IS_COMMAND.reset(token)
            sys.unraisablehook = before
            logging.disable(level)


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM when the context ends.

    The import of dask-jobqueue 0.9 replaces Python's handler of SIGINT by `sys.exit()`, with status 0
    (`dask_jobqueue/runner.py`).
    """
    if not _is_main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not installed by Python, which cannot restore it
                signal.signal(number, handler)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer SIGINT and SIGTERM to the end of the context; a second signal raises at once.

    A cluster that has started only in part cannot be closed. Processes and threads that start in this context
    have SIGINT blocked: a terminal sends Ctrl-C to all processes, and workers would print a traceback.
    SIGTERM is not blocked in them, as it ends workers. In other threads than the main one, and on Windows,
    nothing is deferred.
    """
    if not _is_main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    found: list[int] = []

    def note(number: int, _: object) -> None:
        if found:
            _raise(number)
        found.append(number)
        _silence()

    ensure_running()  # it would unblock SIGINT if it started with the workers' processes
    with handlers_restored():
        for number in _ENDING:
            # Not if the signal is ignored, or has its default action, as SIGTERM has in a plain Python.
            if callable(signal.getsignal(number)):
                signal.signal(number, note)
        # Blocked for new threads, and noted, since older threads may receive the signal for the process.
        is_blocked = _SIGINT & signal.pthread_sigmask(signal.SIG_BLOCK, _SIGINT)
        try:
            yield
        except Exception:
            if not found:  # else the signal may be the reason: it also ends sbatch
                raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGINT - is_blocked)
    if found:
        _raise(found[0])


@contextmanager
def closed_undisturbed() -> Iterator[ExitStack]:
    """Yield a stack of contexts that are left with SIGINT and SIGTERM deferred.

    A cluster that is closed in part leaves jobs and processes. A second signal raises at once.
    """
    stack = ExitStack()
    try:
        yield stack
    finally:
        with interrupts_deferred():
            stack.close()
