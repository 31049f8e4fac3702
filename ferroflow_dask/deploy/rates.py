"""What workers do, and the ways between them: measured on some of them, for all.

Workers of one kind need not be alike: nodes differ, and some have more beside the cluster to do. So several
are measured, of as many hosts as there are. Those of one host come one after another, since they share it,
and share the repetitions that a single one would have.
"""

from __future__ import annotations

import math
import statistics
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice, zip_longest

import numpy as np
from distributed import Client, get_worker, wait

from ferroflow_dask.clients import workers_of
from ferroflow_dask.lowering import device_here

#: Of workers by address: numbers by name, [FLOP/s] and [B/s].
Rates = Mapping[str, Mapping[str, float]]
#: Measures on a worker, so many times; None if the worker lacks what is measured.
Measure = Callable[[int], Mapping[str, float] | None]

#: Names of tasks: nothing that Dask learns of them is taken for another's.
_PREFIX = "ferroflow-calibrate"
#: Workers of a kind that are measured.
_MOST_WORKERS = 4
#: How often something is measured on the workers of a host together, and at least on each: the first time
#: opens what the second finds open.
_REPETITIONS, _FEWEST_REPETITIONS = 4, 2
_TRANSFERS, _TRANSFER_NBYTES = 3, 2**23
_MATRIX = 384
#: What fills a GPU.
_LARGE = 1024
_COPY_NBYTES = 2**25
#: What is copied on a device: far more than its caches hold, but no large part of its memory [B].
_DEVICE_COPY_NBYTES, _DEVICE_COPY_SHARE = 2**29, 1 / 16
#: How long a transfer may take until it is asked whether its workers are still there [s].
_PATIENCE_S = 1.0
#: Where workers share a process nothing is sent [B/s].
FASTEST = 1e12


def task_name() -> str:
    """Return a name for tasks of a calibration."""
    return f"{_PREFIX}-{uuid.uuid4().hex}"


def at_least(least: float, value: float) -> float:
    """Return a measured difference, or the least that it can be where noise is larger than it."""
    return value if math.isfinite(value) and value > least else least


def hosts_of(client: Client) -> dict[str, str]:
    """Return the host of each worker, by address."""
    return {address: worker["host"] for address, worker in workers_of(client).items()}


def spread(hosts: Mapping[str, str], n: int = _MOST_WORKERS) -> list[list[str]]:
    """Return `n` workers, or all of fewer, of as many hosts as there are.

    They come in rounds; the workers of a round are all of different hosts.

    Examples
    --------
    >>> spread({"a": "one", "b": "one", "c": "one", "d": "other"}, 3)
    [['a', 'd'], ['b']]
    """
    by_host: dict[str, list[str]] = {}
    for address, host in hosts.items():
        by_host.setdefault(host, []).append(address)
    rounds = [[address for address in several if address] for several in zip_longest(*by_host.values())]
    chosen = set(islice(chain.from_iterable(rounds), n))
    return [kept for several in rounds if (kept := [address for address in several if address in chosen])]


def measure_rates(
    client: Client, measure: Measure, hosts: Mapping[str, str], *, opens: bool = False
) -> Rates:
    """Measure on some workers.

    Parameters
    ----------
    client : distributed.Client
    measure : callable
    hosts : mapping of str to str
        Of the workers to choose from, by address; others are measured where these leave meanwhile.
    opens : bool, optional
        Measure once on all of them at the same time before: what takes long to open is opened together.
    """
    rounds = spread(hosts)
    if opens:
        _measure_on(client, measure, 1, [address for several in rounds for address in several])
    repetitions = max(_FEWEST_REPETITIONS, math.ceil(_REPETITIONS / max(1, len(rounds))))
    found: dict[str, Mapping[str, float]] = {}
    for several in rounds:
        found.update(_measure_on(client, measure, repetitions, several))
    return found


def _measure_on(client: Client, measure: Measure, repetitions: int, workers: Sequence[str]) -> Rates:
    futures = [
        client.submit(
            _measure_here,
            measure,
            repetitions,
            key=task_name(),
            workers=[address],
            allow_other_workers=True,
        )
        for address in workers
    ]
    return {address: rates for address, rates in client.gather(futures) if rates is not None}


def _measure_here(measure: Measure, repetitions: int) -> tuple[str, Mapping[str, float] | None]:
    return get_worker().address, measure(repetitions)


def medians(rates: Rates) -> dict[str, float]:
    """Return the median of each rate over the workers; none if there are none."""
    names = dict.fromkeys(name for of_one in rates.values() for name in of_one)
    return {name: statistics.median(of_one[name] for of_one in rates.values()) for name in names}


def bandwidths(client: Client, submit_s: float) -> dict[str, float]:
    """Return what gets from one worker to another [B/s]: ``"on one host"`` and ``"between hosts"``.

    What there are no two workers for is left out.

    Parameters
    ----------
    client : distributed.Client
    submit_s : float
        From the submission of a task that does nothing to its result [s].
    """
    hosts = hosts_of(client)
    return {
        where: _bandwidth(client, is_one_host, submit_s)
        for where, is_one_host in (("on one host", True), ("between hosts", False))
        if _pair(hosts, is_one_host)
    }


def _pair(hosts: Mapping[str, str], is_one_host: bool) -> tuple[str, str] | None:
    """Return two workers of one host, or of two; O(workers)."""
    firsts: dict[str, str] = {}
    for address, host in hosts.items():
        first = firsts.setdefault(host if is_one_host else "", address)
        if address != first and (hosts[first] == host) == is_one_host:
            return first, address
    return None


def _bandwidth(client: Client, is_one_host: bool, submit_s: float) -> float:
    def transfer_s() -> float:
        pair = _pair(hosts_of(client), is_one_host)
        if pair is None:
            return 0.0
        source, target = pair
        data = client.submit(
            np.ones, _TRANSFER_NBYTES // 8, key=task_name(), workers=[source], allow_other_workers=True
        )
        wait(data)
        start = time.perf_counter()
        # By the other only: whoever has the data would take this as well.
        size = client.submit(np.size, data, key=task_name(), workers=[target])
        while True:
            with suppress(TimeoutError):
                size.result(timeout=_PATIENCE_S)
                return time.perf_counter() - start - submit_s
            if target not in client.nthreads():
                return transfer_s()  # between those that are there now

    middle_s = statistics.median(transfer_s() for _ in range(_TRANSFERS))
    return min(FASTEST, _TRANSFER_NBYTES / at_least(_TRANSFER_NBYTES / FASTEST, middle_s))


def thread_rates(repetitions: int) -> dict[str, float]:
    """Return what a thread of this process does [FLOP/s], [B/s]: the best of several times."""
    matrix = np.random.default_rng(0).standard_normal((_MATRIX, _MATRIX), dtype=np.float32)
    data = np.ones(_COPY_NBYTES // 8)

    def best_s(call: Callable[[], object]) -> float:
        spent = []
        for _ in range(repetitions):
            start = time.perf_counter()
            call()
            spent.append(time.perf_counter() - start)
        return min(spent)

    product_s, copy_s = best_s(lambda: matrix @ matrix), best_s(data.copy)
    # A copy reads and writes.
    return {"flop_rate": 2 * _MATRIX**3 / product_s, "memory_bandwidth": 2 * _COPY_NBYTES / copy_s}


def device_rates(repetitions: int) -> dict[str, float] | None:
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
            for _ in range(repetitions):
                start = device.record()
                kept = call()
                end = device.record()
                end.synchronize()
                spent.append(device.elapsed_s(start, end))
                del kept
            return min(spent)

        product_s, copy_s = best_s(lambda: device.product(matrix, matrix)), best_s(data.copy)
    return {"gpu_flop_rate": 2 * _LARGE**3 / product_s, "gpu_memory_bandwidth": 2 * nbytes / copy_s}
