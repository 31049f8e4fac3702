"""Make fewer tasks of a Dask collection, by what a cluster knows of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, TypeVar

from dask.base import is_dask_collection
from dask.typing import Key
from distributed import Client

from ferroflow_dask.bundling.dask_graphs import (
    Learned,
    PackedGraph,
    bundle_graph,
    is_annotated,
    optimize_for,
    pack_graph,
)
from ferroflow_dask.clients import check_synchronous
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.deploy.calibration import profile_of
from ferroflow_dask.exceptions import ClusterError, UsageError
from ferroflow_dask.scheduler import (
    check_workers,
    installed,
    learned,
    learned_in_this_process,
    threads_in_this_process,
)

C = TypeVar("C")

#: Where Dask's own optimization of collections is, by the setting that replaces it. (Data frames have none.)
_DASKS: Mapping[str, str] = {
    "array_optimize": "dask.array.optimization",
    "bag_optimize": "dask.bag.core",
    "delayed_optimize": "dask.delayed",
}


def optimize(collection: C, client: Client) -> C:
    """Return a Dask collection that computes the same in fewer tasks on a cluster.

    Tasks that are short, by what the plugin has learned of tasks of their names in earlier runs, are fused
    and grouped, as many together as is predicted to be fastest and as workers have memory for. Results,
    and the keys that the collection asks for, stay the same, but a data frame has new keys. What is long,
    has not run before, or knows that it runs in Dask, stays by itself; P2P shuffles, with all that they read,
    stay as they are. Collections with annotations, and data frames that would not have fewer tasks, are
    returned as they are.

    The same collection is optimized alike as long as nothing else is learned. Of different ones that are
    optimized one by one, tasks that they share run once for each, even in one `dask.compute`. While results
    of a collection under the keys that it asks for are held, persisted ones say, compute it as it was when
    they were: Dask warns of keys that read other tasks than before.

    Parameters
    ----------
    collection : Dask collection
    client : distributed.Client
        Synchronous; with the plugin installed. The cluster is measured if it has not been (`calibrate`) and
        is idle. The collection is cut for the workers that it has now; without any it stays as it is.

    Raises
    ------
    ClusterError
        The plugin is not installed, so that nobody has learned anything; or workers lack this package.
    UsageError
        The client is asynchronous, closed, or none; or the collection is none.

    Examples
    --------
    >>> optimize(frame.value.sum(), client).compute()  # doctest: +SKIP
    """
    check_synchronous(client, "optimize")
    if not is_dask_collection(collection):
        raise UsageError(
            f"optimize takes one Dask collection, as an array or a data frame, and not a "
            f"{type(collection).__name__}; with dask.config.set(optimizations(client)) any number are "
            "optimized together"
        )
    profile = _profile(client)
    if not client.nthreads():
        return collection  # an adaptive cluster starts workers for it
    return optimize_for(collection, profile, _known(learned(client)))


def optimize_graph(
    dsk: Mapping[Key, Any], keys: Any, client: Client, *, profile: ClusterProfile | None = None
) -> PackedGraph:
    """Return a graph of Dask's in fewer tasks, for `Client.get`.

    Unlike in `optimize`, values that are asked for may share a task.

    Parameters
    ----------
    dsk : mapping
        Tasks by key.
    keys : key or nested list of keys
        What is wanted of it.
    client : distributed.Client
        As for `optimize`.
    profile : ClusterProfile, optional
        What `calibrate` gave for this cluster; what was kept of it if left out.

    Raises
    ------
    ClusterError
        The plugin is not installed, or workers lack this package.
    UsageError
        The client is asynchronous.

    Examples
    --------
    >>> packed = optimize_graph(dsk, keys, client)  # doctest: +SKIP
    >>> values = packed.values(client.get(packed.dsk, packed.keys))  # doctest: +SKIP
    """
    check_synchronous(client, "optimize_graph")
    if profile is None:
        profile = _profile(client)
    else:
        check_workers(client)
    return pack_graph(dsk, keys, profile, _known(learned(client)))


def optimizations(client: Client) -> dict[str, Callable[..., Any]]:
    """Return settings of Dask that have `optimize` applied to whatever is computed on a cluster.

    Arrays, bags and delayed calls are optimized as Dask does it, then as `optimize` does, on the scheduler
    and by what it has learned by then, for the workers that it has then. What is computed elsewhere is
    optimized by Dask only. Data frames know no such setting; call `optimize` on them.

    Parameters
    ----------
    client : distributed.Client
        As for `optimize`.

    Raises
    ------
    ClusterError
        The plugin is not installed, or workers lack this package.
    UsageError
        The client is asynchronous.

    Examples
    --------
    >>> dask.config.set(optimizations(client))  # doctest: +SKIP
    """
    check_synchronous(client, "optimizations")
    profile, scheduler_id = _profile(client), str(client.scheduler_info()["id"])
    return {setting: _Optimization(setting, scheduler_id, profile) for setting in _DASKS}


@dataclass(frozen=True, slots=True)
class _Optimization:
    """Stands in for Dask's own optimization; Dask sends it to the scheduler with the collection."""

    setting: str
    scheduler_id: str
    profile: ClusterProfile

    def __call__(self, dsk: Any, keys: Any, **options: Any) -> Any:
        optimized = import_module(_DASKS[self.setting]).optimize(dsk, keys, **options)
        known = _known(learned_in_this_process(self.scheduler_id))
        threads = threads_in_this_process(self.scheduler_id)
        if not known or not threads or is_annotated(dsk):
            return optimized
        # The cluster may have grown, or shrunk, since it was measured.
        profile = self.profile if threads == self.profile.threads else replace(self.profile, threads=threads)
        return bundle_graph(optimized, keys, profile, known).dsk


def _profile(client: Client) -> ClusterProfile:
    if installed(client) is None:
        raise ClusterError("optimize goes by what the plugin has learned; call install(client) first")
    check_workers(client)
    profile, _ = profile_of(client)
    return profile


def _known(by_name: Mapping[str, tuple[float, float]]) -> dict[str, Learned]:
    return {name: Learned(*values) for name, values in by_name.items()}
