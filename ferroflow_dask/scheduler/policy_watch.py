"""Watch over a policy: calls that take too long are logged, and end the plugin if they go on.

A policy runs in the event loop of the scheduler. While it decides, no worker gets a task.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback

from ferroflow_dask.exceptions import ClusterError
from ferroflow_dask.policy.events import Event
from ferroflow_dask.scheduler.changes import CallChange

logger = logging.getLogger(__name__)

#: Calls above the limit that end the plugin, with at most so many calls between them. A single one may be due
#: to a large graph, or to Python's garbage collector.
_MOST_SLOW, _BETWEEN = 3, 100
#: How often a thread looks at the present call [s], and how many looks see the same one before it is logged.
_LOOK_S, _LOOKS = 1.0, 10


class PolicyWatch:
    """Measures the calls of a policy.

    Parameters
    ----------
    name : str
        Of the policy.
    limit_s : float
        Time of a call above which it is slow [s]. Waiting counts, since the event loop waits, too.
    """

    def __init__(self, name: str, limit_s: float) -> None:
        self._name = name
        self.limit_s = limit_s
        self.n_calls = 0
        self._n_slow = 0
        self._last_slow = 0
        #: The event that the policy answers now.
        self.event: Event | None = None
        self._has_ended = threading.Event()

    def slow(self, event: Event, seconds: float) -> None:
        """Note a call above the limit, and its time [s].

        Raises
        ------
        ClusterError
            Several calls were slow.
        """
        self._n_slow = self._n_slow + 1 if self.n_calls - self._last_slow <= _BETWEEN else 1
        self._last_slow = self.n_calls
        took = f"the policy {self._name} took {seconds:.2g} s to answer {type(event).__name__}"
        if self._n_slow >= _MOST_SLOW:
            raise ClusterError(f"{took}, and at least {self.limit_s:g} s in {self._n_slow} calls")
        if self._n_slow == 1:
            logger.warning("ferroflow: %s; the limit is %g s (ferroflow.policy-limit)", took, self.limit_s)

    def change(self) -> CallChange:
        """Return the change that starts a thread, which logs a call that does not return."""
        return CallChange("watch over the policy", self._start, self._has_ended.set)

    def _start(self) -> None:
        loop = threading.get_ident()
        threading.Thread(target=self._look, args=(loop,), name="ferroflow-policy-watch", daemon=True).start()

    def _look(self, loop: int) -> None:
        seen, n_looks = None, 0
        while not self._has_ended.wait(_LOOK_S):
            event = self.event
            n_looks = n_looks + 1 if event is not None and event is seen else 0
            seen = event
            if n_looks == _LOOKS:
                stack = "".join(traceback.format_stack(sys._current_frames().get(loop)))
                logger.warning(
                    "ferroflow: the policy %s has not answered %s for %d s. It runs:\n%s",
                    self._name,
                    type(event).__name__,
                    _LOOK_S * _LOOKS,
                    stack,
                )
