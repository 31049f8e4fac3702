"""Jobs in WfFormat, the format of WfCommons for workflows and their runs (github.com/wfcommons/WfFormat).

Task durations, results and their readers are kept, and nothing else: graphs that a client sent one after
another are one workflow. The result of a task is one file. Of a workflow that others have written, a task's
result has the size of all its output files. Each task takes one thread, also if it had several cores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.documents import as_list, as_number, as_object, as_text, short
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.replay.job import Job, JobGraph, in_order
from ferroflow_dask.virtual import VirtualTask
from ferroflow_dask.whole_files import write_text

#: The version that is written; the later one, which WfCommons 1.6 writes, adds sums that nothing here reads.
SCHEMA_VERSION, LATER_VERSION = "1.5", "1.6"
#: Of a job.
MOST_TASKS, MOST_THREADS = 5_000_000, 100_000
#: Characters that ids must not have, and the lists of ids in a task.
_FORBIDDEN = re.compile(r"[^0-9a-zA-Z\-_.#]")
_IDS = ("parents", "children", "inputFiles", "outputFiles")
#: Decimal places of a percentage: so it is the same when it is read and written again.
_PLACES = 10
_PERCENT = 100


def is_wfformat(document: Any) -> bool:
    """Return whether a JSON document says that it is in WfFormat."""
    return isinstance(document, Mapping) and "schemaVersion" in document


def job_of_wfformat(document: Mapping[str, Any]) -> Job:
    """Return the job of a workflow and its run.

    Raises
    ------
    UsageError
        The document is not valid, has no durations, or its lists of parents and children differ.
    """
    if document["schemaVersion"] not in (SCHEMA_VERSION, LATER_VERSION):
        found = short(document["schemaVersion"])
        raise UsageError(f"schemaVersion must be {SCHEMA_VERSION!r} or {LATER_VERSION!r}, got {found}")
    workflow = as_object(document.get("workflow"), "workflow")
    specification = as_object(workflow.get("specification"), "workflow.specification")
    execution = as_object(workflow.get("execution"), "workflow.execution, which has the durations,")
    rows = as_list(specification.get("tasks"), "tasks of the specification")
    if len(rows) > MOST_TASKS:
        raise UsageError(f"tasks must be at most {MOST_TASKS:,}, got {len(rows):,}")
    specified = {_text(row, "id", f"task {at}"): row for at, row in enumerate(rows)}
    if len(specified) < len(rows):
        raise UsageError("each id of a task must be used once, got one twice")
    ids = {one: {name: _ids(row, name, one) for name in _IDS} for one, row in specified.items()}
    _check_links(ids)
    runs = {
        _text(row, "id", f"executed task {at}"): row
        for at, row in enumerate(as_list(execution.get("tasks"), "tasks of the execution"))
    }
    nbytes_of = _file_sizes(specification.get("files", []))
    keys: dict[str, Key] = {one: (_text(row, "name", f"task {one!r}"), one) for one, row in specified.items()}
    tasks: dict[Key, VirtualTask] = {}
    for one, links in ids.items():
        if one not in runs:
            raise UsageError(f"the execution must have each task of the specification, got none of {one!r}")
        unknown = next((file for file in links["outputFiles"] if file not in nbytes_of), None)
        if unknown is not None:
            raise UsageError(f"files must have the outputs of task {one!r}, got no {short(unknown)}")
        tasks[keys[one]] = VirtualTask(
            as_number(runs[one].get("runtimeInSeconds"), f"runtimeInSeconds of task {one!r}"),
            tuple(keys[parent] for parent in links["parents"]),
            sum(nbytes_of[file] for file in links["outputFiles"]),
            core_share=_core_share(runs[one].get("avgCPU", _PERCENT), one),
        )
    ordered = {key: tasks[key] for key in in_order(tasks)}
    read = {keys[parent] for links in ids.values() for parent in links["parents"]}
    wanted = tuple(key for key in ordered if key not in read)
    system = document.get("runtimeSystem")
    return Job(
        (JobGraph(ordered, wanted),),
        _text(document, "name", "the workflow"),
        "" if system is None else _text(as_object(system, "runtimeSystem"), "name", "runtimeSystem"),
        _threads(execution.get("machines", [])),
        as_number(execution.get("makespanInSeconds"), "makespanInSeconds"),
    )


def _text(row: Any, name: str, where: str) -> str:
    return as_text(as_object(row, where).get(name), f"{name} of {where}")


def _ids(row: Mapping[str, Any], name: str, one: str) -> list[str]:
    values = as_list(row.get(name, []), f"{name} of task {one!r}")
    where = f"one of {name} of task {one!r}"
    return list(dict.fromkeys(as_text(value, where, may_be_empty=True) for value in values))


def _check_links(ids: Mapping[str, Mapping[str, list[str]]]) -> None:
    """Raise an error unless each parent lists its children, and the other way round."""
    children = {one: set(links["children"]) for one, links in ids.items()}
    for one, links in ids.items():
        for parent in links["parents"]:
            if one not in children.get(parent, ()):
                raise UsageError(f"children of {short(parent)} must have {one!r}, whose parents have it")
            children[parent].discard(one)
    for one, left in children.items():
        if left:
            raise UsageError(f"parents of {short(min(left))} must have {one!r}, whose children have it")


def _file_sizes(rows: Any) -> dict[str, int]:
    return {
        _text(row, "id", f"file {at}"): int(as_number(row.get("sizeInBytes"), f"sizeInBytes of file {at}"))
        for at, row in enumerate(as_list(rows, "files"))
    }


def _core_share(percent: Any, one: str) -> float:
    return min(1.0, round(as_number(percent, f"avgCPU of task {one!r}") / _PERCENT, _PLACES + 2))


def _threads(rows: Any) -> tuple[int, ...]:
    """Return the cores of each machine; those of which none are known count as one."""
    found = []
    for at, row in enumerate(as_list(rows, "machines")):
        cpu = as_object(as_object(row, f"machine {at}").get("cpu", {}), f"cpu of machine {at}")
        cores = cpu.get("coreCount", 1)
        if not isinstance(cores, int) or isinstance(cores, bool) or not 1 <= cores <= MOST_THREADS:
            raise UsageError(
                f"coreCount of machine {at} must be from 1 to {MOST_THREADS:,}, got {short(cores)}"
            )
        found.append(cores)
    return tuple(found)


def save_wfformat(job: Job, path: str | Path, executed_at: datetime) -> None:
    """Write a recorded run as a workflow in WfFormat 1.5.

    Parameters
    ----------
    job : Job
        With a makespan, such as `load_record` returns.
    path : str or path
    executed_at : datetime
        When it ran.

    Raises
    ------
    UsageError
        The job has no makespan.
    OSError
        The file cannot be written.
    """
    write_text(Path(path), json.dumps(_document(job, executed_at), indent=1))


def _document(job: Job, executed_at: datetime) -> dict[str, Any]:
    if job.makespan_s is None:
        raise UsageError("a workflow of WfFormat must have run, got a job without makespan; record one")
    names = _names(job.tasks)
    children: dict[Key, list[str]] = {key: [] for key in job.tasks}
    for key, task in job.tasks.items():
        for parent in dict.fromkeys(task.dependencies):
            children[parent].append(names[key][1])
    tasks, files, runs = [], [], []
    for key, task in job.tasks.items():
        name, own = names[key]
        parents = [names[parent][1] for parent in dict.fromkeys(task.dependencies)]
        tasks.append(
            {
                "name": name,
                "id": own,
                "parents": parents,
                "children": children[key],
                "inputFiles": [_file(parent) for parent in parents],
                "outputFiles": [_file(own)],
            }
        )
        files.append({"id": _file(own), "sizeInBytes": task.nbytes})
        percent = round(task.core_share * _PERCENT, _PLACES)
        runs.append({"id": own, "runtimeInSeconds": task.duration_s, "coreCount": 1, "avgCPU": percent})
    execution: dict[str, Any] = {
        "makespanInSeconds": job.makespan_s,
        "executedAt": executed_at.isoformat(),
        "tasks": runs,
    }
    if job.threads:
        execution["machines"] = [
            {"nodeName": f"worker-{at}", "cpu": {"coreCount": n}} for at, n in enumerate(job.threads)
        ]
    document: dict[str, Any] = {
        "name": job.name or "job",
        "createdAt": executed_at.isoformat(),
        "schemaVersion": SCHEMA_VERSION,
        "workflow": {"specification": {"tasks": tasks, "files": files}, "execution": execution},
    }
    if job.policy:
        document["runtimeSystem"] = {"name": job.policy, "version": "dask"}
    return document


def _names(keys: Iterable[Key]) -> dict[Key, tuple[str, str]]:
    """Return a name and an id for each task: those that it was read with, as far as they are allowed."""
    found: dict[Key, tuple[str, str]] = {}
    taken: set[str] = set()
    for at, key in enumerate(keys):
        match key:
            case (str(name), str(own)) if name and own and not _FORBIDDEN.search(own):
                pass
            case _:
                name, own = key_split(key) or "task", _FORBIDDEN.sub("_", str(key))
        while own in taken:
            own = f"{own}#{at}"
        taken.add(own)
        found[key] = name, own
    return found


def _file(own: str) -> str:
    return f"{own}.out"
