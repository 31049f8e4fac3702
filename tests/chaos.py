"""Faults on real clusters: programs with known results run while workers die, hang and come back.

A seed decides which faults strike and when, and which programs run. Processes take their time, so two runs of
a seed differ in details.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import threading
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import dask
import dask.array as da
import numpy as np
from distributed import Client, KilledWorker, LocalCluster, as_completed
from distributed.client import FutureCancelledError
from distributed.comm import CommClosedError
from distributed.stealing import WorkStealing
from fault_injection import differences, inventory
from feature_faults import _X, _model, _rounded, _rows, _strategy
from proxy import Proxy
from waiting import until

from ferroflow_dask import install, installed, uninstall

#: Workers at the start, and at most.
_WORKERS, _MOST = 3, 8
#: Memory of a worker: some tasks need more than the part at which workers spill and pause [B].
_MEMORY_NBYTES = 400 * 2**20
_LARGE_NBYTES = 60 * 2**20
#: Mean time between two faults, and how long workers hang or the network is paused at most [s].
_BETWEEN_S, _LONGEST_S = 0.35, 1.5
#: A program that takes longer after the last fault hangs [s].
_HANGS_S = 90.0
_PROGRAMS_AT_A_TIME = 3
#: Errors that faults may cause with any scheduler: workers died too often, results were cancelled or lost.
_OWN = (KilledWorker, CancelledError, FutureCancelledError, CommClosedError, TimeoutError, OSError)
#: Texts of further errors that stock Dask raises if workers die: P2P, placed data, a lost connection.
_OWN_TEXTS = (
    *("P2P", "shuffle", "cancelled", "lost dependencies", "no worker", "Worker", "worker"),
    *("scheduler", "closed"),
)
_SETTINGS = {
    "distributed.scheduler.allowed-failures": 20,
    "distributed.scheduler.worker-ttl": "10s",
    "distributed.comm.timeouts.connect": "10s",
    "distributed.comm.timeouts.tcp": "15s",
    "distributed.deploy.lost-worker-timeout": "1s",
    "distributed.nanny.pre-spawn-environ.OMP_NUM_THREADS": 1,
    "array.rechunk.method": "p2p",
}


# Programs; functions that workers call are made inside, since workers do not import this file


def mapped(client: Client, rng: random.Random) -> bool:
    """Map a function; the results are gathered."""
    n, seconds = rng.randint(20, 80), rng.choice((0.0, 0.005, 0.02))

    def work(i: int) -> int:
        time.sleep(seconds)
        return i + 1

    return bool(client.gather(client.map(work, range(n), pure=False)) == list(range(1, n + 1)))


def delayed(client: Client, rng: random.Random) -> bool:
    """Compute a graph of short tasks, which is bundled."""
    n = rng.randint(20, 120)
    name = uuid.uuid4().hex

    def add(*values: int) -> int:
        return sum(values) + 1

    leaves = [dask.delayed(add)(i, dask_key_name=f"leaf-{name}-{i}") for i in range(n)]
    pairs = [dask.delayed(add)(*leaves[i : i + 4], dask_key_name=f"pair-{name}-{i}") for i in range(0, n, 4)]
    total = dask.delayed(add)(*pairs, dask_key_name=f"total-{name}")
    return bool(client.compute(total).result() == sum(range(n)) + n + len(pairs) + 1)


def rechunked(client: Client, rng: random.Random) -> bool:
    """Rechunk a small array by P2P."""
    n, add = rng.randint(20, 40), rng.randint(1, 99)
    x = da.arange(n * n, chunks=n).reshape(n, n).rechunk((n, 7)) + add
    return bool(client.compute(x.sum()).result() == sum(range(n * n)) + add * n * n)


def large(client: Client, rng: random.Random) -> bool:
    """Keep more results than fit into memory, so that workers spill and pause."""
    n = rng.randint(6, 14)

    def make(i: int, nbytes: int) -> Any:
        return np.full(nbytes // 8, i, np.int64)

    def look(x: Any) -> int:
        return int(x[0]) + int(x[-1])

    made = client.map(make, range(n), nbytes=_LARGE_NBYTES, pure=False)
    return bool(client.gather(client.map(look, made, pure=False)) == [2 * i for i in range(n)])


def batches(client: Client, _: random.Random) -> bool:
    """Compute a model on batches."""
    return bool(_rounded(client.compute(_model().map_batches(_X, batch=5)).result()) == _rows())


def in_parts(client: Client, _: random.Random) -> bool:
    """Compute a model by a strategy; its parts wait for workers that are gone, so it is given up in time."""
    return bool(_strategy(client, None) == _rows())  # type: ignore[arg-type]


def cancelled(client: Client, rng: random.Random) -> bool:
    """Cancel some of the tasks, and wait for the others."""

    def work(i: int) -> int:
        time.sleep(0.01)
        return i

    futures = client.map(work, range(40), pure=False)
    gone = set(rng.sample(range(40), 10))
    client.cancel([futures[i] for i in gone])
    return bool(
        client.gather([futures[i] for i in range(40) if i not in gone]) == sorted(set(range(40)) - gone)
    )


def completed(client: Client, rng: random.Random) -> bool:
    """Take results in the order in which they come, of tasks that share a root."""

    def work(root: int, i: int) -> int:
        time.sleep(0.002)
        return root + i

    root = client.submit(int, rng.randint(0, 9), pure=False)
    futures = client.map(work, [root] * 30, range(30), pure=False)
    found = sorted(future.result() for future in as_completed(futures, loop=client.loop))
    return bool(found == [found[0] + i for i in range(30)])


PROGRAMS: Mapping[str, Callable[[Client, random.Random], bool]] = {
    one.__name__: one for one in (mapped, delayed, rechunked, large, batches, in_parts, cancelled, completed)
}


# Faults


class Chaos:
    """A cluster on which programs run while faults strike.

    Parameters
    ----------
    seed : int
    processes : bool
    with_plugin : bool
    """

    def __init__(self, seed: int, *, processes: bool, with_plugin: bool) -> None:
        self._seed = seed
        self.rng = random.Random(f"{seed} {processes}")
        self.processes = processes
        self.with_plugin = with_plugin
        self.faults: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self._ends = threading.Event()
        self._stopped: set[int] = set()
        self._timers: list[threading.Timer] = []
        self._clients: list[Client] = []

    @contextmanager
    def open(self) -> Iterator[Chaos]:
        """Start the cluster behind a proxy."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with ExitStack() as stack:
            stack.enter_context(dask.config.set(_SETTINGS))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            logging.disable(logging.CRITICAL)
            stack.callback(logging.disable, logging.NOTSET)
            self.proxy = Proxy(port)
            stack.callback(self.proxy.close)
            self.cluster = stack.enter_context(
                LocalCluster(
                    n_workers=_WORKERS,
                    threads_per_worker=1,
                    processes=self.processes,
                    memory_limit=_MEMORY_NBYTES if self.processes else 0,
                    dashboard_address=":0",
                    scheduler_port=port,
                    scheduler_kwargs={"contact_address": self.proxy.address},
                    silence_logs=logging.CRITICAL,
                )
            )
            self._clients = [
                stack.enter_context(Client(f"tcp://127.0.0.1:{port}", set_as_default=not i)) for i in range(2)
            ]
            scheduler: Any = self.cluster.scheduler
            until(lambda: {c.id for c in self._clients} <= _subscribers(scheduler))
            self.before = inventory(scheduler)
            if self.with_plugin:
                install(self._clients[0])
            try:
                yield self
            finally:
                self._heal()

    def run(self, seconds: float) -> None:
        """Let faults strike for some time, and wait for the programs."""
        with ThreadPoolExecutor(_PROGRAMS_AT_A_TIME) as pool:
            running = [pool.submit(self._programs, i) for i in range(_PROGRAMS_AT_A_TIME)]
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                self.strike()
                time.sleep(self.rng.expovariate(1 / _BETWEEN_S))
            self._ends.set()
            self._heal()
            until = time.monotonic() + _HANGS_S
            for one in running:
                try:
                    one.result(timeout=max(0.0, until - time.monotonic()))
                except TimeoutError:
                    self.problems.append(f"a program hangs: {self._stuck()}")
                    for client in self._clients:
                        client.close(timeout=5)
                    break
        if not self.problems:
            self._at_the_end()

    def strike(self) -> None:
        """Let one fault happen."""
        weights = {name: weight for name, weight in _FAULTS.items() if self._may(name)}
        (name,) = self.rng.choices(list(weights), list(weights.values()))
        try:
            getattr(self, f"_{name}")()
            self.faults[name] += 1
        # Of a worker that is not there.
        except (*_OWN, RuntimeError, LookupError, AttributeError, TypeError, ValueError) as error:
            self.faults[f"{name} ({type(error).__name__})"] += 1

    def _may(self, name: str) -> bool:
        return (self.processes or name not in _OF_PROCESSES) and (self.with_plugin or name != "reinstall")

    def _worker(self) -> Any:
        return self.rng.choice(sorted(self.cluster.workers.items(), key=str))[1]

    def _pid(self) -> int:
        return int(self._worker().process.process.pid)

    def _kill(self) -> None:
        os.kill(self._pid(), signal.SIGKILL)

    def _hang(self) -> None:
        pid = self._pid()
        os.kill(pid, signal.SIGSTOP)
        self._stopped.add(pid)
        self._later(self._continue, pid)

    def _continue(self, pid: int) -> None:
        self._stopped.discard(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def _pause(self) -> None:
        self.proxy.pause()
        self._later(self.proxy.resume)

    def _cut(self) -> None:
        self.proxy.cut(self.rng.random())

    def _scale(self) -> None:
        self.cluster.scale(self.rng.choice((0, 1, 2, 3, 3, 4, _MOST)))

    def _adapt(self) -> None:
        adaptive = self.cluster.adapt(minimum=0, maximum=self.rng.choice((3, _MOST)), interval="200ms")
        self._later(adaptive.stop)

    def _retire(self) -> None:
        scheduler: Any = self.cluster.scheduler
        address = self.rng.choice(sorted(scheduler.workers))
        self.cluster.loop.add_callback(scheduler.retire_workers, workers=[address])

    def _close(self) -> None:
        scheduler: Any = self.cluster.scheduler
        address = self.rng.choice(sorted(scheduler.workers))
        self.cluster.loop.add_callback(scheduler.remove_worker, address, stimulus_id="chaos")

    def _restart(self) -> None:
        self._clients[1].restart(timeout=20, wait_for_workers=False)

    def _reinstall(self) -> None:
        uninstall(self._clients[0])
        install(self._clients[0])

    def _later(self, function: Callable[..., Any], *args: Any) -> None:
        timer = threading.Timer(self.rng.uniform(0.05, _LONGEST_S), function, args)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _heal(self) -> None:
        for timer in self._timers:
            timer.join(_LONGEST_S + 1)
        for pid in list(self._stopped):
            self._continue(pid)
        self.proxy.resume()
        with suppress(*_OWN, RuntimeError):
            self.cluster.scale(_WORKERS)

    # Programs

    def _programs(self, number: int) -> None:
        rng = random.Random(f"{self._seed} program {number}")
        # With threads, stock Dask keeps what closed workers had in memory.
        names = [name for name in PROGRAMS if self.processes or name != "large"]
        while not self._ends.is_set():
            name = rng.choice(names)
            client = rng.choice(self._clients)
            try:
                is_right = PROGRAMS[name](client, rng)
            except Exception as error:  # noqa: BLE001 -- any is judged
                is_own = isinstance(error, _OWN) or any(text in str(error) for text in _OWN_TEXTS)
                self.outcomes[f"{name}: {type(error).__name__}"] += 1
                if not is_own:
                    self.problems.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
                continue
            self.outcomes[f"{name}: {'right' if is_right else 'WRONG'}"] += 1
            if not is_right:
                self.problems.append(f"{name}: wrong result")

    def _stuck(self) -> str:
        tasks = self.cluster.scheduler.tasks.values()
        states = Counter(ts.state for ts in tasks)
        waiting = [(str(ts.key)[:60], ts.worker_restrictions) for ts in tasks if ts.state == "no-worker"]
        return f"{dict(states)}, {len(self.cluster.scheduler.workers)} workers, no worker for {waiting[:3]}"

    def _at_the_end(self) -> None:
        scheduler: Any = self.cluster.scheduler
        client = self._clients[0]
        client.wait_for_workers(1, timeout=60)
        if self.with_plugin:
            if installed(client) is None:
                self.problems.append("the plugin has ended")
            uninstall(client)
        deadline = time.monotonic() + 10
        while (found := differences(self.before, inventory(scheduler))) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.problems += [f"not restored: {one}" for one in found]
        if type(scheduler.extensions["stealing"]) is not WorkStealing:
            self.problems.append("Dask's stealing is not back")
        if client.gather(client.map(abs, range(20), pure=False)) != list(range(20)):
            self.problems.append("wrong results with Dask's scheduling")


def _subscribers(scheduler: Any) -> set[str]:
    topic = scheduler._broker._topics.get("warn")
    return set() if topic is None else set(topic.subscribers)


#: How often each fault strikes, in relation to the others.
_FAULTS: Mapping[str, float] = {
    "kill": 1,
    "hang": 3,
    "pause": 4,
    "cut": 1,
    "scale": 1,
    "adapt": 0.5,
    "retire": 0.7,
    "close": 0.7,
    "restart": 0.2,
    "reinstall": 1,
}
_OF_PROCESSES = ("kill", "hang", "restart")
