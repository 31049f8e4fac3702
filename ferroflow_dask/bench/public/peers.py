"""Peers of Dask: other libraries run the programs of `tasks`, each in processes of its own.

`python -m ferroflow_dask.bench.public.peers PEER PROGRAM …` starts a peer, runs programs one after another
and prints a line of JSON for each. Ray and Parsl leave processes behind when they are killed, and put some
into process groups of their own. All of them stay in the session of that command, by which they are counted
and ended. The command ends its session itself once its standard input ends, so that no process is left if the
caller is killed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

import psutil

from ferroflow_dask.bench.public.base import Clock, Options, Other
from ferroflow_dask.bench.public.tasks import Api, SmallTasks, nap, small_tasks

OK = "ok"
USUAL, ADVISED = "as usual", "as advised"
#: Duration after which a program counts as hung; several have as much together [s].
_TIMEOUT_S = 900.0
#: First characters of the line of JSON.
_MARK = '{"seconds":'
#: Measures of each round.
_MEDIANS = ("seconds", "cpu_s")
#: Sleep of the tasks that start and warm the workers, before the clock starts [s].
_WARM_S = 0.2
#: How often it is seen whether a session has ended [s].
_POLL_S = 0.01
#: Parsl's documentation advises prefetching for many short tasks; tasks per worker.
_PREFETCH = 20


class Peer(Api):
    """A library that is compared; it is started, used and stopped in a process of its own."""

    package = ""
    #: Programs that it can run, by the first part of their name; all if empty.
    kinds: Collection[str] = ()
    #: The advice is about settings: the program itself is the usual one.
    advises_settings = False

    #: Stops the workers; `start` sets it.
    stop: Callable[[], object]

    def start(self, n_workers: int, is_advised: bool) -> None:
        """Start workers of one core each."""
        raise NotImplementedError


class Pool(Peer):
    """`concurrent.futures.ProcessPoolExecutor`; the documentation of its `map` advises chunks of calls."""

    advised = ("empty",)

    def start(self, n_workers: int, is_advised: bool) -> None:
        """Start the processes."""
        del is_advised
        self._pool = ProcessPoolExecutor(n_workers)
        self.stop = self._pool.shutdown

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Submit a call once its arguments are there: the pool takes values only."""
        values = [x.result() if isinstance(x, Future) else x for x in arguments]
        return self._pool.submit(function, *values)


class Ray(Peer):
    """Ray tasks; its documentation warns of fine-grained tasks and of large arguments by value."""

    package = "ray"
    advised = ("empty", "readers")

    def start(self, n_workers: int, is_advised: bool) -> None:
        """Start Ray with as many CPUs."""
        del is_advised
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self._ray = import_module("ray")
        self._ray.init(num_cpus=n_workers, logging_level="error", _temp_dir=os.getcwd())
        self._remote, self.stop = cache(self._ray.remote), self._ray.shutdown

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Submit a remote function, which is declared once."""
        return self._remote(function).remote(*arguments)

    def put(self, value: Any) -> Any:
        """Call `ray.put`."""
        return self._ray.put(value)

    def results(self, futures: Any) -> Any:
        """Call `ray.get`."""
        return self._ray.get(list(futures))


class Parsl(Peer):
    """Parsl's Python apps on its HighThroughputExecutor; its `prefetch_capacity` is meant for short tasks."""

    package = "parsl"
    advised = ("empty", "sleep", "first", "readers")
    advises_settings = True

    def start(self, n_workers: int, is_advised: bool) -> None:
        """Start one block of workers on this machine."""
        parsl, executors = import_module("parsl"), import_module("parsl.executors")
        executor = executors.HighThroughputExecutor(
            address="127.0.0.1",
            max_workers_per_node=n_workers,
            cores_per_worker=1e-6,  # or there would be no more workers than cores
            prefetch_capacity=n_workers * _PREFETCH if is_advised else 0,
            provider=import_module("parsl.providers").LocalProvider(init_blocks=1, max_blocks=1),
        )
        self.stop = parsl.load(parsl.Config(executors=[executor], strategy="none")).cleanup
        self._app = cache(parsl.python_app)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call an app, which is declared once."""
        return self._app(function)(*arguments)


class HyperQueue(Peer):
    """HyperQueue's tasks that are programs: `true` and `sleep`; the documentation advises fewer output files.

    Its function tasks are left out: each starts an interpreter, and none returns a result.
    """

    package = "hyperqueue"
    kinds = advised = ("empty", "sleep")
    advises_settings = True

    def start(self, n_workers: int, is_advised: bool) -> None:
        """Start a server and workers of one core in this process."""
        module = import_module("hyperqueue.cluster")
        cluster = module.LocalCluster()
        for _ in range(n_workers):
            cluster.start_worker(module.WorkerConfig(cores=1))
        self._client = cluster.client()
        self.stop = cluster.stop
        self._options = {"stdout": None, "stderr": None} if is_advised else {}

    def map(self, function: Callable[..., Any], *values: Collection[Any], batch: int | None = None) -> Any:
        """Submit one job with a program for each call."""
        del batch
        job = import_module("hyperqueue").Job()
        for _, *rest in zip(*values, strict=True):
            command = ["sleep", *map(str, rest)] if function is nap else ["true"]
            job.program(command, **self._options)
        return [self._client.submit(job)]

    def results(self, futures: Any) -> Any:
        """Wait for the job, of which a failed task would raise; there are no results."""
        self._client.wait_for_jobs(futures)


PEERS: dict[str, type[Peer]] = {"process-pool": Pool, "ray": Ray, "parsl": Parsl, "hyperqueue": HyperQueue}


# In the process of a peer


def _members(session: int) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def _cpu_seconds() -> float:
    """Return the CPU seconds of all processes of this session and of those that they have waited for."""
    total = 0.0
    for process in _members(os.getsid(0)):
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # user and system, of itself and of its children
    return total


def digest(answer: Any) -> str:
    """Return the digest of an answer."""
    return hashlib.sha256(repr(answer).encode()).hexdigest()


def _run(
    peer: Peer, programs: Sequence[SmallTasks], n_workers: int, is_advised: bool, rounds: int
) -> Iterator[dict[str, Any]]:
    is_other = is_advised and not peer.advises_settings
    peer.start(n_workers, is_advised)
    if not peer.kinds:
        peer.results(peer.map(nap, range(2 * n_workers), [_WARM_S] * (2 * n_workers)))
    futures: Any = ()
    for program in programs:
        seconds, cpu_s, answer = [], [], None
        for _ in range(rounds):
            peer.results(futures)  # so that no task is left of the round before
            before = _cpu_seconds()
            with Clock() as clock:
                answer, futures = program.way(is_other)(peer, program.n)
            cpu_s.append(_cpu_seconds() - before)
            seconds.append(clock.seconds)
        yield {"seconds": seconds, "cpu_s": cpu_s, "digest": answer if answer is None else digest(answer)}


def _end_with_caller() -> None:
    """Start a process that ends this session once the caller has gone."""
    # Not a thread: a worker that is forked meanwhile would be missed.
    if os.fork() == 0:
        os.read(0, 1)
        end_session(os.getsid(0))
        os._exit(0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run programs under a peer and print a line of JSON for each."""
    programs = {program.name: program for is_full in (True, False) for program in small_tasks(is_full)}
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("program", choices=programs, nargs="+")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--advised", action="store_true")
    given = parser.parse_args(arguments)
    if is_leader := os.getsid(0) == os.getpid():
        _end_with_caller()
    peer = PEERS[given.peer]()
    chosen = [programs[name] for name in given.program]
    for result in _run(peer, chosen, given.workers, given.advised, given.rounds):
        print(json.dumps(result), flush=True)
    if is_leader:
        # Nothing more is measured, and Parsl's own way waits for all tasks that are left.
        end_session(os.getsid(0))
        os._exit(0)
    peer.stop()


# Outside


def peer_rows(options: Options) -> Iterator[Other]:
    """Yield runs of the programs of `tasks` under the peers that are installed.

    Parameters
    ----------
    options : Options
        Number of workers. If full: three rounds instead of one, and programs as documentations advise, too.
    """
    for name, peer in PEERS.items():
        if not peer.package or find_spec(peer.package):
            programs = small_tasks(options.is_full)
            programs = [one for one in programs if not peer.kinds or one.kind in peer.kinds]
            yield from run_peer(name, programs, False, options)
            if options.is_full:
                advised = [program for program in programs if program.kind in peer.advised]
                yield from run_peer(name, advised, True, options)


def run_peer(
    name: str, programs: Sequence[SmallTasks], is_advised: bool, options: Options
) -> Iterator[Other]:
    """Yield medians of programs under a peer, in a session of its own, of which no process is left.

    A program that fails ends the session; those after it have another one.
    """
    left = list(programs)
    while left:
        command = [sys.executable, "-m", __name__, name, *(program.name for program in left)]
        command += ["--workers", str(options.workers), "--rounds", "3" if options.is_full else "1"]
        found, failure = _output([*command, *["--advised"] * is_advised], _TIMEOUT_S * len(left))
        ended, left = left[: len(found) + 1], left[len(found) + 1 :]
        for program, one in zip_longest(ended, found):
            status = _status(program, one) if one else failure
            seconds, cpu_s = (statistics.median(one[key]) if status == OK else 0.0 for key in _MEDIANS)
            yield Other(
                program=program.name,
                by=name,
                way=ADVISED if is_advised else USUAL,
                seconds=seconds,
                cpu_s=cpu_s,
                workers=options.workers,
                status=status,
            )


def _status(program: SmallTasks, found: Mapping[str, Any]) -> str:
    is_right = found["digest"] in (None, digest(program.expected(program.n)))
    return OK if is_right else "wrong answer"


def _output(command: Sequence[str], timeout_s: float) -> tuple[list[dict[str, Any]], str]:
    """Return the lines of JSON of a command in a session of its own, and why it did not print more."""
    reader, writer = os.pipe()
    failure = ""
    with tempfile.TemporaryDirectory(prefix="ff-", ignore_cleanup_errors=True) as folder:
        # Not pipes: a process that is left behind would keep them open.
        output, errors = (Path(folder, name) for name in ("output", "errors"))
        with output.open("w") as stdout, errors.open("w") as stderr:
            process = subprocess.Popen(
                command, cwd=folder, stdin=reader, stdout=stdout, stderr=stderr, start_new_session=True
            )
        os.close(reader)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            failure = f"no answer within {timeout_s:g} s"
        finally:
            end_session(process.pid)
            process.wait()
            os.close(writer)
        found = [json.loads(line) for line in output.read_text().splitlines() if line.startswith(_MARK)]
        failure = failure or f"failed: {(errors.read_text().strip() or 'no output').splitlines()[-1]:.100}"
    return found, failure


def end_session(session: int) -> None:
    """End all processes of a session but this one, and those that they start meanwhile."""
    while running := [process for process in _members(session) if process.pid != os.getpid()]:
        for process in running:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
