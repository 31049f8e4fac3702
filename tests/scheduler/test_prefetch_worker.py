"""The workers' end of tasks that are sent ahead: what is kept, started, and asked for again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from distributed.worker_state_machine import ComputeTaskEvent
from loose_workers import LooseWorker

from ferroflow_dask.scheduler.features.prefetch_worker import (
    CONFIRM,
    SEND,
    TAKEN_ON,
    WITHDRAW,
    PrefetchedTasks,
)
from ferroflow_dask.scheduler.remote_worker import RemotePlugin


class Loose(LooseWorker):
    """One that keeps what happens to it."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []
        self.loop = SimpleNamespace(asyncio_loop=SimpleNamespace(call_soon=lambda call, *args: call(*args)))
        self.plug()

    def plug(self) -> None:
        """Let another plugin come."""
        self.plugin: Any = RemotePlugin(PrefetchedTasks)
        self.plugin.setup(self)

    def handle_stimulus(self, event: Any) -> None:
        self.events.append(event)

    def has(self, key: str, state: str, run_id: int = 1) -> None:
        self.tasks[key] = SimpleNamespace(state=state, run_id=run_id)
        if state == "memory":
            self.data[key] = None

    @property
    def started(self) -> list[str]:
        return [event.key for event in self.events if isinstance(event, ComputeTaskEvent)]


def sent(key: str, priority: int = 0, run_id: int = 2, **awaits: int) -> dict[str, Any]:
    return {
        "key": key,
        "run_id": run_id,
        "priority": (priority,),
        "stimulus_id": "s",
        "who_has": dict.fromkeys(awaits, ("here",)),
        "nbytes": dict.fromkeys(awaits, -1),
        "run_spec": None,
        "resource_restrictions": {},
        "actor": False,
        "annotations": {},
        "span_id": None,
        "awaits": list(awaits.items()),
        "starts_by": "compute-task",
    }


@pytest.mark.parametrize(
    "state", [*sorted(TAKEN_ON), "released", "cancelled", "resumed", "fetch", "flight", "missing"]
)
def test_a_confirmed_task_that_does_not_run_there_is_placed_anew(state: str) -> None:
    worker = Loose()
    worker.has("known", state)
    for key, run_id in (("known", 1), ("known", 2), ("unknown", 1)):
        worker.stream_handlers[CONFIRM](key=key, run_id=run_id, stimulus_id="s")
    again = (
        [("known", 2), ("unknown", 1)] if state in TAKEN_ON else [("known", 1), ("known", 2), ("unknown", 1)]
    )
    assert [message["key"] for message in worker.sent] == [key for key, _ in again]
    assert {message["op"] for message in worker.sent} == {"reschedule"}


def test_inputs_of_an_earlier_run_are_no_inputs() -> None:
    worker = Loose()
    worker.has("a", "memory", run_id=1)
    worker.stream_handlers[SEND](**sent("b", a=2))
    worker.plugin.transition("a", "flight", "memory")
    assert worker.started == []
    worker.has("a", "memory", run_id=2)
    worker.plugin.transition("a", "executing", "memory")
    assert worker.started == ["b"]


def test_what_has_become_complete_starts_by_priority() -> None:
    worker = Loose()
    for key, priority in (("b", 3), ("c", 1), ("d", 2)):
        worker.stream_handlers[SEND](**sent(key, priority, a=1))
    worker.has("a", "memory")
    worker.plugin.transition("a", "executing", "memory")
    assert worker.started == ["c", "d", "b"]


def test_what_has_lost_an_input_waits_to_be_confirmed() -> None:
    worker = Loose()
    worker.stream_handlers[SEND](**(sent("b", a=1) | {"nbytes": {"a": -1, "m": 8}}))
    worker.has("a", "memory")
    worker.plugin.transition("a", "executing", "memory")
    assert worker.started == []
    worker.stream_handlers[CONFIRM](key="b", run_id=2, stimulus_id="s")
    assert worker.started == ["b"]


def test_a_task_is_computed_by_the_handler_that_was_there_when_it_came() -> None:
    worker = Loose()
    computed: list[str] = []
    worker.stream_handlers["other"] = lambda key, **_: computed.append(key)
    worker.stream_handlers[SEND](**(sent("b", a=1) | {"starts_by": "other"}))
    del worker.stream_handlers["other"]
    worker.stream_handlers[CONFIRM](key="b", run_id=2, stimulus_id="s")
    assert computed == ["b"]
    assert worker.events == []


def test_what_was_sent_before_the_plugin_came_again_is_still_withdrawn() -> None:
    worker = Loose()
    earlier = worker.plugin
    worker.stream_handlers[SEND](**sent("b", a=1))
    worker.plug()
    worker.stream_handlers[WITHDRAW](runs=[("b", 2)], stimulus_id="s")
    worker.has("a", "memory")
    earlier.transition("a", "executing", "memory")
    assert worker.started == []
