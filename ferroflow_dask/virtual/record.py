"""What happened in a run: executions, completions, transfers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dask.typing import Key
from distributed.diagnostics.plugin import SchedulerPlugin

from ferroflow_dask.virtual.clock import VirtualTime


class Outcome(Enum):
    """How an execution ended."""

    FINISHED = "finished"
    FAILED = "failed"
    LOST = "lost with its worker"


@dataclass(frozen=True, slots=True)
class Execution:
    """One run of a task on a worker's thread, from `start` to `stop` [s]."""

    key: Key
    worker: int
    start: float
    stop: float
    outcome: Outcome = Outcome.FINISHED


@dataclass(frozen=True, slots=True)
class Completion:
    """The scheduler learned at a time [s] that a task's result is in memory."""

    key: Key
    time: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """Results that a worker fetched from another one, from `start` to `stop` [s]."""

    keys: tuple[Key, ...]
    source: int
    destination: int
    nbytes: int
    start: float
    stop: float


class MemoryRecord:
    """What the memory of workers with a limit did [B]."""

    def __init__(self) -> None:
        #: Largest size of each process.
        self.peaks: dict[int, int] = {}
        #: Largest sum of all results, replicas and spilled ones included.
        self.results_peak = 0
        #: Written to disk and read from it, by worker.
        self.written: dict[int, int] = {}
        self.read: dict[int, int] = {}
        self.pauses = 0
        #: Workers that were ended for their memory, in this order.
        self.deaths: list[int] = []
        self._results: dict[int, int] = {}
        self._results_nbytes = 0

    def holds(self, worker: int, process: int, results: int) -> None:
        """Note the size of a process, and of all results that it has."""
        self.peaks[worker] = max(process, self.peaks.get(worker, 0))
        self._results_nbytes += results - self._results.get(worker, 0)
        self._results[worker] = results
        self.results_peak = max(self.results_peak, self._results_nbytes)


class Record(SchedulerPlugin):
    """Collects what happens, in the order in which it ends."""

    name = "virtual-record"

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self.executions: list[Execution] = []
        #: Runs of the steps of bundles, each of which is one of `executions` as a whole.
        self.steps: list[Execution] = []
        self.completions: list[Completion] = []
        self.transfers: list[Transfer] = []
        self.memory = MemoryRecord()
        #: How often each task was started.
        self.n_started: Counter[Key] = Counter()
        #: Graphs on their way to the scheduler, and what clients want that is not there yet.
        self.n_arriving = 0
        self.wanted: set[Key] = set()
        #: Called when all is there that clients want.
        self.on_idle: Callable[[], None] | None = None
        #: Messages that the scheduler has handled, by operation.
        self.messages: Counter[str] = Counter()
        # Tasks that have run, and calls that wait for some of them, by one of these.
        self._ended: set[Key] = set()
        self._waiting: dict[Key, list[tuple[Sequence[Key], Callable[[], None]]]] = {}

    def executed(self, execution: Execution) -> None:
        """Note an execution."""
        self.executions.append(execution)
        if execution.outcome is Outcome.FINISHED:
            self._has_run(execution.key)

    def ran_step(self, execution: Execution) -> None:
        """Note the run of a step of a bundle."""
        self.steps.append(execution)
        self._has_run(execution.key)

    def _has_run(self, key: Key) -> None:
        self._ended.add(key)
        for keys, call in self._waiting.pop(key, ()):
            self.await_all(keys, call)

    def await_all(self, keys: Sequence[Key], call: Callable[[], None]) -> None:
        """Call a function once some tasks have run."""
        missing = next((key for key in keys if key not in self._ended), None)
        if missing is None:
            call()
        else:
            self._waiting.setdefault(missing, []).append((keys, call))

    def transition(self, key: Key, start: Any, finish: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 -- hook
        """Note a completion."""
        if finish == "memory" and start != "memory":
            self.completions.append(Completion(key, self._time.now))
            if key in self.wanted:
                self.wanted.discard(key)
                if not self.wanted and not self.n_arriving and self.on_idle is not None:
                    self.on_idle()

    @property
    def n_messages(self) -> int:
        """Messages that the scheduler has handled."""
        return self.messages.total()

    @property
    def makespan_s(self) -> float:
        """Time of the last completion [s]; 0 without any."""
        return self.completions[-1].time if self.completions else 0.0

    def timeline(self) -> list[tuple[Key, int, float, float]]:
        """Return (key, worker, start [s], stop [s]) of each execution, in the order in which they began."""
        rows = ((e.key, e.worker, e.start, e.stop) for e in self.executions)
        return sorted(rows, key=lambda row: row[2:0:-1])
