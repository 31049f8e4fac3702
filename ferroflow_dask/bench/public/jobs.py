"""Process of a side whose workers are in jobs of a batch system.

Only this process is stopped between the turns of its side. Workers on other nodes wait for messages.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import dask

from ferroflow_dask.bench.observe import error_line
from ferroflow_dask.bench.public.base import Options, Suite
from ferroflow_dask.bench.public.host import Outcome, Prepare, programs_by_name, run_requests
from ferroflow_dask.deploy.interrupts import signals_raised
from ferroflow_dask.exceptions import FerroflowError

if TYPE_CHECKING:
    from distributed import Client


@dataclass(frozen=True, slots=True)
class Jobs:
    """A cluster of jobs, one for each side.

    Parameters
    ----------
    start : callable
        Submits the jobs and yields a client, as a context; picklable.
    section : str
        Of the configuration that describes the jobs.
    is_encrypted : bool
    start_s, end_s : float
        Time that the jobs may take to start, and to be cancelled [s].
    """

    start: Callable[[], AbstractContextManager[Client]]
    section: str = ""
    is_encrypted: bool = False
    start_s: float = 600.0
    end_s: float = 60.0


def serve_on_jobs(
    connection: Connection, suites: Sequence[Suite], options: Options, jobs: Jobs, prepare: Prepare | None
) -> None:
    """Submit jobs and run programs on them until the runner closes the connection or sends SIGTERM."""
    os.setpgid(0, 0)  # as in `host.serve`
    logging.getLogger("distributed").setLevel(logging.ERROR)
    programs = programs_by_name(suites, options)
    with suppress(KeyboardInterrupt, EOFError), signals_raised():
        try:
            with dask.config.set({"distributed.scheduler.worker-ttl": None}), jobs.start() as client:
                run_requests(connection, client, programs, prepare)
        except FerroflowError as error:  # of the jobs
            connection.send(Outcome(0.0, {}, error_line(error)))
