"""Rows of errors: which exceptions tasks raise, in which tasks, and what clients see of them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import dask
from distributed import Reschedule, wait

from matrix.row import no_more, row
from matrix.tasks import (
    PlannedError,
    add,
    error_of,
    fail_for,
    inc,
    note,
    noted,
    noting_inc,
    outcome,
    outcomes,
    runs,
)
from matrix.trial import Trial


class CustomError(Exception):
    """An exception with arguments of its own."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


class UnpicklableError(Exception):
    """An exception that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not this one")


def _raise(x: int, which: str, folder: str) -> int:
    note(folder, x)
    if x != 42:
        return x
    if which == "custom":
        raise CustomError(7, "seven")
    if which == "unpicklable":
        raise UnpicklableError("text")
    if which == "cause":
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise PlannedError("outer") from error
    if which == "group":
        raise ExceptionGroup("several", [ValueError(1), KeyError("two")])
    error = PlannedError("noted")
    error.add_note("a note")
    raise error


@row("exceptions: custom, unpicklable, with cause, group, notes", "B", "one of 100 tasks raises each")
def exceptions(trial: Trial) -> Any:
    found: dict[str, Any] = {}
    for which in ("custom", "unpicklable", "cause", "group", "notes"):
        folder = Path(trial.folder, which)
        folder.mkdir()
        futures = trial.client.map(_raise, range(100), which=which, folder=str(folder))
        wait(futures)
        error = futures[42].exception()
        text = (
            error_of(error)
            if which != "unpicklable"
            else (type(error).__name__, "UnpicklableError" in repr(error))
        )
        found[which] = text, [f.status for f in futures].count("error"), runs(str(folder))
    return found


def _long_error(x: int) -> int:
    if x == 5:
        raise PlannedError("x" * 50_000)
    return x


@row(
    "exception longer than max-error-length",
    "B",
    "truncated text",
    settings={"distributed.admin.max-error-length": 1000},
)
def long_exception(trial: Trial) -> Any:
    error = trial.client.map(_long_error, range(40))[5].exception()
    return type(error).__name__, len(str(error))


class OwnBaseError(BaseException):
    """Not an `Exception`."""


def _raise_base(x: int, which: str) -> int:
    if x == 7:
        if which == "cancelled":
            raise asyncio.CancelledError("mine")
        raise OwnBaseError(x)
    return x


@row("CancelledError raised by a task", "B", "as `Future.exception`", cluster={})
def cancelled_error(trial: Trial) -> Any:
    futures = trial.client.map(_raise_base, range(30), which="cancelled")
    return trial.client.gather([*futures[:7], *futures[8:]]), outcome(futures[7])[:2]


@row("BaseException raised by a task", "B", "in stock, the task never ends", cluster={})
def base_exception(trial: Trial) -> Any:
    futures = trial.client.map(_raise_base, range(30), which="base")
    return trial.client.gather([*futures[:7], *futures[8:]]), outcome(futures[7], 1)[:2]


def _exit(x: int) -> int:
    if x == 7:
        sys.exit(3)
    return x


@row(
    "SystemExit from a task",
    "B",
    "the fate of the worker, and the error; others that were there may be blamed, too",
    compare=no_more("failed", slack=1),
    needs_processes=True,
)
def system_exit(trial: Trial) -> Any:
    found = [one[:2] for one in outcomes(trial.client.map(_exit, range(30)), 30)]
    return {"exit": found[7], "failed": sum(kind == "error" for kind, _ in found)}


@row("two steps fail", "B", "the first and the last of a bundle: both errors, each its own")
def two_errors(trial: Trial) -> Any:
    futures = trial.client.map(fail_for, range(48), failing=frozenset({0, 11, 12, 47}), folder=trial.folder)
    return outcomes(futures), runs(trial.folder)


@row("10 of 70 tasks fail on their first run", "B", "no retries: 10 errors, one run each")
def first_runs_fail(trial: Trial) -> Any:
    futures = trial.client.map(_fail_on_first_run, range(70), folder=trial.folder)
    return outcomes(futures), runs(trial.folder)


def _fail_on_first_run(x: int, folder: str) -> int:
    is_first = str(x) not in noted(folder)
    note(folder, x)
    if x % 7 == 0 and is_first:
        raise PlannedError(x)
    return x


@row("error in a shared input", "B", "a diamond: the key of the error of each output", covers=("dask",))
def shared_error(trial: Trial) -> Any:
    base = dask.delayed(fail_for)(1, frozenset({1}), trial.folder, dask_key_name="blamed")
    middle = [
        dask.delayed(noting_inc)(base, trial.folder, f"middle-{i}", dask_key_name=f"middle-{i}")
        for i in range(20)
    ]
    outputs = [dask.delayed(add)(*middle[i : i + 2], dask_key_name=f"out-{i}") for i in range(19)]
    futures = trial.client.compute(outputs)
    wait(futures)
    blamed = {str(trial.scheduler.tasks[f.key].exception_blame.key) for f in futures}
    return blamed, outcomes(futures), runs(trial.folder)


@row("error in one of two outputs", "B", "the other output is complete")
def one_of_two_outputs(trial: Trial) -> Any:
    base = [dask.delayed(noting_inc)(i, trial.folder, dask_key_name=f"base-{i}") for i in range(20)]
    good = dask.delayed(sum)(base, dask_key_name="good")
    bad = dask.delayed(_failing_sum)(base, dask_key_name="bad")
    futures = trial.client.compute([good, bad])
    return outcomes(futures), runs(trial.folder)


def _failing_sum(values: list[int]) -> int:
    raise PlannedError(len(values))


def _give_lock(x: int) -> Any:
    import threading

    return threading.Lock() if x == 7 else x


def _numbers(x: int) -> Any:
    yield from range(x)


def _give_numbers(x: int) -> Any:
    return _numbers(3)


def _consume(numbers: Any) -> list[int]:
    return [*numbers]


def _give(x: int, value: Any) -> Any:
    return value


@row("results: None, NotImplemented, lock", "B", "values, or the error of stock")
def odd_results(trial: Trial) -> Any:
    client = trial.client
    none = client.gather(client.map(_give, range(20), value=None))
    other = client.gather(client.map(_give, range(20), value=NotImplemented))
    locks = client.map(_give_lock, range(20))
    good = client.gather([*locks[:7], *locks[8:]])
    try:
        locks[7].result(5)
    except Exception as error:  # noqa: BLE001 -- any is an observation
        return none, other, good, locks[7].status, error_of(error)[1]
    return none, other, good


@row("results: generators", "T", "each is consumed by its only reader, on the worker")
def generators(trial: Trial) -> Any:
    client = trial.client
    made = client.map(_give_numbers, range(24))
    address = trial.workers[0]
    alone = client.map(_give_numbers, range(100, 104), workers=[address])
    read = client.map(_consume, alone, workers=[address], pure=False)
    wait(made)
    return client.gather(read), {f.status for f in made}, {f.type.__name__ for f in made}


def _large(x: int) -> Any:
    import numpy as np

    return np.full(2**17 if x else 6 * 2**20, x, dtype="u1" if x else "u8")


@row("results: an array of 50 MB", "B", "among arrays of 128 kB")
def large_results(trial: Trial) -> Any:
    futures = trial.client.map(_large, range(20))
    sizes = trial.client.map(len, futures)
    return trial.client.gather(sizes), int(futures[0].result().sum())


class NotLoaded:
    """A value that cannot be unpickled outside of its worker's thread."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> Any:
    raise PlannedError("not here")


def _not_loaded(x: int) -> Any:
    return NotLoaded() if x == 7 else x


@row("value that cannot be unpickled at the client", "B", "the error")
def not_unpickled(trial: Trial) -> Any:
    futures = trial.client.map(_not_loaded, range(20))
    wait(futures)
    good = trial.client.gather([*futures[:7], *futures[8:]])
    return good, outcome(futures[7], 5)[:2], futures[7].status


def _reschedule_twice(x: int, folder: str) -> int:
    note(folder, x)
    if x == 7 and noted(folder).count("7") < 3:
        raise Reschedule
    return x


@row("Reschedule", "T", "a task that raises it twice: its runs", covers=("Reschedule",))
def reschedule(trial: Trial) -> Any:
    futures = trial.client.map(_reschedule_twice, range(40), folder=trial.folder)
    return trial.client.gather(futures), runs(trial.folder)


def _refuse_one_worker(x: int, folder: str, refused: str) -> int:
    note(folder, x)
    if Path(folder, "refuses").exists() and _here() == refused:
        raise Reschedule
    return inc(x)


def _here() -> str:
    from distributed import get_worker

    return str(get_worker().address)


_NO_END = "no end"


def _ends(stock: Any, other: Any) -> str | None:
    """Return whether a task runs more than twice as often as the one that runs most often in stock."""
    if stock[0] != other[0] and stock[0] != _NO_END:
        return f"{stock[0]} in stock, {other[0]} here"
    return None if other[1] <= 2 * stock[1] + 20 else f"a task runs {other[1]} times, {stock[1]} in stock"


@row("Reschedule while on one of four workers", "", "100 tasks", compare=_ends)
def reschedule_on_one_worker(trial: Trial) -> Any:
    Path(trial.folder, "refuses").touch()
    futures = trial.client.map(_refuse_one_worker, range(100), folder=trial.folder, refused=trial.workers[0])
    try:
        wait(futures, timeout=8)
        return trial.client.gather(futures), max(runs(trial.folder).values())
    except TimeoutError:
        return _NO_END, max(runs(trial.folder).values())
    finally:
        Path(trial.folder, "refuses").unlink()
