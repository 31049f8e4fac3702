"""Core: what a feature may use of the plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ferroflow_dask.device_reports import DeviceTotals
from ferroflow_dask.policy import ClusterView
from ferroflow_dask.scheduler.changes import Guard

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler


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
    device_totals : DeviceTotals
    counts : callable
        Returns the counts of the plugin and its features, by name.
    gauges : callable
        Returns what was learned, by name: a help text and the value.
    """

    scheduler: Scheduler
    view: ClusterView
    clock: Callable[[], float]
    guard: Guard
    device_totals: DeviceTotals
    counts: Callable[[], Mapping[str, Counts]]
    gauges: Callable[[], Mapping[str, tuple[str, float]]]
