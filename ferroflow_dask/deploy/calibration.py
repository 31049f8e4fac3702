"""Measure what a cluster is like, and keep it for the next time.

A calibration takes a second or so: a few hundred tasks that do nothing, transfers between two workers of one
host and of two, and matrix products and copies on some workers.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import operator
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from ipaddress import ip_address
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import Client, Future, wait

from ferroflow_dask.clients import ask_workers, check_synchronous, workers_of
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.deploy.rates import (
    FASTEST,
    Rates,
    at_least,
    bandwidths,
    device_rates,
    measure_rates,
    medians,
    spread,
    task_name,
    thread_rates,
)
from ferroflow_dask.devices import attached
from ferroflow_dask.devices.workers import gpu_workers
from ferroflow_dask.exceptions import ClusterError, UsageError
from ferroflow_dask.scheduler import check_workers, installed
from ferroflow_dask.whole_files import write_text

if TYPE_CHECKING:
    from distributed import Worker

_REPETITIONS = 3
#: Calibrations, if other programs on the machine make the first ones implausible.
_TRIES = 3
_CHAIN = 20
_TASKS_PER_THREAD, _FEWEST_TASKS, _MOST_TASKS = 20, 100, 1000
#: What differences of times are at least [s]: nothing is as fast.
_LEAST_S = 1e-5
#: Measurements of a calibration.
N_STEPS = 7
#: Kinds of ops whose durations are kept for a cluster.
_KEPT_KINDS = 10_000
#: Clusters that something is kept of, the last ones.
_KEPT_CLUSTERS = 32


def calibrate(client: Client) -> ClusterProfile:
    """Measure a cluster as it is now, idle, so that graphs can be cut for it.

    Parameters
    ----------
    client : distributed.Client
        Synchronous.

    Raises
    ------
    ClusterError
        It has no workers, or some of them lack this package.
    UsageError
        The client is asynchronous.

    Examples
    --------
    >>> profile = calibrate(client)  # doctest: +SKIP
    >>> client.compute(model.bind(x=x, profile=profile)).result()  # doctest: +SKIP
    """
    return calibration_of(client).profile


@dataclass(frozen=True, slots=True)
class Calibration:
    """A profile, and what those of its numbers are made of that are not the same everywhere.

    Parameters
    ----------
    profile : ClusterProfile
    hosts : mapping of str to str
        Of all workers, by address.
    rates, gpu_rates : mapping of str to mapping of str to float
        What was measured on workers, by address and by the name that its median has in the profile; of
        those with GPUs what these do.
    bandwidths : mapping of str to float
        Between workers, by where these are [B/s]; the least is the profile's.
    """

    profile: ClusterProfile
    hosts: Mapping[str, str]
    rates: Rates
    gpu_rates: Rates
    bandwidths: Mapping[str, float]


def calibration_of(client: Client, on_step: Callable[[int], object] = lambda _: None) -> Calibration:
    """Measure a cluster as `calibrate` does, and return besides what its numbers are made of.

    Parameters
    ----------
    client : distributed.Client
    on_step : callable, optional
        Called with the number of measurements that are made, up to `N_STEPS`.
    """
    check_synchronous(client, "calibrate")
    with client.as_current():
        return _calibrate(client, on_step)


def count_gpus(client: Client) -> int:
    """Return how many workers have GPUs that they use."""
    return len(_devices(client))


def _devices(client: Client) -> dict[str, str]:
    """Return the workers that have devices, and in which precision these multiply."""
    gpus = gpu_workers(client)
    modes = ask_workers(client, _device_mode, workers=gpus) if gpus else {}
    return {address: mode for address, mode in modes.items() if mode is not None}


def _device_mode(dask_worker: Worker) -> str | None:
    runner = attached(dask_worker.id)
    return None if runner is None else runner.device.mode


def _calibrate(client: Client, on_step: Callable[[int], object]) -> Calibration:
    check_workers(client)
    gpus = list(_devices(client))
    workers = workers_of(client)
    if not workers:
        raise ClusterError("there are no workers to measure; start some and calibrate again")
    hosts = {address: worker["host"] for address, worker in workers.items()}
    on_gpus = {address: hosts[address] for address in gpus if address in hosts}
    on_cpus = {address: host for address, host in hosts.items() if address not in on_gpus} or hosts
    threads = tuple(workers[address]["nthreads"] for address in {**on_gpus, **hosts})
    _graph_s(client, _independent(2 * sum(threads)))  # opens connections, imports
    on_step(1)
    submit_s = _median(lambda: _graph_s(client, _independent(1)))
    on_step(2)
    chain_s = _chain_s(client, on_cpus)
    on_step(3)
    n_tasks = min(max(_FEWEST_TASKS, _TASKS_PER_THREAD * sum(threads)), _MOST_TASKS)
    many_s = _median(lambda: _graph_s(client, _independent(n_tasks)))
    on_step(4)
    limits = [worker["memory_limit"] for worker in workers.values()]
    rates = measure_rates(client, thread_rates, on_cpus)
    on_step(5)
    gpu_rates = measure_rates(client, device_rates, on_gpus, opens=True)
    on_step(6)
    ways = bandwidths(client, submit_s)
    on_step(N_STEPS)
    profile = ClusterProfile(
        threads=threads,
        task_s=at_least(_LEAST_S, (many_s - submit_s) / (n_tasks - 1)),
        round_trip_s=at_least(_LEAST_S, (chain_s - submit_s) / (_CHAIN - 1)),
        submit_s=submit_s,
        bandwidth=min(ways.values(), default=FASTEST),
        memory_nbytes=min(filter(None, limits), default=0),  # 0: no limit
        cores=0,  # costs are given as they were measured
        n_gpus=len(on_gpus),
        **medians(rates),
        **medians(gpu_rates),
    )
    return Calibration(profile, hosts, rates, gpu_rates, ways)


def _chain_s(client: Client, hosts: Mapping[str, str]) -> float:
    """Return what a chain of tasks takes, as median over workers that it is made to run on [s]."""
    workers = [address for several in spread(hosts) for address in several]
    spent = []
    for address in islice(cycle(workers), max(_REPETITIONS, len(workers))):
        # Only what it starts from is bound to a worker: restrictions would make the tasks others.
        root = client.submit(int, 0, key=task_name(), workers=[address], allow_other_workers=True)
        wait(root)
        spent.append(_graph_s(client, _chain(_CHAIN, root)))
    return statistics.median(spent)


def profile_of(client: Client) -> tuple[ClusterProfile, bool | None]:
    """Return the profile of a cluster, and whether it was kept; None if it was not measured.

    It is not where a profile was kept, and neither while the cluster is busy: then it is a typical one.
    """
    kept = load_profile(client)
    if kept is not None:
        return kept, None
    for _ in range(_TRIES):
        if _is_busy(client):
            break
        profile = calibrate(client)
        if _is_plausible(profile) and not _is_busy(client):
            return profile, save_profile(client, profile)
    # What is measured beside other work says little of the cluster, and would be kept for good.
    threads = tuple(worker["nthreads"] for worker in workers_of(client).values())
    return ClusterProfile(threads or (1,)), None


def _is_busy(client: Client) -> bool:
    """Return whether a cluster has tasks to run, or nobody to run them."""
    return not client.nthreads() or any(client.processing().values())


def _is_plausible(profile: ClusterProfile) -> bool:
    return min(profile.task_s, profile.round_trip_s) > _LEAST_S


def load_profile(client: Client) -> ClusterProfile | None:
    """Return what was kept of a cluster like this one, None if nothing was."""
    entry = _read(profiles_file()).get(_identity(client))
    if entry is None:
        return None
    try:
        profile = ClusterProfile.from_dict(entry)
    except (KeyError, TypeError, UsageError):
        return None  # of another version
    return profile if _is_plausible(profile) else None


def save_profile(client: Client, profile: ClusterProfile) -> bool:
    """Keep a profile for clusters like this one; return whether it could be written."""
    return _keep(profiles_file(), _identity(client), profile.as_dict())


def load_durations(client: Client, kind: str = "") -> dict[str, float]:
    """Return how long kinds of ops have taken on clusters like this one, as `MeasuredCost` takes it [s].

    Those on workers of a kind, if one is named.
    """
    entry = _read(_durations_file()).get(_identity(client) + kind)
    known = entry.items() if isinstance(entry, dict) else ()
    return {kind: seconds for kind, seconds in known if isinstance(seconds, float) and seconds >= 0}


def save_durations(client: Client, durations_s: Mapping[str, float], kind: str = "") -> None:
    """Keep how long kinds of ops have taken, the last ones of too many [s]."""
    last = dict(list(durations_s.items())[-_KEPT_KINDS:])
    _keep(_durations_file(), _identity(client) + kind, last)


def profiles_file() -> Path:
    """Return where profiles are kept: `ferroflow-dask/profiles.json` in the user's cache.

    The path begins with `~` where the user has no home folder; nothing is kept there.
    """
    # Path.home() would raise.
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "ferroflow-dask" / "profiles.json"


def topology_file() -> Path:
    """Return where the topology of the last calibration is kept."""
    return profiles_file().with_name("topology.yaml")


def _durations_file() -> Path:
    return profiles_file().with_name("durations.json")


def _keep(path: Path, identity: str, entry: Mapping[str, Any]) -> bool:
    if path.parts[0] == "~":
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            others = {known: of_it for known, of_it in _read(path).items() if known != identity}
            last = list({**others, identity: entry}.items())[-_KEPT_CLUSTERS:]
            write_text(path, json.dumps(dict(last), indent=1))
    except OSError:
        return False
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Be alone with what lies beside a file, which cannot be locked itself, as it is replaced."""
    with path.open("a") as file:
        with suppress(OSError):  # a file system that has no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> dict[str, Any]:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _identity(client: Client) -> str:
    """Return what clusters with the same profile have in common; of SLURM jobs no two have an address."""
    devices = _devices(client)
    workers = workers_of(client)
    counts = Counter(
        (
            address.partition("://")[0],
            worker["nthreads"],
            worker["memory_limit"],
            *([devices[address]] if address in devices else ()),
        )
        for address, worker in workers.items()
    )
    # The same address on each machine, and one cache for all where they share home folders.
    is_here = any(map(_is_local, workers, (worker["host"] for worker in workers.values())))
    machine = platform.node() if is_here else None
    told = repr((sorted(counts.items()), machine, version("distributed"), installed(client) is not None))
    return hashlib.blake2s(told.encode(), digest_size=16).hexdigest()


def _is_local(address: str, host: str) -> bool:
    """Return whether an address is of no use to other machines."""
    if address.startswith("inproc://"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _independent(n: int) -> dict[Any, Any]:
    name = task_name()
    return {(name, i): (operator.neg, i) for i in range(n)}


def _chain(n: int, root: Future[int]) -> dict[Any, Any]:
    name = task_name()
    return {(name, i): (operator.neg, (name, i - 1) if i else root) for i in range(n)}


def _graph_s(client: Client, dsk: dict[Any, Any]) -> float:
    keys = list(dsk)
    start = time.perf_counter()
    futures = client.get(dsk, keys, sync=False)
    wait(futures)
    return time.perf_counter() - start


def _median(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(_REPETITIONS))
