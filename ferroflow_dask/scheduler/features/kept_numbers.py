"""Kept numbers: those that the plugin learns outlive the scheduler, in the file of `ferroflow.learned`."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Iterable

from tornado.ioloop import PeriodicCallback

from ferroflow_dask import config
from ferroflow_dask.scheduler.changes import CallChange, Change
from ferroflow_dask.scheduler.core import Core
from ferroflow_dask.scheduler.features.base import Feature
from ferroflow_dask.scheduler.learned_file import LearnedFile

#: Time between two writes [s]: a scheduler that is killed loses no more.
_EVERY_S = 60.0


class KeptNumbers(Feature):
    """Reads the file when the plugin is installed, and writes it each minute and at the end."""

    name = "kept_numbers"
    summary = "Learned numbers outlive the scheduler in a file"
    reason = "a new cluster bundles its first graph at once: `tests/scheduler/test_kept_numbers.py`"
    parts = ("scheduler/learned_file",)

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        path = config.get_path("learned")
        self._file = None if path is None else LearnedFile(path)
        self._clock: PeriodicCallback | None = None
        self._writing: Future[None] | None = None

    def unavailable(self) -> str:
        """Return that there is no file, which is the default."""
        return "the setting ferroflow.learned names no file" if self._file is None else ""

    def changes(self) -> Iterable[Change]:
        """Read the file now, and write it until the change is undone."""
        if self._file is not None:
            file = self._file
            yield CallChange("file of learned numbers", lambda: self._start(file), lambda: self._end(file))

    def _start(self, file: LearnedFile) -> None:
        file.read_into(self.core.learned)
        if not file.is_closed:
            self._clock = PeriodicCallback(self.core.guard(lambda: self._write(file)), 1e3 * _EVERY_S)
            self._clock.start()

    def _write(self, file: LearnedFile) -> None:
        """Write in another thread, unless the disk is so slow that the last write goes on."""
        if self._writing is None or self._writing.done():
            numbers = self.core.learned.exported()
            self._writing = asyncio.get_running_loop().run_in_executor(None, file.write, numbers)

    def _end(self, file: LearnedFile) -> None:
        if self._clock is None:
            return
        self._clock.stop()
        if self.core.guard.error is None:  # else the numbers may be part of the failure
            file.write(self.core.learned.exported(), is_last=True)
        self._clock = None
