"""Feature: one thing that the plugin does besides placing and stealing tasks.

A feature is a file of this package, two with its worker end, and a line in the list of `features`. It is made
with the core of the plugin, which is all that it uses. When the plugin is installed, the changes of each
feature are made in the order of the list. They are undone in reverse order. Then the feature hears of events,
by methods with the names that Dask's scheduler plugins have. Only methods that a feature defines are called.

Other packages add features by the entry point group `ferroflow_dask.features`. Each entry point is a class.
An exception in an event ends the plugin, as for the code of the plugin itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ferroflow_dask.policy.events import Event
from ferroflow_dask.scheduler.changes import Change
from ferroflow_dask.scheduler.core import Core, Gauge

if TYPE_CHECKING:
    from distributed.scheduler import TaskState


class Feature:
    """One thing that the plugin does.

    Parameters
    ----------
    core : Core
    """

    #: Name in the list, in metrics and in messages.
    name: ClassVar[str]
    #: One sentence.
    summary: ClassVar[str]

    def __init__(self, core: Core) -> None:
        self.core = core

    def state(self) -> Any:
        """Return what the same feature of the next installation takes over; None for nothing."""
        return None

    def inherit(self, state: Any) -> None:
        """Take over the state of this feature in the installation before."""

    def changes(self) -> Iterable[Change]:
        """Return all that the feature changes in Dask."""
        return ()

    def counts(self) -> Mapping[str, int]:
        """Return what the feature has done, by kind; shown among Dask's metrics."""
        return {}

    def gauges(self) -> Mapping[str, Gauge]:
        """Return what the feature has learned, by name."""
        return {}

    # Events

    def add_worker(self, address: str) -> None:
        """Note a worker that joined."""

    def remove_worker(self, address: str) -> None:
        """Note a worker that left."""

    def add_client(self, client: str) -> None:
        """Note a client that connects: its stream is opened after this call."""

    def remove_client(self, client: str) -> None:
        """Note a client that disconnected."""

    def update_graph(self) -> None:
        """Note that the tasks of a graph were created, before any of them is placed."""

    def task_ran(self, ts: TaskState, thread: tuple[str, int], start_s: float, stop_s: float) -> None:
        """Note a task that a thread has finished.

        Parameters
        ----------
        ts : distributed.scheduler.TaskState
        thread : tuple of str and int
            A worker and its thread.
        start_s, stop_s : float
            By the worker's clock [s].
        """

    def wants_pass(self) -> bool:
        """Return whether a pass is needed; asked whenever a task has started or ended."""
        return False

    def in_pass(self) -> None:
        """Act outside of transitions; called in each pass over idle workers, before they are served."""

    def policy_took(self, event: Event, seconds: float) -> None:
        """Note that the policy took longer than its limit to answer an event, and the time [s]."""
