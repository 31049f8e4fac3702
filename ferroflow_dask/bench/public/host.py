"""Process of one side: a cluster, its client, and the programs that the runner sends.

Each side has a process group of its own. The runner stops the group between the turns of the side, so that
idle clusters take no CPU time from the side that runs, and kills it if a program hangs. If the runner itself
is killed, the guard of the side (`sides`) kills the group.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import dask
import numpy as np
from distributed import Client, LocalCluster

from ferroflow_dask.bench.observe import PEAK, error_line, settle
from ferroflow_dask.bench.public.base import SKIPPED, Clock, Options, Program, SkippedError, Suite
from ferroflow_dask.bench.public.probe import Probe
from ferroflow_dask.bench.schema import OK
from ferroflow_dask.scheduler.extension import extension_on
from ferroflow_dask.scheduler.installation import install

#: Memory of a worker that Dask chooses.
AUTO = "auto"
#: Time that a scheduler may take to start, and a process to end [s].
_CONNECT_S, _END_S = 100.0, 5.0
#: Time that the results of a run may take to leave the scheduler [s].
_SETTLE_S = 30.0


@dataclass(frozen=True, slots=True)
class Place:
    """The cluster of a side.

    Parameters
    ----------
    workers, threads : int
    memory_limit : str
        Of each worker, as Dask takes it.
    is_separate : bool
        Whether the scheduler has a process of its own.
    settings : mapping
        Of Dask, in all processes.
    """

    workers: int = 4
    threads: int = 1
    memory_limit: str = AUTO
    is_separate: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run on a side: its duration [s], the fields of its row, "ok" or the failure, and the answer."""

    seconds: float
    seen: Mapping[str, Any]
    status: str
    answer: bytes | None = None

    @property
    def is_clean(self) -> bool:
        """Whether the cluster can run the next program."""
        return self.status == OK or self.status.startswith(SKIPPED)


#: Prepares a side once its client is there, such as `install`; None for stock Dask.
Prepare = Callable[[Client], object]


def serve(
    connection: Connection, suites: Sequence[Suite], options: Options, place: Place, prepare: Prepare | None
) -> None:
    """Start a cluster and run programs on it until the runner closes the connection."""
    os.setpgid(0, 0)
    logging.getLogger("distributed").setLevel(logging.ERROR)  # warnings of stock Dask are no result
    programs = programs_by_name(suites, options)
    # A stopped scheduler would take its workers for lost when it goes on.
    settings = {"distributed.scheduler.worker-ttl": None, **place.settings}
    with dask.config.set(settings), _cluster(place) as client:
        run_requests(connection, client, programs, prepare)


Programs = Mapping[tuple[str, str], Program]


def programs_by_name(suites: Sequence[Suite], options: Options) -> Programs:
    """Return the programs by the names of their suites and their own."""
    return {(suite.name, program.name): program for suite in suites for program in suite.programs(options)}


def run_requests(connection: Connection, client: Client, programs: Programs, prepare: Prepare | None) -> None:
    """Prepare a side, send the address of its scheduler, and run programs as the runner asks for them."""
    if prepare is not None:
        prepare(client)
    probe = Probe(client)
    connection.send(client.scheduler_info()["address"])
    while (request := connection.recv()) is not None:
        suite, name, seed = request
        connection.send(_run(programs[suite, name], client, probe, seed, prepare is plugin))


@contextmanager
def _cluster(place: Place) -> Iterator[Client]:
    """Start a cluster as a user does."""
    with ExitStack() as stack:
        if place.is_separate:
            address = stack.enter_context(_processes(place))
            client = stack.enter_context(Client(address, timeout=_CONNECT_S))
            client.wait_for_workers(place.workers)
        else:
            cluster = LocalCluster(
                n_workers=place.workers,
                threads_per_worker=place.threads,
                memory_limit=place.memory_limit,
                silence_logs=logging.CRITICAL,  # workers that end may log that the scheduler has left
                dashboard_address="127.0.0.1:0",  # the usual port has one dashboard, and three sides need one
            )
            client = stack.enter_context(Client(stack.enter_context(cluster)))
        yield client


@contextmanager
def _processes(place: Place) -> Iterator[str]:
    """Start `dask scheduler` and `dask worker`; yield the scheduler's address."""
    port = random.SystemRandom().randint(20_000, 40_000)
    address = f"tcp://127.0.0.1:{port}"
    dask_command = [sys.executable, "-m", "dask"]
    commands = (
        [*dask_command, "scheduler", "--host", "127.0.0.1", "--port", str(port), "--dashboard-address", ":0"],
        [
            *(*dask_command, "worker", address, "--nworkers", str(place.workers)),
            *("--nthreads", str(place.threads), "--memory-limit", place.memory_limit),
        ],
    )
    # As with the processes of a local cluster, which import what this process can and have its settings.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "DASK_INTERNAL_INHERIT_CONFIG": dask.config.serialize(dask.config.global_config),
    }
    started = [subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment) for command in commands]
    try:
        yield address
    finally:
        # Workers leave their scheduler at once, but wait for one that does not answer.
        for process in reversed(started):
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _run(program: Program, client: Client, probe: Probe, seed: int, is_ours: bool) -> Outcome:
    """Run a program; all that fails is the status of this run."""
    clock = Clock(probe.start, probe.stop)
    try:
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 -- programs of others use it
        gc.collect()
        with clock:
            answer = program.run(client, clock)
        seen = probe.read(clock.started)
        if is_ours and (problem := client.run_on_scheduler(_problem)):
            return Outcome(clock.seconds, seen, f"the plugin gave up: {problem}")
        packed = cloudpickle.dumps(answer)
        del answer
        gc.collect()
        settle(client, _SETTLE_S)
        return Outcome(clock.seconds, seen, OK, packed)
    except SkippedError as error:
        return Outcome(0.0, {}, f"{SKIPPED}{error}")
    except Exception as error:  # noqa: BLE001 -- it is the status
        return Outcome(clock.seconds, {}, error_line(error))


def _problem(dask_scheduler: Any) -> str:
    extension = extension_on(dask_scheduler)
    if extension is None:
        return "it is not in charge"
    return "" if extension.error is None else error_line(extension.error)


def plugin(client: Client) -> None:
    """Put the plugin in charge, as a user does."""
    install(client)


def serve_anchors(suite: Suite, options: Options, connection: Connection) -> None:
    """Run anchors of programs until the runner closes the connection."""
    os.setpgid(0, 0)
    programs = {one.name: one for one in suite.programs(options)}
    connection.send("ready")
    while (request := connection.recv()) is not None:
        program, name = request
        connection.send(_run_anchor(programs[program].anchors[name]))


def _run_anchor(anchor: Callable[[Clock], Any]) -> Outcome:
    try:
        gc.collect()
        PEAK.reset()
        before_s = sum(os.times()[:4])
        with Clock() as clock:
            answer = anchor(clock)
        seen = {"client_cpu_s": sum(os.times()[:4]) - before_s, "peak_client_memory": PEAK.read() or None}
        return Outcome(clock.seconds, seen, OK, cloudpickle.dumps(answer))
    except Exception as error:  # noqa: BLE001 -- it is the status
        return Outcome(0.0, {}, error_line(error))
