"""Growth of memory: `python tests/growth.py tasks 500000`, `mixed 200000`, or `cycles 1000` of installations.

Scheduler, workers and client are in one process. Each variant runs in a process of its own, whose resident
memory is compared before and after the second half of the work. The plugin's growth is that beyond stock's.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import operator
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import numpy as np
from dask import delayed
from distributed import Client, LocalCluster

from ferroflow_dask import install, uninstall

_WAVE = 5000
#: Allowed beyond stock [B].
MOST_OF_TASK, MOST_OF_CYCLE = 20, 5000
#: Logs of limited length are full before the first half ends.
_SETTINGS = {
    "distributed.worker.memory.spill": False,
    "distributed.admin.low-level-log-length": 100,
}
_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")


def resident_nbytes() -> int:
    """Return the memory of this process once what is free has been given back [B]."""
    for _ in range(3):
        gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE_NBYTES


def until_forgotten(client: Client) -> None:
    scheduler: Any = client.cluster.scheduler
    while scheduler.tasks:
        time.sleep(0.005)


def wave(client: Client) -> int:
    """Run equal tasks; return their number."""
    futures = client.map(abs, range(_WAVE), pure=False, batch_size=_WAVE)
    assert sum(client.gather(futures)) == _WAVE * (_WAVE - 1) // 2
    del futures
    until_forgotten(client)
    return _WAVE


def mixed(client: Client) -> int:
    """Run an array, a bag, a tree, tasks that fail and cancelled ones; return the number of tasks."""
    x = da.from_array(np.ones((160, 160)), chunks=(20, 20), name=False)
    bag = db.from_sequence(range(1000), npartitions=50).map(abs).filter(bool).sum()
    leaves = [delayed(abs, pure=False)(i) for i in range(128)]
    while len(leaves) > 1:
        leaves = [delayed(operator.add, pure=False)(*pair) for pair in zip(*[iter(leaves)] * 2, strict=True)]
    graphs = [(x @ x.T).sum(), bag, leaves[0]]
    assert client.gather(client.compute(graphs)) == [160**3, 499_500, 127 * 64]
    failing = client.map(operator.truediv, [1] * 50, [0, *[1] * 49], pure=False)
    assert len(client.gather(failing, errors="skip")) == 49
    cancelled = client.map(time.sleep, [0.01] * 200, pure=False)
    readers = client.map(type, cancelled, pure=False)
    client.gather(readers[:20])
    client.cancel(cancelled[20:])
    n_tasks = sum(len(graph.__dask_graph__()) for graph in graphs) + len(failing) + 2 * len(cancelled)
    del failing, cancelled, readers
    until_forgotten(client)
    return n_tasks


def cycle(client: Client, with_plugin: bool) -> int:
    """Install and uninstall the plugin while a few tasks run."""
    futures = client.map(abs, range(10), pure=False)
    if with_plugin:
        install(client)
    more = client.map(abs, range(10), pure=False)
    if with_plugin:
        uninstall(client)
    client.gather(futures + more)
    return 1


def grown(what: str, n: int, with_plugin: bool) -> float:
    """Return the growth for each task or cycle of the second half [B]."""
    logging.getLogger("distributed").setLevel(logging.ERROR)  # it keeps its last 10,000 records
    with (
        dask.config.set(_SETTINGS),
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=False,
            memory_limit=0,
            dashboard_address=None,
            silence_logs=logging.ERROR,
        ) as cluster,
        Client(cluster) as client,
    ):
        step: Callable[[], int]
        if what == "cycles":
            step = partial(cycle, client, with_plugin)
        else:
            if with_plugin:
                install(client)
            step = partial({"tasks": wave, "mixed": mixed}[what], client)
        first = second = 0
        while first < n // 2:
            first += step()
        before = resident_nbytes()
        while second < n - n // 2:
            second += step()
        return (resident_nbytes() - before) / second


def main() -> None:
    """Print the growth of stock Dask and of the plugin."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("tasks", "mixed", "cycles"))
    parser.add_argument("n", type=int)
    parser.add_argument("--variant", choices=("stock", "plugin"))
    options = parser.parse_args()
    if options.variant:
        print(grown(options.what, options.n, options.variant == "plugin"))
        return
    found = {}
    for variant in ("stock", "plugin"):
        command = [sys.executable, __file__, options.what, str(options.n), "--variant", variant]
        found[variant] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"{variant}: {found[variant]:.1f} B for each of the last half of {options.n} ({options.what})")
    most = MOST_OF_CYCLE if options.what == "cycles" else MOST_OF_TASK
    more = found["plugin"] - found["stock"]
    print(f"beyond stock: {more:.1f} B; at most {most} B are allowed")
    sys.exit(more > most)


if __name__ == "__main__":
    main()
