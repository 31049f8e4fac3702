"""Rows of futures: results, errors, states, callbacks, `wait`, `as_completed`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import dask
from distributed import CancelledError, TimeoutError, Variable, as_completed, fire_and_forget, futures_of, wait
from distributed import get_task_metadata
from matrix.row import row
from matrix.tasks import (
    add,
    error_of,
    fail_for,
    inc,
    noted,
    noting_inc,
    open_gate,
    outcome,
    outcomes,
    pass_gate,
    pause_ms,
    runs,
    wait_until,
)
from matrix.trial import Trial


def _gate_or_inc(x: int, folder: str, waiting: int) -> int:
    return pass_gate(x, folder) if x == waiting else noting_inc(x, folder)


@row(
    "Future.result(timeout=)",
    "B",
    "a step that takes longer: `TimeoutError`, the value later",
    covers=("Future.result", "TimeoutError", "Future.client", "Future.executor"),
)
def result_timeout(trial: Trial) -> Any:
    futures = trial.client.map(_gate_or_inc, range(40), folder=trial.folder, waiting=39)
    early: Any = None
    try:
        futures[39].result(timeout=0.05)
    except TimeoutError as error:
        early = error_of(error)[:2]
    open_gate(trial.folder)
    same = futures[0].client is trial.client, futures[0].executor is trial.client
    return early, trial.client.gather(futures), same, runs(trial.folder)


def _invert(x: int) -> float:
    y = 7
    return 1 / (x - y)


@row(
    "Future.exception, traceback",
    "B",
    "a failing step: frames by name, text of lines",
    covers=("Future.exception", "Future.traceback"),
)
def exception_of_future(trial: Trial) -> Any:
    import traceback

    futures = trial.client.map(_invert, range(40))
    error, lines = futures[7].exception(), traceback.extract_tb(futures[7].traceback())
    good = futures[3].exception(), futures[3].traceback()
    return error_of(error), [(line.name, line.line) for line in lines], good


@row(
    "Future.done, status, type, cancelled",
    "B",
    "polled until the end",
    covers=("Future.done", "Future.status", "Future.type", "Future.cancelled", "Future.key"),
)
def states_of_future(trial: Trial) -> Any:
    futures = trial.client.map(_gate_or_inc, range(40), folder=trial.folder, waiting=20)
    bad = trial.client.map(_invert, range(10))
    before = futures[20].status, futures[20].done(), futures[20].type, futures[20].cancelled()
    open_gate(trial.folder)
    wait([*futures, *bad])
    after = [(f.status, f.done(), f.type.__name__, f.cancelled()) for f in futures]
    bad[0].cancel()
    wait_until(bad[0].cancelled)
    return before, after, [f.status for f in bad], bad[0].done()


@row("Future.add_done_callback", "B", "100 callbacks: each once, the right status", covers=("Future.add_done_callback",))
def callbacks(trial: Trial) -> Any:
    seen: list[Any] = []
    futures = trial.client.map(fail_for, range(100), failing=frozenset({5, 50}))
    for i, future in enumerate(futures):
        future.add_done_callback(lambda f, i=i: seen.append((i, f.status)))
    wait(futures)
    wait_until(lambda: len(seen) >= 100)
    return sorted(seen)


def _fail_first(x: int, folder: str) -> int:
    note_path = Path(folder, f"tried-{x}")
    noting_inc(x, folder)
    if x % 20 == 3 and not note_path.exists():
        note_path.touch()
        raise ValueError(x)
    return x


@row("Future.retry, Client.retry", "B", "tasks that failed once; a failed input", covers=("Future.retry", "Client.retry"))
def retry(trial: Trial) -> Any:
    client = trial.client
    futures = client.map(_fail_first, range(40), folder=trial.folder)
    readers = client.map(inc, futures)
    wait(readers)
    before = [f.status for f in futures], [f.status for f in readers]
    futures[3].retry()
    first = outcome(futures[3])
    client.retry([futures[23], readers[23], readers[3]])
    return before, first, outcomes(readers), runs(trial.folder)


@row("Future pickled, bind_client", "B", "sent through a `Variable`, and pickled", covers=("Variable", "Future.bind_client"))
def pickled_futures(trial: Trial) -> Any:
    import pickle

    futures = trial.client.map(inc, range(40))
    variable = Variable(f"matrix-{id(trial)}", client=trial.client)
    variable.set(futures[7])
    received = variable.get()
    loaded = pickle.loads(pickle.dumps(futures[9]))
    loaded.bind_client(trial.client)
    found = received.result(), loaded.result(), received.key == futures[7].key
    variable.delete()
    return found


@row("wait, FIRST_COMPLETED, timeout", "B", "short tasks, one of which waits", covers=("wait",))
def waiting(trial: Trial) -> Any:
    futures = trial.client.map(_gate_or_inc, range(40), folder=trial.folder, waiting=39)
    first = wait(futures, return_when="FIRST_COMPLETED")
    some = len(first.done) > 0, len(first.done) + len(first.not_done)
    try:
        late: Any = wait(futures, timeout=0.05)
    except TimeoutError as error:
        late = error_of(error)[:2]
    open_gate(trial.folder)
    every = wait(futures)
    return some, late, len(every.done), len(every.not_done)


@row(
    "as_completed: with_results, raise_errors=False",
    "B",
    "1,000 tasks, of which 5 fail: each once",
    covers=("as_completed",),
)
def completed_results(trial: Trial) -> Any:
    futures = trial.client.map(fail_for, range(1000), failing=frozenset(range(100, 1000, 200)))
    seen = [
        (future.status, result if future.status == "finished" else error_of(result[1])[1:3])
        for future, result in as_completed(futures, with_results=True, raise_errors=False)
    ]
    return sorted(seen, key=repr)


@row(
    "as_completed: add, update, next_batch, batches, timeout",
    "B",
    "futures that are added while others run: each once",
    covers=(
        *("as_completed.add", "as_completed.update", "as_completed.next_batch", "as_completed.batches"),
        *("as_completed.count", "as_completed.has_ready", "as_completed.is_empty", "as_completed.clear"),
        *("as_completed.next",),
    ),
)
def completed_added(trial: Trial) -> Any:
    client = trial.client
    iterator = as_completed(client.map(inc, range(50)))
    iterator.update(client.map(inc, range(50, 100)))
    iterator.add(client.submit(inc, 1000))
    values = [iterator.next().result(), *(f.result() for f in iterator.next_batch(block=True))]
    count = iterator.count() + len(values)
    values += [f.result() for batch in iterator.batches() for f in batch]
    empty = iterator.is_empty(), iterator.has_ready(), iterator.count()
    held = client.map(_gate_or_inc, range(20), folder=trial.folder, waiting=0)
    late: Any = None
    slow = as_completed(held[:1], timeout=0.05)
    try:
        next(slow)
    except TimeoutError as error:
        late = error_of(error)[:2]
    open_gate(trial.folder)
    wait(held)
    iterator.add(held[0])
    iterator.clear()
    return sorted(values), count, empty, late


def _write(x: int, folder: str) -> None:
    Path(folder, f"file-{x}").touch()


@row("fire_and_forget", "B", "100 tasks that write files: nothing is left", covers=("fire_and_forget",))
def forgotten(trial: Trial) -> Any:
    futures = trial.client.map(_write, range(100), folder=trial.folder)
    fire_and_forget(futures)
    del futures
    wait_until(lambda: len(list(Path(trial.folder).glob("file-*"))) == 100)
    return len(list(Path(trial.folder).glob("file-*")))


@row("futures_of, get_task_metadata", "B", "mapped tasks: keys and states", covers=("get_task_metadata",))
def task_metadata(trial: Trial) -> Any:
    keys = [f"meta-{i}" for i in range(40)]
    with get_task_metadata() as tasks:
        futures = trial.client.map(inc, range(40), key=keys)
        wait(futures)
    states = {key: tasks.state.get(key) for key in keys}
    x = trial.client.persist(dask.delayed(inc)(1))
    return states, sorted(k for k in tasks.metadata if k in set(keys)), len(futures_of([x, {"a": x}]))


@row("same graph twice, and after release", "B", "twice 100 tasks: runs of each")
def same_graph(trial: Trial) -> Any:
    client = trial.client
    found = [client.map(noting_inc, range(100), folder=trial.folder) for _ in range(2)]
    values = [client.gather(futures) for futures in found]
    once = max(runs(trial.folder).values())
    found.clear()
    wait_until(lambda: not trial.scheduler.tasks)
    values.append(client.gather(client.map(noting_inc, range(100), folder=trial.folder)))
    return values, once, runs(trial.folder)


@row("Future.cancel(reason, msg)", "T", "a finished and an unstarted step; unstarted ones never start", covers=(
    "Future.cancel", "Client.cancel", "CancelledError",
))  # fmt: skip
def cancel(trial: Trial) -> Any:
    client = trial.client
    blocked = client.map(pass_gate, range(4), folder=trial.folder, topic="blocked", priority=1000)
    wait_until(lambda: len(noted(trial.folder, "blocked")) == 4)
    futures = client.map(noting_inc, range(200), folder=trial.folder)
    client.sync(client.scheduler.identity)
    futures[5].cancel(reason="matrix", msg="not wanted")
    error = outcome(futures[5])
    client.cancel(futures)
    wait_until(lambda: not any(client.run(_n_unstarted).values()))
    open_gate(trial.folder)
    wait(blocked)
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
        mine = trial.client.map(_gate_or_inc, range(40), folder=trial.folder, waiting=3, key=keys)
        theirs = second.map(_gate_or_inc, range(40), folder=trial.folder, waiting=3, key=keys)
        second.sync(second.scheduler.identity)
        trial.client.cancel(mine, force=True)
        seen = wait_until(lambda: all(f.cancelled() for f in [*mine, *theirs]))
        open_gate(trial.folder)
        return seen, {f.status for f in mine}, {f.status for f in theirs}


def _at_most_files(stock: Any, other: Any) -> str | None:
    """Return how much more starts after a cancel than in stock: up to a step of each thread and its successors."""
    if stock[0] != other[0]:
        return f"{stock[0]} in stock, {other[0]} here"
    return None if other[1] <= stock[1] + 100 else f"{other[1]} of 300 tasks start after the cancel, {stock[1]} in stock"


@row("cancel of every second future", "T", "tasks that write files: at most 100 more than in stock", compare=_at_most_files)
def cancel_half(trial: Trial) -> Any:
    futures = trial.client.map(pause_ms, range(600), ms=1, folder=trial.folder)
    wait_until(lambda: noted(trial.folder))
    trial.client.cancel(futures[1::2])
    values = trial.client.gather(futures[::2])
    return values, sum(int(name) % 2 for name in noted(trial.folder))


@row("Future.release, del of half", "T", "as cancel: no value is left", compare=_at_most_files, covers=("Future.release",))
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
        theirs = second.map(_gate_or_inc, range(60), folder=trial.folder, waiting=0, key=keys)
        wait_until(lambda: noted(trial.folder))
        mine = trial.client.map(_gate_or_inc, range(60), folder=trial.folder, waiting=0, key=keys)[::2]
        trial.client.sync(trial.client.scheduler.identity)
    open_gate(trial.folder)
    del theirs
    return trial.client.gather(mine)


@row("two graphs share hidden tasks", "B", "both orders of arrival: each task runs at most once for each graph")
def shared_graphs(trial: Trial) -> Any:
    base = [dask.delayed(noting_inc)(i, trial.folder) for i in range(30)]
    graphs = [[dask.delayed(add)(one, n) for one in base] for n in range(2)]
    futures = [trial.client.compute(graph) for graph in graphs]
    values = [trial.client.gather(one) for one in futures]
    return values, max(runs(trial.folder).values()) <= 2


@row("client reconnects after a lost connection", "", "a graph in flight: its futures are cancelled", cluster={})
def reconnect(trial: Trial) -> Any:
    client = trial.client
    futures = client.map(_gate_or_inc, range(40), folder=trial.folder, waiting=3)
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
