"""Fabric: what a virtual cluster runs on, made of a topology or of a few numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from ferroflow_dask.scheduler.features.low_latency_worker import Load
from ferroflow_dask.topology import Runtime, Topology
from ferroflow_dask.topology import Worker as WorkerSpec
from ferroflow_dask.virtual.clock import VirtualTime
from ferroflow_dask.virtual.hosts import Cores, Process
from ferroflow_dask.virtual.memory import MemorySpec
from ferroflow_dask.virtual.network import Network, SharedNetwork


@dataclass
class Fabric:
    """Network, hosts, and the processes of Dask but for the workers.

    Parameters
    ----------
    time : VirtualTime
    network : Network
    runtime : Runtime
    topology : Topology or None
        None if no process ever waits for a core.
    hosts : list of int, optional
        Number of each worker's host in the topology, also of workers that join later.
    """

    time: VirtualTime
    network: Network
    runtime: Runtime
    topology: Topology | None = None
    hosts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        topology = self.topology
        unlimited = Cores(self.time)
        self._cores = [] if topology is None else [Cores(self.time, host.cores) for host in topology.hosts]
        self._unlimited = unlimited
        on_scheduler = on_client = unlimited
        if topology is not None:
            on_scheduler = self._cores[topology.host_number(topology.scheduler)]
            on_client = self._cores[topology.host_number(topology.client)]
        self.scheduler = Process(self.time, on_scheduler)
        self.client = Process(self.time, on_client)

    @classmethod
    def on(cls, time: VirtualTime, topology: Topology) -> Fabric:
        """Return the fabric of a topology."""
        hosts = topology.host_of
        return cls(time, SharedNetwork(time, topology, hosts), topology.runtime, topology, hosts)

    def cores_of(self, worker: int) -> Cores:
        """Return the cores of a worker's host."""
        return self._cores[self.hosts[worker]] if worker < len(self.hosts) else self._unlimited

    def host_of(self, worker: int, workers_per_host: int) -> tuple[int, int]:
        """Return the number of a worker's host, and the worker's place on it."""
        if worker < len(self.hosts):
            host = self.hosts[worker]
            return host, worker - self.hosts.index(host)
        return divmod(worker, workers_per_host)

    def replace(self, worker: int) -> None:
        """Let the next worker that joins be on the host of an earlier one."""
        if worker < len(self.hosts):
            self.hosts.append(self.hosts[worker])

    def memory_of(self, worker: int) -> MemorySpec | None:
        """Return the memory that the topology gives a worker; None if it has no limit."""
        found = self.worker(worker)
        if found is None or not found.memory_nbytes:
            return None
        return MemorySpec(found.memory_nbytes, found.disk_bandwidth)

    def worker(self, number: int) -> WorkerSpec | None:
        """Return what the topology says of a worker; None without a topology."""
        return None if self.topology is None else self.topology.workers[number]


class ProcessLoad(Load):
    """Load of a virtual process, by which messages are batched.

    Parameters
    ----------
    process : Process
    ready : object, optional
        The load is 1 while this is true.
    """

    def __init__(self, process: Process, ready: object = None) -> None:
        super().__init__()
        self._process = process
        self._ready = ready

    def at(self, now_s: float) -> float:
        """Return the load over the last window."""
        return 1.0 if self._ready else self._process.load(now_s)


def plain_runtime(service_s: float, batching_s: tuple[float, float]) -> Runtime:
    """Return the costs of a cluster of a few numbers: the scheduler's time for a message, and batches."""
    to_workers_s, to_scheduler_s = batching_s
    return Runtime(0.0, 0.0, 0.0, {"other": service_s}, 0.0, 0.0, 0.0, to_workers_s, to_scheduler_s)
