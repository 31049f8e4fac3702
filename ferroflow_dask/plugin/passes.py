"""When the shell looks for idle workers: soon after an event, and again while time may tell something."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tornado.ioloop import IOLoop

#: How soon idle workers look again without an event, at first and at last [s].
_FIRST_LOOK_S = 0.01
_LAST_LOOK_S = 0.64
#: A look that comes later than this was held up by other work of the loop, and waits until the messages that
#: came meanwhile are read: or workers would seem silent that are not [s].
_LATE_S = 0.01
_READ_S = 0.002


class Passes:
    """Runs passes on the scheduler's event loop, never inside the call that asks for one.

    That a task runs longer than expected is no event. While workers idle beside others that have tasks
    waiting, time is let pass and looked at: soon until each idle worker had its turn, then ever more
    rarely until something happens.

    Parameters
    ----------
    loop : tornado.ioloop.IOLoop
    run : callable
        Makes one pass and returns how many idle workers found nothing to steal; None if none looked.
        Must not raise.
    n_hopeful : callable
        Returns how many workers idle while others have tasks waiting; 0 ends the looking.
    clock : callable
        Returns the time [s].
    """

    def __init__(
        self,
        loop: IOLoop,
        run: Callable[[], int | None],
        n_hopeful: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._loop = loop
        self._run = run
        self._n_hopeful = n_hopeful
        self._clock = clock
        self._is_asked_for = False
        self._is_closed = False
        # The look that is due: its number, when, and after how long [s]; 0 if none is.
        self._number = 0
        self._due_at = self._armed_s = 0.0
        self._look_s = _FIRST_LOOK_S
        self._n_fruitless = 0

    def ask(self) -> None:
        """Ask for a pass after the present turn of the event loop."""
        if not (self._is_asked_for or self._is_closed):
            self._is_asked_for = True
            self._loop.add_callback(self._pass)

    def close(self) -> None:
        """Run no pass from now on."""
        self._is_closed = True

    def _pass(self) -> None:
        self._is_asked_for = False
        self._look_s = _FIRST_LOOK_S
        self._n_fruitless = 0
        self._run_once()

    def _look(self, number: int, was_late: bool = False) -> None:
        if number != self._number:
            return
        if not was_late and self._clock() - self._due_at > _LATE_S:
            self._loop.call_later(_READ_S, self._look, number, True)
            return
        self._armed_s = 0.0
        self._run_once()

    def _run_once(self) -> None:
        if self._is_closed:
            return
        n_fruitless = self._run()
        if n_fruitless is None:
            return
        self._n_fruitless += n_fruitless
        n_hopeful = self._n_hopeful()
        if self._is_closed or not n_hopeful or 0 < self._armed_s <= self._look_s:
            return
        self._number += 1
        self._armed_s, self._due_at = self._look_s, self._clock() + self._look_s
        self._loop.call_later(self._look_s, self._look, self._number)
        if self._n_fruitless >= n_hopeful:  # each had its turn
            self._n_fruitless = 0
            self._look_s = min(2 * self._look_s, _LAST_LOOK_S)
