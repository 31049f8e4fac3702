"""What is learned of messages and transfers: how much longer they take than is foreseen."""

from __future__ import annotations

from math import exp2

#: What is kept of earlier transfers when there is a new one, and how long the first of all count for [s].
_TRANSFERS_KEPT = 0.9
_FIRST_GUESS_S = 0.01
#: Bounds of what is learned of transfers: how many times as long as foreseen.
_LEAST_SLOWNESS, _MOST_SLOWNESS = 1.0, 20.0
#: The most that a late answer counts for [s]: a worker whose task holds the interpreter is late for that.
_LATEST_S = 0.05
#: Part of a new answer in what is known of answers, and the half-life of that [s]: what makes steals rare
#: must not keep them so.
_ANSWER_WEIGHT = 0.2
_ANSWERS_HALVED_S = 1.0


class Transfers:
    """How transfers compare with what the bandwidth says; objects have to be packed and unpacked, too."""

    def __init__(self) -> None:
        self._took_s = self._foreseen_s = _FIRST_GUESS_S

    @property
    def slowness(self) -> float:
        """How many times as long as foreseen they take."""
        return min(max(self._took_s / self._foreseen_s, _LEAST_SLOWNESS), _MOST_SLOWNESS)

    def record(self, seconds: float, foreseen_s: float) -> None:
        """Learn from a transfer: what it took, and what was foreseen [s].

        Sums are compared, since of what is fetched in one go for several tasks one is told all of it.
        """
        self._took_s = _TRANSFERS_KEPT * self._took_s + seconds
        self._foreseen_s = _TRANSFERS_KEPT * self._foreseen_s + foreseen_s


class Answers:
    """How late workers answer; what is known is forgotten as time goes."""

    def __init__(self) -> None:
        self._late_s = self._at = 0.0

    def late_s(self, now: float) -> float:
        """Return by how much an answer is later than its messages take [s]."""
        return self._late_s * exp2(-max(0.0, now - self._at) / _ANSWERS_HALVED_S)

    def record(self, late_s: float, now: float) -> None:
        """Learn from an answer that was so late [s]."""
        known_s = self.late_s(now)
        self._late_s = known_s + _ANSWER_WEIGHT * (min(max(late_s, 0.0), _LATEST_S) - known_s)
        self._at = now
