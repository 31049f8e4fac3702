"""Rows of futures: results, errors, states, callbacks, `wait`, `as_completed`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask
from distributed import (
    Variable,
    as_completed,
    fire_and_forget,
    futures_of,
    get_task_metadata,
    wait,
)

from matrix.row import row
from matrix.tasks import (
    arrived,
    blocked,
    error_of,
    fail_for,
    gate_or_inc,
    inc,
    noting_inc,
    open_gate,
    outcome,
    outcomes,
    runs,
    wait_until,
)
from matrix.trial import Trial


@row(
    "Future.result(timeout=)",
    "B",
    "a step that takes longer: `TimeoutError`, the value later",
    covers=("Future.result", "TimeoutError", "Future.client", "Future.executor"),
)
def result_timeout(trial: Trial) -> Any:
    futures = trial.client.map(gate_or_inc, range(40), folder=trial.folder, waiting=39)
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
    futures = trial.client.map(gate_or_inc, range(40), folder=trial.folder, waiting=20)
    bad = trial.client.map(_invert, range(10))
    before = futures[20].status, futures[20].done(), futures[20].type, futures[20].cancelled()
    open_gate(trial.folder)
    wait([*futures, *bad])
    after = [(f.status, f.done(), f.type.__name__, f.cancelled()) for f in futures]
    bad[0].cancel()
    wait_until(bad[0].cancelled)
    return before, after, [f.status for f in bad], bad[0].done()


@row(
    "Future.add_done_callback",
    "B",
    "100 callbacks: each once, the right status",
    covers=("Future.add_done_callback",),
)
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


@row(
    "Future.retry, Client.retry",
    "B",
    "tasks that failed once; a failed input",
    covers=("Future.retry", "Client.retry"),
)
def retry(trial: Trial) -> Any:
    client = trial.client
    gate = blocked(trial)  # readers of errors stay separate
    futures = client.map(_fail_first, range(40), folder=trial.folder)
    readers = client.map(inc, futures)
    arrived(trial, readers)
    open_gate(trial.folder)
    wait([*gate, *readers])
    before = [f.status for f in futures], [f.status for f in readers]
    futures[3].retry()
    first = outcome(futures[3])
    client.retry([futures[23], readers[23], readers[3]])
    return before, first, outcomes(readers), runs(trial.folder)


@row(
    "Future pickled, bind_client",
    "B",
    "sent through a `Variable`, and pickled",
    covers=("Variable", "Future.bind_client"),
)
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
    futures = trial.client.map(gate_or_inc, range(40), folder=trial.folder, waiting=39)
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
    "500 tasks, of which 5 fail: each once",
    covers=("as_completed",),
)
def completed_results(trial: Trial) -> Any:
    futures = trial.client.map(fail_for, range(500), failing=frozenset(range(50, 500, 100)))
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
    held = client.map(gate_or_inc, range(20), folder=trial.folder, waiting=0)
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
