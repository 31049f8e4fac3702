"""Machine: a cluster in numbers, as the light engine reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.topology import Route, Topology


@dataclass(frozen=True, slots=True)
class Machine:
    """Workers, links and overheads.

    Parameters
    ----------
    threads : sequence of int
        Of each worker.
    speeds : sequence of float
        Of each worker: how many times faster than declared it runs tasks.
    bandwidths : sequence of float
        Of each link [B/s].
    route : callable
        Returns the way from a worker to another one; its latency is that of a transfer.
    submit_s : float, optional
        From `compute` to the first task that is ready [s].
    arrival_s : float, optional
        The same for each task of the graph [s].
    task_s : float, optional
        Time of the scheduler for each task that it sends to a worker [s].
    round_trip_s : float, optional
        From the end of a task to the time at which its dependents are ready [s].
    worker_s : float, optional
        Time of a worker's thread for each task, which is a part of the round trip [s].
    pause_s : float, optional
        Time of a thread before each task [s].
    memory_nbytes : sequence of int, optional
        Of each worker [B]; 0 or none if there is no limit.
    """

    threads: Sequence[int]
    speeds: Sequence[float]
    bandwidths: Sequence[float]
    route: Callable[[int, int], Route]
    submit_s: float = 0.0
    arrival_s: float = 0.0
    task_s: float = 0.0
    round_trip_s: float = 0.0
    worker_s: float = 0.0
    pause_s: float = 0.0
    memory_nbytes: Sequence[int] = ()

    @property
    def n_threads(self) -> int:
        """Threads of all workers."""
        return sum(self.threads)

    @classmethod
    def of_profile(cls, profile: ClusterProfile) -> Machine:
        """Return workers that each fetch over a link of their own, as a profile describes them."""

        def route(_: int, destination: int) -> Route:
            return routes[destination]

        n = len(profile.threads)
        routes = [Route((worker,), profile.round_trip_s, profile.bandwidth) for worker in range(n)]
        return cls(
            profile.threads,
            (1.0,) * n,
            (profile.bandwidth,) * n,
            route,
            submit_s=profile.submit_s,
            task_s=profile.task_s,
            round_trip_s=profile.round_trip_s,
            pause_s=profile.pause_s,
        )

    @classmethod
    def of_topology(cls, topology: Topology) -> Machine:
        """Return the workers and links of a topology."""
        hosts, workers, runtime = topology.host_of, topology.workers, topology.runtime
        found: dict[tuple[int, int], Route] = {}

        def route(source: int, destination: int) -> Route:
            between = hosts[source], hosts[destination]
            known = found.get(between)
            if known is None:
                way = topology.route(*between)
                # A fetch asks first, unless the runtime costs nothing: then results are pushed.
                latency_s = way.latency_s + (way.latency_s + runtime.fetch_s if runtime.fetch_s else 0.0)
                known = found[between] = Route(way.links, latency_s, way.bandwidth)
            return known

        profile = topology.profile()
        has_costs = runtime.task_s + runtime.worker_task_s > 0
        return cls(
            [worker.threads for worker in workers],
            [worker.speed for worker in workers],
            topology.bandwidths,
            route,
            submit_s=runtime.submit_s,
            arrival_s=runtime.client_task_s + runtime.graph_task_s,
            task_s=runtime.of_message("task-finished"),
            round_trip_s=profile.round_trip_s if has_costs else 0.0,
            worker_s=runtime.worker_task_s,
            memory_nbytes=[worker.memory_nbytes for worker in workers],
        )
