"""Clients of a cluster: checks of what a caller passes, and questions to scheduler and workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distributed import Client, Scheduler

from ferroflow_dask.arguments import check_kind
from ferroflow_dask.exceptions import UsageError


def check_open(target: Any, function: str, *, or_cluster: bool = False) -> None:
    """Raise `UsageError` unless `target` is an open client or, with `or_cluster`, cluster or scheduler."""
    if not (or_cluster and hasattr(target, "scheduler_address")):  # clusters have no common base class
        kinds, more = ((Client, Scheduler), ", a cluster or a Scheduler") if or_cluster else (Client, "")
        check_kind(function, target, kinds, f"a distributed.Client{more}; Client(address) makes one")
    status = getattr(target, "status", None)
    status = getattr(status, "name", status)  # of clusters it is an enumeration
    if status in ("closed", "closing"):
        raise UsageError(f"{function} needs a {type(target).__name__} that is open, and this one is {status}")


def check_synchronous(client: Client, function: str) -> None:
    """Raise `UsageError` unless `client` is an open, synchronous client.

    The methods of an asynchronous client return awaitables, which our functions do not await.
    """
    check_open(client, function)
    if client.asynchronous:
        address = "address" if client.scheduler is None else repr(client.scheduler.address)
        raise UsageError(
            f"{function} waits for the cluster, and this client is asynchronous; call it in a thread with "
            f"another one: Client({address})"
        )


def answers(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answers of the workers that could be reached.

    Parameters
    ----------
    found : mapping of str to object
        The result of `Client.run` with ``on_error="return"``. A worker that is leaving or has died has an
        `OSError` there. Any other exception was raised by the function and is an answer.
    """
    return {address: answer for address, answer in found.items() if not isinstance(answer, OSError)}


def ask_workers(
    client: Client, function: Callable[..., Any], *args: object, workers: list[str] | None = None
) -> dict[str, Any]:
    """Call a function in each worker, or in the given ones, and return its results by address.

    Workers that left in the meantime are left out. An exception that the function raises in a worker is
    raised here.
    """
    found = answers(client.run(function, *args, workers=workers, on_error="return"))
    for answer in found.values():
        if isinstance(answer, Exception):
            raise answer
    return found


def workers_of(client: Client) -> Mapping[str, Mapping[str, Any]]:
    """Return the scheduler's information about each worker, by address.

    `Client.scheduler_info` is not enough: it returns the client's cached copy. The client refreshes that copy
    every two seconds without any workers, which may happen during the call.
    """
    check_synchronous(client, "workers_of")
    scheduler: Any = client.scheduler
    found: Mapping[str, Any] = client.sync(scheduler.identity, n_workers=-1)["workers"]
    return found


def is_address(worker: str) -> bool:
    """Return whether a worker is one of a cluster, and not only a name."""
    return "://" in worker
