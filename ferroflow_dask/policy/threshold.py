"""How many waiting tasks make a worker worth stealing from, learned from how steals end."""

from __future__ import annotations

from collections import deque

#: Steals after which the threshold is reconsidered, and how many of the last ones are looked at.
_EVERY = 10
_WINDOW = 20
#: Success rates above and below which the threshold moves.
_GOOD = 0.7
_BAD = 0.3
#: Times that it may keep a thief from trying before it is lowered: idle workers are not asked often.
_HELD_BACK = 2


class AdaptiveThreshold:
    """A thief's threshold: down after success, up after refusals.

    ferroflow's rule (every 10 attempts, over the last 20) without its ratchet: there an attempt that
    found nothing to steal counted as a failure, so that the end of every run raised the threshold.
    Here only a victim's refusal counts, what the threshold itself has kept from being tried lowers it, and
    a graph with costs starts afresh.

    Parameters
    ----------
    initial : int
        At least 1.
    adaptive : bool
        False keeps `initial` for ever.
    """

    def __init__(self, initial: int = 1, adaptive: bool = True) -> None:
        self._initial = initial
        self._adaptive = adaptive
        self.value = initial
        self._outcomes: deque[bool] = deque(maxlen=_WINDOW)
        self._since_change = 0
        self._n_held_back = 0

    def record(self, succeeded: bool, n_workers: int) -> None:
        """Take the end of one steal into account."""
        self._outcomes.append(succeeded)
        self._since_change += 1
        if not self._adaptive or self._since_change < _EVERY:
            return
        self._since_change = 0
        rate = sum(self._outcomes) / len(self._outcomes)
        if rate > _GOOD:
            self.value = max(1, self.value - 1)
        elif rate < _BAD:
            self.value = min(max(4, n_workers // 4), self.value + 2)

    def held_back(self) -> None:
        """Take into account that nothing was tried because of the threshold; it might have succeeded."""
        self._n_held_back += 1
        if self._n_held_back >= _HELD_BACK and self.value > self._initial:
            self._n_held_back = 0
            self.value -= 1

    def reset(self) -> None:
        """Forget all outcomes."""
        self.value = self._initial
        self._outcomes.clear()
        self._since_change = self._n_held_back = 0
