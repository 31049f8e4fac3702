"""Both sides of features on workers: handlers stay as long as a message may arrive, and no longer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from loose_workers import LooseWorker

from ferroflow_dask.scheduler.changes import CallChange
from ferroflow_dask.scheduler.remote import Remote
from ferroflow_dask.scheduler.remote_worker import RemotePlugin, WorkerEnd, close_of, closed_of

CLOSE, CLOSED = close_of("echo"), closed_of("echo")


class Later:
    """Stands for an event loop: keeps what is to be called later."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def call_later(self, _: float, call: Callable[..., None], *args: Any) -> None:
        self.calls.append(lambda: call(*args))

    def run(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


class Echo(WorkerEnd):
    """Sends what it gets."""

    name = "echo"
    sends = True
    is_closed = False

    def handlers(self) -> dict[str, Callable[..., object]]:
        return {"echo": self.say}

    def say(self, **_: Any) -> None:
        """Do nothing."""

    def closed(self) -> None:
        self.is_closed = True


class Silent(Echo):
    """Sends nothing."""

    sends = False


def scheduler_of(*addresses: str) -> Any:
    sent: list[tuple[str, dict[str, Any]]] = []
    return SimpleNamespace(
        workers=dict.fromkeys(addresses),
        stream_comms=dict.fromkeys(addresses),
        stream_handlers={},
        loop=Later(),
        sent=sent,
        worker_send=lambda address, message: sent.append((address, message)),
    )


def remote_on(scheduler: Any) -> Remote:
    core: Any = SimpleNamespace(
        scheduler=scheduler,
        remotes={},
        put_on_workers=lambda plugin, name: CallChange(name, lambda: plugin, lambda: None),
    )
    return Remote(core, Echo, {"said": (lambda **_: "received", lambda **_: "ignored")})


def closing_on(scheduler: Any) -> None:
    """Open the remote, and close it after the worker `a` has announced its end."""
    remote = remote_on(scheduler)
    remote.apply()
    remote.announced("a", 1)
    remote.undo()


def test_messages_are_ignored_until_each_worker_has_answered() -> None:
    scheduler = scheduler_of("a", "b")
    remote = remote_on(scheduler)
    remote.apply()
    for address in ("a", "b"):
        remote.announced(address, 1)
    assert scheduler.stream_handlers["said"]() == "received"
    remote.undo()
    assert scheduler.sent == [(address, {"op": CLOSE, "number": 1}) for address in ("a", "b")]
    answer = scheduler.stream_handlers[CLOSED]
    answer(worker="a")
    assert scheduler.stream_handlers["said"]() == "ignored"
    answer(worker="b")
    assert scheduler.stream_handlers == {}


def test_an_answer_to_an_earlier_installation_finds_a_handler() -> None:
    scheduler = scheduler_of("a")
    closing_on(scheduler)
    second = remote_on(scheduler)
    second.apply()
    second.undo()  # before the worker has announced its plugin
    scheduler.stream_handlers[CLOSED](worker="a")
    assert scheduler.stream_handlers == {}


def test_an_early_answer_does_not_take_the_handlers_of_the_next_installation() -> None:
    scheduler = scheduler_of("a")
    closing_on(scheduler)
    second = remote_on(scheduler)
    second.apply()
    second.announced("a", 2)
    scheduler.stream_handlers[CLOSED](worker="a")
    assert scheduler.stream_handlers["said"]() == "received"
    second.undo()
    assert scheduler.stream_handlers["said"]() == "ignored"
    scheduler.stream_handlers[CLOSED](worker="a")
    assert scheduler.stream_handlers == {}


def test_a_worker_that_leaves_before_it_answers_is_not_waited_for() -> None:
    scheduler = scheduler_of("a")
    closing_on(scheduler)
    scheduler.loop.run()
    assert scheduler.stream_handlers
    scheduler.workers.clear()
    scheduler.loop.run()
    assert scheduler.stream_handlers == {}
    assert scheduler.loop.calls == []


@pytest.mark.parametrize(("address", "number"), [(["a"], 1), ("a", "1"), ("other", 1), (None, None)])
def test_events_that_are_no_announcements_are_ignored(address: object, number: object) -> None:
    remote = remote_on(scheduler_of("a"))
    remote.apply()
    remote.announced(address, number)
    assert remote.supporting == {}


def test_an_end_sends_messages_only_if_the_scheduler_receives_some() -> None:
    core: Any = SimpleNamespace(scheduler=scheduler_of())
    with pytest.raises(TypeError, match=r"Echo\.sends must be False"):
        Remote(core, Echo)
    with pytest.raises(TypeError, match=r"Silent\.sends must be True"):
        Remote(core, Silent, {"said": (print, print)})


class Loose(LooseWorker):
    """One with an event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = Later()

    def plug(self) -> Any:
        plugin: Any = RemotePlugin(Echo)
        plugin.setup(self)
        return plugin


def test_an_end_answers_each_last_message_and_closes_at_that_of_the_newest_plugin() -> None:
    worker = Loose()
    end, same = worker.plug().end, worker.plug().end
    assert end is same
    worker.stream_handlers[CLOSE](number=1)
    assert not end.is_closed
    worker.stream_handlers[CLOSE](number=2)
    assert end.is_closed
    assert worker.stream_handlers == {}
    assert worker.sent == [{"op": CLOSED}] * 2


@pytest.mark.parametrize("comes_again", [True, False])
def test_an_end_without_plugins_does_not_wait_for_ever(comes_again: bool) -> None:
    worker = Loose()
    plugin = worker.plug()
    plugin.teardown(worker)  # the scheduler does not know of the end
    if comes_again:
        worker.plug()
    worker.loop.run()
    assert plugin.end.is_closed is not comes_again
    assert bool(worker.stream_handlers) is comes_again
    assert worker.sent == []
