"""Measure what a cluster is like, and keep it for the next time.

A calibration takes a second or so: a few hundred tasks that do nothing, a transfer between two workers, a
matrix product and a copy.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import operator
import os
import platform
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import Client, wait

from ferroflow_dask.cost import ClusterProfile
from ferroflow_dask.devices import attached
from ferroflow_dask.exceptions import ClusterError, UsageError
from ferroflow_dask.lowering import device_here
from ferroflow_dask.lowering.clients import ask_workers, check_synchronous
from ferroflow_dask.plugin import check_workers, gpu_workers, installed, workers_of
from ferroflow_dask.whole_files import write_text

if TYPE_CHECKING:
    from distributed import Worker

#: Names of tasks: nothing that Dask learns of them is taken for another's.
_PREFIX = "ferroflow-calibrate"
_REPETITIONS = 3
_CHAIN = 20
_TASKS_PER_THREAD, _FEWEST_TASKS, _MOST_TASKS = 20, 100, 1000
_TRANSFER_NBYTES = 2**23
_MATRIX = 384
#: What fills a GPU.
_LARGE = 1024
_COPY_NBYTES = 2**25
#: What is copied on a device: far more than its caches hold, but no large part of its memory [B].
_DEVICE_COPY_NBYTES, _DEVICE_COPY_SHARE = 2**29, 1 / 16
#: Kinds of ops whose durations are kept for a cluster.
_KEPT_KINDS = 10_000
#: Clusters that something is kept of, the last ones.
_KEPT_CLUSTERS = 32
#: How long a transfer may take until it is asked whether its workers are still there [s].
_PATIENCE_S = 1.0
#: Where workers share a process nothing is sent [B/s].
_FASTEST = 1e12


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
    >>> client.compute(bind(model, {"x": x}, profile=profile)).result()  # doctest: +SKIP
    """
    check_synchronous(client, "calibrate")
    with client.as_current():
        return _calibrate(client)


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


def _calibrate(client: Client) -> ClusterProfile:
    check_workers(client)
    gpus = list(_devices(client))
    n_threads_of = client.nthreads()
    threads = {address: n_threads_of[address] for address in (*gpus, *(set(n_threads_of) - set(gpus)))}
    if not threads:
        raise ClusterError("there are no workers to measure; start some and calibrate again")
    n_threads = sum(threads.values())
    _graph_s(client, _independent(2 * n_threads))  # opens connections, imports
    submit_s = _median(lambda: _graph_s(client, _independent(1)))
    chain_s = _median(lambda: _graph_s(client, _chain(_CHAIN)))
    n_tasks = min(max(_FEWEST_TASKS, _TASKS_PER_THREAD * n_threads), _MOST_TASKS)
    many_s = _median(lambda: _graph_s(client, _independent(n_tasks)))
    limits = [worker["memory_limit"] for worker in workers_of(client).values()]
    others_than_gpus = [address for address in threads if address not in gpus]
    # Wherever they are computed if those workers leave meanwhile.
    flop_rate, memory_bandwidth = client.submit(
        _rates, key=_name(), workers=others_than_gpus or gpus, allow_other_workers=True
    ).result()
    on_gpu = (
        client.submit(_device_rates, key=_name(), workers=gpus, allow_other_workers=True).result()
        if gpus
        else None
    )
    return ClusterProfile(
        threads=tuple(threads.values()),
        task_s=_at_least(1e-5, (many_s - submit_s) / (n_tasks - 1)),
        round_trip_s=_at_least(1e-5, (chain_s - submit_s) / (_CHAIN - 1)),
        submit_s=submit_s,
        bandwidth=_bandwidth(client, submit_s),
        memory_nbytes=min(filter(None, limits), default=0),  # 0: no limit
        flop_rate=flop_rate,
        memory_bandwidth=memory_bandwidth,
        n_gpus=len(gpus),
        **(on_gpu or {}),
    )


def profile_of(client: Client) -> tuple[ClusterProfile, bool | None]:
    """Return the profile of a cluster, and whether it was kept; None if it had not to be measured."""
    kept = load_profile(client)
    if kept is not None:
        return kept, None
    profile = calibrate(client)
    return profile, save_profile(client, profile)


def load_profile(client: Client) -> ClusterProfile | None:
    """Return what was kept of a cluster like this one, None if nothing was."""
    entry = _read(profiles_file()).get(_identity(client))
    if entry is None:
        return None
    try:
        return ClusterProfile.from_dict(entry)
    except (KeyError, TypeError, UsageError):
        return None  # of another version


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
    except (OSError, ValueError):
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


def _name() -> str:
    return f"{_PREFIX}-{uuid.uuid4().hex}"


def _independent(n: int) -> dict[Any, Any]:
    name = _name()
    return {(name, i): (operator.neg, i) for i in range(n)}


def _chain(n: int) -> dict[Any, Any]:
    name = _name()
    return {(name, i): (operator.neg, (name, i - 1) if i else 0) for i in range(n)}


def _graph_s(client: Client, dsk: dict[Any, Any]) -> float:
    keys = list(dsk)
    start = time.perf_counter()
    futures = client.get(dsk, keys, sync=False)
    wait(futures)
    return time.perf_counter() - start


def _median(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(_REPETITIONS))


def _at_least(least: float, value: float) -> float:
    return value if math.isfinite(value) and value > least else least


def _bandwidth(client: Client, submit_s: float) -> float:
    def transfer_s() -> float:
        source, *others = client.nthreads()
        if not others:
            return 0.0
        data = client.submit(
            np.ones, _TRANSFER_NBYTES // 8, key=_name(), workers=[source], allow_other_workers=True
        )
        wait(data)
        start = time.perf_counter()
        # By others only: whoever has the data would take this as well.
        size = client.submit(np.size, data, key=_name(), workers=others)
        while True:
            with suppress(TimeoutError):
                size.result(timeout=_PATIENCE_S)
                return time.perf_counter() - start - submit_s
            if client.nthreads().keys().isdisjoint(others):
                return transfer_s()  # between those that are there now

    return min(_FASTEST, _TRANSFER_NBYTES / _at_least(_TRANSFER_NBYTES / _FASTEST, _median(transfer_s)))


def _device_rates() -> dict[str, float] | None:
    """Return what this worker's device does [FLOP/s], [B/s]; None if it has none."""
    runner = device_here()
    if runner is None:
        return None
    device = runner.device
    with device.use():
        matrix = device.to_device(
            np.random.default_rng(0).standard_normal((_LARGE, _LARGE), dtype=np.float32)
        )
        nbytes = min(_DEVICE_COPY_NBYTES, int(_DEVICE_COPY_SHARE * device.total_nbytes()))
        data = np.full_like(device.to_device(np.ones(1)), 1, shape=(nbytes // 8,))

        def best_s(call: Callable[[], object]) -> float:
            spent = []
            for _ in range(_REPETITIONS + 1):
                start = device.record()
                kept = call()
                end = device.record()
                end.synchronize()
                spent.append(device.elapsed_s(start, end))
                del kept
            return min(spent)

        product_s, copy_s = best_s(lambda: device.product(matrix, matrix)), best_s(data.copy)
    return {"gpu_flop_rate": 2 * _LARGE**3 / product_s, "gpu_memory_bandwidth": 2 * nbytes / copy_s}


def _rates() -> tuple[float, float]:
    matrix = np.random.default_rng(0).standard_normal((_MATRIX, _MATRIX), dtype=np.float32)
    data = np.ones(_COPY_NBYTES // 8)

    def best_s(call: Callable[[], object]) -> float:
        spent = []
        for _ in range(_REPETITIONS + 1):
            start = time.perf_counter()
            call()
            spent.append(time.perf_counter() - start)
        return min(spent)

    product_s, copy_s = best_s(lambda: matrix @ matrix), best_s(data.copy)
    # A copy reads and writes.
    return 2 * _MATRIX**3 / product_s, 2 * _COPY_NBYTES / copy_s
