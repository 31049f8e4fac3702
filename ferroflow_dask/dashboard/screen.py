"""When the figures of a page are brought up to date: the more it costs a scheduler, the less often."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from distributed.metrics import thread_time, time

from ferroflow_dask.dashboard.figure import Figure

logger = logging.getLogger("ferroflow_dask")

#: Part of the time of a scheduler's event loop that the figures of one page may take. Sending what they have
#: changed takes about as much again.
_SHARE = 0.005
#: Between two updates, whatever they cost: who looks sees that it is alive [s].
_LONGEST_S = 3.0


class Screen:
    """Brings the figures of a document up to date, all at once, so that they show the same moment.

    Parameters
    ----------
    recorder : Recorder
    figures : sequence of Figure
    is_watched : callable
        Returns whether a browser is there; without one nothing is done.
    clock, cpu : callable, optional
        Return the time, and the CPU time of this thread [s].
    """

    #: Time between two looks at whether it is time for an update [ms].
    interval = 1000

    def __init__(
        self,
        recorder: Any,
        figures: Sequence[Figure],
        is_watched: Callable[[], bool],
        *,
        clock: Callable[[], float] = time,
        cpu: Callable[[], float] = thread_time,
    ) -> None:
        self._recorder = recorder
        self._figures = figures
        self._is_watched = is_watched
        self._clock, self._cpu = clock, cpu
        self._due_s = 0.0

    def update(self) -> None:
        """Take a sample if it is time for one, and bring the figures up to date if that is due."""
        if not self._is_watched():
            return
        self._recorder.sample()
        now_s, spent_s = self._clock(), self._cpu()
        if now_s < self._due_s:
            return
        for figure in self._figures:
            try:
                figure.refresh()
            except Exception:
                logger.exception("%s is not up to date", type(figure).__name__)
        self._due_s = now_s + min(_LONGEST_S, (self._cpu() - spent_s) / _SHARE)
