"""Topology: hosts with workers, and the routes between them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, count, cycle, islice
from typing import Any, NamedTuple

from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.exceptions import TopologyError
from ferroflow_dask.topology.parts import MOST, Group, Host, Link, Runtime, Worker

#: The place that all sites, racks without a site and hosts without a rack are connected to.
_NETWORK = "network"


@dataclass(frozen=True, slots=True)
class Route:
    """The way from a worker to another one.

    Parameters
    ----------
    links : tuple of int
        Numbers of the links on the way, in `Topology.bandwidths`.
    latency_s : float
        Of all of them [s].
    bandwidth : float
        Of the slowest [B/s].
    """

    links: tuple[int, ...]
    latency_s: float
    bandwidth: float


class _Step(NamedTuple):
    """A link on the way of a host to the network: its number, and the place that it leads to."""

    number: int
    link: Link
    to: str


@dataclass(frozen=True)
class Topology:
    """A cluster: its hosts, the links between them, and the costs of Dask on it.

    Parameters
    ----------
    hosts : sequence of Host
    racks, sites : sequence of Group, optional
    scheduler, client : str, optional
        Names of the hosts on which they run; the first host if left out.
    runtime : Runtime, optional
    name : str, optional

    Raises
    ------
    TopologyError
        There are no workers, a name is unknown or used twice, or two hosts have no route to each other.

    Examples
    --------
    >>> pair = [Host(name, 2, (Worker(2),), link=Link(1e-4, 1e9)) for name in ("a", "b")]
    >>> Topology(pair).route(0, 1).bandwidth
    1000000000.0
    """

    hosts: Sequence[Host]
    racks: Sequence[Group] = ()
    sites: Sequence[Group] = ()
    scheduler: str = ""
    client: str = ""
    runtime: Runtime = field(default_factory=Runtime)
    name: str = ""
    #: Of each link [B/s]: the inside, the way out and the way in of each host; then those of racks and sites.
    bandwidths: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _routes: dict[tuple[int, int], Route] = field(init=False, repr=False, compare=False, default_factory=dict)
    _ways: list[list[_Step]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("hosts", "racks", "sites"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.hosts:
            for name in ("scheduler", "client"):
                object.__setattr__(self, name, getattr(self, name) or self.hosts[0].name)
        self._check_names()
        bandwidths = []
        for host in self.hosts:
            out = host.link.bandwidth if host.link is not None else 0.0
            bandwidths += [host.inside.bandwidth, out, out]
        number, links = {}, {}
        for kind, group in self._groups():
            name = f"{kind} {group.name}"
            number[name], links[name] = len(bandwidths), group.link
            bandwidths += [group.link.bandwidth if group.link is not None else 0.0] * 2
        after = {f"rack {rack.name}": f"site {rack.inside}" for rack in self.racks if rack.inside}
        object.__setattr__(self, "bandwidths", tuple(bandwidths))
        ways = []
        for at, host in enumerate(self.hosts):
            way, link, out = [], host.link, 3 * at + 1
            here = f"rack {host.rack}" if host.rack else _NETWORK
            while link is not None:
                way.append(_Step(out, link, here))
                if here == _NETWORK:
                    break
                link, out, here = links[here], number[here], after.get(here, _NETWORK)
            ways.append(way)
        object.__setattr__(self, "_ways", ways)
        self._check_routes()

    def _groups(self) -> list[tuple[str, Group]]:
        return [*(("rack", rack) for rack in self.racks), *(("site", site) for site in self.sites)]

    def _check_names(self) -> None:
        names = [host.name for host in self.hosts]
        for kind, found in (
            ("host", names),
            ("rack", [rack.name for rack in self.racks]),
            ("site", [site.name for site in self.sites]),
        ):
            twice = [name for name, n in Counter(found).items() if n > 1]
            if twice:
                raise TopologyError(f"the name of a {kind} must be used once, got {twice[0]!r} twice")
        if not any(host.workers for host in self.hosts):
            raise TopologyError("a topology must have a worker, got none; add `workers` to a host")
        n_workers = sum(len(host.workers) for host in self.hosts)
        if max(n_workers, len(names)) > MOST:
            raise TopologyError(f"a topology must have at most {MOST:,} hosts and workers, got more")
        for what in ("scheduler", "client"):
            name = getattr(self, what)
            if name not in names:
                raise TopologyError(f"{what} must be the name of a host, got {name!r}; one is {names[0]!r}")
        racks, sites = {rack.name for rack in self.racks}, {site.name for site in self.sites}
        for host in self.hosts:
            if host.rack and host.rack not in racks:
                raise TopologyError(
                    f"rack of host {host.name!r} must be the name of a rack, got {host.rack!r}"
                )
        for rack in self.racks:
            if rack.inside and rack.inside not in sites:
                raise TopologyError(
                    f"site of rack {rack.name!r} must be the name of a site, got {rack.inside!r}"
                )

    def _check_routes(self) -> None:
        """Raise unless the hosts that communicate all reach the same place."""
        names = {self.scheduler, self.client}
        used = [at for at, host in enumerate(self.hosts) if host.workers or host.name in names]
        first = used[0]
        for at in used[1:]:
            if (
                not self._ways[at]
                or not self._ways[first]
                or self._ways[at][-1].to != self._ways[first][-1].to
            ):
                raise self._no_route(first, at)

    def _no_route(self, source: int, destination: int) -> TopologyError:
        a, b = self.hosts[source].name, self.hosts[destination].name
        return TopologyError(
            f"there must be a route between all hosts, got none from {a!r} to {b!r}; "
            "add `link` to the hosts, racks and sites between them"
        )

    # Workers

    @property
    def workers(self) -> list[Worker]:
        """All workers, host by host."""
        return [worker for host in self.hosts for worker in host.workers]

    @property
    def host_of(self) -> list[int]:
        """Number of each worker's host."""
        return [at for at, host in enumerate(self.hosts) for _ in host.workers]

    def host_number(self, name: str) -> int:
        """Return the number of a host."""
        return next(at for at, host in enumerate(self.hosts) if host.name == name)

    def with_workers(self, n: int, per_host: int | None = None) -> Topology:
        """Return the topology with another number of workers.

        The first workers remain. Copies of the hosts are added if there are too few.

        Parameters
        ----------
        n : int
        per_host : int, optional
            Workers of each host; as they are if left out.
        """
        if n < 1 or n > MOST:
            raise TopologyError(f"workers must be a whole number from 1 to {MOST:,}, got {n!r}")
        if per_host is not None and per_host < 1:
            raise TopologyError(f"workers of a host must be at least 1, got {per_host!r}")
        templates = [host for host in self.hosts if host.workers]
        others = [host for host in self.hosts if not host.workers]
        hosts: list[Host] = []
        left = n
        names = {host.name for host in others}
        for turn, host in _rounds(templates):
            of_host = host.workers
            if per_host is not None:
                of_host = tuple(islice(cycle(of_host), per_host))
            name = host.name if not turn else f"{host.name}-copy-{turn}"
            name = next(f"{name}{'+' * i}" for i in count() if f"{name}{'+' * i}" not in names)
            names.add(name)
            hosts.append(replace(host, name=name, workers=of_host[:left]))
            left -= len(of_host)
            if left <= 0:
                break
        kept = {host.name for host in chain(hosts, others)}
        needed = [h for h in self.hosts if h.name in {self.scheduler, self.client} - kept]
        bare = [replace(host, workers=()) for host in needed]
        return replace(self, hosts=[*hosts, *bare, *others])

    # Routes

    def route(self, source: int, destination: int) -> Route:
        """Return the way from a host to a host, by their numbers; remembered."""
        found = self._routes.get((source, destination))
        if found is None:
            found = self._routes[source, destination] = self._route(source, destination)
        return found

    def _route(self, source: int, destination: int) -> Route:
        if source == destination:
            inside = self.hosts[source].inside
            return Route((3 * source,), inside.latency_s, inside.bandwidth)
        up, down = self._ways[source], self._ways[destination]
        common = next((step.to for step in up if any(step.to == other.to for other in down)), None)
        if common is None:
            raise self._no_route(source, destination)
        out, into = _until(common, up), _until(common, down)
        links = [step.link for step in (*out, *into)]
        return Route(
            (*(step.number for step in out), *(step.number + 1 for step in into)),
            sum(link.latency_s for link in links),
            min(link.bandwidth for link in links),
        )

    # As others see it

    def profile(self) -> ClusterProfile:
        """Return the cluster as bundles are cut for it."""
        workers, hosts = self.workers, self.host_of
        scheduler = self.host_number(self.scheduler)
        messages = [self.route(scheduler, at) for at in dict.fromkeys(hosts)]
        latency_s = max(route.latency_s for route in messages)
        first, last = hosts[0], hosts[-1]
        used = self.route(first, last).bandwidth if len(workers) > 1 else self.hosts[first].inside.bandwidth
        limits = [worker.memory_nbytes for worker in workers if worker.memory_nbytes]
        runtime = self.runtime
        return ClusterProfile(
            tuple(worker.threads for worker in workers),
            task_s=max(runtime.task_s, 1e-9),
            round_trip_s=max(
                2 * latency_s + runtime.of_message("task-finished") + runtime.worker_task_s, 1e-9
            ),
            submit_s=max(runtime.submit_s + 2 * latency_s, 1e-9),
            bandwidth=used,
            memory_nbytes=int(min(limits, default=0)),
            n_gpus=sum(worker.kind == "gpu" for worker in workers),
        )

    @classmethod
    def of_profile(
        cls, profile: ClusterProfile, hosts: Sequence[int] | None = None, runtime: Runtime | None = None
    ) -> Topology:
        """Return a topology for a profile.

        Parameters
        ----------
        profile : ClusterProfile
        hosts : sequence of int, optional
            Number of the host of each worker; a host for each if left out.
        runtime : Runtime, optional
            The costs of Dask; from the profile if left out.
        """
        places = list(range(len(profile.threads))) if hosts is None else list(hosts)
        task_s = profile.task_s
        if runtime is None:
            message_s = {"task-finished": task_s / 2, "add-keys": task_s / 8, "other": task_s / 20}
            rest_s = max(profile.round_trip_s - task_s / 2, 0.0)
            runtime = Runtime(
                submit_s=profile.submit_s,
                client_task_s=task_s / 4,
                graph_task_s=task_s / 2,
                message_s=message_s,
                worker_task_s=rest_s / 2,
                fetch_s=profile.round_trip_s,
                plugin_task_s=0.0,
                to_workers_s=0.0,
                to_scheduler_s=0.0,
            )
        handled_s = runtime.of_message("task-finished") + runtime.worker_task_s
        latency_s = max(profile.round_trip_s - handled_s, 0.0) / 2
        by_host: dict[int, list[Worker]] = {}
        for at, threads in zip(places, profile.threads, strict=True):
            kind = "gpu" if sum(map(len, by_host.values())) < profile.n_gpus else "cpu"
            by_host.setdefault(at, []).append(Worker(threads, kind, 1.0, profile.memory_nbytes))
        link = Link(latency_s / 2, profile.bandwidth)
        inside = Link(latency_s, profile.bandwidth)
        found = [Host(f"host-{at}", math.inf, tuple(by_host[at]), "", link, inside) for at in sorted(by_host)]
        return cls(found, runtime=runtime, name="profile")

    def as_dict(self) -> dict[str, Any]:
        """Return the topology as `load_topology` reads it."""
        return {
            "version": 1,
            "name": self.name,
            "hosts": [_host_dict(host) for host in self.hosts],
            "racks": [_group_dict(rack, "site") for rack in self.racks],
            "sites": [_group_dict(site, "") for site in self.sites],
            "scheduler": self.scheduler,
            "client": self.client,
            "runtime": self.runtime.as_dict(),
        }


def _until(place: str, way: Sequence[_Step]) -> list[_Step]:
    """Return the steps of a way up to a place."""
    return list(way[: 1 + next(at for at, step in enumerate(way) if step.to == place)])


def _rounds(hosts: Sequence[Host]) -> Iterator[tuple[int, Host]]:
    return ((turn, host) for turn in count() for host in hosts)


def _link_dict(link: Link) -> Mapping[str, float]:
    return {"latency_s": link.latency_s, "bandwidth": link.bandwidth}


def _host_dict(host: Host) -> dict[str, Any]:
    workers = [asdict(worker) for worker in host.workers]
    found: dict[str, Any] = {"name": host.name, "workers": workers, "inside": _link_dict(host.inside)}
    if host.cores < math.inf:
        found["cores"] = host.cores
    if host.rack:
        found["rack"] = host.rack
    if host.link is not None:
        found["link"] = _link_dict(host.link)
    return found


def _group_dict(group: Group, outer: str) -> dict[str, Any]:
    found: dict[str, Any] = {"name": group.name}
    if group.inside:
        found[outer] = group.inside
    if group.link is not None:
        found["link"] = _link_dict(group.link)
    return found
