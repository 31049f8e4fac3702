"""What was seen of a cluster: tasks that ran, workers at a moment, samples, failures."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ferroflow_dask.dashboard.idle import Idle
from ferroflow_dask.dashboard.progress import GraphProgress


class OpRun(NamedTuple):
    """A task that ran; a tuple, of which many are made.

    Parameters
    ----------
    name : str
        Of its kind.
    key : str
    worker : str
        Address.
    thread : int
    start, stop : float
        [s]
    stolen : bool
    """

    name: str
    key: str
    worker: str
    thread: int
    start: float
    stop: float
    stolen: bool


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker at one moment.

    Parameters
    ----------
    address, name : str
    kind : str
        cpu or gpu.
    n_threads, n_running, n_waiting : int
        Threads, and tasks that run or wait there.
    remaining_s : float
        Until it has done what it was given [s].
    is_running : bool
        False while it is paused or about to leave.
    cpu : float, optional
        CPU time of the last second, by the worker's last heartbeat, as a part of its threads.
    memory, memory_limit : int, optional
        Memory of its process, by its last heartbeat, and 0 or what it may use [B].
    idle : Idle or None, optional
        Why it has free threads.
    """

    address: str
    name: str
    kind: str
    n_threads: int
    n_running: int
    n_waiting: int
    remaining_s: float
    is_running: bool
    cpu: float = 0.0
    memory: int = 0
    memory_limit: int = 0
    idle: Idle | None = None

    @property
    def memory_part(self) -> float | None:
        """Memory as a part of what may be used; None without a limit."""
        return self.memory / self.memory_limit if self.memory_limit else None


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster at one moment.

    Parameters
    ----------
    time : float
        [s]
    tasks_per_s : float
        That have ended since the sample before.
    efficiency : float
        Part of the threads that had a task.
    steals_per_s : float
    success : float
        Part of the steals asked for so far that were confirmed.
    threshold : float
    """

    time: float
    tasks_per_s: float
    efficiency: float
    steals_per_s: float
    success: float
    threshold: float


class RunStart(NamedTuple):
    """When a measured run began, and the steals until then.

    Parameters
    ----------
    time : float
        [s]
    steals : dict of str to int
    flows : Counter
    """

    time: float
    steals: dict[str, int]
    flows: Counter[tuple[str, str]]


class Failure(NamedTuple):
    """A task that raised an exception.

    Parameters
    ----------
    time : float
        [s]
    key : str
    workers : tuple of str
        Names.
    error, traceback : str
    """

    time: float
    key: str
    workers: tuple[str, ...]
    error: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Recording:
    """What a recorder has noted, to be taken elsewhere; figures read it like a recorder.

    Parameters
    ----------
    ops : list of OpRun
    n_ran : int
        Ops that ran, kept or not.
    samples : list of Sample
    loads : list of WorkerLoad
    flow_counts : Counter
    progress : GraphProgress
    n_threads : int
    steals : mapping of str to int
        By outcome.
    thieves : frozenset of str
        Addresses of workers for which a steal is under way.
    policy : str or None
    time : float
        When it was taken [s].
    failures : list of Failure
        Latest first.
    began : RunStart or None
        The last measured run.
    stock_s : float or None
        Simulated makespan of the last graphs as single tasks [s].
    """

    ops: list[OpRun]
    n_ran: int
    samples: list[Sample]
    loads: list[WorkerLoad]
    flow_counts: Counter[tuple[str, str]]
    progress: GraphProgress
    n_threads: int
    steals: dict[str, int]
    thieves: frozenset[str]
    policy: str | None
    time: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    began: RunStart | None = None
    stock_s: float | None = None

    @property
    def n_ops(self) -> int:
        """Ops that are there."""
        return len(self.ops)

    def new_ops(self, n_seen: int) -> list[OpRun]:
        """Return the ops after the first `n_seen`."""
        return self.ops[n_seen:]

    def workers(self, *, why_idle: bool = False) -> list[WorkerLoad]:
        """Return the workers as they were, with the reasons why they had free threads."""
        return self.loads

    def flows(self) -> Counter[tuple[str, str]]:
        """Return the tasks that one worker has given up to another, by their addresses."""
        return self.flow_counts

    def measured(self) -> Recording:
        """Return the last measured run; all, if none was."""
        began = self.began
        if began is None:
            return self
        return replace(
            self,
            ops=[op for op in self.ops if op.start >= began.time],
            samples=[sample for sample in self.samples if sample.time >= began.time],
            flow_counts=self.flow_counts - began.flows,
            steals={outcome: n - began.steals.get(outcome, 0) for outcome, n in self.steals.items()},
            failures=[failure for failure in self.failures if failure.time >= began.time],
        )

    def preparation(self) -> Recording:
        """Return the tasks before the last measured run; none, if none was."""
        ops = [] if self.began is None else [op for op in self.ops if op.start < self.began.time]
        return replace(self, ops=ops, flow_counts=Counter(), steals={}, failures=[])
