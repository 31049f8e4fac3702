"""Watch over a policy: calls that take too long are logged, and end the plugin if they go on.

A policy runs in the event loop of the scheduler. While it decides, no worker gets a task.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Iterable

from ferroflow_dask import config
from ferroflow_dask.exceptions import ClusterError
from ferroflow_dask.policy.events import Event
from ferroflow_dask.scheduler.changes import CallChange, Change
from ferroflow_dask.scheduler.core import Core
from ferroflow_dask.scheduler.features.base import Feature

logger = logging.getLogger(__name__)

#: Calls above the limit that end the plugin, with at most so many calls between them. A single one may be due
#: to a large graph, or to Python's garbage collector.
_MOST_SLOW, _BETWEEN = 3, 100
#: How often a thread looks at the present call [s], and how many looks see the same one before it is logged.
_LOOK_S, _LOOKS = 1.0, 10


class PolicyWatch(Feature):
    """Measures the calls of the policy. Waiting counts, since the event loop waits, too."""

    name = "policy_watch"
    summary = "A policy that takes too long is logged, and replaced by Dask if it goes on"
    reason = "ends a policy that holds the scheduler up: `tests/scheduler/test_policy_watch.py`"

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._limit_s = config.get_seconds("policy-limit")
        self._calls = core.policy_calls
        self._n_slow = 0
        self._last_slow = 0
        self._has_ended = threading.Event()

    def changes(self) -> Iterable[Change]:
        """Hear of slow calls, and start a thread that logs a call that does not return."""
        yield CallChange("watch over the policy", self._start, self._has_ended.set)

    def policy_took(self, event: Event, seconds: float) -> None:
        """Note a call above the limit, and its time [s].

        Raises
        ------
        ClusterError
            Several calls were slow.
        """
        n = self._calls.n
        self._n_slow = self._n_slow + 1 if n - self._last_slow <= _BETWEEN else 1
        self._last_slow = n
        policy = type(self.core.policy).__name__
        took = f"the policy {policy} took {seconds:.2g} s to answer {type(event).__name__}"
        if self._n_slow >= _MOST_SLOW:
            raise ClusterError(f"{took}, and at least {self._limit_s:g} s in {self._n_slow} calls")
        if self._n_slow == 1:
            logger.warning("ferroflow: %s; the limit is %g s (ferroflow.policy-limit)", took, self._limit_s)

    def _start(self) -> None:
        self._calls.limit_s = self._limit_s
        loop = threading.get_ident()
        threading.Thread(target=self._look, args=(loop,), name="ferroflow-policy-watch", daemon=True).start()

    def _look(self, loop: int) -> None:
        seen, n_looks = None, 0
        while not self._has_ended.wait(_LOOK_S):
            event = self._calls.event
            n_looks = n_looks + 1 if event is not None and event is seen else 0
            seen = event
            if n_looks == _LOOKS:
                stack = "".join(traceback.format_stack(sys._current_frames().get(loop)))
                logger.warning(
                    "ferroflow: the policy %s has not answered %s for %d s. It runs:\n%s",
                    type(self.core.policy).__name__,
                    type(event).__name__,
                    _LOOK_S * _LOOKS,
                    stack,
                )
