"""The rows that `ferroflow bench` writes: one JSON object a line, one line a run.

The version changes whenever a field changes its name or meaning. Files of other versions are refused.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ferroflow_dask.bench.markdown import count, table

#: Name of the schema: what a row must be to be ours.
NAME = "ferroflow-bench"
#: Version of the schema that this release writes.
VERSION = 6
#: Name and version of the schema; part of every row.
SCHEMA = f"{NAME}/{VERSION}"

#: What `BenchRecord.family` may be.
FAMILIES = ("dag", "task-bench", "rsds", "stealing", "array", "frame")
#: What `BenchRecord.costs` may be.
COSTS = ("known", "learned", "unknown")
#: What `BenchRecord.cluster` may be; of old rows, and of those that `bench` has not made, it is unknown.
CLUSTERS = ("local", "slurm", "unknown")
#: What `BenchRecord.status` is of a run that counts.
OK = "ok"


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Size of a cluster: workers, threads of each, and whether each is a process."""

    workers: int
    threads: int
    processes: bool

    @property
    def n_threads(self) -> int:
        """Threads of all workers."""
        return self.workers * self.threads

    def __str__(self) -> str:
        kind = "processes" if self.processes else "in one process"
        return f"{count(self.workers, 'worker')} × {count(self.threads, 'thread')}, {kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRecord:
    """One run of one workload under one policy.

    Parameters
    ----------
    schema : str
        Name and version of this schema.
    workload : str
        Its name.
    family : str
        dag, task-bench, rsds, stealing, array or frame.
    arguments : mapping
        Sizes of the workload.
    policy : str
        Who decided: a baseline's name, or one of ours.
    lowering : str
        How the computation was written, where that makes a difference to Dask; "" if there is one way.
    costs : str
        known (declared), learned (by runs before this one) or unknown (nothing was known at the start).
    workers, threads_per_worker : int
        Of the cluster.
    processes : bool
        Whether each worker is a process of its own.
    cluster : str
        local, slurm or unknown.
    section : str or None
        Of the configuration, from which the jobs were made; of jobs of two sections both, with their
        numbers. "" where there are no jobs; null if it is unknown.
    tls : bool or None
        Whether messages were encrypted; null if that is unknown.
    fresh : bool or None
        Whether there was a new cluster for each run; null if that is unknown.
    invocation : str or None
        Drawn anew by each call of `ferroflow bench`; null if the call is unknown.
    repetition : int
        From 0; runs of one repetition and one invocation were made one right after the other.
    makespan_s : float
        From the un-lowered graph until all results are gathered [s]; cluster up, constants scattered.
    bound_s : float or None
        max(T1/P, T∞) [s], by declared durations where there are any, else by those measured in this run.
    efficiency : float or None
        bound_s / makespan_s.
    predicted_s : float or None
        The makespan that was expected when the graph was cut into bundles [s].
    predicted_tasks : int or None
        The tasks that were expected then.
    predicted_bytes : int or None
        What workers were expected to fetch from each other [B].
    ops : int
        By which throughput is counted.
    tasks : int
        Tasks that Dask was given.
    executed : int
        Executions, counted on the workers: of ops in DAGs and Task Bench, else of tasks.
    steals_asked : int
        Tasks that a worker was asked to give to another.
    steals_confirmed : int
        Those that it gave.
    steals_refused : int
        Those that it kept, since it ran them already.
    bytes_moved : int
        Fetched by workers from each other, without P2P shuffles [B].
    idle_fraction : float
        Part of makespan_s × P in which threads ran no task.
    scheduler_cpu_s : float
        CPU time of the scheduler's thread [s]; on a local cluster it serves the client too.
    peak_worker_memory : int
        Largest resident set of any worker process during the run [B].
    status : str
        "ok", or why the run does not count.
    seed : int
        Of inputs, of the order of runs, and of policies that draw.
    versions : mapping
        Of Python and of the packages that matter.
    commit : str
        Of the working tree, "" if there is none; ends in "+" if it was changed.
    machine : str
        Processor, cores, memory.
    """

    schema: str = SCHEMA
    workload: str
    family: str = "dag"
    arguments: Mapping[str, Any]
    policy: str
    lowering: str = ""
    costs: str = "learned"
    workers: int
    threads_per_worker: int
    processes: bool = True
    cluster: str = "unknown"
    section: str | None = None
    tls: bool | None = None
    fresh: bool | None = None
    invocation: str | None = None
    repetition: int
    makespan_s: float
    bound_s: float | None = None
    efficiency: float | None = None
    predicted_s: float | None = None
    predicted_tasks: int | None = None
    predicted_bytes: int | None = None
    ops: int
    tasks: int = 0
    executed: int
    steals_asked: int = 0
    steals_confirmed: int = 0
    steals_refused: int = 0
    bytes_moved: int = 0
    idle_fraction: float = 0.0
    scheduler_cpu_s: float = 0.0
    peak_worker_memory: int = 0
    status: str = OK
    seed: int = 0
    versions: Mapping[str, str]
    commit: str
    machine: str


def written(arguments: Mapping[str, Any]) -> str:
    """Return arguments as text that tells them from others; they may hold lists, which cannot be keys.

    Examples
    --------
    >>> written({"n": 2, "chunks": [1, 3]})
    '{"chunks": [1, 3], "n": 2}'
    """
    return json.dumps(dict(arguments), sort_keys=True)


#: A field of a numpydoc "Parameters" section: names and type on a line, then the indented description.
_FIELD = re.compile(r"^(\w[\w, ]*) : (.+)$")


def schema_table() -> str:
    """Return the fields of a row as a markdown table, made from the docstring of `BenchRecord`.

    Examples
    --------
    >>> print(schema_table().splitlines()[0])
    | field | type | meaning |
    """
    return table(("field", "type", "meaning"), _described_fields())


def _described_fields() -> Iterator[tuple[str, str, str]]:
    section = inspect.cleandoc(BenchRecord.__doc__ or "").partition("Parameters\n----------\n")[2]
    meanings: dict[str, list[str]] = {}
    types: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        if match := _FIELD.match(line):
            names = match[1].split(", ")
            for name in names:
                types[name], meanings[name] = match[2], []
        else:
            for name in names:
                meanings[name].append(line.strip())
    for name in BenchRecord.__dataclass_fields__:
        yield f"`{name}`", types[name], " ".join(meanings[name])
