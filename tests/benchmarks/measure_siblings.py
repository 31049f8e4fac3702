"""Bytes that move, and durations, with and without siblings: `python measure_siblings.py`.

Stock Dask, the plugin without siblings, and the plugin run the same programs in turn, each on four processes
of its own. Bundles are off: tasks of 50 ms would be single anyway, once their durations are known.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from statistics import median
from typing import Any

import dask
import dask.array as da
import numpy as np
from distributed import Client, LocalCluster

import ferroflow_dask

ROUNDS = 3
#: Features that are off, by side; None for stock Dask.
SIDES: Mapping[str, list[str] | None] = {
    "stock": None,
    "without": ["bundles", "siblings"],
    "siblings": ["bundles"],
}


def slow(values: Any) -> Any:
    """Return the values after 50 ms."""
    time.sleep(0.05)
    return values


def rows(i: int) -> Any:
    """Return 4 MB after 50 ms."""
    return slow(np.full(500_000, float(i)))


def merged_blocks() -> Any:
    """Return the sum over blocks, each of which is made of 16 slow ones."""
    blocks = da.random.random((6000, 6000), chunks=300).map_blocks(slow, dtype=float)
    return blocks.rechunk(1200).map_blocks(lambda block: block.sum(keepdims=True)).sum()


def tree_of_sums() -> Any:
    """Return the sum of 256 slow arrays, eight at a time."""
    parts = [dask.delayed(rows)(i) for i in range(256)]
    while len(parts) > 1:
        parts = [dask.delayed(sum)(parts[i : i + 8]) for i in range(0, len(parts), 8)]
    return parts[0].sum()


PROGRAMS: tuple[Callable[[], Any], ...] = (merged_blocks, tree_of_sums)


def moved(client: Client) -> int:
    """Return the bytes that workers have sent to each other so far."""
    sent = client.run(lambda dask_worker: dask_worker.transfer_outgoing_bytes_total)
    return sum(sent.values())


def main() -> None:
    """Print the medians, after one run that does not count."""
    with ExitStack() as stack:
        clients = {}
        for side, without in SIDES.items():
            cluster = LocalCluster(
                4, threads_per_worker=1, dashboard_address=":0", silence_logs=logging.ERROR
            )
            stack.enter_context(cluster)
            clients[side] = stack.enter_context(Client(cluster, set_as_default=False))
            if without is not None:
                ferroflow_dask.install(clients[side], without=without)
        for program in PROGRAMS:
            found: dict[str, list[tuple[float, int]]] = defaultdict(list)
            for _ in range(1 + ROUNDS):
                for side, client in clients.items():
                    before, started = moved(client), time.perf_counter()
                    client.compute(program()).result()
                    found[side].append((time.perf_counter() - started, moved(client) - before))
            for side, runs in found.items():
                seconds, nbytes = (median(each) for each in zip(*runs[1:], strict=True))
                print(f"{program.__name__:15} {side:10} {seconds:5.2f} s {nbytes / 1e6:6.0f} MB", flush=True)


if __name__ == "__main__":
    main()
