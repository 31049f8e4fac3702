"""A scheduler's recorder, from a client."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from tornado.ioloop import PeriodicCallback

from ferroflow_dask.dashboard.recorder import recorder_of, renew_recording, start_recording, stop_recording
from ferroflow_dask.dashboard.recording import Recording
from ferroflow_dask.exceptions import ClusterError

if TYPE_CHECKING:
    from distributed import Client
    from distributed.scheduler import Scheduler

#: What a call raises whose scheduler is gone, or whose client is closed since it is.
GONE = (OSError, RuntimeError, CancelledError)
#: Those who record from afar ask again within this time, or are gone [s].
_LEASE_S = 60.0


@contextmanager
def recording(client: Client, *, is_summary: bool = False) -> Iterator[Callable[[], Recording]]:
    """Record what a cluster does while the context lasts; yields what returns the recording so far.

    Parameters
    ----------
    client : distributed.Client
        Synchronous; the scheduler has this package.
    is_summary : bool, optional
        Only what a terminal shows is fetched.

    Raises
    ------
    ClusterError
        The scheduler is gone.
    """
    who = f"client {uuid.uuid4().hex}"
    where = f"the scheduler at {client.scheduler.address if client.scheduler is not None else '?'}"

    def look(is_summary: bool = is_summary) -> Recording:
        try:
            found: Recording = client.run_on_scheduler(_recording, who=who, is_summary=is_summary)
        except GONE as error:
            raise ClusterError(f"{where} is gone: {error}") from error
        return found

    look(is_summary=True)
    loop: Any = client.loop

    async def renew() -> None:
        with suppress(*GONE):
            await client.run_on_scheduler(_renew, who=who)  # on the loop it is a coroutine

    renewal = PeriodicCallback(renew, _LEASE_S / 3 * 1000)
    loop.add_callback(renewal.start)
    try:
        yield look
    finally:
        loop.add_callback(renewal.stop)
        with suppress(*GONE):
            client.run_on_scheduler(_stop, who=who)


def _recording(dask_scheduler: Scheduler, who: str, is_summary: bool) -> Recording:
    recorder = start_recording(dask_scheduler, who, _LEASE_S)
    recorder.sample()
    return recorder.recording(is_summary)


def begin_run(client: Client) -> None:
    """Note on a scheduler that a measured run begins: reports tell it from its preparation.

    Parameters
    ----------
    client : distributed.Client
        Its scheduler is recorded.
    """
    client.run_on_scheduler(_begin_run)


def _begin_run(dask_scheduler: Scheduler) -> None:
    recorder = recorder_of(dask_scheduler)
    if recorder is not None:
        recorder.begin_run()


def _renew(dask_scheduler: Scheduler, who: str) -> None:
    renew_recording(dask_scheduler, who, _LEASE_S)


def _stop(dask_scheduler: Scheduler, who: str) -> None:
    stop_recording(dask_scheduler, who)
