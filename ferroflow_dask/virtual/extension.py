"""The stealing extension of a virtual scheduler: ours with a policy, Dask's, or none."""

from __future__ import annotations

from collections.abc import Collection

import dask
from distributed import WorkerPlugin
from distributed.stealing import WorkStealing

from ferroflow_dask.policy import Policy, make_policy
from ferroflow_dask.scheduler.changes import CallChange, Change
from ferroflow_dask.scheduler.extension import FerroflowStealing
from ferroflow_dask.scheduler.features import VIRTUAL
from ferroflow_dask.virtual.clock import VirtualTime
from ferroflow_dask.virtual.upstream import VirtualScheduler, start_stealing

_INTERVAL = "distributed.scheduler.work-stealing-interval"
#: What stands beside the names of policies.
STOCK = "dask"
NONE = "no-stealing"


def install_stealing(
    scheduler: VirtualScheduler,
    time: VirtualTime,
    policy: str | Policy | type[WorkStealing],
    latency_s: float,
    *,
    interval_s: float | None,
    without: Collection[str] = (),
) -> WorkStealing | None:
    """Put an extension where `Scheduler.__init__` would, and start it.

    Parameters
    ----------
    scheduler : VirtualScheduler
    time : VirtualTime
    policy : str, Policy or subclass of WorkStealing
        `dask`, `no-stealing`, the name of a policy of ours, such a policy, or any other extension.
    latency_s : float
        What our policies take for the time from a decision to its effect [s].
    interval_s : float or None
        Time between two rounds of stealing [s]; None for what distributed's configuration says.
    without : collection of str, optional
        Names of features that are switched off.
    """
    if policy == NONE:
        return None
    interval_ms = {} if interval_s is None else {_INTERVAL: interval_s * 1e3}
    with dask.config.set(interval_ms):
        extension = _make(scheduler, time, policy, latency_s, without)
    scheduler.extensions["stealing"] = extension
    start_stealing(extension, time)
    return extension


def _make(
    scheduler: VirtualScheduler,
    time: VirtualTime,
    policy: str | Policy | type[WorkStealing],
    latency_s: float,
    without: Collection[str],
) -> WorkStealing:
    if policy == STOCK:
        return WorkStealing(scheduler)
    if isinstance(policy, type):
        return policy(scheduler)
    chosen = make_policy(policy) if isinstance(policy, str) else policy
    stealing = FerroflowStealing(
        scheduler,
        chosen,
        latency_s,
        clock=time,
        without=without,
        features=VIRTUAL,
        put_on_workers=_on_workers,
    )
    stealing.parts.open()
    return stealing


def _on_workers(plugin: WorkerPlugin, name: str) -> Change:  # noqa: ARG001 -- virtual workers have the ends
    return CallChange(f"worker plugin {name}", lambda: None, lambda: None)
