"""Task functions and observations that rows share; workers find this module by its name."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from distributed import Scheduler, Worker

#: A task or a program waits no longer for a partner, so that a failing row ends [s].
LONGEST_S = 20.0
_POLL_S = 0.002
_ADDRESS = re.compile(" at 0x[0-9a-f]+")


class PlannedError(Exception):
    """An exception that tasks raise on purpose."""


def note(folder: str, name: object, topic: str = "runs") -> None:
    """Write that something has happened; safe in all threads and processes."""
    file = os.open(os.path.join(folder, topic), os.O_APPEND | os.O_CREAT | os.O_WRONLY)
    os.write(file, f"{name}\n".encode())
    os.close(file)


def noted(folder: str, topic: str = "runs") -> list[str]:
    """Return the notes in their order."""
    path = Path(folder, topic)
    return path.read_text().splitlines() if path.exists() else []


def runs(folder: str, topic: str = "runs") -> dict[str, int]:
    """Return how often each task ran."""
    return dict(sorted(Counter(noted(folder, topic)).items()))


def wait_until(condition: Any, within_s: float = LONGEST_S) -> bool:
    """Return whether a condition becomes true in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def wait_for_notes(folder: str, n: int, topic: str = "runs") -> bool:
    """Return whether so many notes are written in time."""
    return wait_until(lambda: len(noted(folder, topic)) >= n)


def open_gate(folder: str, name: str = "gate") -> None:
    """Let tasks pass that wait at a gate."""
    Path(folder, name).touch()


def error_of(error: BaseException | None) -> tuple[Any, ...]:
    """Return an exception as data that can be compared."""
    if error is None:
        return ("no error",)
    # The client keeps the exception, whose frames keep the futures of the program.
    error.__traceback__ = None
    cause = error.__cause__
    notes = tuple(getattr(error, "__notes__", ()))
    inner = tuple(error_of(one) for one in getattr(error, "exceptions", ()))
    return (
        "error",
        type(error).__name__,
        tuple(_ADDRESS.sub("", repr(one)) for one in error.args),
        error_of(cause) if cause is not None else None,
        notes,
        inner,
    )


def outcome(future: Any, timeout: float = LONGEST_S) -> tuple[Any, ...]:
    """Return the value or the error of a future."""
    try:
        return ("value", future.result(timeout))
    except BaseException as error:  # noqa: BLE001 -- any is an observation
        return error_of(error)


def outcomes(futures: Iterable[Any], timeout: float = LONGEST_S) -> list[tuple[Any, ...]]:
    """Return the values or errors of futures; the limit is for all of them."""
    deadline = time.monotonic() + timeout
    return [outcome(future, max(deadline - time.monotonic(), 0.05)) for future in futures]


# What tasks call


def inc(x: int) -> int:
    """Return a number."""
    return x + 1


def add(*values: int) -> int:
    """Return a sum."""
    return sum(values)


def noting_inc(x: int, folder: str, name: object = None, topic: str = "runs") -> int:
    """Note a run, and return a number."""
    note(folder, x if name is None else name, topic)
    return x + 1


def fail_for(x: int, failing: frozenset[int], folder: str | None = None) -> int:
    """Raise an exception for some numbers."""
    if folder is not None:
        note(folder, x)
    if x in failing:
        raise PlannedError(x)
    return x


def pause_ms(x: int, ms: float = 1.0, folder: str | None = None) -> int:
    """Take some time."""
    if folder is not None:
        note(folder, x)
    time.sleep(ms / 1e3)
    return x


def pass_gate(x: int, folder: str, name: str = "gate", topic: str = "runs") -> int:
    """Note a start, and wait until a gate is open."""
    note(folder, x, topic)
    wait_until(Path(folder, name).exists)
    return x


def gate_or_inc(x: int, folder: str, waiting: int) -> int:
    """Wait at the gate in one task."""
    return pass_gate(x, folder) if x == waiting else noting_inc(x, folder)


# What programs do


def blocked(trial: Any) -> list[Any]:
    """Block all threads by tasks that wait at a gate."""
    futures = trial.client.map(pass_gate, range(4), folder=trial.folder, topic="blocked", priority=1000)
    assert wait_for_notes(trial.folder, 4, "blocked")
    return list(futures)


def arrived(trial: Any, futures: list[Any]) -> None:
    """Wait until the scheduler has handled all messages of the client, and workers in threads those of it."""
    wait_until(lambda: futures[-1].key in trial.scheduler.tasks)
    trial.client.submit(inc, 0, key="arrived", priority=2000, workers=trial.workers[:1]).release()
    trial.client.sync(trial.client.scheduler.identity)
    workers = [worker for worker in trial.cluster.workers.values() if isinstance(worker, Worker)]
    wait_until(lambda: all(_has_its_tasks(worker, trial.scheduler) for worker in workers))


def _has_its_tasks(worker: Worker, scheduler: Scheduler) -> bool:
    sent = list(scheduler.workers[worker.address].processing)
    return all(ts.key in worker.state.tasks for ts in sent)


def low_before_high(folder: str) -> int:
    """Return how many tasks called low start before half of those called high."""
    n_low = n_high = 0
    for name in noted(folder):
        n_low, n_high = n_low + name.startswith("low"), n_high + name.startswith("high")
        if n_high == 20:
            break
    return n_low
