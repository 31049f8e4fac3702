"""Make fewer tasks of a Dask collection, by what a cluster knows of them."""

from __future__ import annotations

from typing import TypeVar

from distributed import Client

from ferroflow_dask.deploy.calibration import profile_of
from ferroflow_dask.exceptions import ClusterError
from ferroflow_dask.lowering.foreign import Learned, optimize_for
from ferroflow_dask.plugin import installed, learned

C = TypeVar("C")


def optimize(collection: C, client: Client) -> C:
    """Return a Dask collection that computes the same in fewer tasks on a cluster.

    Tasks that are short, by what the plugin has learned of tasks of their names in earlier runs, are fused
    and grouped, as many together as is predicted to be fastest and as workers have memory for. Results,
    and the keys that the collection asks for, stay the same. What is long, has not run before, or knows
    that it runs in Dask, stays by itself; collections with annotations are returned as they are.

    Parameters
    ----------
    collection : Dask collection
    client : distributed.Client
        Synchronous; with the plugin installed. The cluster is measured if it has not been (`calibrate`).

    Raises
    ------
    ClusterError
        The plugin is not installed, so that nobody has learned anything.

    Examples
    --------
    >>> optimize(frame.groupby("name").value.mean(), client).compute()  # doctest: +SKIP
    """
    if installed(client) is None:
        raise ClusterError("optimize goes by what the plugin has learned; call install(client) first")
    profile, _ = profile_of(client)
    known = {name: Learned(*values) for name, values in learned(client).items()}
    return optimize_for(collection, profile, known)
