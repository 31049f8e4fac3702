"""Fixed values: results that cannot be sent to another worker, so their readers run where they are.

Results of some types are known to be fixed. Of others the scheduler learns it from a worker that failed to
fetch one: then all results of that prefix and type are fixed, until one is fetched; see `failed_transfers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.scheduler import _distributed

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

    from ferroflow_dask.scheduler.core import Core
    from ferroflow_dask.scheduler.graphs.splitting import Splitting

#: Types that `pickle` refuses, as `dask.utils.typename` names them.
TYPES = frozenset(
    (
        *("_thread.lock", "_thread.RLock", "_thread._local", "threading.Condition", "threading.Event"),
        *("socket.socket", "sqlite3.Connection", "sqlite3.Cursor", "module"),
        *("generator", "async_generator", "coroutine", "_io.FileIO", "_io.TextIOWrapper"),
        *("_io.BufferedReader", "_io.BufferedWriter", "_io.BufferedRandom"),
    )
)
#: Result of a bundle: what is in it decides.
_RESULTS = "ferroflow_dask.bundling.results.Results"
_STIMULUS = "ferroflow-fixed"


class FixedValues:
    """Knows which results are fixed, and where their readers may run.

    Parameters
    ----------
    core : Core
    splitting : Splitting
    """

    def __init__(self, core: Core, splitting: Splitting) -> None:
        self._scheduler = core.scheduler
        self._bundles = splitting.bundles
        self._split = core.guard(splitting.split)
        #: Types whose results are fixed.
        self.types: frozenset[str] = TYPES
        #: Type of the fixed results by prefix; "" for any.
        self.prefixes: dict[str, str] = {}

    def scheduler_started(self) -> None:
        """Fix no types if all workers are in this process: they share all objects."""
        if _distributed.is_in_process(self._scheduler):
            self.types = frozenset()

    def is_fixed(self, ts: TaskState) -> bool:
        """Return whether the result of a task is fixed, as far as is known; may be called by any thread."""
        if ts.type in self.types:
            return True
        prefixes = self.prefixes
        return bool(prefixes) and any(prefixes.get(name) in ("", ts.type) for name in self.prefixes_of(ts))

    def prefixes_of(self, ts: TaskState) -> list[str]:
        """Return the prefixes of the values in the result of a task."""
        bundle = self._bundles.get(ts.key) if ts.type == _RESULTS else None
        return [ts.prefix.name] if bundle is None else [key_split(key) for key in bundle.exports]

    def holders(self, ts: TaskState) -> frozenset[str] | None:
        """Return the addresses of the workers with all fixed inputs of a task; None if there are none."""
        found: frozenset[str] | None = None
        for needed in ts.dependencies:
            if self.is_fixed(needed):
                there = frozenset(ws.address for ws in needed.who_has or ())
                found = there if found is None else found & there
        return found

    def must_wait(self, ts: TaskState) -> bool:
        """Return whether a task that reads fixed values has to wait without a worker.

        The workers that have the values are paused, or it is a bundle whose tasks read them on several
        workers. Such a bundle is split.
        """
        holders = self.holders(ts)
        if holders is None:
            return False
        if holders:
            return all(ws.address not in holders for ws in self._scheduler.running)
        if not self._is_divisible(ts):
            return False
        self._scheduler.loop.add_callback(self._split, ts.key, _STIMULUS)
        return True

    def _is_divisible(self, ts: TaskState) -> bool:
        bundle = self._bundles.get(ts.key)
        return bundle is not None and len(bundle.tasks) > 1

    # What was learned of transfers

    def learn(self, ts: TaskState) -> None:
        """Remember that a result and others like it are fixed."""
        names = self.prefixes_of(ts)
        self.prefixes |= dict.fromkeys(names, "" if ts.type == _RESULTS else str(ts.type))

    def were_fetched(self, keys: Iterable[Key]) -> bool:
        """Forget values that were fetched, as they are not fixed; return whether one was known as fixed."""
        n_before = len(self.prefixes)
        for key in keys:
            ts = self._scheduler.tasks.get(key)
            for name in self.prefixes_of(ts) if ts is not None else ():
                self.prefixes.pop(name, None)
        return len(self.prefixes) < n_before
