"""Put the plugin on a running scheduler, and take it off again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from distributed import Client
from distributed.diagnostics.plugin import SchedulerPlugin

from ferroflow_dask import config
from ferroflow_dask.exceptions import ClusterError, UsageError
from ferroflow_dask.plugin.settings import configured_policy
from ferroflow_dask.plugin.stealing import FerroflowStealing
from ferroflow_dask.plugin.swap import PLUGIN_NAME, restore_stock, swap

if TYPE_CHECKING:
    from distributed.deploy.cluster import Cluster
    from distributed.scheduler import Scheduler

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

    async def start(self, scheduler: Scheduler) -> None:
        """Swap the extension; called by distributed when the plugin is registered."""
        # What the scheduler's configuration lacks is found before anything is taken away.
        policy = configured_policy(self.policy, self.options)
        latency_s = config.get_seconds("latency")
        present = scheduler.extensions.get("stealing")
        was_enabled = present.was_enabled if isinstance(present, FerroflowStealing) else present is not None
        await swap(scheduler, lambda _: FerroflowStealing(scheduler, policy, latency_s, was_enabled))
        scheduler.plugins.pop(PLUGIN_NAME, None)  # distributed adds this one in its place now


@contextmanager
def _client_of(target: Client | Cluster) -> Iterator[Client]:
    if getattr(target, "asynchronous", False):
        raise UsageError(
            f"a synchronous client or cluster is needed, not {target!r}; with an asynchronous client: "
            "await client.register_plugin(ferroflow_dask.FerroflowPlugin())"
        )
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
        check_scheduler(client)
        client.register_plugin(plugin)


def uninstall(target: Client | Cluster) -> None:
    """Leave the cluster to Dask's own scheduling; nothing happens where ferroflow's is not in place."""
    with _client_of(target) as client:
        client.run_on_scheduler(_restore)


def installed(client: Client) -> FerroflowPlugin | None:
    """Return the plugin that schedules a cluster, as it was installed; None where Dask does it."""
    found: FerroflowPlugin | None = client.run_on_scheduler(_find)
    return found


async def _restore(dask_scheduler: Scheduler) -> None:
    present = dask_scheduler.extensions.get("stealing")
    if isinstance(present, FerroflowStealing):
        await restore_stock(dask_scheduler, present, present.was_enabled)


def _find(dask_scheduler: Scheduler) -> FerroflowPlugin | None:
    extension = dask_scheduler.extensions.get("stealing")
    plugin = dask_scheduler.plugins.get(PLUGIN_NAME)
    is_working = isinstance(extension, FerroflowStealing) and extension.error is None
    return plugin if is_working and isinstance(plugin, FerroflowPlugin) else None


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
