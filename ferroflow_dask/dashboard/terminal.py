"""A cluster in a terminal: what its workers do, how fast, and what was stolen."""

from __future__ import annotations

import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from dask.utils import format_bytes
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ferroflow_dask.dashboard.idle import NO_READY_TASK, PAUSED, WAITING_FOR_DATA, Idle
from ferroflow_dask.dashboard.recorder import SUMMARY_SAMPLES
from ferroflow_dask.dashboard.recording import Recording, WorkerLoad
from ferroflow_dask.exceptions import ClusterError
from ferroflow_dask.printable import printable

#: Time between two looks at the scheduler [s].
INTERVAL_S = 0.5
_LINE_S = 1.0
_BARS = "▁▂▃▄▅▆▇█"
_BESIDE_SPARKS = 45
_GAUGE = 20
#: Letters of the name of a worker, and the width from which there is room for twice as many.
_NAME, _WIDE = 10, 80
#: Reasons for which a worker with tasks runs none of them; the reason if there is nothing to do.
_STOPPED = frozenset({PAUSED, WAITING_FOR_DATA})
_NOTHING = Idle(NO_READY_TASK, 0)
_GRAPH = "graph    "
#: Workers for which there is a line; of others only the number is told.
_MOST_WORKERS = 40


def view(recording: Recording, width: int = 80, height: int = 24) -> Group:
    """Return what to show of a cluster."""
    samples = recording.samples[-max(1, min(SUMMARY_SAMPLES, width - _BESIDE_SPARKS)) :]
    last = samples[-1] if samples else None
    policy = f"policy {recording.policy}" if recording.policy else "Dask's own scheduling"
    head = Text(f"{len(recording.loads)} workers · {recording.n_threads} threads · {policy}", style="bold")
    lines = [head]
    if last is not None:
        lines.append(
            Text(
                f"tasks/s  {_sparkline([sample.tasks_per_s for sample in samples])} {last.tasks_per_s:,.0f}"
                f" · {last.efficiency:.0%} of threads at work"
            )
        )
        lines.append(Text(_steals(recording)))
    lines.append(Text(printable(_progress(recording))))
    table = Table(box=None, pad_edge=False, expand=False)
    for name in ("worker", "state", "run", "wait", "cpu", "memory", "left"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("worker", "state") else "right")
    longest_s = max((worker.remaining_s for worker in recording.loads), default=0.0)
    shown = recording.loads[: max(1, min(_MOST_WORKERS, height - len(lines) - 3))]
    gauge = max(0, min(_GAUGE, width - 68))
    for worker in shown:
        table.add_row(
            Text(printable(worker.name[:_NAME] if width < _WIDE else worker.name[: 2 * _NAME])),
            Text(_state(worker, recording)),
            f"{worker.n_running}/{worker.n_threads}",
            f"{worker.n_waiting}",
            f"{worker.cpu:.0%}",
            _memory(worker),
            Text(f"{worker.remaining_s:.2f} s {_gauge(worker.remaining_s, longest_s, gauge)}"),
        )
    more = len(recording.loads) - len(shown)
    rest = [Text(f"… and {more} more workers")] if more else []
    return Group(*lines, table, *rest)


def _state(worker: WorkerLoad, recording: Recording) -> str:
    if worker.address in recording.thieves:
        return "stealing"
    if worker.idle is not None and (worker.idle.word in _STOPPED or not worker.n_running):
        return "done" if worker.idle == _NOTHING and recording.progress.is_all_done else str(worker.idle)
    return "executing" if worker.n_running else "idle"


def _memory(worker: WorkerLoad) -> str:
    part = worker.memory_part
    return format_bytes(worker.memory) if part is None else f"{part:.0%}"


def _gauge(value: float, most: float, width: int) -> str:
    return "█" * round(width * value / most) if most > 0 else ""


def _sparkline(values: list[float]) -> str:
    most = max((value for value in values if value > 0), default=1.0)
    # Without a value: nobody looked.
    return "".join(
        " " if math.isnan(value) else _BARS[min(len(_BARS) - 1, int(value / most * len(_BARS)))]
        for value in values
    )


def _steals(recording: Recording) -> str:
    asked, confirmed = recording.steals.get("asked", 0), recording.steals.get("confirmed", 0)
    last = recording.samples[-1] if recording.samples else None
    rate = 0.0 if last is None else last.steals_per_s
    success = f" ({confirmed / asked:.0%})" if asked else ""
    threshold = "" if last is None or math.isnan(last.threshold) else f" · threshold {last.threshold:g}"
    return f"steals   {confirmed:,} of {asked:,} asked{success}, {rate:.1f}/s{threshold}"


def _progress(recording: Recording) -> str:
    progress = recording.progress
    if progress.started_at is None:
        return f"{_GRAPH}nothing was submitted since this was started"
    seconds = recording.stock_s
    stock = "" if seconds is None else f"; as single tasks of Dask: {seconds:.2f} s (simulated)"
    return f"{_GRAPH}{progress.in_words(recording.n_threads, recording.time)}{stock}"


def line(recording: Recording) -> str:
    """Return what to say of a cluster in one line."""
    last = recording.samples[-1] if recording.samples else None
    told = printable(_progress(recording)).removeprefix(_GRAPH)
    rate = "" if last is None else f" · {last.tasks_per_s:,.0f} tasks/s · {last.efficiency:.0%} at work"
    confirmed = recording.steals.get("confirmed", 0)
    return f"{datetime.now():%H:%M:%S} {told}{rate} · {confirmed:,} stolen"


def watch(look: Callable[[], Recording], console: Console, ended: Callable[[], bool]) -> None:
    """Show a cluster until `ended`, or until the user presses q; a line a second where there is no terminal.

    Parameters
    ----------
    look : callable
        Returns what was recorded so far.
    console : rich.console.Console
    ended : callable
    """
    if not console.is_terminal or console.is_dumb_terminal:
        until_s = 0.0
        while not ended():
            if time.monotonic() >= until_s:
                console.print(line(look()), soft_wrap=True, highlight=False, markup=False)
                until_s = time.monotonic() + _LINE_S
            time.sleep(0.05)
        console.print(line(look()), soft_wrap=True, highlight=False, markup=False)
        return
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while not ended():
            live.update(view(look(), console.width, console.height), refresh=True)
            if "q" in pressed(INTERVAL_S):
                return


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield what waits so long for a key and returns those that were pressed."""
    if not _has_keys():
        yield _no_keys
        return
    import termios
    import tty

    before: Any = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)

    def pressed(within_s: float) -> str:
        ready, _, _ = select.select([sys.stdin], [], [], within_s)
        return os.read(sys.stdin.fileno(), 64).decode(errors="replace") if ready else ""

    try:
        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _has_keys() -> bool:
    try:
        # In the background, a program that changes the terminal is stopped.
        return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:  # the terminal is another session's, or hung up
        return False


def _no_keys(within_s: float) -> str:
    time.sleep(within_s)
    return ""


@contextmanager
def watching(look: Callable[[], Recording], console: Console) -> Iterator[None]:
    """Show a cluster while the context lasts; that its scheduler or the terminal is gone, others tell."""
    ended = threading.Event()

    def watched() -> None:
        with suppress(ClusterError, OSError):
            watch(look, console, ended.is_set)

    thread = threading.Thread(target=watched, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
