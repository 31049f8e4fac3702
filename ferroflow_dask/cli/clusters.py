"""The cluster that a command runs on, and who is in charge of it meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click
from distributed import Client, KilledWorker

from ferroflow_dask.cli.devices import Devices
from ferroflow_dask.cli.slurm import SlurmOptions, slurm_client
from ferroflow_dask.deploy import DeviceChoice, connect, count_gpus, device_client, local_client
from ferroflow_dask.device_reports import GPU_RESOURCE
from ferroflow_dask.devices.workers import gpu_workers, use_devices
from ferroflow_dask.exceptions import ClusterError
from ferroflow_dask.scheduler import check_scheduler, check_workers, install, installed, uninstall

#: Policies that need no plugin: no cluster at all, and Dask as it is.
PLAIN_POLICIES = ("sequential", "dask")


@dataclass(frozen=True, slots=True)
class Where:
    """The cluster that options name: that of an address, of SLURM jobs, or a local one.

    Parameters
    ----------
    address : str or None
    timeout_s : float
        For the address to answer [s].
    slurm : SlurmOptions or None
    workers, threads : int
    processes : bool
        Of a local cluster.
    devices : Devices or None
        That ops may run on, beside CPUs.
    """

    address: str | None
    timeout_s: float
    slurm: SlurmOptions | None
    workers: int
    threads: int
    processes: bool
    devices: Devices | None = None

    @property
    def tells_processes(self) -> bool | None:
        """What a record says of the workers."""
        return self.processes if self.address is None and self.slurm is None else None

    def n_threads(self) -> int:
        """Return the threads of all workers, as far as options tell; of an address, as the scheduler does."""
        if self.slurm is not None:
            return self.slurm.n_threads()
        if self.address is not None:
            with connect(self.address, self.timeout_s) as client:
                return sum(client.nthreads().values())
        return max(1, self.workers * self.threads)  # there may be GPU workers only


@contextmanager
def client_for(where: Where) -> Iterator[Client]:
    """Yield a client of the cluster; what goes wrong with it is told in one line."""
    is_lost = False
    try:
        with _client(where) as client:
            try:
                yield client
            except (CancelledError, OSError, RuntimeError):
                is_lost = client.status != "running"
                raise
    except KilledWorker as error:
        raise ClusterError(
            f"workers died while they ran task {error.task!r}; they may lack memory"
        ) from error
    except (CancelledError, OSError, RuntimeError) as error:
        if is_lost:
            told = "the scheduler closed during the run, as `ferroflow slurm cancel` has it do"
        elif isinstance(error, CancelledError):
            told = "workers were lost, with data that only they held; they may lack memory"
        else:
            told = f"the cluster failed: {error}"
        raise ClusterError(told) from error


@contextmanager
def _client(where: Where) -> Iterator[Client]:
    choice = None if where.devices is None else where.devices.choice
    if where.slurm is not None:
        with slurm_client(where.slurm) as client:
            _use(choice, client)
            yield client
    elif where.address is not None:
        with connect(where.address, where.timeout_s) as client:
            check_scheduler(client)
            check_workers(client)
            _use(choice, client)
            yield client
    elif choice is None:
        with local_client(where.workers, where.threads, where.processes) as client:
            yield client
    else:
        with device_client(choice, where.workers, where.threads) as client:
            yield client


def _use(choice: DeviceChoice | None, client: Client) -> None:
    """Let workers that have the resource for it use their GPUs."""
    if choice is None:
        return
    if gpu_workers(client):
        use_devices(client, choice.spec)
        if not count_gpus(client):
            click.echo("workers with GPUs lack CuPy or a driver: ops run on their CPUs", err=True)
    elif choice.kind != "auto":
        raise ClusterError(
            f"--device {choice}: no worker of this cluster has the resource {GPU_RESOURCE}; start some by: "
            f"dask cuda worker ADDRESS --resources {GPU_RESOURCE}=1"
        )


@contextmanager
def policy_installed(client: Client, policy: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Put a policy in charge of a cluster, and what was there before afterwards."""
    before = installed(client)  # on a running cluster that others have set up
    if policy in PLAIN_POLICIES:
        uninstall(client)
    else:
        install(client, policy, **options)
    try:
        yield
        if policy not in PLAIN_POLICIES and installed(client) is None:
            raise ClusterError(
                f"policy {policy!r} was taken off during the run; the scheduler's log may say why"
            )
    finally:
        if client.status != "running":
            pass  # there is nothing to restore
        elif before is None:
            uninstall(client)
        else:
            client.register_plugin(before)
