"""Time limit of a command."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ferroflow_dask.cli.cluster_options import Duration
from ferroflow_dask.cli.sections import how_option

timeout_option = how_option(
    "--timeout",
    "timeout_s",
    type=Duration(),
    help="How long the command may take, its cluster included [s].  [default: unlimited]",
)


class Expired(KeyboardInterrupt):
    """The time limit is over; it unwinds the stack as Ctrl-C does, so that clusters are closed."""

    line = "the command must end within its time limit; give more time with --timeout"


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `Expired` in the main thread after some time."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(_: int, __: object) -> None:
        raise Expired

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
