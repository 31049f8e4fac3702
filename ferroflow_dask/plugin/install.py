"""Put the plugin on a running scheduler, and take it off again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from distributed import Client, Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from packaging.version import Version

from ferroflow_dask import config
from ferroflow_dask.clients import answers, check_open
from ferroflow_dask.exceptions import ClusterError
from ferroflow_dask.plugin import seams
from ferroflow_dask.plugin.settings import configured_policy
from ferroflow_dask.plugin.stealing import FerroflowStealing
from ferroflow_dask.plugin.streams import TOPIC, follow, unfollow
from ferroflow_dask.plugin.swap import PLUGIN_NAME, restore, swap

if TYPE_CHECKING:
    from distributed.deploy.cluster import Cluster

_DISTRIBUTION = "ferroflow-dask"
#: The release that dask-cuda 26.10 pins.
OLDEST_DISTRIBUTED = Version("2026.7.1")


class FerroflowPlugin(SchedulerPlugin):
    """Scheduler plugin that replaces Dask's stealing extension by ferroflow's.

    Parameters
    ----------
    policy : str, optional
        Name of the policy; `ferroflow.policy` from the scheduler's configuration if left out.
    **options
        Arguments of the policy (`threshold` and `adaptive` of ferroflow's, `seed` of the random one);
        they override the configuration.

    See Also
    --------
    install : registers the plugin through a client or a cluster.
    """

    name = PLUGIN_NAME

    def __init__(self, policy: str | None = None, **options: Any) -> None:
        # What is wrong with options or settings is told here, not in the scheduler's log.
        configured_policy(policy, options)
        _latency_of_checked_settings()
        if unknown := config.unknown_settings():
            warnings.warn(f"ferroflow: {'; '.join(unknown)}", stacklevel=3)
        self.policy = policy
        self.options = options

    def __repr__(self) -> str:
        """Return the call that makes it."""
        given = ({} if self.policy is None else {"policy": self.policy}) | self.options
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    async def start(self, scheduler: Scheduler) -> None:
        """Swap the extension; called by distributed when the plugin is registered."""
        # What this distributed or its configuration lacks is found before anything is taken away.
        if missing := seams.missing_names():
            raise ClusterError(
                f"this distributed lacks {', '.join(missing)}; Dask goes on scheduling as before"
            )
        present = scheduler.extensions.get("stealing")
        if isinstance(present, FerroflowStealing) and present.installed_by is self:
            return  # a scheduler starts its plugins once more when it starts itself
        policy = configured_policy(self.policy, self.options)
        latency_s = _latency_of_checked_settings()  # others are read again once everything is in place
        replaced = None if present is None else type(present)
        if isinstance(present, FerroflowStealing):
            replaced = present.replaced

        def make(scheduler: Scheduler) -> FerroflowStealing:
            shell = FerroflowStealing(scheduler, policy, latency_s, replaced)
            shell.installed_by = self
            return shell

        await swap(scheduler, make)
        if scheduler.plugins.get(PLUGIN_NAME) is not self:
            scheduler.plugins.pop(PLUGIN_NAME, None)  # distributed adds this one in its place now


def _latency_of_checked_settings() -> float:
    """Return `ferroflow.latency` [s], once the settings that are not of a policy are known to make sense."""
    config.get_bytes("inline-limit")
    for name in ("low-latency-streams", "send-successors"):
        config.get_bool(name)
    return config.get_seconds("latency")


def install(target: Client | Cluster | Scheduler, policy: str | None = None, **options: Any) -> Any:
    """Let ferroflow decide where the tasks of a running cluster go.

    Existing code needs no change: `client.compute()`, `client.submit()`, `dask.compute()` and
    everything built on them are scheduled by the policy from now on, for all clients of the cluster and
    until `uninstall`. A client's own messages leave at once where it is the target, or has the preload
    (`distributed.client.preload`); others batch theirs as Dask does.

    Parameters
    ----------
    target : distributed.Client, a cluster or a distributed.Scheduler
        Any cluster of Dask's. The same version of the package has to be installed where the scheduler
        runs; workers need it for graphs, models, `calibrate` and `optimize` only.
    policy : str, optional
        `ferroflow`, `ring`, `static` or `random`; `ferroflow.policy` if left out, from the configuration
        where the scheduler runs, as all settings of the plugin.
    **options
        Arguments of the policy (`threshold` and `adaptive` of ferroflow's, `seed` of the random one);
        they override the configuration.

    Returns
    -------
    None, or an awaitable of None
        An awaitable where the target is asynchronous, as a scheduler always is.

    Raises
    ------
    UsageError
        There is no such policy, or it does not take these options; or the target is something else, or
        closed.
    ClusterError
        The scheduler has not this package, or another version of it, or a distributed that is too old.

    Examples
    --------
    >>> from distributed import Client, LocalCluster
    >>> cluster = LocalCluster(n_workers=2, processes=False, dashboard_address=":0")
    >>> with cluster, Client(cluster) as client:
    ...     install(client)
    ...     client.submit(sum, [1, 2, 3]).result()
    6
    """
    check_open(target, "install", or_cluster=True)
    plugin = FerroflowPlugin(policy, **options)
    if isinstance(target, Scheduler):
        return _add_to(target, plugin)
    return _through_client(target, _install, plugin)


def uninstall(target: Client | Cluster | Scheduler) -> Any:
    """Leave the cluster to Dask's own scheduling; nothing happens where ferroflow's is not in place.

    Returns None, or an awaitable of None where the target is asynchronous, as in `install`.
    """
    check_open(target, "uninstall", or_cluster=True)
    if isinstance(target, Scheduler):
        return _restore(target)
    return _through_client(target, _uninstall)


def installed(target: Client | Cluster | Scheduler) -> Any:
    """Return the plugin that schedules a cluster, as it was installed; None where Dask does it.

    Parameters
    ----------
    target : distributed.Client, a cluster or a distributed.Scheduler

    Returns
    -------
    FerroflowPlugin or None, or an awaitable of it
        An awaitable where the target is asynchronous, as a scheduler always is.

    Raises
    ------
    UsageError
        The target is something else, or closed.
    """
    check_open(target, "installed", or_cluster=True)
    if isinstance(target, Scheduler):
        return _find_on(target)
    return _through_client(target, find_installed)


def learned(client: Client) -> Any:
    """Return what the plugin has learned of tasks by name: seconds and bytes; nothing if it is not there.

    An asynchronous client gets an awaitable.
    """
    return client.sync(_learned, client)


def check_scheduler(client: Client) -> Any:
    """Raise `ClusterError` unless the scheduler can run the plugin; an awaitable if asynchronous."""
    return client.sync(_check_scheduler, client)


def check_workers(client: Client) -> Any:
    """Raise `ClusterError` unless all workers have this package, which they need to run a graph's ops."""
    return client.sync(_check_workers, client)


def _through_client(target: Client | Cluster, action: Callable[..., Any], *arguments: Any) -> Any:
    if isinstance(target, Client):
        return target.sync(action, target, *arguments)
    if target.asynchronous:
        return _with_own_client(target, action, *arguments)
    with Client(target, set_as_default=False) as client:
        return client.sync(action, client, *arguments)


async def _with_own_client(cluster: Cluster, action: Callable[..., Any], *arguments: Any) -> Any:
    async with Client(cluster, asynchronous=True, set_as_default=False) as client:
        return await action(client, *arguments)


async def _install(client: Client, plugin: FerroflowPlugin) -> None:
    await _check_scheduler(client)
    await client.register_plugin(plugin)
    await follow_streams(client)


async def follow_streams(client: Client) -> None:
    """Let a client's messages leave at once as long as ferroflow schedules its cluster."""
    if follow(client):
        await client.run_on_scheduler(_follow, name=client.id)


async def _uninstall(client: Client) -> None:
    unfollow(client)
    if await _version_there(client, _DISTRIBUTION) is not None:  # else it cannot have been installed
        await client.run_on_scheduler(_restore, name=client.id)


async def find_installed(client: Client) -> FerroflowPlugin | None:
    """Return what `installed` does, on the client's event loop."""
    if await _version_there(client, _DISTRIBUTION) is None:
        return None
    found: FerroflowPlugin | None = await client.run_on_scheduler(_find)
    return found


async def _learned(client: Client) -> dict[str, tuple[float, float]]:
    if await _version_there(client, _DISTRIBUTION) is None:
        return {}
    found: dict[str, tuple[float, float]] = await client.run_on_scheduler(_by_name)
    return found


def _by_name(dask_scheduler: Scheduler) -> dict[str, tuple[float, float]]:
    extension = dask_scheduler.extensions.get("stealing")
    return extension.durations.by_name() if isinstance(extension, FerroflowStealing) else {}


async def _add_to(scheduler: Scheduler, plugin: FerroflowPlugin) -> None:
    await plugin.start(scheduler)
    scheduler.add_plugin(plugin, name=PLUGIN_NAME)


async def _restore(dask_scheduler: Scheduler, name: str | None = None) -> None:
    present = dask_scheduler.extensions.get("stealing")
    if isinstance(present, FerroflowStealing):
        await restore(dask_scheduler, present, present.replaced)
    if name is not None:
        dask_scheduler.unsubscribe_topic(TOPIC, name)


def _follow(dask_scheduler: Scheduler, name: str) -> None:
    present = dask_scheduler.extensions.get("stealing")
    if isinstance(present, FerroflowStealing):
        present.messages.streams.followed_by(name)


def _find(dask_scheduler: Scheduler) -> FerroflowPlugin | None:
    extension = dask_scheduler.extensions.get("stealing")
    if not isinstance(extension, FerroflowStealing) or extension.error is not None:
        return None
    # Who takes the plugin off the scheduler's list takes nothing else away.
    plugin = extension.installed_by
    return plugin if isinstance(plugin, FerroflowPlugin) else None


async def _find_on(scheduler: Scheduler) -> FerroflowPlugin | None:
    return _find(scheduler)


async def _version_there(client: Client, distribution: str) -> str | None:
    # What is sent is the standard library's function, which any scheduler can load.
    try:
        return str(await client.run_on_scheduler(version, distribution))
    except PackageNotFoundError:
        return None


async def _check_scheduler(client: Client) -> None:
    where = f"the scheduler at {client.scheduler.address if client.scheduler is not None else '?'}"
    theirs = await _version_there(client, _DISTRIBUTION)
    if theirs is None:
        raise ClusterError(_missing(where))
    if theirs != version(_DISTRIBUTION):
        raise ClusterError(_differs(where, theirs))
    distributed = await _version_there(client, "distributed")
    if distributed is None or Version(distributed) < OLDEST_DISTRIBUTED:
        raise ClusterError(f"{where} runs distributed {distributed}; {OLDEST_DISTRIBUTED} or newer is needed")


async def _check_workers(client: Client) -> None:
    theirs = answers(await client.run(version, _DISTRIBUTION, on_error="return"))
    without = [address for address, answer in theirs.items() if isinstance(answer, Exception)]
    other = [address for address, answer in theirs.items() if answer != version(_DISTRIBUTION)]
    for wrong, say in ((without, _missing), (other, lambda who: _differs(who, theirs[other[0]]))):
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise ClusterError(say(f"the worker at {wrong[0]}{more}"))


def _missing(who: str) -> str:
    return f"{who} has no package {_DISTRIBUTION}; run there, in a clone: pip install ."


def _differs(who: str, theirs: str) -> str:
    ours = version(_DISTRIBUTION)
    cure = f"run there, in a clone of {ours}: pip install ."
    return f"{who} has {_DISTRIBUTION} {theirs}, here it is {ours}; {cure}"
