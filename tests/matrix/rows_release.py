"""Rows of cancelled and released futures, and of several clients."""

from __future__ import annotations

import time
from typing import Any

import dask
from distributed import CancelledError, wait

from matrix.row import row
from matrix.tasks import (
    add,
    blocked,
    error_of,
    gate_or_inc,
    inc,
    noted,
    noting_inc,
    open_gate,
    outcome,
    pause_ms,
    runs,
    wait_until,
)
from matrix.trial import Trial


@row("Future.cancel(reason, msg)", "T", "unstarted steps never start", covers=(
    "Future.cancel", "Client.cancel", "CancelledError",
), is_timed=True)  # fmt: skip  # on a busy machine the release may come after some tasks have started
def cancel(trial: Trial) -> Any:
    client = trial.client
    gate = blocked(trial)
    futures = client.map(noting_inc, range(200), folder=trial.folder)
    client.sync(client.scheduler.identity)
    futures[5].cancel(reason="matrix", msg="not wanted")
    error = outcome(futures[5])
    client.cancel(futures)
    wait_until(lambda: not any(client.run(_n_unstarted).values()))
    open_gate(trial.folder)
    wait(gate)
    _settle(trial)
    try:
        futures[6].result()
    except CancelledError as other:
        second = error_of(other)[1]
    return error[1], "not wanted" in repr(error), second, {f.status for f in futures}, noted(trial.folder)


def _n_unstarted(dask_worker: Any) -> int:
    return sum(ts.state in ("ready", "waiting", "constrained") for ts in dask_worker.state.tasks.values())


def _settle(trial: Trial) -> None:
    """Let all workers run a task, so that those sent before have ended."""
    client = trial.client
    last = [client.submit(pause_ms, i, 5, workers=[address]) for i, address in enumerate(trial.workers)]
    wait(last)


@row("cancel(force=True) with a second client", "T", "both clients see it")
def cancel_shared(trial: Trial) -> Any:
    from distributed import Client

    with Client(trial.scheduler.address, set_as_default=False) as second:
        keys = [f"shared-{i}" for i in range(40)]
        mine = trial.client.map(gate_or_inc, range(40), folder=trial.folder, waiting=3, key=keys)
        theirs = second.map(gate_or_inc, range(40), folder=trial.folder, waiting=3, key=keys)
        second.sync(second.scheduler.identity)
        trial.client.cancel(mine, force=True)
        seen = wait_until(lambda: all(f.cancelled() for f in [*mine, *theirs]))
        open_gate(trial.folder)
        return seen, {f.status for f in mine}, {f.status for f in theirs}


def _at_most_files(stock: Any, other: Any) -> str | None:
    """Return whether more than 100 tasks more than in stock start after a cancel."""
    if stock[0] != other[0]:
        return f"{stock[0]} in stock, {other[0]} here"
    return (
        None
        if other[1] <= stock[1] + 100
        else f"{other[1]} of 300 tasks start after the cancel, {stock[1]} in stock"
    )


@row(
    "cancel of every second future",
    "T",
    "tasks that write files: at most 100 more than in stock",
    compare=_at_most_files,
)
def cancel_half(trial: Trial) -> Any:
    futures = trial.client.map(pause_ms, range(600), ms=1, folder=trial.folder)
    wait_until(lambda: noted(trial.folder))
    trial.client.cancel(futures[1::2])
    values = trial.client.gather(futures[::2])
    return values, sum(int(name) % 2 for name in noted(trial.folder))


@row(
    "Future.release, del of half",
    "T",
    "as cancel: no value is left",
    compare=_at_most_files,
    covers=("Future.release",),
)
def release_half(trial: Trial) -> Any:
    futures = trial.client.map(pause_ms, range(600), ms=1, folder=trial.folder)
    wait_until(lambda: noted(trial.folder))
    kept = futures[::2]
    for future in futures[1::4]:
        future.release()
    del futures
    values = trial.client.gather(kept)
    return values, sum(int(name) % 2 for name in noted(trial.folder))


@row("two clients, same keys", "B", "the second one while the first runs: each task at most twice")
def two_clients(trial: Trial) -> Any:
    from distributed import Client

    with Client(trial.scheduler.address, set_as_default=False) as second:
        keys = [f"both-{i}" for i in range(60)]
        mine = trial.client.map(noting_inc, range(60), folder=trial.folder, key=keys)
        theirs = second.map(noting_inc, range(60), folder=trial.folder, key=keys)
        found = second.gather(theirs), trial.client.gather(mine)
    return found, max(runs(trial.folder).values()) <= 2


@row("client closes while its bundle runs", "T", "another client wants half: its values; no key is left")
def client_closes(trial: Trial) -> Any:
    from distributed import Client

    keys = [f"closing-{i}" for i in range(60)]
    with Client(trial.scheduler.address, set_as_default=False) as second:
        theirs = second.map(gate_or_inc, range(60), folder=trial.folder, waiting=0, key=keys)
        wait_until(lambda: noted(trial.folder))
        mine = trial.client.map(gate_or_inc, range(60), folder=trial.folder, waiting=0, key=keys)[::2]
        trial.client.sync(trial.client.scheduler.identity)
    open_gate(trial.folder)
    del theirs
    return trial.client.gather(mine)


@row(
    "two graphs share hidden tasks", "B", "both orders of arrival: each task runs at most once for each graph"
)
def shared_graphs(trial: Trial) -> Any:
    base = [dask.delayed(noting_inc)(i, trial.folder) for i in range(30)]
    graphs = [[dask.delayed(add)(one, n) for one in base] for n in range(2)]
    futures = [trial.client.compute(graph) for graph in graphs]
    values = [trial.client.gather(one) for one in futures]
    return values, max(runs(trial.folder).values()) <= 2


@row(
    "client reconnects after a lost connection",
    "",
    "a graph in flight: its futures are cancelled",
    cluster={},
)
def reconnect(trial: Trial) -> Any:
    client = trial.client
    futures = client.map(gate_or_inc, range(40), folder=trial.folder, waiting=3)
    wait_until(lambda: noted(trial.folder))
    client.sync(_abort, client)
    lost = wait_until(lambda: all(f.status in ("lost", "cancelled") for f in futures))
    open_gate(trial.folder)
    wait_until(lambda: client.status == "running")
    begin = time.monotonic()
    while time.monotonic() < begin + 10:
        try:
            return lost, client.gather(client.map(inc, range(40)))
        except CancelledError:
            continue
    return lost


async def _abort(client: Any) -> None:
    client.scheduler_comm.comm.abort()
