"""Partners: the ways in which tasks of a program wait for each other, and the function of these tasks.

Workers import this module by its name, also if the program is a script.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Collection, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client, Event, Lock, Queue, Variable

#: A waiting task looks so often whether its program has been given up [s].
_POLL_S = 0.02


class GivenUpError(Exception):
    """The program has taken too long; raised in its waiting tasks, so that their threads are free."""


class Meeting:
    """Way in which tasks wait for others. Each task of a program has a copy of its own.

    Parameters
    ----------
    folder : Path
        A folder of the program, empty at first. Its name is unique.
    waits : mapping of int to collection of int
        The tasks for which each waiting task waits.
    """

    def __init__(self, folder: Path, waits: Mapping[int, Collection[int]]) -> None:
        self.folder = folder
        self.name = folder.name
        self.waits = waits

    def prepare(self, client: Client) -> None:
        """Make what the tasks share; called by the client."""

    def arrive(self, i: int) -> None:
        """Tell the waiting tasks that task `i` has run."""
        raise NotImplementedError

    def has_arrived(self, i: int) -> bool:
        """Return whether task `i` has run; wait a little for it."""
        raise NotImplementedError

    def wait(self, waiter: int) -> None:
        """Wait for all partners of a waiting task."""
        for i in self.waits[waiter]:
            while not self.has_arrived(i):
                self.check()

    def check(self) -> None:
        """Raise `GivenUpError` if the program has been given up."""
        if (self.folder / "given up").exists():
            raise GivenUpError(self.name)

    def waiters(self, i: int) -> list[int]:
        """Return the tasks that wait for task `i`."""
        return [waiter for waiter, partners in self.waits.items() if i in partners]


class ByFile(Meeting):
    """Each task writes a file."""

    def arrive(self, i: int) -> None:
        (self.folder / str(i)).touch()

    def has_arrived(self, i: int) -> bool:
        if (self.folder / str(i)).exists():
            return True
        time.sleep(_POLL_S)
        return False


class ByEvent(Meeting):
    """Each task sets a distributed event."""

    def arrive(self, i: int) -> None:
        Event(f"{self.name}-{i}").set()

    def has_arrived(self, i: int) -> bool:
        return bool(Event(f"{self.name}-{i}").wait(timeout=_POLL_S))


class ByQueue(Meeting):
    """Each task puts its number into the queues of those that wait for it."""

    def arrive(self, i: int) -> None:
        for waiter in self.waiters(i):
            Queue(f"{self.name}-{waiter}").put(i)

    def wait(self, waiter: int) -> None:
        queue, missing = Queue(f"{self.name}-{waiter}"), set(self.waits[waiter])
        while missing:
            self.check()
            try:
                missing.discard(queue.get(timeout=_POLL_S))
            except TimeoutError:
                continue


class ByVariable(Meeting):
    """Each task sets a distributed variable."""

    def arrive(self, i: int) -> None:
        Variable(f"{self.name}-{i}").set(True)

    def has_arrived(self, i: int) -> bool:
        try:
            return bool(Variable(f"{self.name}-{i}").get(timeout=_POLL_S))
        except TimeoutError:
            return False


class ByLock(Meeting):
    """All tasks read and write one file, which a distributed lock protects."""

    def prepare(self, client: Client) -> None:
        (self.folder / "arrived").touch()

    def arrive(self, i: int) -> None:
        with Lock(self.name), (self.folder / "arrived").open("a") as file:
            file.write(f"{i}\n")

    def has_arrived(self, i: int) -> bool:
        with Lock(self.name):
            if str(i) in (self.folder / "arrived").read_text().split():
                return True
        time.sleep(_POLL_S)
        return False


class Register:
    """Actor: the numbers of the tasks that have run."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()

    def add(self, i: int) -> None:
        self.numbers.add(i)

    def has(self, i: int) -> bool:
        return i in self.numbers


class ByActor(Meeting):
    """Each task calls an actor."""

    actor: Any

    def prepare(self, client: Client) -> None:
        self.actor = client.submit(Register, actor=True, key=f"register-{self.name}").result()

    def arrive(self, i: int) -> None:
        self.actor.add(i).result()

    def has_arrived(self, i: int) -> bool:
        if self.actor.has(i).result():
            return True
        time.sleep(_POLL_S)
        return False


class ByServer(Meeting):
    """A waiting task starts an HTTP server, and the others send requests to it.

    A task that finds no server leaves a file instead. It looks for the server once more after that, and a
    server looks for files after it has announced itself: so no task is missed.
    """

    def arrive(self, i: int) -> None:
        for waiter in self.waiters(i):
            if not self._report(waiter, i):
                (self.folder / f"{i} for {waiter}").touch()
                self._report(waiter, i)

    def _report(self, waiter: int, i: int) -> bool:
        try:
            port = int((self.folder / f"port of {waiter}").read_text())
        except FileNotFoundError:
            return False
        connection = http.client.HTTPConnection("127.0.0.1", port)
        try:
            connection.request("GET", f"/{i}")
            connection.getresponse().read()
        except OSError:  # the server has seen the file, and has ended
            pass
        finally:
            connection.close()
        return True

    def wait(self, waiter: int) -> None:
        arrived: set[int] = set()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                arrived.add(int(self.path[1:]))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        with HTTPServer(("127.0.0.1", 0), Handler) as server:
            server.timeout = _POLL_S
            announced = self.folder / f"port of {waiter}"
            announced.with_suffix(".new").write_text(str(server.server_port))
            announced.with_suffix(".new").rename(announced)
            arrived.update(i for i in self.waits[waiter] if (self.folder / f"{i} for {waiter}").exists())
            while not arrived.issuperset(self.waits[waiter]):
                self.check()
                server.handle_request()


#: Events of this process, by program and task.
_EVENTS: dict[tuple[str, int], threading.Event] = {}


class InProcess(Meeting):
    """Each task sets an event of its process: only for workers in one process."""

    def arrive(self, i: int) -> None:
        self._event(i).set()

    def has_arrived(self, i: int) -> bool:
        return self._event(i).wait(_POLL_S)

    def _event(self, i: int) -> threading.Event:
        return _EVENTS.setdefault((self.name, i), threading.Event())


PARTNERS: dict[str, type[Meeting]] = {
    "file": ByFile,
    "event": ByEvent,
    "queue": ByQueue,
    "variable": ByVariable,
    "lock": ByLock,
    "actor": ByActor,
    "server": ByServer,
    "in-process": InProcess,
}


class Work:
    """Function of all tasks of a program; its name is their prefix, which no other program has.

    Parameters
    ----------
    meeting : Meeting
    seconds : float
        Duration of a task that does not wait [s].
    """

    def __init__(self, meeting: Meeting, seconds: float) -> None:
        self.__name__ = meeting.name
        self.meeting = meeting
        self.seconds = seconds

    def __call__(self, value: Any) -> Any:
        """Run a task, whose number is the value or the first one of a block."""
        i = int(np.ravel(value)[0])
        if i in self.meeting.waits:
            self.meeting.wait(i)
        else:
            if self.seconds:
                time.sleep(self.seconds)
            self.meeting.arrive(i)
        return value
