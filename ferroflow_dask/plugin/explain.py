"""Why a task is where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask.typing import Key

from ferroflow_dask.clients import check_open
from ferroflow_dask.exceptions import ClusterError, UsageError
from ferroflow_dask.plugin.install import find_installed
from ferroflow_dask.plugin.journal import Decision
from ferroflow_dask.plugin.stealing import FerroflowStealing

if TYPE_CHECKING:
    from distributed import Client, Future
    from distributed.scheduler import Scheduler


def explain(client: Client, key: Key | Future[Any]) -> Any:
    """Return the decisions about a task, oldest first, each with its reason.

    Where it was placed, each steal of it that was asked for and how that ended, and each that was
    declined. The scheduler keeps the last 50,000 decisions.

    Parameters
    ----------
    client : distributed.Client
        Of a cluster on which ferroflow is installed; an asynchronous one gets an awaitable.
    key : Key or Future
        Of the task, or how its key is written.

    Returns
    -------
    list of Decision

    Raises
    ------
    ClusterError
        ferroflow is not installed on the cluster.
    UsageError
        No decision about such a task is known; or the client is none, or closed.
    """
    check_open(client, "explain")
    return client.sync(_explain, client, getattr(key, "key", key))


async def _explain(client: Client, key: Key) -> list[Decision]:
    if await find_installed(client) is None:
        raise ClusterError("ferroflow does not schedule this cluster; call ferroflow_dask.install(client)")
    decisions: list[Decision] = await client.run_on_scheduler(_about, name=str(key))
    if not decisions:
        raise UsageError(
            f"nothing is known of a task {str(key)!r}; give its key as the dashboard writes it, and soon: "
            "old decisions are forgotten"
        )
    return decisions


def _about(dask_scheduler: Scheduler, name: str) -> list[Decision]:
    stealing = dask_scheduler.extensions["stealing"]
    assert isinstance(stealing, FerroflowStealing)
    return list(stealing.journal.about(name))
