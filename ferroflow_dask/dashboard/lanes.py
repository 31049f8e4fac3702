"""Rows of a timeline: one for each thread of each worker, also while workers come and go."""

from __future__ import annotations

from collections.abc import Iterable, Set

from ferroflow_dask.dashboard.recording import WorkerLoad


def natural(name: str) -> tuple[int, str]:
    """Sort `10` after `9`."""
    return (int(name), "") if name.isdecimal() else (-1, name)


class Lanes:
    """A row for each thread of each worker, from top to bottom; workers that come later come below."""

    def __init__(self) -> None:
        self.n = 0
        #: By address: numbers that fall from 0.
        self.rows: dict[str, range] = {}
        #: By address: threads that have a row and which of the worker's it is, the latest last.
        self._places: dict[str, dict[int, int]] = {}

    def add(self, workers: Iterable[WorkerLoad]) -> None:
        """Make rows for workers that have none yet."""
        new = [worker for worker in workers if worker.address not in self.rows]
        for worker in sorted(new, key=lambda worker: natural(worker.name)):
            self._add(worker.address, max(1, worker.n_threads))

    def _add(self, address: str, n_rows: int) -> None:
        self.rows[address] = range(-self.n, -self.n - n_rows, -1)
        self.n += n_rows

    def drop(self, addresses: Set[str]) -> dict[int, int]:
        """Take away the rows of workers; return where each row that stays goes."""
        before, self.rows, self.n = self.rows, {}, 0
        moved: dict[int, int] = {}
        for address, rows in before.items():
            if address in addresses:
                self._places.pop(address, None)
            else:
                self._add(address, len(rows))
                moved.update(zip(rows, self.rows[address], strict=True))
        return moved

    def of(self, address: str, thread: int) -> int:
        """Return the row of a thread."""
        if address not in self.rows:  # it has left
            self._add(address, 1)
        rows, places = self.rows[address], self._places.setdefault(address, {})
        if thread in places:
            place = places.pop(thread)
        elif len(places) < len(rows):
            place = len(places)
        else:  # async tasks, other executors and threads that left the pool: the row that was still longest
            place = places.pop(next(iter(places)))
        places[thread] = place
        return rows[place]
