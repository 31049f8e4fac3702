"""Put the plugin on a running scheduler, and take it off again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from distributed import Client
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.stealing import WorkStealing

from ferroflow_dask.exceptions import ClusterError, UsageError
from ferroflow_dask.plugin.settings import configured_policy
from ferroflow_dask.plugin.stealing import FerroflowStealing

if TYPE_CHECKING:
    from distributed.deploy.cluster import Cluster
    from distributed.scheduler import Scheduler

#: Name under which the plugin is registered; there is at most one on a scheduler.
PLUGIN_NAME = "ferroflow"
_DISTRIBUTION = "ferroflow-dask"


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
        configured_policy(policy, options)  # a wrong name or option is told here, not in the scheduler's log
        self.policy = policy
        self.options = options
        self._had_stealing = False
        self._scheduler: Scheduler | None = None

    async def start(self, scheduler: Scheduler) -> None:
        """Swap the extension; called by distributed when the plugin is registered."""
        before = scheduler.plugins.get(PLUGIN_NAME)
        if isinstance(before, FerroflowPlugin) and before is not self:
            await before.restore()
        self._scheduler = scheduler
        self._had_stealing = "stealing" in scheduler.extensions
        await _swap(
            scheduler,
            lambda: FerroflowStealing(scheduler, configured_policy(self.policy, self.options), self._failed),
        )

    async def restore(self) -> None:
        """Put back what stood there before."""
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is None:
            return
        await _swap(scheduler, (lambda: WorkStealing(scheduler)) if self._had_stealing else None)
        if scheduler.plugins.get(PLUGIN_NAME) is self:
            scheduler.remove_plugin(name=PLUGIN_NAME)

    def _failed(self, _error: BaseException) -> None:
        if self._scheduler is not None:
            self._scheduler.loop.add_callback(self.restore)


async def _swap(scheduler: Scheduler, make: Any) -> None:
    old = scheduler.extensions.get("stealing")
    if old is not None:
        # Answers to steals in flight must still find the handler that asked; where stealing has not
        # been started there are none, and stop() would wait for ever.
        if "stealing" in scheduler.periodic_callbacks or old.in_flight:
            await old.stop()
        del scheduler.extensions["stealing"]
        for name, plugin in list(scheduler.plugins.items()):
            if plugin is old:
                scheduler.remove_plugin(name=name)
        old.teardown()
    if make is not None:
        scheduler.extensions["stealing"] = make()
        await scheduler.extensions["stealing"].start()


@contextmanager
def _client_of(target: Client | Cluster) -> Iterator[Client]:
    if isinstance(target, Client):
        yield target
    else:
        with Client(target, set_as_default=False) as client:
            yield client


def install(target: Client | Cluster, policy: str | None = None, **options: Any) -> None:
    """Let ferroflow decide where the tasks of a running cluster go.

    Existing code needs no change: `client.compute()`, `client.submit()`, `dask.compute()` and
    everything built on them are scheduled by the policy from now on.

    Parameters
    ----------
    target : distributed.Client or a cluster
        Any cluster of Dask's; the package has to be installed where the scheduler runs.
    policy : str, optional
        `ferroflow`, `static` or `random`; `ferroflow.policy` from the configuration if left out.
    **options
        Arguments of the policy (`threshold` and `adaptive` of ferroflow's, `seed` of the random one);
        they override the configuration.

    Raises
    ------
    UsageError
        There is no such policy, or it does not take these options.
    ClusterError
        The scheduler cannot import this package.

    Examples
    --------
    >>> from distributed import Client, LocalCluster
    >>> cluster = LocalCluster(n_workers=2, processes=False, dashboard_address=":0")
    >>> with cluster, Client(cluster) as client:
    ...     install(client)
    ...     client.submit(sum, [1, 2, 3]).result()
    6
    """
    plugin = FerroflowPlugin(policy, **options)
    with _client_of(target) as client:
        if client.asynchronous:
            raise UsageError(
                "install() takes a synchronous client or cluster; with an asynchronous one: "
                "await client.register_plugin(ferroflow_dask.FerroflowPlugin())"
            )
        check_scheduler(client)
        client.register_plugin(plugin)


def uninstall(target: Client | Cluster) -> None:
    """Leave the cluster to Dask's own scheduling; nothing happens where the plugin is not installed."""
    with _client_of(target) as client:
        client.run_on_scheduler(_restore)


async def _restore(dask_scheduler: Scheduler) -> None:
    plugin = dask_scheduler.plugins.get(PLUGIN_NAME)
    if isinstance(plugin, FerroflowPlugin):
        await plugin.restore()


def check_scheduler(client: Client) -> None:
    """Raise `ClusterError` unless the scheduler has this package.

    What is sent is the standard library's function, which any scheduler can load.
    """
    try:
        client.run_on_scheduler(version, _DISTRIBUTION)
    except PackageNotFoundError as error:
        address = client.scheduler.address if client.scheduler is not None else "?"
        raise ClusterError(_missing(f"the scheduler at {address}")) from error


def check_workers(client: Client) -> None:
    """Raise `ClusterError` unless all workers have this package; they need it to run a graph's ops."""
    answers = client.run(version, _DISTRIBUTION, on_error="return")
    without = [address for address, answer in answers.items() if isinstance(answer, Exception)]
    if without:
        more = f" and {len(without) - 1} more" if len(without) > 1 else ""
        raise ClusterError(_missing(f"the worker at {without[0]}{more}"))


def _missing(who: str) -> str:
    return f"{who} has no package {_DISTRIBUTION}; run there: pip install {_DISTRIBUTION}"
