"""Records of runs in JSON: read without unpickling, checked field by field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dask.typing import Key

from ferroflow_dask.documents import as_list, as_number, as_object, check_format, read_document, short
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.replay.job import Job, JobGraph
from ferroflow_dask.replay.wfformat import MOST_TASKS, MOST_THREADS, is_wfformat, job_of_wfformat
from ferroflow_dask.virtual import VirtualTask

FORMAT, VERSION = "ferroflow record", 1
#: Of sums of floats.
_DUST = 1e-9


def load_record(path: str | Path) -> Job:
    """Return the job of a run that `record` has written, or of a workflow in WfFormat 1.5 or 1.6.

    Raises
    ------
    UsageError
        The file cannot be read, or is not a record.
    """
    path = Path(path)
    document = read_document(path, "a record")
    try:
        if is_wfformat(document):
            return job_of_wfformat(document)
        return job_of_document(document, name=path.stem)
    except UsageError as error:
        raise UsageError(f"{str(path)!r} is not a valid record: {error}") from error


def job_of_document(document: Any, name: str = "") -> Job:
    """Return the job that the document of a record describes."""
    document = check_format(document, FORMAT, VERSION)
    rows, graphs = as_list(document.get("tasks"), "tasks"), as_list(document.get("graphs"), "graphs")
    if len(rows) > MOST_TASKS:
        raise UsageError(f"tasks must be at most {MOST_TASKS:,}, got {len(rows):,}")
    core_share, queued_share = _share(document, "core_share", 1.0), _share(document, "queued_share", 0.0)
    if core_share + queued_share > 1 + _DUST:
        raise UsageError(
            f"core_share and queued_share must be at most 1 together, got {core_share + queued_share}"
        )
    # How long tasks wait for a core depends on the host: it is simulated.
    kept = 1 - queued_share
    core_share = min(1.0, core_share / kept) if kept else 1.0
    keys: list[Key] = []
    tasks: list[dict[Key, VirtualTask]] = [{} for _ in graphs]
    wanted: list[list[Key]] = [[] for _ in graphs]
    for at, row in enumerate(rows):
        graph, task, is_wanted = _task(row, at, keys, len(graphs))
        key = row[0]
        task = replace(task, duration_s=task.duration_s * kept, core_share=core_share)
        tasks[graph][key] = task
        keys.append(key)
        if is_wanted:
            wanted[graph].append(key)
    if len(set(keys)) < len(keys):
        raise UsageError("each key of tasks must be used once, got one twice")
    found = []
    for at, value in enumerate(graphs):
        sent = as_object(value, f"graph {at}")
        delay_s = as_number(sent.get("delay_s", 0.0), f"delay_s of graph {at}")
        if tasks[at]:
            found.append(JobGraph(tasks[at], tuple(wanted[at]), bool(sent.get("waits")), delay_s))
    threads = tuple(_count(n, "threads of a worker") for n in as_list(document.get("threads"), "threads"))
    if sum(threads) > MOST_THREADS:
        raise UsageError(f"threads must be at most {MOST_THREADS:,} in all, got {sum(threads):,}")
    as_list(document.get("transfers"), "transfers")  # nothing reads them yet, but the file must be whole
    return Job(
        tuple(found),
        name,
        str(document.get("policy", "")),
        threads,
        as_number(document.get("makespan_s"), "makespan_s"),
    )


def _task(row: Any, at: int, keys: list[Key], n_graphs: int) -> tuple[int, VirtualTask, bool]:
    """Return graph, task and whether clients want it, of a row as `record` writes it."""
    if not isinstance(row, list) or len(row) != 8 or not isinstance(row[0], str):
        raise UsageError(
            f"task {at} must be a list of key, graph, duration, size, dependencies, worker, start and "
            f"whether it is wanted; got {short(row)}"
        )
    _, graph, duration_s, nbytes, needed, _, _, is_wanted = row
    if not isinstance(graph, int) or not 0 <= graph < n_graphs:
        raise UsageError(f"graph of task {at} must be from 0 to {n_graphs - 1}, got {short(graph)}")
    if not isinstance(needed, list):
        raise UsageError(f"dependencies of task {at} must be a list, got {short(needed)}")
    for one in needed:
        if not isinstance(one, int) or isinstance(one, bool) or not 0 <= one < at:
            raise UsageError(f"a dependency of task {at} must be an earlier task, got {short(one)}")
    task = VirtualTask(
        as_number(duration_s, f"duration of task {at}"),
        tuple([keys[one] for one in needed]),
        int(as_number(nbytes, f"size of task {at}")),
    )
    return graph, task, bool(is_wanted)


def _share(document: Mapping[str, Any], name: str, default: float) -> float:
    share = as_number(document.get(name, default), name)
    if share > 1:
        raise UsageError(f"{name} must be at most 1, got {share}")
    return share


def _count(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{where} must be a whole number, at least 1, got {short(value)}")
    return value
