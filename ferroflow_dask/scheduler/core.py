"""Core: what a feature may use of the plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Protocol

from dask.typing import Key

from ferroflow_dask.device_reports import DeviceTotals
from ferroflow_dask.policy import ClusterView, Policy
from ferroflow_dask.policy.events import Event
from ferroflow_dask.scheduler.changes import Change, Changes, Guard
from ferroflow_dask.scheduler.decisions import DecisionLog
from ferroflow_dask.scheduler.hooks import Hooks
from ferroflow_dask.scheduler.learned import Learned
from ferroflow_dask.scheduler.passes import Passes
from ferroflow_dask.scheduler.pauses import Pauses

if TYPE_CHECKING:
    from distributed import WorkerPlugin
    from distributed.scheduler import Scheduler

    from ferroflow_dask.scheduler.graphs.graphs import Graphs
    from ferroflow_dask.scheduler.remote import Remote

#: A help text, and the value.
Gauge = tuple[str, float]


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers that only grow, for one purpose.

    Parameters
    ----------
    help_text : str
    label : str
        What the keys of `values` are.
    values : mapping of str to int
    """

    help_text: str
    label: str
    values: Mapping[str, int]


@dataclass(slots=True)
class PolicyCalls:
    """Calls of the policy.

    Parameters
    ----------
    limit_s : float, optional
        Time above which features hear of a call [s].
    """

    limit_s: float = inf
    n: int = 0
    #: The event that the policy answers now.
    event: Event | None = None


class Collaborators(Protocol):
    """What is made with the core and used by features; see `parts`."""

    graphs: Graphs

    def counts(self) -> Mapping[str, Counts]:
        """Return the counts of the plugin and its features, by name."""

    def gauges(self) -> Mapping[str, Gauge]:
        """Return what was learned, by name."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Core:
    """What a feature may use of the plugin.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    view : ClusterView
    clock : callable
        Returns the time [s].
    guard : Guard
    changes : Changes
    hooks : Hooks
    passes : Passes
        Features hear of each pass by `in_pass`.
    learned : Learned
    pauses : Pauses
    policy : Policy
    decisions : DecisionLog
    parts : callable
        Returns the collaborators, which are made with the core.
    put_on_workers : callable
        Returns the change that registers a worker plugin, given it and its name.
    """

    scheduler: Scheduler
    view: ClusterView
    clock: Callable[[], float]
    guard: Guard
    changes: Changes
    hooks: Hooks
    passes: Passes
    learned: Learned
    pauses: Pauses
    policy: Policy
    decisions: DecisionLog
    parts: Callable[[], Collaborators]
    put_on_workers: Callable[[WorkerPlugin, str], Change]
    policy_calls: PolicyCalls = field(default_factory=PolicyCalls)
    device_totals: DeviceTotals = field(default_factory=DeviceTotals)
    #: Tasks that may have ended a worker, until they end.
    suspects: dict[Key, None] = field(default_factory=dict)
    #: Tasks that have refused workers, until they end, with the addresses; the last one at the end.
    refused: dict[Key, tuple[str, ...]] = field(default_factory=dict)
    #: Tasks that no worker gets: parts of graphs that are held.
    held: dict[Key, None] = field(default_factory=dict)
    #: For each task that these read: those which do.
    held_inputs: dict[Key, set[Key]] = field(default_factory=dict)
    #: Processing tasks that were sent before their inputs existed.
    sent_early: set[Key] = field(default_factory=set)
    #: Addresses of workers that the plugin restarts: their tasks have not started, and are not blamed.
    restarted: set[str] = field(default_factory=set)
    #: Names of the features that are installed.
    on: set[str] = field(default_factory=set)
    #: The ends of features on workers, by the feature's name.
    remotes: dict[str, Remote] = field(default_factory=dict)

    def is_usual(self, address: str) -> bool:
        """Return whether a worker is as fast as others: a task with local inputs finishes nowhere sooner."""
        worker = self.view.workers.get(address)
        return worker is not None and worker.speed >= 1 and not self.view.has_devices
