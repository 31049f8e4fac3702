"""Rows of tasks that wait for each other: files, events, queues, variables, locks, actors, sockets."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import dask
from distributed import Event, Lock, MultiLock, Queue, Semaphore, Variable, wait

from matrix.row import no_more, row
from matrix.tasks import LONGEST_S, note, noted, noting_inc, pause_ms, runs, wait_for_notes, wait_until
from matrix.trial import Trial

_N = 60


def _wait_for_siblings(x: int, folder: str, waiting: int, n: int, ms: float) -> Any:
    if x == waiting:
        return wait_for_notes(folder, n - 1)
    pause_ms(x, ms)
    return noting_inc(x, folder)


@row(
    "file as partner",
    "T",
    "the first, the middle or the last of 60 tasks waits for 59 files: by map and delayed",
)
def files(trial: Trial) -> Any:
    found = []
    for waiting in (0, 30, 59):
        for by_map in (True, False):
            folder = Path(trial.folder, f"{waiting}-{by_map}")
            folder.mkdir()
            options = {"folder": str(folder), "waiting": waiting, "n": _N, "ms": 1}
            if by_map:
                futures = trial.client.map(_wait_for_siblings, range(_N), **options)
            else:
                tasks = [dask.delayed(_wait_for_siblings)(i, **options) for i in range(_N)]
                futures = trial.client.compute(tasks)
            found.append((trial.client.gather(futures), runs(str(folder))))
    return found


def _event(x: int, folder: str, name: str, setter: int, waiter: int) -> Any:
    note(folder, x)
    if x == waiter:
        return Event(name).wait(timeout=LONGEST_S)
    if x == setter:
        Event(name).set()
    return x


def _queue(x: int, folder: str, name: str, setter: int, waiter: int) -> Any:
    note(folder, x)
    if x == waiter:
        return Queue(name).get(timeout=LONGEST_S)
    if x == setter:
        Queue(name).put(7)
    return x


def _variable(x: int, folder: str, name: str, setter: int, waiter: int) -> Any:
    note(folder, x)
    if x == waiter:
        return Variable(name).get(timeout=LONGEST_S)
    if x == setter:
        Variable(name).set(7)
    return x


def _pairs(trial: Trial, function: Any, name: str) -> Any:
    """Return values for both orders of the partners."""
    found = []
    for setter, waiter in ((5, 6), (6, 5)):
        options = {"folder": trial.folder, "name": f"{name}-{setter}", "setter": setter, "waiter": waiter}
        found.append(trial.client.gather(trial.client.map(function, range(_N), **options)))
    return found, runs(trial.folder)


@row("Event with a timeout", "T", "siblings as partners, both orders", covers=("Event",))
def distributed_events(trial: Trial) -> Any:
    return _pairs(trial, _event, f"event-{id(trial)}")


@row("Queue with a timeout", "T", "siblings as partners, both orders", covers=("Queue",))
def queues(trial: Trial) -> Any:
    return _pairs(trial, _queue, f"queue-{id(trial)}")


@row("Variable with a timeout", "T", "siblings as partners, both orders")
def variables(trial: Trial) -> Any:
    found = _pairs(trial, _variable, f"variable-{id(trial)}")
    for setter in (5, 6):
        Variable(f"variable-{id(trial)}-{setter}", client=trial.client).delete()
    return found


def _locked(x: int, name: str, folder: str) -> int:
    with Lock(name):
        _exclusive(folder)
    return x


def _multi_locked(x: int, names: list[str], folder: str) -> int:
    lock = MultiLock(names)
    assert lock.acquire(timeout=LONGEST_S)
    try:
        _exclusive(folder)
    finally:
        lock.release()
    return x


def _leased(x: int, name: str, folder: str) -> int:
    with Semaphore(max_leases=1, name=name):
        _exclusive(folder)
    return x


def _exclusive(folder: str) -> None:
    path = Path(folder, "exclusive")
    path.touch(exist_ok=False)
    path.unlink()


@row(
    "Lock, MultiLock, Semaphore",
    "T",
    "20 tasks for each: never two at once",
    covers=("Lock", "MultiLock", "Semaphore"),
)
def locks(trial: Trial) -> Any:
    name, client = f"lock-{id(trial)}", trial.client
    semaphore = Semaphore(max_leases=1, name=f"{name}-semaphore")
    found = [
        client.gather(client.map(_locked, range(20), name=name, folder=trial.folder)),
        client.gather(
            client.map(_multi_locked, range(20), names=[f"{name}-a", f"{name}-b"], folder=trial.folder)
        ),
        client.gather(client.map(_leased, range(20), name=semaphore.name, folder=trial.folder)),
    ]
    return found, semaphore.get_value()


class Meeting:
    """An actor at which tasks meet."""

    def __init__(self) -> None:
        self._n = 0

    def arrive(self) -> int:
        """Count a task."""
        self._n += 1
        return self._n

    def arrived(self) -> int:
        """Return how many tasks were counted."""
        return self._n


def _meet(x: int, meeting: Any, waiting: int, n: int) -> Any:
    if x == waiting:
        return wait_until(lambda: meeting.arrived().result() >= n - 1)
    meeting.arrive().result()
    return x


@row(
    "actor as partner; a method called by 100 tasks",
    "",
    "one task waits until the actor has met its siblings",
    is_timed=True,
)
def actors(trial: Trial) -> Any:
    meeting = trial.client.submit(Meeting, actor=True).result()
    values = trial.client.gather(trial.client.map(_meet, range(40), meeting=meeting, waiting=3, n=40))
    return values, meeting.arrived().result()


def _talk(x: int, folder: str, port: int, waiting: int) -> Any:
    note(folder, x)
    with socket.create_connection(("127.0.0.1", port), timeout=LONGEST_S) as connection:
        connection.sendall(b"w" if x == waiting else b"s")
        return connection.recv(1).decode()


def _serve(server: socket.socket, n: int) -> None:
    """Answer the waiting connection after the others have come."""
    others, waiting = 0, None
    while others < n - 1 or waiting is None:
        connection, _ = server.accept()
        if connection.recv(1) == b"w":
            waiting = connection
        else:
            others += 1
            connection.sendall(b"a")
            connection.close()
    waiting.sendall(b"z")
    waiting.close()


@row("socket as partner", "T", "the server answers one task after all its siblings")
def sockets(trial: Trial) -> Any:
    import threading

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_serve, args=(server, _N), daemon=True).start()
        port = server.getsockname()[1]
        options = {"folder": trial.folder, "port": port, "waiting": 3}
        return trial.client.gather(trial.client.map(_talk, range(_N), **options)), runs(trial.folder)


def _pair(x: int, folder: str) -> Any:
    note(folder, x)
    return x if x % 2 else wait_until(lambda: str(x + 1) in noted(folder))


@row(
    "60 tasks in pairs",
    "T",
    "each even one waits for the next one: all threads wait at once",
    # In stock, all threads may wait for tasks that are behind them.
    compare=no_more("without a partner"),
    is_timed=True,
)
def pairs(trial: Trial) -> Any:
    futures = trial.client.map(_pair, range(_N), folder=trial.folder)
    wait(futures)
    values = trial.client.gather(futures)
    return {"without a partner": values[::2].count(False), "values": values[1::2], "runs": runs(trial.folder)}


def _hold(x: int, name: str) -> Any:
    semaphore = Semaphore(max_leases=3, name=name)
    return semaphore.acquire(timeout=0.01 if x == 100 else LONGEST_S) and semaphore.release()


@row("Semaphore with timeouts", "", "leases are free at the end")
def semaphores(trial: Trial) -> Any:
    semaphore = Semaphore(max_leases=3, name=f"three-{id(trial)}")
    values = trial.client.gather(trial.client.map(_hold, range(20), name=semaphore.name))
    return values, semaphore.get_value()
