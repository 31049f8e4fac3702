"""The last decisions and their reasons, for those who ask why a task is where it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from dask.typing import Key

from ferroflow_dask.policy.instructions import Reason, in_words

#: Decisions kept; at 300 bytes each they take 15 MB.
_KEPT = 50_000


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision about a task.

    Parameters
    ----------
    time : float
        Seconds since the epoch.
    key : Key
    what : str
        placed, steal asked, steal declined, steal confirmed, steal refused, steal aborted, withdrawn, of what
        was sent ahead, or placement declined, where a policy would break restrictions.
    worker : str
        Where the task is to run from now on; of what was declined, the worker that might have had it.
    reason : str
    """

    time: float
    key: Key
    what: str
    worker: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what} · {self.worker} · {self.reason}"


class Journal:
    """Keeps the last decisions; a note costs a microsecond."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._decisions: deque[tuple[float, Key, str, str, Reason]] = deque(maxlen=kept)
        #: All that were ever noted.
        self.n_noted = 0

    def note(self, time: float, key: Key, what: str, worker: str, reason: Reason) -> None:
        """Keep a decision, and forget the oldest if there are too many."""
        self._decisions.append((time, key, what, worker, reason))
        self.n_noted += 1

    def last(self, n: int) -> list[Decision]:
        """Return the last decisions, oldest first."""
        return [_decision(*noted) for noted in islice(reversed(self._decisions), n)][::-1]

    def keys(self, n: int, what: str) -> Iterator[Key]:
        """Yield the tasks of one kind of decision among the last `n`, newest first."""
        return (noted[1] for noted in islice(reversed(self._decisions), n) if noted[2] == what)

    def about(self, name: str) -> Iterator[Decision]:
        """Yield the decisions about a task, oldest first; `name` is its key, or how it is written."""
        return (_decision(*noted) for noted in self._decisions if str(noted[1]) == name)


def _decision(time: float, key: Key, what: str, worker: str, reason: Reason) -> Decision:
    return Decision(time, key, what, worker, in_words(reason))
