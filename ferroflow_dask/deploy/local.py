"""Clusters on this machine, and clients of clusters that are there already."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import dask
from distributed import Client, LocalCluster, Security
from distributed.comm.core import connect as connect_comm

from ferroflow_dask.deploy.interrupts import interrupts_deferred
from ferroflow_dask.exceptions import ClusterError, UsageError

#: What Dask has workers' memory allocators do: give back whatever is free.
_DASKS_TRIM = 65536
#: Free memory that a worker of ours keeps [B]. By Dask's setting each array of more than 128 KiB comes fresh
#: from the operating system and is filled page by page, which for a matrix product of 512 × 512 takes as long
#: as the product.
_KEPT_FREE = 2**26
#: Of clusters that a command starts for itself.
CLUSTER_OPTIONS: Mapping[str, Any] = {
    "dashboard_address": ":0",  # any free port: the default one may belong to another cluster
    "scheduler_kwargs": {"dashboard": False},
    # A heartbeat that meets the end of the cluster is logged as an error, with a traceback; what goes wrong
    # in a run is raised by its results.
    "silence_logs": logging.CRITICAL,
}
_ENVIRONMENT = "distributed.nanny.pre-spawn-environ"


def worker_environment() -> AbstractContextManager[object]:
    """Start worker processes with our allocator's settings in place of Dask's own."""
    context: AbstractContextManager[object] = dask.config.set({_ENVIRONMENT: _environment()})
    return context


def _environment() -> dict[str, Any]:
    configured: dict[str, Any] = dict(dask.config.get(_ENVIRONMENT))
    if configured.get("MALLOC_TRIM_THRESHOLD_") != _DASKS_TRIM:
        return configured  # somebody has decided
    return {**configured, "MALLOC_TRIM_THRESHOLD_": _KEPT_FREE, "MALLOC_MMAP_THRESHOLD_": _KEPT_FREE}


@contextmanager
def local_client(workers: int, threads: int = 1, processes: bool = True) -> Iterator[Client]:
    """Start workers on this machine and yield a client of them; both end with the context.

    Parameters
    ----------
    workers, threads : int
    processes : bool, optional
        Whether each worker is a process of its own, or all share this one.
    """
    with ExitStack() as stack:
        stack.enter_context(worker_environment())
        with interrupts_deferred():
            cluster = stack.enter_context(
                LocalCluster(
                    n_workers=workers, threads_per_worker=threads, processes=processes, **CLUSTER_OPTIONS
                )
            )
            client = stack.enter_context(Client(cluster))
        yield client


@contextmanager
def connect(address: str | None, timeout_s: float = 10.0, *, needs_workers: bool = True) -> Iterator[Client]:
    """Yield a client of a running scheduler.

    Parameters
    ----------
    address : str or None
        None for Dask's setting `scheduler-address`, as `distributed.Client()` takes it.
    timeout_s : float, optional
        For it to answer [s].
    needs_workers : bool, optional
        Whether it is of no use without workers.

    Raises
    ------
    ClusterError
        Nothing answers at `address` within `timeout_s`, the address makes no sense, or no worker is
        there though one is needed.
    UsageError
        There is no address, and no such setting.
    """
    where = ""
    if address is None:
        address, where = _configured_address(), ", as Dask's setting scheduler-address says,"
    told = f"{address!r}{where}"
    try:
        who = asyncio.run(asyncio.wait_for(_ask_who(address, timeout_s), timeout_s))
    except (ImportError, OSError, RuntimeError, TimeoutError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ClusterError(
            f"no scheduler answers at {told} within {timeout_s:g} s ({reason}); "
            "give the address that it prints when it starts, like tcp://10.0.0.1:8786"
        ) from error
    if who != "Scheduler":
        raise ClusterError(f"at {told} there is a {who}; give the address of its scheduler")
    with Client(address, timeout=timeout_s) as client:
        if needs_workers and not client.nthreads():
            raise ClusterError(f"the scheduler at {told} has no workers; start some and run again")
        yield client


def _configured_address() -> str:
    address = dask.config.get("scheduler-address", None)
    if not address:
        raise UsageError(
            "which scheduler? Give its address, like tcp://10.0.0.1:8786, or set DASK_SCHEDULER_ADDRESS"
        )
    return str(address)  # a number in the environment is one in Dask's configuration


async def _ask_who(address: str, timeout_s: float) -> str:
    # A Client waits without limit for what accepts a connection and then says nothing of use, like a
    # web server. Asking first, with a limit, finds that out.
    comm = await connect_comm(address, timeout=timeout_s, **Security().get_connection_args("client"))
    try:
        await comm.write({"op": "identity", "reply": True})
        answer = await comm.read()
        return str(answer["type"])
    finally:
        comm.abort()
