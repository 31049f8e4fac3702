"""Which clients may be used where, and what workers answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

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


def answers(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what workers answered, given the result of `Client.run` with ``on_error="return"``.

    A worker that cannot be reached, since it is leaving or has died, has no answer. What a function raised in
    a worker is an answer.
    """
    return {address: answer for address, answer in found.items() if not isinstance(answer, OSError)}


def ask_workers(
    client: Client, function: Callable[..., Any], *args: object, workers: list[str] | None = None
) -> dict[str, Any]:
    """Return what a function returns in each worker, or in those named, without the ones that left meanwhile.

    What it raises in a worker is raised.
    """
    found = answers(client.run(function, *args, workers=workers, on_error="return"))
    for answer in found.values():
        if isinstance(answer, Exception):
            raise answer
    return found
