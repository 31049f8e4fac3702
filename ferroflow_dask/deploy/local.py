"""Clusters on this machine, and clients of running clusters."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.spawn import get_preparation_data
from typing import Any

import dask
from distributed import Client, LocalCluster, Security, Worker
from distributed.comm.core import connect as connect_comm
from distributed.utils import get_mp_context

from ferroflow_dask.deploy.interrupts import closed_undisturbed, interrupts_deferred
from ferroflow_dask.exceptions import ClusterError, UsageError

#: Dask's setting of workers' memory allocators, by which they return free memory to the operating system.
_DASKS_TRIM = 65536
#: Free memory that a worker keeps [B]. With Dask's setting the operating system allocates each array of more
#: than 128 KiB anew, page by page. For a matrix product of 512 × 512 this takes as long as the product.
_KEPT_FREE = 2**26
_LOOPBACK = "127.0.0.1:0"
#: Options of clusters that a command starts for itself.
CLUSTER_OPTIONS: Mapping[str, Any] = {
    # Not reachable from other hosts. Any free port, since another cluster may have the default one.
    "dashboard_address": _LOOPBACK,
    "scheduler_kwargs": {"dashboard": False},
    # distributed logs a heartbeat that fails at the end of the cluster as an error with a traceback. Failures
    # of a run are raised when its results are read.
    "silence_logs": logging.CRITICAL,
}
_ENVIRONMENT = "distributed.nanny.pre-spawn-environ"


def worker_environment() -> AbstractContextManager[object]:
    """Start worker processes with ferroflow's settings of the memory allocator instead of Dask's."""
    context: AbstractContextManager[object] = dask.config.set({_ENVIRONMENT: _environment()})
    return context


def _environment() -> dict[str, Any]:
    configured: dict[str, Any] = dict(dask.config.get(_ENVIRONMENT))
    if configured.get("MALLOC_TRIM_THRESHOLD_") != _DASKS_TRIM:
        return configured  # the user has changed it
    return {**configured, "MALLOC_TRIM_THRESHOLD_": _KEPT_FREE, "MALLOC_MMAP_THRESHOLD_": _KEPT_FREE}


def check_main() -> None:
    """Raise `UsageError` unless worker processes can import `__main__`.

    They cannot if the program is read from standard input or from a pipe. Without this check the cluster
    would only report that a worker has failed to start.
    """
    # Processes that are forked, and those of a frozen program, have `__main__` already.
    if get_mp_context().get_start_method() == "fork" or getattr(sys, "frozen", False):
        return
    # Neither an interactive session nor a module that has a name is imported by its path.
    path = get_preparation_data("worker").get("init_main_from_path")
    if path is not None and not os.path.isfile(path):
        raise UsageError(
            f"__main__ must be a file for worker processes, got {sys.modules['__main__'].__file__!r}; "
            "save the program and run: python program.py"
        )


class _LoopbackWorker(Worker):
    """A worker in this process, whose HTTP server is not reachable from other hosts.

    Workers in other processes have a `host`, which `LocalCluster` does not accept without processes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "dashboard_address": _LOOPBACK})


@contextmanager
def local_client(workers: int, threads: int = 1, processes: bool = True) -> Iterator[Client]:
    """Start workers on this machine and yield a client; both are closed with the context.

    All ports, that of the dashboard included, are open on the loopback interface only.

    Parameters
    ----------
    workers, threads : int
    processes : bool, optional
        Whether each worker is a process. If False, all are threads of this process.

    Raises
    ------
    UsageError
        Worker processes cannot import `__main__`.
    """
    if processes:
        check_main()
    with closed_undisturbed() as stack:
        stack.enter_context(worker_environment())
        with interrupts_deferred():
            cluster = stack.enter_context(
                LocalCluster(
                    n_workers=workers,
                    threads_per_worker=threads,
                    processes=processes,
                    worker_class=None if processes else _LoopbackWorker,
                    **CLUSTER_OPTIONS,
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
        None for Dask's setting `scheduler-address`, which `distributed.Client()` uses too.
    timeout_s : float, optional
        Time that the scheduler may take to answer [s].
    needs_workers : bool, optional
        Whether to raise an error if the scheduler has no workers.

    Raises
    ------
    ClusterError
        No scheduler answers at `address` within `timeout_s`, the address is not valid, or the scheduler has
        no workers although `needs_workers`.
    UsageError
        There is neither an address nor the setting.
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
    # A Client waits forever for a server that accepts a connection and does not answer, like a web server.
    comm = await connect_comm(address, timeout=timeout_s, **Security().get_connection_args("client"))
    try:
        await comm.write({"op": "identity", "reply": True})
        answer = await comm.read()
        return str(answer["type"])
    finally:
        comm.abort()
