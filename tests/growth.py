"""Growth of memory: `python tests/growth.py tasks 500000`, or `cycles 1000` for installations.

Scheduler, workers and client are in one process. Each variant runs in a process of its own, whose resident
memory is compared before and after the second half of the work. The plugin's growth is that beyond stock's.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import subprocess
import sys
import time
from typing import Any

import dask
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


def wave(client: Client, n: int) -> None:
    """Run tasks, and wait until the scheduler has forgotten them."""
    futures = client.map(abs, range(n), pure=False, batch_size=n)
    assert sum(client.gather(futures)) == n * (n - 1) // 2
    del futures
    scheduler: Any = client.cluster.scheduler
    while scheduler.tasks:
        time.sleep(0.005)


def cycle(client: Client, with_plugin: bool) -> None:
    """Install and uninstall the plugin while a few tasks run."""
    futures = client.map(abs, range(10), pure=False)
    if with_plugin:
        install(client)
    more = client.map(abs, range(10), pure=False)
    if with_plugin:
        uninstall(client)
    client.gather(futures + more)


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
        if what == "tasks":
            if with_plugin:
                install(client)
            steps, per_step = n // _WAVE, _WAVE
            run: Any = lambda: wave(client, _WAVE)  # noqa: E731 -- one use
        else:
            steps, per_step = n, 1
            run = lambda: cycle(client, with_plugin)  # noqa: E731 -- one use
        for _ in range(steps // 2):
            run()
        before = resident_nbytes()
        for _ in range(steps - steps // 2):
            run()
        return (resident_nbytes() - before) / ((steps - steps // 2) * per_step)


def main() -> None:
    """Print the growth of stock Dask and of the plugin."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("tasks", "cycles"))
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
        print(f"{variant}: {found[variant]:.1f} B for each of the last half of {options.n} {options.what}")
    most = MOST_OF_TASK if options.what == "tasks" else MOST_OF_CYCLE
    more = found["plugin"] - found["stock"]
    print(f"beyond stock: {more:.1f} B; at most {most} B are allowed")
    sys.exit(more > most)


if __name__ == "__main__":
    main()
