"""Feature: one thing that the plugin does besides placing and stealing tasks.

A feature is a file of this package, two with its worker end, and a line in the list of `features`. It is made
with the core of the plugin, which is all that it uses. When the plugin is installed, the changes of each
feature are made in the order of the list. They are undone in reverse order. Then the feature hears of events,
by methods with the names that Dask's scheduler plugins have. Only events, answers and filters that a feature
defines are called.

Other packages add features by the entry point group `ferroflow_dask.features`. Each entry point is a class.
An exception in an event ends the plugin, as for the code of the plugin itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from dask.typing import Key

from ferroflow_dask.policy.events import Event
from ferroflow_dask.scheduler.changes import Change
from ferroflow_dask.scheduler.core import Core, Gauge
from ferroflow_dask.scheduler.hooks import Watch

if TYPE_CHECKING:
    from distributed.scheduler import TaskState, WorkerState


class Feature:
    """One thing that the plugin does.

    Parameters
    ----------
    core : Core
    """

    #: Name in the list, in metrics and in messages, and of the switch `ferroflow.features.<name>`.
    name: ClassVar[str]
    #: One sentence.
    summary: ClassVar[str]
    #: Why it stays although no class of the ablation shows a gain of 5 %, and the test that shows it.
    reason: ClassVar[str] = ""
    #: Modules and packages of `ferroflow_dask` that are its own, besides its file and that of its worker end.
    parts: ClassVar[tuple[str, ...]] = ()
    #: Features without which it is off.
    needs: ClassVar[tuple[str, ...]] = ()
    #: Tasks for which `place` and `instead` may have an answer: they are not called while it is empty. A
    #: feature that defines one of them sets this in its constructor, to one object for all its life.
    placed: Collection[Key] = ()
    #: `message` is not called while this is empty. A feature that seldom changes messages sets it likewise.
    filtered: object = True

    def __init__(self, core: Core) -> None:
        self.core = core

    def state(self) -> Any:
        """Return what the same feature of the next installation takes over; None for nothing."""
        return None

    def inherit(self, state: Any) -> None:
        """Take over the state of this feature in the installation before."""

    def unavailable(self) -> str:
        """Return why the feature is off here; nothing if it is on. Switches are read elsewhere."""
        return ""

    def changes(self) -> Iterable[Change]:
        """Return all that the feature changes in Dask."""
        return ()

    def watches(self) -> Iterable[Watch]:
        """Return the tasks of which the feature follows each transition."""
        return ()

    def counts(self) -> Mapping[str, int]:
        """Return what the feature has done, by kind; shown among Dask's metrics."""
        return {}

    def gauges(self) -> Mapping[str, Gauge]:
        """Return learned values, by name."""
        return {}

    def pending(self) -> Collection[Key]:
        """Return the tasks that the feature keeps account of; none once all have ended."""
        return ()

    # Events

    def add_worker(self, address: str) -> None:
        """Handle a worker that joined."""

    def remove_worker(self, address: str) -> None:
        """Handle a worker that left."""

    def worker_dies(self, address: str) -> Collection[Key]:
        """Handle a worker that is about to be removed, and was not asked to leave.

        Return those of its tasks that are not blamed.
        """
        return ()

    def log_event(self, topic: str, msg: dict[str, Any]) -> None:
        """Handle an event that the scheduler, a worker or a nanny logs, if it is a dict."""

    def add_client(self, client: str) -> None:
        """Handle a client that connects: its stream is opened after this call."""

    def remove_client(self, client: str) -> None:
        """Handle a client that disconnected."""

    def update_graph(self) -> None:
        """Handle a graph whose tasks were created; Dask places them after this call."""

    def restart(self) -> None:
        """Forget all tasks: the cluster restarts."""

    def failed(self) -> None:
        """Withdraw messages that Dask does not know: the plugin has failed, maybe within a transition."""

    def task_sent(self, ts: TaskState) -> None:
        """Handle a task with dependents that is sent to a worker."""

    def task_waits(self, ts: TaskState) -> None:
        """Handle a task that waits for inputs."""

    def task_moved(self, key: Key) -> None:
        """Handle a task that is about to go to another worker."""

    def task_redefined(self, key: Key) -> None:
        """Handle a task whose definition is about to change."""

    def task_failed(self, ts: TaskState) -> None:
        """Handle a task that has failed, or that depends on one."""

    def task_reported(self, ts: TaskState, metadata: dict[str, Any]) -> None:
        """Handle metadata in the report of a task that has ended, if there are any; they may be changed."""

    def wants_pass(self) -> bool:
        """Return whether a pass is needed; asked whenever a task has started or ended."""
        return False

    def in_pass(self) -> None:
        """Act outside of transitions; called in each pass over idle workers, before they are served."""

    def policy_took(self, event: Event, seconds: float) -> None:
        """Handle an answer for which the policy took longer than its limit [s]."""

    # Answers, of which the first that is not None holds

    def place(self, ts: TaskState) -> tuple[str, str] | None:
        """Return the address of the worker for a ready task, and the reason."""

    def instead(self, ts: TaskState) -> dict[str, Any] | None:
        """Return a message that is sent to a task's worker in place of Dask's."""

    def result_of(self, key: Key) -> bytes | None:
        """Return the pickled result of a task, for a client."""

    # Filters

    def message(self, ts: TaskState, ws: WorkerState, message: dict[str, Any]) -> dict[str, Any]:
        """Return Dask's message that sends a task to a worker, with changes."""
        return message

    def may_drop(self, key: Key, address: str) -> bool:
        """Return whether a worker may be asked to drop its replica of a result."""
        return True

    # Facts about messages

    def arrives_with(self, ts: TaskState) -> Collection[Key]:
        """Return the inputs that are sent with a task."""
        return ()

    def brings(self, ws: WorkerState, key: Key) -> bool:
        """Return whether a worker gets a result with each plain task that reads it."""
        return False
