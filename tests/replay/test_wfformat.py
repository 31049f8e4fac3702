"""WfFormat: workflows that are read, written and read again, and files that are refused."""

from __future__ import annotations

import copy
import json
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from command_line import USAGE, answer, assert_one_line, ferroflow

from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.replay import load_record, save_wfformat, simulate_job
from ferroflow_dask.topology import load_topology

#: Two tasks read the two files of the first one, and one reads theirs.
DIAMOND: dict[str, Any] = {
    "name": "diamond",
    "schemaVersion": "1.5",
    "runtimeSystem": {"name": "pegasus", "version": "5"},
    "workflow": {
        "specification": {
            "tasks": [
                {"name": "last", "id": "d", "parents": ["b", "c"], "children": [], "inputFiles": ["f3"]},
                {
                    "name": "split",
                    "id": "a",
                    "parents": [],
                    "children": ["b", "c"],
                    "inputFiles": ["raw"],
                    "outputFiles": ["f1", "f2"],
                },
                {"name": "work", "id": "b", "parents": ["a"], "children": ["d"], "outputFiles": ["f3"]},
                {"name": "work", "id": "c", "parents": ["a"], "children": ["d"]},
            ],
            "files": [{"id": f"f{i}" if i else "raw", "sizeInBytes": 10 * i} for i in range(4)],
        },
        "execution": {
            "makespanInSeconds": 9.5,
            "executedAt": "2026-01-01T00:00:00Z",
            "tasks": [
                {"id": one, "runtimeInSeconds": seconds, "avgCPU": 50 if one == "b" else 230}
                for one, seconds in (("a", 1.5), ("b", 2), ("c", 3.25), ("d", 4))
            ],
            "machines": [{"nodeName": "n1", "cpu": {"coreCount": 4}}, {"nodeName": "n2"}],
        },
    },
}


def written(tmp_path: Path, document: Any) -> Path:
    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_a_workflow_is_a_job(tmp_path: Path) -> None:
    job = load_record(written(tmp_path, DIAMOND))
    assert (job.name, job.policy, job.threads, job.makespan_s) == ("diamond", "pegasus", (4, 1), 9.5)
    a, b, c, d = ("split", "a"), ("work", "b"), ("work", "c"), ("last", "d")
    assert list(job.tasks) == [a, b, c, d]  # each after its parents
    assert {key: task.dependencies for key, task in job.tasks.items()} == {a: (), b: (a,), c: (a,), d: (b, c)}
    assert [task.nbytes for task in job.tasks.values()] == [10 + 20, 30, 0, 0]
    assert [task.duration_s for task in job.tasks.values()] == [1.5, 2.0, 3.25, 4.0]
    assert [task.core_share for task in job.tasks.values()] == [1.0, 0.5, 1.0, 1.0]
    assert job.graphs[0].wanted == (d,)
    found = simulate_job(job, load_topology("this-machine").with_workers(2), "ferroflow", repeat=1)
    assert found.makespan_s > 1.5 + 3.25 + 4.0


def workflow(seed: int) -> dict[str, Any]:
    """Return a random workflow, whose tasks are in any order."""
    rng = random.Random(seed)
    n = rng.randint(1, 12)
    names = [f"{rng.choice(['m.Add', 'fit-x', 'Ω'])}_ID{i:07}" for i in range(n)]
    names = [name if rng.random() < 0.8 else f"odd {name}" for name in names]
    parents = [sorted(rng.sample(range(i), rng.randint(0, min(i, 3)))) for i in range(n)]
    sizes = [rng.randint(0, 10**9) for _ in range(n)]
    tasks = [
        {
            "name": rng.choice(["fit", "fit-x", names[i]]),
            "id": names[i],
            "parents": [names[parent] for parent in parents[i]],
            "children": [names[j] for j in range(n) if i in parents[j]],
            "outputFiles": [f"f{i}"] if rng.random() < 0.8 else [],
        }
        for i in range(n)
    ]
    rng.shuffle(tasks)
    runs = [
        {"id": name, "runtimeInSeconds": rng.random(), "avgCPU": rng.uniform(0, 120), "coreCount": 2}
        for name in names
    ]
    document = copy.deepcopy(DIAMOND)
    document["workflow"]["specification"] = {
        "tasks": tasks,
        "files": [{"id": f"f{i}", "sizeInBytes": sizes[i]} for i in range(n)],
    }
    document["workflow"]["execution"]["tasks"] = runs
    return document


@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_random_workflows_are_read_written_and_read_again(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 100):
        job = load_record(written(tmp_path, workflow(seed)))
        save_wfformat(job, tmp_path / "again.json", datetime.now(UTC))
        again = load_record(tmp_path / "again.json")
        is_odd = any(" " in own or not own.isascii() for _, own in job.tasks)
        if is_odd:  # ids that the format does not allow are replaced
            durations = [[task.duration_s for task in one.tasks.values()] for one in (job, again)]
            assert durations[0] == durations[1]
            save_wfformat(again, tmp_path / "third.json", datetime.now(UTC))
            assert load_record(tmp_path / "third.json") == again
        else:
            assert again == job


def test_a_record_becomes_a_workflow(tmp_path: Path) -> None:
    rows = [[f"inc-{i}", 0, 0.5, 8, [] if i < 2 else [0, 1, 1], 0, 0.0, i == 2] for i in range(3)]
    record = {"format": "ferroflow record", "version": 1, "policy": "dask", "threads": [2, 1]}
    record |= {"tasks": rows, "graphs": [{"waits": False}], "transfers": [], "makespan_s": 1.25}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    printed = answer("simulate", "--record", path, "--export", tmp_path / "workflow.json").output
    assert printed == f"wrote {tmp_path / 'workflow.json'}: 3 tasks\n"
    document = json.loads((tmp_path / "workflow.json").read_text(encoding="utf-8"))
    specified = document["workflow"]["specification"]["tasks"]
    assert [(one["name"], one["id"]) for one in specified] == [("inc", f"inc-{i}") for i in range(3)]
    assert specified[2]["parents"] == ["inc-0", "inc-1"]
    assert specified[0]["children"] == ["inc-2"]
    job = load_record(tmp_path / "workflow.json")
    assert (job.policy, job.threads, job.makespan_s, job.work_s) == ("dask", (2, 1), 1.25, 1.5)


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the diamond with another value at a path; none at all for an ellipsis."""
    document = copy.deepcopy(DIAMOND)
    *way, last = (int(step) if step.isdecimal() else step for step in path.split("."))
    at: Any = document
    for step in way:
        at = at[step]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schemaVersion", "1.4", "schemaVersion must be '1.5' or '1.6', got '1.4'"),
        ("workflow.execution", ..., "workflow.execution, which has the durations, must be an object"),
        ("workflow.specification.tasks.1.id", "b", "each id of a task must be used once"),
        ("workflow.specification.tasks.1.children", ["b"], "children of 'a' must have 'c'"),
        ("workflow.specification.tasks.3.parents", [], "parents of 'c' must have 'a'"),
        ("workflow.specification.tasks.3.parents", ["x"], "children of 'x' must have 'c'"),
        (
            "workflow.specification.tasks.1.outputFiles",
            ["f9"],
            "files must have the outputs of task 'a'",
        ),
        (
            "workflow.execution.tasks.0",
            ...,
            "must have each task of the specification, got none of 'a'",
        ),
        (
            "workflow.execution.tasks.0.runtimeInSeconds",
            -1,
            "runtimeInSeconds of task 'a' must be",
        ),
        ("workflow.execution.machines.0.cpu.coreCount", 0, "coreCount of machine 0 must be from 1"),
    ],
)
def test_a_bad_workflow_is_refused_in_one_line(path: str, value: Any, message: str, tmp_path: Path) -> None:
    refused = ferroflow("simulate", "--record", written(tmp_path, changed(path, value)))
    assert_one_line(refused.exit_code, refused.stderr, USAGE, message)


def test_a_cycle_is_refused(tmp_path: Path) -> None:
    document = changed("workflow.specification.tasks.1.parents", ["d"])
    document["workflow"]["specification"]["tasks"][0]["children"] = ["a"]
    with pytest.raises(UsageError, match="must not depend on each other in a cycle"):
        load_record(written(tmp_path, document))


def test_only_a_record_is_exported(tmp_path: Path) -> None:
    refused = ferroflow("simulate", "--dag", "wide", "--export", tmp_path / "w.json")
    assert_one_line(
        refused.exit_code, refused.stderr, USAGE, "--export writes a recorded run; give --record FILE"
    )
