"""Rows of clusters that change: workers join, leave, pause, restart and die."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from distributed import CancelledError, wait

from matrix.row import difference, row
from matrix.tasks import (
    error_of,
    inc,
    note,
    noted,
    noting_inc,
    open_gate,
    outcomes,
    pass_gate,
    pause_ms,
    runs,
    wait_until,
)
from matrix.trial import Trial

_N = 100


def _gate_or_pause(x: int, folder: str) -> int:
    return pass_gate(x, folder) if x == 0 else pause_ms(x, 2, folder)


@row("worker joins, scale down", "T", "a worker joins and leaves while tasks run", cluster={"n_workers": 2})
def joins(trial: Trial) -> Any:
    futures = trial.client.map(pause_ms, range(200), ms=3)
    trial.cluster.scale(4)
    trial.client.wait_for_workers(4)
    trial.cluster.scale(2)
    wait_until(lambda: len(trial.scheduler.workers) == 2)
    return trial.client.gather(futures)


@row(
    "adaptive 0–4",
    "",
    "an adaptive cluster without workers",
    covers=("Adaptive", "Client.wait_for_workers"),
    cluster={"n_workers": 0},
)
def adaptive(trial: Trial) -> Any:
    trial.cluster.adapt(minimum=0, maximum=4, interval="50ms")
    return trial.client.gather(trial.client.map(pause_ms, range(100), ms=2))


@row(
    "retire_workers",
    "T",
    "a worker that runs a task: values, data has moved",
    covers=("Client.retire_workers",),
    cluster={},
)
def retires(trial: Trial) -> Any:
    futures = trial.client.map(_gate_or_pause, range(_N), folder=trial.folder)
    wait_until(lambda: "0" in noted(trial.folder))
    trial.client.retire_workers(trial.workers[:1], close_workers=True)
    open_gate(trial.folder)
    return trial.client.gather(futures), len(trial.scheduler.workers), max(runs(trial.folder).values()) <= 2


@row(
    "restart, restart_workers",
    "",
    "while tasks run: states of futures",
    covers=("Client.restart", "Client.restart_workers"),
    needs_processes=True,
)
def restarts(trial: Trial) -> Any:
    client = trial.client
    futures = client.map(_gate_or_pause, range(_N), folder=trial.folder)
    wait_until(lambda: "0" in noted(trial.folder))
    client.restart()
    cancelled = wait_until(lambda: all(f.status in ("cancelled", "lost") for f in futures))
    again = client.map(noting_inc, range(_N), folder=trial.folder, pure=False)
    client.restart_workers(trial.workers[:1])
    return cancelled, client.gather(again)


@row(
    "shutdown, close while bundles run",
    "",
    "no hang",
    covers=("Client.shutdown", "Client.close", "Status"),
    cluster={},
)
def shutdowns(trial: Trial) -> Any:
    futures = trial.client.map(pause_ms, range(500), ms=2, folder=trial.folder)
    wait_until(lambda: noted(trial.folder))
    begin = time.monotonic()
    trial.client.shutdown()
    try:
        futures[-1].result(2)
    except (CancelledError, TimeoutError) as error:
        return error_of(error)[1], time.monotonic() - begin < 15
    return "a value", time.monotonic() - begin < 15


def _at_most_steps(stock: Any, other: Any) -> str | None:
    if stock[0] != other[0]:
        return difference(stock[0], other[0])
    return (
        None
        if other[1] <= stock[1] + 2
        else f"{other[1]} tasks start on the paused worker, {stock[1]} in stock"
    )


@row(
    "paused worker",
    "T",
    "no task starts on the paused worker; it resumes",
    is_timed=True,
    compare=_at_most_steps,
    # The worker's monitor would let it run again.
    settings={"distributed.worker.memory.pause": False},
)
def pauses(trial: Trial) -> Any:
    client = trial.client
    address = min(client.scheduler_info(n_workers=-1)["workers"])
    futures = client.map(_pause_here, range(1000), folder=trial.folder)
    wait_until(lambda: noted(trial.folder))
    client.run(_set_status, "paused", workers=[address])
    wait_until(lambda: trial.scheduler.workers[address].status.name == "paused")
    time.sleep(0.1)  # for the message that asks for the steps of its bundle
    before = sum(line.endswith(address) for line in noted(trial.folder))
    n_noted = len(noted(trial.folder))
    wait_until(lambda: len(noted(trial.folder)) > n_noted + 50, 2)
    after = sum(line.endswith(address) for line in noted(trial.folder))
    client.run(_set_status, "running", workers=[address])
    values = client.gather(futures)
    return values, after - before


def _pause_here(x: int, folder: str) -> int:
    from distributed.worker import get_worker

    note(folder, f"{x} {get_worker().address}")
    time.sleep(0.002)
    return x


def _set_status(name: str, dask_worker: Any) -> None:
    from distributed import Status

    dask_worker.status = Status[name]


#: A worker of two threads has as many tasks of Dask's own queue; they may share the blame for a death.
_TOGETHER = 3


def _no_more_deaths(stock: Any, other: Any) -> str | None:
    """Return whether more tasks fail than in stock, or with keys that are no tasks of the program."""
    if other[0] != "ends" or not all(key.startswith(("killer", "task-")) for key in other[2]):
        return f"{stock} in stock, {other} here"
    n = max(stock[1], _TOGETHER)
    return None if other[1] <= n else f"{stock[1]} tasks fail in stock, {other[1]} here"


def _die(x: int, how: str, folder: str, times: int) -> int:
    note(folder, x)
    if x == 50 and noted(folder).count("50") <= times:
        if how == "exit":
            os._exit(1)
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(10)
    return x


def _killed(trial: Trial, how: str) -> Any:
    keys = ["killer" if i == 50 else f"task-{i}" for i in range(_N)]
    futures = trial.client.map(_die, range(_N), how=how, folder=trial.folder, times=99, key=keys)
    found = outcomes(futures, 15)
    failed = [one for one in found if one[0] == "error"]
    blamed = {one[2][0].strip("'") for one in failed if one[1] == "KilledWorker"}
    hangs = any(one[1] == "TimeoutError" for one in failed)
    return "hangs" if hangs else "ends", len(failed), blamed


def _add_deaths() -> None:
    """Add a row for each way in which a worker dies, and each number of failures that is allowed."""
    for how in ("exit", "SIGKILL", "SIGSEGV"):
        for allowed in (0, 1, 3):
            row(
                f"worker killed: {how}, allowed-failures {allowed}",
                "T",
                "one of 100 tasks ends its worker each time: failed keys, deaths",
                compare=_no_more_deaths,
                needs_processes=True,
                settings={"distributed.scheduler.allowed-failures": allowed},
                covers=("KilledWorker",) if how == "exit" else (),
            )(lambda trial, how=how: _killed(trial, how))


_add_deaths()


@row("worker killed once", "T", "the values of all tasks", needs_processes=True)
def killed_once(trial: Trial) -> Any:
    futures = trial.client.map(_die, range(_N), how="SIGKILL", folder=trial.folder, times=1)
    return trial.client.gather(futures)


@row("worker stopped (SIGSTOP) beyond worker-ttl", "", "values", needs_processes=True, settings={
    "distributed.scheduler.worker-ttl": "2s",
})  # fmt: skip
def stopped(trial: Trial) -> Any:
    futures = trial.client.map(_stop_once, range(_N), folder=trial.folder)
    return trial.client.gather(futures)


def _stop_once(x: int, folder: str) -> int:
    path = Path(folder, "stopped")
    if x == 50 and not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    return pause_ms(x, 2)


@row("delivered value lost with its worker", "", "read by a second graph: its value", cluster={})
def lost_values(trial: Trial) -> Any:
    client = trial.client
    futures = client.map(noting_inc, range(_N), folder=trial.folder)
    wait(futures)
    name = next(iter(trial.cluster.workers))
    client.sync(_remove, trial.cluster.workers[name])
    wait_until(lambda: len(trial.scheduler.workers) == len(trial.cluster.workers) - 1)
    return client.gather(client.map(inc, futures)), max(runs(trial.folder).values()) <= 2


async def _remove(worker: Any) -> None:
    await worker.close(timeout=2, nanny=False)


def _semaphore_holder(x: int, name: str, folder: str) -> int:
    from distributed import Semaphore

    path = Path(folder, "killed")
    with Semaphore(max_leases=1, name=name):
        if x == 3 and not path.exists():
            path.touch()
            os._exit(1)
    return x


@row("Semaphore leases of a killed worker", "T", "the leases come back", needs_processes=True, settings={
    "distributed.scheduler.locks.lease-timeout": "1s",
    "distributed.scheduler.locks.lease-validation-interval": "200ms",
})  # fmt: skip
def lost_leases(trial: Trial) -> Any:
    from distributed import Semaphore

    semaphore = Semaphore(max_leases=1, name=f"lost-{id(trial)}")
    futures = trial.client.map(_semaphore_holder, range(20), name=semaphore.name, folder=trial.folder)
    return trial.client.gather(futures), semaphore.get_value()


class Remembering:
    """An actor."""

    def value(self) -> int:
        """Return a number."""
        return 7


@row("actor's worker lost", "", "the error of a call", cluster={})
def lost_actor(trial: Trial) -> Any:
    future = trial.client.submit(Remembering, actor=True, workers=trial.workers[:1])
    actor = future.result()
    before = actor.value().result()
    (worker,) = (one for one in trial.cluster.workers.values() if one.address == trial.workers[0])
    trial.client.sync(_remove, worker)
    values = trial.client.gather(trial.client.map(inc, range(40)))
    try:
        return before, values, actor.value().result(5)
    except Exception as error:  # noqa: BLE001 -- any is an observation
        return before, values, type(error).__name__
