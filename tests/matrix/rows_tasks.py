"""Rows of tasks that talk to Dask, and of annotations."""

from __future__ import annotations

import importlib
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import dask
import distributed
from distributed import get_client, get_worker, rejoin, secede, wait, worker_client

from matrix.row import no_more, row
from matrix.tasks import (
    blocked,
    inc,
    low_before_high,
    note,
    noted,
    noting_inc,
    open_gate,
    runs,
    wait_for_notes,
    wait_until,
)
from matrix.trial import Trial


def _ask_worker(x: int, folder: str, how: str) -> Any:
    note(folder, x, how)
    if x != 42:
        return x
    module = importlib.import_module("distributed") if how == "importlib" else distributed
    worker = module.get_worker()
    return worker.address in {worker.address} and str(worker.get_current_task())[:6]


@row(
    "get_worker, also by importlib, for one input only",
    "T",
    "1 of 100 calls it: its own key",
    covers=("get_worker", "Worker"),
)
def worker_of_task(trial: Trial) -> Any:
    found = []
    for how in ("import", "importlib"):
        keys = [f"{how[-3:]}{i:03}" for i in range(100)]
        found.append(
            trial.client.gather(
                trial.client.map(_ask_worker, range(100), folder=trial.folder, how=how, key=keys)
            )
        )
    return found, runs(trial.folder, "import"), runs(trial.folder, "importlib")


def _current_key(x: int) -> str:
    return str(get_worker().get_current_task())


@row("get_current_task", "", "hidden in a library: own key of each task")
def current_task(trial: Trial) -> Any:
    keys = [f"current-{i}" for i in range(40)]
    return trial.client.gather(trial.client.map(_current_key, range(40), key=keys))


def _with_children(x: int, how: str) -> int:
    if x != 42:
        return x
    if how == "get_client":
        return int(get_client().submit(inc, x, pure=False).result())
    with worker_client(separate_thread=how == "apart") as client:
        return sum(client.gather(client.map(inc, range(5), pure=False)))


@row(
    "get_client, worker_client(separate_thread=…)",
    "T",
    "children of 1 of 100 tasks: its value",
    covers=("get_client", "worker_client"),
)
def children(trial: Trial) -> Any:
    return [
        trial.client.gather(trial.client.map(_with_children, range(100), how=how, pure=False))
        for how in ("get_client", "apart", "same")
    ]


def _secede(x: int, folder: str, n: int) -> Any:
    if x != 17:
        return noting_inc(x, folder)
    secede()
    done = wait_for_notes(folder, n - 1)
    rejoin()
    return done


@row("secede, rejoin", "T", "1 of 100 secedes and waits for its siblings", covers=("secede", "rejoin"))
def seceding(trial: Trial) -> Any:
    return trial.client.gather(trial.client.map(_secede, range(100), folder=trial.folder, n=100)), runs(
        trial.folder
    )


def _nested(x: int, level: int) -> int:
    if level == 0:
        return x
    with worker_client() as client:
        return sum(client.gather([client.submit(_nested, i, level - 1, pure=False) for i in range(2)])) + x


def _nested_compute(x: int) -> int:
    return int(dask.compute(dask.delayed(sum)([dask.delayed(inc)(i) for i in range(x, x + 3)]))[0])


@row("nested dask.compute, client.submit in tasks", "", "three levels: values")
def nested(trial: Trial) -> Any:
    client = trial.client
    submitted = [client.submit(_nested, i, 3, pure=False) for i in range(4)]
    computed = client.map(_nested_compute, range(12))
    return client.gather(submitted), client.gather(computed)


def _print(x: int) -> int:
    distributed.print(f"line {x}")
    distributed.warn(f"warning {x}", UserWarning)
    return x


@row(
    "distributed.print, warn",
    "",
    "20 tasks: lines and warnings at the client",
    covers=("print", "warn"),
)
def printing(trial: Trial) -> Any:
    lines: list[str] = []
    warned: list[str] = []
    client = trial.client
    client.subscribe_topic("print", lambda event: lines.append(str(event[1]["args"][0])))
    client.subscribe_topic("warn", lambda event: warned.append(str(event[1]["message"])[:60]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = client.gather(client.map(_print, range(20)))
        wait_until(lambda: len(lines) >= 20 and len(warned) >= 20, 5)
    client.unsubscribe_topic("print")
    client.unsubscribe_topic("warn")
    return values, sorted(lines), len(warned)


def _log_event(x: int) -> int:
    get_worker().log_event("matrix-tasks", {"x": x})
    return x


@row(
    "worker.log_event, client.log_event",
    "",
    "100 events of tasks, and 3 of the client",
    covers=("Client.log_event",),
)
def events(trial: Trial) -> Any:
    client = trial.client
    client.gather(client.map(_log_event, range(100)))
    for i in range(3):
        client.log_event("matrix-client", i)
    wait_until(
        lambda: len(client.get_events("matrix-tasks")) >= 100 and len(client.get_events("matrix-client")) >= 3
    )
    return sorted(msg["x"] for _, msg in client.get_events("matrix-tasks")), len(
        client.get_events("matrix-client")
    )


def _log(x: int) -> int:
    import logging

    logging.getLogger("matrix.tasks").warning("line %d", x)
    return x


@row("Python logging in tasks", "B", "one line for each task")
def logging_lines(trial: Trial) -> Any:
    import logging

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("matrix.tasks")
    logger.addHandler(handler)
    try:
        trial.client.gather(trial.client.map(_log, range(40)))
    finally:
        logger.removeHandler(handler)
    return sorted(lines)


@row(
    "annotation priority number, callable, mixed",
    "",
    "order of starts",
    is_timed=True,
    compare=no_more("low first", slack=12),
)
def annotated_priority(trial: Trial) -> Any:
    gate = blocked(trial)
    tasks = []
    for i in range(80):
        with dask.annotate(priority=10 if i % 2 else 0):
            tasks.append(dask.delayed(note)(trial.folder, f"{'high' if i % 2 else 'low'}-{i}"))
    with dask.annotate(priority=lambda key: 1):
        called = [dask.delayed(inc)(i) for i in range(20)]
    futures = trial.client.compute([*tasks, *called], optimize_graph=False)
    trial.client.sync(trial.client.scheduler.identity)
    open_gate(trial.folder)
    wait([*futures, *gate])
    return {"low first": low_before_high(trial.folder), "runs": runs(trial.folder)}


def _part(name: str, n: int = 4, **annotations: Any) -> list[Any]:
    with dask.annotate(**annotations):
        return [dask.delayed(inc)(i, dask_key_name=f"{name}-{i}") for i in range(n)]


@row(
    "annotations retries, workers, allow_other_workers, executor",
    "S",
    "on part of a graph: at least 80 % of the rest are in bundles",
    separate=lambda key: key.startswith("apart-"),
    covers=("annotation executor",),
)
def annotated_part(trial: Trial) -> Any:
    parts = [
        *_part("apart-retries", retries=1),
        *_part("apart-workers", workers=trial.workers[:1]),
        *_part("apart-others", workers=trial.workers[:1], allow_other_workers=True),
        *_part("apart-executor", executor="offload"),
    ]
    rest = [dask.delayed(inc)(i, dask_key_name=f"rest-{i}") for i in range(84)]
    futures = trial.client.compute([*parts, *rest], optimize_graph=False)
    return trial.client.gather(futures)


@row(
    "annotation span, distributed.span",
    "B",
    "nested spans: tasks by span",
    covers=("annotation span", "span"),
)
def spans(trial: Trial) -> Any:
    from distributed import span

    with span("matrix-outer"):
        first = trial.client.map(inc, range(40), key=[f"outer-{i}" for i in range(40)])
        with span("matrix-inner"):
            second = trial.client.map(inc, range(50), key=[f"inner-{i}" for i in range(50)])
    values = trial.client.gather([*first, *second])
    extension = trial.scheduler.extensions["spans"]
    named = {
        key[-1]: len(spans) for key, spans in extension.spans_search_by_name.items() if "matrix-" in key[-1]
    }
    return values, sorted(named)


@row(
    "unknown annotation, ferroflow_bundle=False",
    "S",
    "on part of a graph: the annotation is on the task",
    separate=lambda key: key.startswith("apart-"),
)
def unknown_annotation(trial: Trial) -> Any:
    parts = [*_part("apart-unknown", matrix=7), *_part("apart-off", ferroflow_bundle=False)]
    rest = [dask.delayed(inc)(i, dask_key_name=f"rest-{i}") for i in range(42)]
    futures = trial.client.compute([*parts, *rest], optimize_graph=False)
    values = trial.client.gather(futures)
    tasks = trial.scheduler.tasks
    return values, [dict(tasks[f.key].annotations or {}) for f in futures[:4]]


def _make_connection(x: int) -> Any:
    import sqlite3

    return sqlite3.connect(":memory:", check_same_thread=False)


def _use_connection(connection: Any, i: int) -> Any:
    return connection.execute("select ?", (i,)).fetchone()


@row("values that cannot be pickled", "B", "connections with one reader each: values, no hang")
def unpicklable_values(trial: Trial) -> Any:
    tasks = [dask.delayed(_use_connection)(dask.delayed(_make_connection)(i), i) for i in range(32)]
    return trial.client.gather(trial.client.compute(tasks))


def _long_running(x: int, folder: str, mine: str) -> int:
    if x == 0:
        secede()
        wait_until(Path(folder, mine).exists)
    return threading.active_count() > 0 and x


@row("seceded task while the client goes on", "T", "the next graph runs meanwhile")
def long_running(trial: Trial) -> Any:
    first = trial.client.map(_long_running, range(40), folder=trial.folder, mine="mine")
    begin = time.monotonic()
    second = trial.client.gather(trial.client.map(inc, range(40)))
    is_early = time.monotonic() - begin < 10
    open_gate(trial.folder, "mine")
    return second, is_early, trial.client.gather(first), noted(trial.folder)
