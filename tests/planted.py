"""Faults for the sides of a public comparison: each function breaks the cluster of a client in its way."""

from __future__ import annotations

import os
from typing import Any

from distributed import Client, Worker
from distributed.scheduler import Scheduler

#: Every so many tasks one is broken.
EVERY = 3
#: Added to the number of a run; it must not become that of another task.
OTHER_RUN = 10**9


def wrong_values(client: Client) -> None:
    """Change every third value to another one of its type."""
    client.run(_change_values, _other)


def skipped(client: Client) -> None:
    """Skip every third task: its value is None."""
    client.run(_change_values, _nothing)


def _other(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value)({key: _other(item) for key, item in value.items()})
    if isinstance(value, tuple):
        return tuple(map(_other, value))
    if hasattr(value, "select_dtypes"):  # a data frame
        return value.assign(**{name: value[name] + 1 for name in value.select_dtypes("float")})
    if hasattr(value, "to_frame") and value.dtype.kind != "f":  # a series of times, words or truth values
        return value.iloc[::-1].set_axis(value.index)
    try:
        return value + 1
    except Exception:  # noqa: BLE001 -- any value has another one
        return "another value"


def _nothing(_: Any) -> Any:
    return None


def _change_values(change: Any, dask_worker: Worker) -> None:
    store, n = dask_worker.data, 0
    insert = type(store).__setitem__

    class Changed(type(store)):  # type: ignore[misc]
        def __setitem__(self, key: Any, value: Any) -> None:
            nonlocal n
            n += 1
            insert(self, key, change(value) if n % EVERY == 0 else value)

    store.__class__ = Changed


def runs_twice(client: Client) -> None:
    """Send tasks without dependencies to two workers."""
    client.run_on_scheduler(_send_twice)


def _send_twice(dask_scheduler: Scheduler) -> None:
    send = dask_scheduler._task_to_msg

    def sent(ts: Any, *args: Any, **options: Any) -> Any:
        message = send(ts, *args, **options)
        others = [ws for ws in dask_scheduler.workers.values() if ws is not ts.processing_on]
        if others and not ts.dependencies:
            # The scheduler drops the result of a run that it does not know.
            again = {**message, "run_id": message["run_id"] + OTHER_RUN}
            dask_scheduler.stream_comms[others[0].address].send(again)
        return message

    dask_scheduler._task_to_msg = sent  # type: ignore[method-assign]


def hangs(client: Client) -> None:
    """Lose every third task on the way to its worker."""
    client.run_on_scheduler(_lose)


def _lose(dask_scheduler: Scheduler) -> None:
    message_of, n = dask_scheduler._task_to_msg, 0

    def sent(ts: Any, *args: Any, **options: Any) -> Any:
        nonlocal n
        n += 1
        nothing = {"op": "free-keys", "keys": [], "stimulus_id": "planted"}
        return nothing if n % EVERY == 0 else message_of(ts, *args, **options)

    dask_scheduler._task_to_msg = sent  # type: ignore[method-assign]


def crashes(client: Client) -> None:
    """End the process of the scheduler with the first graph."""
    client.run_on_scheduler(_end_with_the_first_graph)


def _end_with_the_first_graph(dask_scheduler: Scheduler) -> None:
    dask_scheduler.stream_handlers["update-graph"] = lambda **_: os._exit(3)


FAULTS = {
    "wrong values": wrong_values,
    "a skipped task": skipped,
    "a task that runs twice": runs_twice,
    "a hang": hangs,
    "a crash": crashes,
}
#: How the status of such a run begins.
STATUS = {
    "wrong values": "wrong answer: ",
    "a skipped task": r"wrong answer: |\w+Error: ",
    "a task that runs twice": r"tasks that ran twice: \d",
    "a hang": "no result within ",
    "a crash": "the process of the client ended with code 3",
}
