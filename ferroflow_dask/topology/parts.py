"""Parts of a topology: workers, hosts, racks, sites, links and the runtime's own costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

from ferroflow_dask.exceptions import TopologyError

#: Most workers and most hosts of a topology: a larger number is more likely a mistake.
MOST = 100_000
#: Of a disk that was not measured: Dask assumes 100 MB/s of a network, and disks are a little faster [B/s].
DISK_BANDWIDTH = 2e8


@dataclass(frozen=True, slots=True)
class Link:
    """A link in one direction; there is a second one like it in the other direction.

    Parameters
    ----------
    latency_s : float
        Of a message or a transfer [s].
    bandwidth : float
        Shared by the transfers that use it at the same time [B/s].
    """

    latency_s: float
    bandwidth: float

    def __post_init__(self) -> None:
        check(self, amounts=("latency_s",), rates=("bandwidth",))


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker process.

    Parameters
    ----------
    threads : int, optional
    kind : str, optional
        `cpu`, `gpu` or any other name.
    speed : float, optional
        How many times faster than declared it runs tasks.
    memory_nbytes : int, optional
        [B]; 0 if there is no limit.
    disk_bandwidth : float, optional
        Of what it spills to disk and reads again [B/s].
    """

    threads: int = 1
    kind: str = "cpu"
    speed: float = 1.0
    memory_nbytes: int = 0
    disk_bandwidth: float = DISK_BANDWIDTH

    def __post_init__(self) -> None:
        check(self, counts=("threads",), amounts=("memory_nbytes",), rates=("speed", "disk_bandwidth"))


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, whose processes share its cores.

    Parameters
    ----------
    name : str
    cores : float
        Infinite if the processes never wait for a core.
    workers : tuple of Worker, optional
    rack : str, optional
        Name of its rack; empty if it is connected to the network directly.
    link : Link, optional
        To its rack or the network. Without one, other hosts cannot reach it.
    inside : Link, optional
        Between the processes of the host. The two directions share it.
    """

    name: str
    cores: float = math.inf
    workers: tuple[Worker, ...] = ()
    rack: str = ""
    link: Link | None = None
    inside: Link = field(default_factory=lambda: Link(1e-5, 1e10))

    def __post_init__(self) -> None:
        if not (self.cores > 0):
            raise TopologyError(f"cores of host {self.name!r} must be above 0, got {self.cores!r}")


@dataclass(frozen=True, slots=True)
class Group:
    """A rack or a site.

    Parameters
    ----------
    name : str
    inside : str, optional
        Name of the site that a rack is in; empty if it is connected to the network directly.
    link : Link, optional
        To the site or the network. Without one, hosts elsewhere cannot be reached.
    """

    name: str
    inside: str = ""
    link: Link | None = None


#: Time of the scheduler by message from a worker [s]; `other` for those that are not listed.
_MESSAGE_S: Mapping[str, float] = MappingProxyType({"task-finished": 2e-4, "add-keys": 5e-5, "other": 2e-5})


@dataclass(frozen=True, slots=True)
class Runtime:
    """The costs of Dask itself, as processor time of its processes.

    Parameters
    ----------
    submit_s : float, optional
        Of the client for a graph, however small [s].
    client_task_s : float, optional
        Of the client to send one task [s].
    graph_task_s : float, optional
        Of the scheduler for a task of a graph that arrives [s].
    message_s : mapping of str to float, optional
        Of the scheduler for a message of a worker, by the message's `op` [s]; `other` for all others.
    worker_task_s : float, optional
        Of a worker to start a task and to report its end [s].
    fetch_s : float, optional
        Of a worker to fetch results from another one, however small [s].
    plugin_task_s : float, optional
        Of the scheduler, in addition, for a task that ends if ferroflow's plugin schedules [s].
    to_workers_s, to_scheduler_s : float, optional
        Least time between two batches of messages [s].
    noise : float, optional
        Relative standard deviation of durations and costs from run to run, from 0 to 1.
    """

    submit_s: float = 5e-3
    client_task_s: float = 1e-4
    graph_task_s: float = 1e-4
    message_s: Mapping[str, float] = field(default_factory=lambda: _MESSAGE_S)
    worker_task_s: float = 2e-4
    fetch_s: float = 2e-3
    plugin_task_s: float = 5e-5
    to_workers_s: float = 5e-3
    to_scheduler_s: float = 2e-3
    noise: float = 0.1

    def __post_init__(self) -> None:
        names = (
            "submit_s",
            "client_task_s",
            "graph_task_s",
            "worker_task_s",
            "fetch_s",
            "plugin_task_s",
            "to_workers_s",
            "to_scheduler_s",
        )
        check(self, amounts=(*names, "noise"))
        if self.noise >= 1:
            raise TopologyError(f"noise must be less than 1, got {self.noise!r}")
        for op, seconds in self.message_s.items():
            if not _is_amount(seconds):
                raise TopologyError(
                    f"message_s of {op!r} must be a finite number, at least 0, got {seconds!r}"
                )

    @classmethod
    def without_costs(cls) -> Runtime:
        """Return the runtime that FlexFlow assumes: it takes no time."""
        return cls(0.0, 0.0, 0.0, {}, 0.0, 0.0, 0.0, 0.0, 0.0)

    def of_message(self, op: str) -> float:
        """Return the scheduler's time for a message of a worker [s]."""
        return self.message_s.get(op, self.message_s.get("other", 0.0))

    @property
    def task_s(self) -> float:
        """Time of the scheduler for a task in all [s]: no run is faster than its tasks times this."""
        return self.graph_task_s + self.of_message("task-finished")

    def as_dict(self) -> dict[str, Any]:
        """Return the costs by name."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {**values, "message_s": dict(self.message_s)}


def check(
    part: object, counts: tuple[str, ...] = (), amounts: tuple[str, ...] = (), rates: tuple[str, ...] = ()
) -> None:
    """Raise `TopologyError` unless some numbers of a part are allowed."""
    what = type(part).__name__.lower()
    for name in counts:
        value = getattr(part, name)
        if not _is_number(Integral, value) or not 1 <= value <= MOST:
            raise TopologyError(
                f"{name} of a {what} must be a whole number from 1 to {MOST:,}, got {value!r}"
            )
    for name in amounts:
        if not _is_amount(getattr(part, name)):
            value = getattr(part, name)
            raise TopologyError(f"{name} of a {what} must be a finite number, at least 0, got {value!r}")
    for name in rates:
        value = getattr(part, name)
        if not _is_number(Real, value) or not 0 < value < math.inf:
            raise TopologyError(f"{name} of a {what} must be a finite number above 0, got {value!r}")


def _is_amount(value: Any) -> bool:
    return _is_number(Real, value) and 0 <= value < math.inf


def _is_number(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
