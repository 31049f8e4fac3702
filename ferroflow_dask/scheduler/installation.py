"""Installation through clients and clusters: `install`, `uninstall`, `installed`, and checks of versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from distributed import Client, Scheduler
from packaging.version import Version

from ferroflow_dask.clients import answers, check_open
from ferroflow_dask.exceptions import ClusterError, UsageError
from ferroflow_dask.scheduler.decisions import Decision
from ferroflow_dask.scheduler.extension import extension_on
from ferroflow_dask.scheduler.features import client_plans
from ferroflow_dask.scheduler.features import low_latency_messages as messages
from ferroflow_dask.scheduler.plugin import FerroflowPlugin, install_on, installed_on, uninstall_from

if TYPE_CHECKING:
    from dask.typing import Key
    from distributed import Future
    from distributed.deploy.cluster import Cluster

_DISTRIBUTION = "ferroflow-dask"
_TIME = attrgetter("time")
#: The release that dask-cuda 26.10 pins.
OLDEST_DISTRIBUTED = Version("2026.7.1")


def install(
    target: Client | Cluster | Scheduler,
    policy: str | None = None,
    *,
    without: Iterable[str] = (),
    **options: Any,
) -> Any:
    """Install the plugin on a running cluster.

    Existing code needs no change: the policy schedules `client.compute()`, `client.submit()`,
    `dask.compute()` and everything built on them, for all clients of the cluster, until `uninstall`. The
    messages of the given client, and of clients with the preload (`distributed.client.preload`), are sent
    without waiting for a batch; other clients batch theirs as Dask does.

    The installation is all or nothing: if a step fails, all earlier ones are undone.

    Parameters
    ----------
    target : distributed.Client, a cluster or a distributed.Scheduler
        Any Dask cluster. The scheduler needs the same version of this package. Workers need it only for
        graphs, models, `calibrate` and bundles.
    policy : str, optional
        `ferroflow`, `ring`, `static` or `random`; the setting `ferroflow.policy` of the scheduler if left
        out. All settings of the plugin are read where the scheduler runs.
    without : iterable of str, optional
        Names of features that are switched off, such as `bundles` or `prefetch`, besides those that the
        settings `ferroflow.features` of the scheduler switch off.
    **options
        Arguments of the policy, such as `seed` of the random one; they override the configuration.

    Returns
    -------
    None, or an awaitable of None
        An awaitable if the target is asynchronous, as a scheduler always is.

    Raises
    ------
    UsageError
        No policy has this name, or it does not accept these options; or the target is closed, or no client,
        cluster or scheduler.
    ClusterError
        The scheduler lacks this package, has another version of it, or a distributed that is too old.

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
    plugin = FerroflowPlugin(policy, without=without, **options)
    if isinstance(target, Scheduler):
        return install_on(target, plugin)
    return _through_client(target, _install, plugin)


def uninstall(target: Client | Cluster | Scheduler) -> Any:
    """Uninstall the plugin: all changes to Dask are undone, and Dask's own stealing is back.

    Nothing happens if the plugin is not installed. A second call repairs what an earlier one could not undo.
    Returns None, or an awaitable of None if the target is asynchronous, as in `install`.
    """
    check_open(target, "uninstall", or_cluster=True)
    if isinstance(target, Scheduler):
        return uninstall_from(target)
    return _through_client(target, _uninstall)


def installed(target: Client | Cluster | Scheduler) -> Any:
    """Return the plugin that schedules a cluster, as it was installed; None if Dask schedules.

    Parameters
    ----------
    target : distributed.Client, a cluster or a distributed.Scheduler

    Returns
    -------
    FerroflowPlugin or None, or an awaitable of it
        An awaitable if the target is asynchronous, as a scheduler always is.

    Raises
    ------
    UsageError
        The target is closed, or no client, cluster or scheduler.
    """
    check_open(target, "installed", or_cluster=True)
    if isinstance(target, Scheduler):
        return _find_on(target)
    return _through_client(target, find_installed)


def learned(client: Client) -> Any:
    """Return learned durations [s] and result sizes [B] by task prefix; empty without the plugin.

    An asynchronous client gets an awaitable.
    """
    return client.sync(_learned, client)


def check_scheduler(client: Client) -> Any:
    """Raise `ClusterError` unless the scheduler can run the plugin; an awaitable if asynchronous."""
    return client.sync(_check_scheduler, client)


def check_workers(client: Client) -> Any:
    """Raise `ClusterError` unless all workers have this package, which lowered graphs need."""
    return client.sync(_check_workers, client)


def explain(client: Client, key: Key | Future[Any]) -> Any:
    """Return the decisions about a task with their reasons, oldest first.

    The placement, each steal that was asked for and how it ended, and each that was declined. For a task in a
    bundle these are the decisions about the bundle. The scheduler keeps the last 50,000 decisions.

    Parameters
    ----------
    client : distributed.Client
        Its cluster must have the plugin. An asynchronous client gets an awaitable.
    key : Key or Future
        Of the task; a key may be given as a string.

    Returns
    -------
    list of Decision

    Raises
    ------
    ClusterError
        The plugin is not installed.
    UsageError
        There is no decision about such a task, or the client is closed.
    """
    check_open(client, "explain")
    return client.sync(_explain, client, getattr(key, "key", key))


async def _explain(client: Client, key: Key) -> list[Decision]:
    if await find_installed(client) is None:
        raise ClusterError("explain needs the plugin; call ferroflow_dask.install(client) first")
    decisions: list[Decision] = await client.run_on_scheduler(decisions_about, name=str(key))
    if not decisions:
        raise UsageError(
            f"key must be that of a recent task, got {str(key)!r}; write it as the dashboard does, and ask "
            "soon: old decisions are forgotten"
        )
    return decisions


def decisions_about(dask_scheduler: Scheduler, name: str) -> list[Decision]:
    """Return the decisions about a task, or about the bundle that holds it, oldest first."""
    extension = extension_on(dask_scheduler)
    if extension is None:
        return []
    names = [name, *map(str, extension.graphs.bundles.holding(name))]
    return sorted((one for each in names for one in extension.decisions.about(each)), key=_TIME)


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
    keep_plans = client_plans.prepared(plugin.without)
    await _check_scheduler(client)
    await client.register_plugin(plugin)
    keep_plans(client)
    await _follow_batching(client)


async def follow(client: Client, plugin: FerroflowPlugin) -> None:
    """Do what `install` does in the process of a client, for a plugin that is installed."""
    client_plans.prepared(plugin.without)(client)
    await _follow_batching(client)


async def _follow_batching(client: Client) -> None:
    """Let a client send its messages without batching, as long as the plugin is installed."""
    if messages.follow(client):
        await client.run_on_scheduler(_follow_on_scheduler, client=client.id)


async def _uninstall(client: Client) -> None:
    client_plans.forget(client)
    messages.unfollow(client)
    if await _version_there(client, _DISTRIBUTION) is not None:  # else it cannot be installed
        await client.run_on_scheduler(_uninstall_on_scheduler, client=client.id)


async def find_installed(client: Client) -> FerroflowPlugin | None:
    """Return the result of `installed` on the client's event loop."""
    if await _version_there(client, _DISTRIBUTION) is None:
        return None
    found: FerroflowPlugin | None = await client.run_on_scheduler(_installed_on_scheduler)
    return found


async def _learned(client: Client) -> dict[str, tuple[float, float]]:
    if await _version_there(client, _DISTRIBUTION) is None:
        return {}
    found: dict[str, tuple[float, float]] = await client.run_on_scheduler(_learned_on_scheduler)
    return found


def _learned_on_scheduler(dask_scheduler: Scheduler) -> dict[str, tuple[float, float]]:
    extension = extension_on(dask_scheduler)
    return {} if extension is None else extension.costs.means()


async def _uninstall_on_scheduler(dask_scheduler: Scheduler, client: str) -> None:
    await uninstall_from(dask_scheduler)
    dask_scheduler.unsubscribe_topic(messages.TOPIC, client)


def _follow_on_scheduler(dask_scheduler: Scheduler, client: str) -> None:
    extension = extension_on(dask_scheduler)
    for feature in extension.features if extension is not None else ():
        if isinstance(feature, messages.LowLatencyMessages):
            feature.followed_by(client)


def _installed_on_scheduler(dask_scheduler: Scheduler) -> FerroflowPlugin | None:
    return installed_on(dask_scheduler)


async def _find_on(scheduler: Scheduler) -> FerroflowPlugin | None:
    return installed_on(scheduler)


async def _version_there(client: Client, distribution: str) -> str | None:
    # A function of the standard library can be loaded by any scheduler.
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
