"""A progress bar for runs on a cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ferroflow_dask.dashboard.remote import GONE
from ferroflow_dask.lowering import BoundGraph

if TYPE_CHECKING:
    from distributed import Client
    from distributed.scheduler import Scheduler

#: Time between two looks at the scheduler [s]: rare enough to cost the run nothing.
_INTERVAL_S = 0.25


def _finished(dask_scheduler: Scheduler, run: str) -> int:
    done = 0
    for name, group in dask_scheduler.task_groups.items():
        if name.endswith(run):
            pending = sum(group.states[state] for state in ("waiting", "processing", "queued", "no-worker"))
            done += len(group) - pending
    return done


@contextmanager
def progress_bar(client: Client, *, is_shown: bool = True) -> Iterator[Callable[[BoundGraph], None] | None]:
    """Show a bar on stderr while the context lasts; yields what to call with the submitted graph.

    Nothing is shown, and nothing asked of the scheduler, where stderr is no terminal.
    """
    console = Console(stderr=True)
    if not (is_shown and console.is_terminal):
        yield None
        return
    ended = threading.Event()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        threads: list[threading.Thread] = []

        def follow(bound: BoundGraph) -> None:
            bar = progress.add_task("tasks", total=bound.n_tasks)
            while not ended.wait(_INTERVAL_S):
                try:
                    completed = client.run_on_scheduler(_finished, run=bound.run)
                except GONE:  # which the run itself will tell
                    return
                progress.update(bar, completed=completed)

        def watch(bound: BoundGraph) -> None:
            threads.append(threading.Thread(target=follow, args=(bound,), daemon=True))
            threads[-1].start()

        try:
            yield watch
        finally:
            ended.set()
            for thread in threads:
                thread.join()
