"""The rows that `ferroflow bench` writes: one JSON object a line, one line a run.

The version changes whenever a field changes its name or meaning. Files of other versions are refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from ferroflow_dask.bench.markdown import table

#: Name of the schema: what a row must be to be ours.
NAME = "ferroflow-bench"
#: Name and version of the schema; part of every row.
SCHEMA = f"{NAME}/7"

#: What `BenchRecord.status` is of a run that counts.
OK = "ok"


class Kind(NamedTuple):
    """What values a field may have: type and range in words, and whether a value has them."""

    type: str
    words: str
    accepts: Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    # The comparison is false of NaN, and of whole numbers that no float can hold.
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def _is_object(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(part, str) for part in value.values())


def _one_of(*names: str) -> Kind:
    return Kind("str", f"one of: {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


_TEXT = Kind("str", "text", lambda value: isinstance(value, str))
_NONEMPTY = Kind("str", "text, and not empty", lambda value: isinstance(value, str) and bool(value))
_COUNT = Kind("int", "a whole number, at least 0", _is_count)
_SIZE = Kind("int", "a whole number, at least 1", lambda value: _is_count(value) and value >= 1)
_NUMBER = Kind("float", "a number, at least 0", _is_number)
_FLAG = Kind("bool", "true or false", lambda value: isinstance(value, bool))
_OBJECT = Kind("mapping", "an object that JSON can hold", _is_object)
_TEXTS = Kind("mapping", "an object of texts", _is_texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRecord:
    """One run of one workload under one policy: each field with its type, its range and its meaning."""

    schema: Annotated[str, _one_of(SCHEMA), "Name and version of this schema."] = SCHEMA
    workload: Annotated[str, _NONEMPTY, "Its name."]
    suite: Annotated[str, _NONEMPTY, "The set of workloads or programs that it is one of."] = "dag"
    source: Annotated[str, _TEXT, 'Who wrote it, with version and licence; "" if it was written here.'] = ""
    arguments: Annotated[Mapping[str, Any], _OBJECT, "Sizes of the workload."]
    policy: Annotated[str, _NONEMPTY, "Who decided: a baseline's name, or one of ours."]
    lowering: Annotated[
        str,
        _TEXT,
        'How the computation was written, where that makes a difference to Dask; "" if there is one way.',
    ] = ""
    costs: Annotated[
        str,
        _one_of("known", "learned", "unknown"),
        "known (declared), learned (by runs before this one) or unknown (nothing was known at the start).",
    ] = "learned"
    workers: Annotated[int, _SIZE, "Of the cluster."]
    threads_per_worker: Annotated[int, _SIZE, "Of the cluster."]
    processes: Annotated[bool, _FLAG, "Whether each worker is a process of its own."] = True
    cluster: Annotated[
        str,
        _one_of("local", "separate", "slurm", "virtual", "unknown"),
        "local, separate (with a process for the scheduler), slurm, virtual (in virtual time) or unknown.",
    ] = "unknown"
    section: Annotated[
        str | None,
        _TEXT,
        "Of the configuration, from which the jobs were made; of jobs of two sections both, with their "
        'numbers. "" where there are no jobs; null if it is unknown.',
    ] = None
    tls: Annotated[bool | None, _FLAG, "Whether messages were encrypted; null if that is unknown."] = None
    fresh: Annotated[
        bool | None, _FLAG, "Whether there was a new cluster for each run; null if that is unknown."
    ] = None
    invocation: Annotated[
        str | None, _TEXT, "Drawn anew by each call of `ferroflow bench`; null if the call is unknown."
    ] = None
    repetition: Annotated[
        int, _COUNT, "From 0; runs of one repetition and one invocation were made one right after the other."
    ]
    makespan_s: Annotated[
        float,
        _NUMBER,
        "From the un-lowered graph until all results are gathered [s]; cluster up, constants scattered.",
    ]
    bound_s: Annotated[
        float | None,
        _NUMBER,
        "max(T1/P, T∞) [s], by declared durations where there are any, else by those measured in this run.",
    ] = None
    efficiency: Annotated[float | None, _NUMBER, "bound_s / makespan_s."] = None
    predicted_s: Annotated[
        float | None, _NUMBER, "The makespan that was expected when the graph was cut into bundles [s]."
    ] = None
    predicted_tasks: Annotated[int | None, _COUNT, "The tasks that were expected then."] = None
    predicted_bytes: Annotated[
        int | None, _COUNT, "What workers were expected to fetch from each other [B]."
    ] = None
    sent_s: Annotated[
        float | None, _NUMBER, "From the start until the first graph has left the client [s]."
    ] = None
    created_s: Annotated[
        float | None, _NUMBER, "From the start until the tasks of the first graph exist on the scheduler [s]."
    ] = None
    started_s: Annotated[
        float | None, _NUMBER, "From the start until a worker starts the first task [s]."
    ] = None
    first_result_s: Annotated[
        float | None, _NUMBER, "From the start until the client knows that a wanted result exists [s]."
    ] = None
    ops: Annotated[int, _COUNT, "By which throughput is counted."]
    tasks: Annotated[int, _COUNT, "Tasks that Dask was given."] = 0
    executed: Annotated[
        int, _COUNT, "Executions, counted on the workers: of ops in DAGs and Task Bench, else of tasks."
    ]
    steals_asked: Annotated[int, _COUNT, "Tasks that a worker was asked to give to another."] = 0
    steals_confirmed: Annotated[int, _COUNT, "Those that it gave."] = 0
    steals_refused: Annotated[int, _COUNT, "Those that it kept, since it ran them already."] = 0
    bytes_moved: Annotated[int, _COUNT, "Fetched by workers from each other, without P2P shuffles [B]."] = 0
    p2p_bytes: Annotated[
        int | None, _COUNT, "Sent by P2P shuffles, shards for the own worker included [B]."
    ] = None
    messages: Annotated[int | None, _COUNT, "Between scheduler and workers, in both directions."] = None
    batches: Annotated[int | None, _COUNT, "In which these messages were sent."] = None
    bundled: Annotated[bool | None, _FLAG, "Whether bundles were on; null of other policies than ours."] = (
        None
    )
    idle_fraction: Annotated[float, _NUMBER, "Part of makespan_s × P in which threads ran no task."] = 0.0
    scheduler_cpu_s: Annotated[
        float, _NUMBER, "CPU time of the scheduler's thread [s]; on a local cluster it serves the client too."
    ] = 0.0
    client_cpu_s: Annotated[
        float | None,
        _NUMBER,
        "CPU time of the client's process, on a local cluster without the scheduler [s].",
    ] = None
    worker_cpu_s: Annotated[float | None, _NUMBER, "CPU time of all worker processes [s]."] = None
    others_cpu_s: Annotated[
        float | None, _NUMBER, "CPU time that the clusters of the other sides took during the run [s]."
    ] = None
    peak_worker_memory: Annotated[
        int, _COUNT, "Largest resident set of any worker process during the run [B]."
    ] = 0
    peak_client_memory: Annotated[
        int | None, _COUNT, "Largest resident set of the client's process during the run [B]."
    ] = None
    peak_scheduler_memory: Annotated[
        int | None, _COUNT, "The same of the scheduler's process; null if that is the client's [B]."
    ] = None
    status: Annotated[str, _NONEMPTY, '"ok", or why the run does not count.'] = OK
    seed: Annotated[int, _COUNT, "Of inputs, of the order of runs, and of policies that draw."] = 0
    versions: Annotated[Mapping[str, str], _TEXTS, "Of Python and of the packages that matter."]
    commit: Annotated[str, _TEXT, 'Of the working tree, "" if there is none; ends in "+" if it was changed.']
    machine: Annotated[str, _TEXT, "Processor, cores, memory."]


class Field(NamedTuple):
    """A field of a row: which values it takes, whether it may be null, and what it means."""

    kind: Kind
    may_be_null: bool
    meaning: str

    def problem(self, value: Any) -> str:
        """Return what a value must be if it is not; "" if it is."""
        if (self.may_be_null and value is None) or self.kind.accepts(value):
            return ""
        words = self.kind.words
        if not self.may_be_null:
            return words
        return f"{words}, or null" if "," in words else f"{words.replace(' or ', ', ')} or null"


def _field(hint: Any) -> Field:
    kind, meaning = hint.__metadata__
    return Field(kind, type(None) in get_args(hint.__origin__), meaning)


#: The fields that tell a run from others in the same place, with the same versions.
_IDENTITY = (
    *("workload", "arguments", "policy", "lowering", "costs", "workers", "threads_per_worker", "processes"),
    *("cluster", "section", "tls", "fresh", "seed", "repetition"),
)


def identity_of(row: BenchRecord) -> str:
    """Return the fields that identify the run of a row; as in `bench.public.runner`."""
    return written({name: getattr(row, name) for name in _IDENTITY})


#: The fields of a row, by name.
ROW: Mapping[str, Field] = {
    name: _field(hint) for name, hint in get_type_hints(BenchRecord, include_extras=True).items()
}


def schema_table() -> str:
    """Return the fields of a row as a markdown table.

    Examples
    --------
    >>> print(schema_table().splitlines()[0])
    | field | type | meaning |
    """
    lines = [
        (f"`{name}`", f"{field.kind.type}{' or None' * field.may_be_null}", field.meaning)
        for name, field in ROW.items()
    ]
    return table(("field", "type", "meaning"), lines)


def written(arguments: Mapping[str, Any]) -> str:
    """Return arguments as text that tells them from others; they may hold lists, which cannot be keys.

    Examples
    --------
    >>> written({"n": 2, "chunks": [1, 3]})
    '{"chunks": [1, 3], "n": 2}'
    """
    return json.dumps(dict(arguments), sort_keys=True)
