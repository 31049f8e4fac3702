"""Make fewer tasks of a Dask collection, by what a cluster knows of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from distributed import Client

from ferroflow_dask.deploy.calibration import profile_of
from ferroflow_dask.lowering.foreign import optimize_for

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

C = TypeVar("C")


def optimize(collection: C, client: Client) -> C:
    """Return a Dask collection that computes the same in fewer tasks on a cluster.

    Tasks that are short, by what the scheduler has learned of tasks of their names, are fused and grouped,
    as many together as is predicted to be fastest. Results, and the keys that the collection asks for,
    stay the same. What is long, or knows that it runs in Dask, stays by itself; collections with
    annotations are returned as they are.

    Parameters
    ----------
    collection : Dask collection
    client : distributed.Client
        Synchronous; the cluster is measured if it has not been (`calibrate`).

    Examples
    --------
    >>> optimize(frame.groupby("name").value.mean(), client).compute()  # doctest: +SKIP
    """
    durations = client.run_on_scheduler(_durations)
    profile, _ = profile_of(client)
    return optimize_for(collection, profile, durations)


def _durations(dask_scheduler: Scheduler) -> dict[str, float]:
    prefixes = dask_scheduler.task_prefixes.items()
    return {name: prefix.duration_average for name, prefix in prefixes if prefix.duration_average >= 0}
