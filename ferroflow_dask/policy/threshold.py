"""How many waiting tasks make a worker worth stealing from, learned from how steals end."""

from __future__ import annotations

from collections import deque

#: Steals after which the threshold is reconsidered, and how many of the last ones are looked at.
_EVERY = 10
_WINDOW = 20
#: Success rates above and below which the threshold moves.
_GOOD = 0.7
_BAD = 0.3


class AdaptiveThreshold:
    """A thief's threshold: down after success, up after refusals.

    ferroflow's rule (every 10 attempts, over the last 20) without its ratchet: there an attempt that
    found nothing to steal counted as a failure, so that the end of every run raised the threshold.
    Here only a victim's refusal counts, and a new graph starts afresh.

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

    def reset(self) -> None:
        """Forget all outcomes."""
        self.value = self._initial
        self._outcomes.clear()
        self._since_change = 0
