"""Decision log: the last decisions with their reasons, and `explain`, which reads it for a client."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from dask.typing import Key

from ferroflow_dask.policy.instructions import Reason, in_words

if TYPE_CHECKING:
    from collections.abc import Callable

#: Decisions kept; at 300 bytes each they take 15 MB.
_KEPT = 50_000
#: Names of workers kept, those of workers that left included.
_KEPT_NAMES = 10_000


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision about a task.

    Parameters
    ----------
    time : float
        Seconds since the epoch.
    key : Key
    what : str
        `placed`, `steal asked`, `steal declined`, `steal confirmed`, `steal refused`, `steal aborted`,
        `withdrawn` for a prefetched task, `placement declined` where a policy ignored restrictions, `bundled`
        for a task that runs several tasks, `split` where these run one by one after all, `divided` where some
        of them leave it while it runs, or `seceded` for a task that leaves its thread pool.
    worker : str
        The worker that is to run the task, by its name on the dashboard; for declined actions, the one that
        might have; "" for bundles that no worker has.
    reason : str
    """

    time: float
    key: Key
    what: str
    worker: str
    reason: str

    def __str__(self) -> str:
        return " · ".join(filter(None, (self.what, self.worker, self.reason)))


class DecisionLog:
    """Keeps the last decisions.

    Parameters
    ----------
    clock : callable
        Returns the time [s].
    kept : int, optional
        Number of decisions.
    """

    def __init__(self, clock: Callable[[], float], kept: int = _KEPT) -> None:
        self._clock = clock
        self._decisions: deque[tuple[float, Key, str, str, Reason]] = deque(maxlen=kept)
        #: Number of decisions ever noted.
        self.n_noted = 0
        self._names: dict[str, str] = {}

    def named(self, address: str, name: str) -> None:
        """Note the name of a worker, by which decisions tell it even after it has left."""
        self._names.pop(address, None)
        self._names[address] = name
        if len(self._names) > _KEPT_NAMES:
            del self._names[next(iter(self._names))]

    def name_of(self, address: str) -> str:
        """Return the name of a worker; its address if it is not known."""
        return self._names.get(address, address)

    def note(self, key: Key, what: str, worker: str, reason: Reason) -> None:
        """Keep a decision; forget the oldest one if there are too many."""
        self._decisions.append((self._clock(), key, what, worker, reason))
        self.n_noted += 1

    def last(self, n: int) -> list[Decision]:
        """Return the last decisions, oldest first."""
        return [self._decision(*noted) for noted in islice(reversed(self._decisions), n)][::-1]

    def keys(self, n: int, what: str) -> Iterator[Key]:
        """Yield the tasks of one kind of decision among the last `n`, newest first."""
        return (noted[1] for noted in islice(reversed(self._decisions), n) if noted[2] == what)

    def about(self, name: str) -> Iterator[Decision]:
        """Yield the decisions about a task by its key as a string, oldest first."""
        return (self._decision(*noted) for noted in self._decisions if str(noted[1]) == name)

    def _decision(self, time: float, key: Key, what: str, worker: str, reason: Reason) -> Decision:
        return Decision(time, key, what, self.name_of(worker), in_words(reason, self._names))
