"""Which clients may be used where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferroflow_dask.exceptions import UsageError

if TYPE_CHECKING:
    from distributed import Client


def check_synchronous(client: Client, function: str) -> None:
    """Raise `UsageError` where a client's methods return awaitables, which a function does not await."""
    if client.asynchronous:
        address = "address" if client.scheduler is None else repr(client.scheduler.address)
        raise UsageError(
            f"{function} waits for the cluster, and this client is asynchronous; call it in a thread with "
            f"another one: Client({address})"
        )
