"""Progress bars on stderr, with rate and time left, for what takes longer than two seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dask.utils import format_bytes
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ferroflow_dask.dashboard.remote import GONE
from ferroflow_dask.lowering.collection import BoundGraph

if TYPE_CHECKING:
    from distributed import Client
    from distributed.scheduler import Scheduler

#: Time between two looks at the scheduler [s]: rare enough to cost the run nothing.
_INTERVAL_S = 0.25
#: Time after which a bar appears [s].
_DELAY_S = 2.0

#: Takes how much is done, and of how much if that was not known before.
Update = Callable[[float, float | None], None]


class Rate(ProgressColumn):
    """How much is done in a second.

    Parameters
    ----------
    unit : str
        What is counted; `B` for bytes.
    """

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        """Return the rate, empty until it is known."""
        speed = task.finished_speed or task.speed
        if speed is None:
            return Text("")
        return Text(f"{format_bytes(int(speed)) if self._unit == 'B' else f'{speed:,.3g} {self._unit}'}/s")


class _Amount(ProgressColumn):
    """Bytes done, and of how many."""

    def render(self, task: Task) -> Text:
        return Text(f"{format_bytes(int(task.completed))} of {format_bytes(int(task.total or 0))}")


@contextmanager
def late_bar(what: str, unit: str, total: float | None = None, *, is_shown: bool = True) -> Iterator[Update]:
    """Show a bar while the context lasts, from two seconds on and on a terminal only; yields its update.

    Parameters
    ----------
    what : str
    unit : str
        What is counted; `B` for bytes.
    total : float, optional
    is_shown : bool, optional
    """
    console = Console(stderr=True)
    if not (is_shown and console.is_terminal):
        yield lambda *_: None
        return
    amount = _Amount() if unit == "B" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, Rate(unit), TimeRemainingColumn())
    progress = Progress(*columns, console=console, transient=True)
    bar = progress.add_task(what, total=total)
    timer = threading.Timer(_DELAY_S, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda done, of: progress.update(bar, completed=done, total=of)
    finally:
        timer.cancel()
        timer.join()
        if progress.live.is_started:
            progress.stop()


def _finished(dask_scheduler: Scheduler, run: str) -> int:
    done = 0
    for name, group in dask_scheduler.task_groups.items():
        if name.endswith(run):
            pending = sum(group.states[state] for state in ("waiting", "processing", "queued", "no-worker"))
            done += len(group) - pending
    return done


@contextmanager
def following(client: Client, update: Update) -> Iterator[Callable[[str, int], None]]:
    """Update a bar while the context lasts; yields its start: suffix of task groups, total."""
    ended = threading.Event()
    threads: list[threading.Thread] = []

    def follow(run: str, total: int) -> None:
        while not ended.wait(_INTERVAL_S):
            try:
                completed = client.run_on_scheduler(_finished, run=run)
            except GONE:  # which the run itself will tell
                return
            update(completed, total)

    def watch(run: str, total: int) -> None:
        threads.append(threading.Thread(target=follow, args=(run, total), daemon=True))
        threads[-1].start()

    try:
        yield watch
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@contextmanager
def _groups_shown(client: Client, what: str, is_shown: bool) -> Iterator[Callable[[str, int], None]]:
    # Nothing is asked of the scheduler where stderr is no terminal.
    if not (is_shown and Console(stderr=True).is_terminal):
        yield lambda *_: None
        return
    with late_bar(what, what) as update, following(client, update) as watch:
        yield watch


@contextmanager
def progress_bar(client: Client, *, is_shown: bool = True) -> Iterator[Callable[[BoundGraph], None]]:
    """Show a bar for the tasks of a graph; yields what to call with it once it is submitted."""
    with _groups_shown(client, "tasks", is_shown) as watch:
        yield lambda bound: watch(bound.run, bound.n_tasks)


@contextmanager
def batches_shown(client: Client, *, is_shown: bool = True) -> Iterator[Callable[[str, int], None]]:
    """Show a bar for batches; yields what to call with the name of their array and their number."""
    with _groups_shown(client, "batches", is_shown) as watch:
        yield watch
