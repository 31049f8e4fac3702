"""Clients of a cluster: checks of what a caller passes, and questions to scheduler and workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distributed import Client, Scheduler

from ferroflow_dask.arguments import check_kind
from ferroflow_dask.exceptions import UsageError


def check_open(target: Any, function: str, *, or_cluster: bool = False) -> None:
    """Raise `UsageError` unless a client, or else a cluster or a scheduler, is given, which is not closed."""
    if not (or_cluster and hasattr(target, "scheduler_address")):  # not all clusters have one base class
        kinds, more = ((Client, Scheduler), ", a cluster or a Scheduler") if or_cluster else (Client, "")
        check_kind(function, target, kinds, f"a distributed.Client{more}; Client(address) makes one")
    status = getattr(target, "status", None)
    status = getattr(status, "name", status)  # clusters have an enumeration
    if status in ("closed", "closing"):
        raise UsageError(f"{function} needs a {type(target).__name__} that is open, and this one is {status}")


def check_synchronous(client: Client, function: str) -> None:
    """Raise `UsageError` where a client's methods return awaitables, which a function does not await.

    And where it is no client, or closed.
    """
    check_open(client, function)
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


def workers_of(client: Client) -> Mapping[str, Mapping[str, Any]]:
    """Return what the scheduler knows of each worker, by address.

    `Client.scheduler_info` returns what the client remembers, and between its asking and its returning the
    client may have refreshed that without any workers, as it does every two seconds.
    """
    check_synchronous(client, "workers_of")
    scheduler: Any = client.scheduler
    found: Mapping[str, Any] = client.sync(scheduler.identity, n_workers=-1)["workers"]
    return found
