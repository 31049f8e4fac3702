"""Suite `workflows`: graphs as WfCommons specifies them, and answers that depend on every edge."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster
from distributed.diagnostics.plugin import SchedulerPlugin

from ferroflow_dask import install
from ferroflow_dask.bench.public import workflows
from ferroflow_dask.bench.public.base import Clock, Options, Program
from ferroflow_dask.bench.public.workflows import SUITE, simulated
from ferroflow_dask.exceptions import ResultError, UsageError
from ferroflow_dask.replay import load_record
from ferroflow_dask.replay.job import JobGraph

pytest.importorskip("wfcommons")
pytestmark = pytest.mark.cluster

Edges = set[tuple[str, str]]


@contextmanager
def tcp_client(n_workers: int) -> Iterator[Client]:
    """Start workers in this process that other processes can reach."""
    with (
        LocalCluster(
            n_workers=n_workers,
            threads_per_worker=1,
            processes=False,
            protocol="tcp://",
            dashboard_address=":0",
            silence_logs=logging.ERROR,
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


class Recorder(SchedulerPlugin):
    """Records the edges of all tasks that wait."""

    def __init__(self, client: Client) -> None:
        self.tasks: set[Any] = set()
        self.edges: set[tuple[Any, Any]] = set()
        self._scheduler = client.cluster.scheduler
        self._scheduler.add_plugin(self, name="edges")

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if start == "released" and finish not in ("forgotten", "released"):
            self.tasks.add(key)
            self.edges |= {(parent.key, key) for parent in self._scheduler.tasks[key].dependencies}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workflows, "RECIPES", ("montage", "rnaseq"))
        patch.setattr(workflows, "SOME", ("montage", "rnaseq"))
        patch.setattr(workflows, "SIZES", (100,))
        patch.setattr(workflows, "OWN", ("montage-100", "rnaseq-100"))
        patch.setattr(workflows, "SIMULATED_TASKS", 100)
        patch.setattr(workflows, "SIMULATED_WORKERS", (16,))
        patch.setattr(workflows, "BOUND_S", 0.1)
        yield


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with tcp_client(4) as client:
        yield client


@pytest.fixture(scope="module")
def programs(data: Path) -> dict[str, Program]:
    return {program.name: program for program in SUITE.programs(Options(data=data))}


def file_of(data: Path, name: str) -> Path:
    return next(data.glob(f"wfcommons-*/{name}.json"))


def links(path: Path) -> tuple[Edges, Edges]:
    """Return the edges of a file in WfFormat by its lists of parents, and by those of children."""
    rows = json.loads(path.read_text())["workflow"]["specification"]["tasks"]
    return (
        {(parent, row["id"]) for row in rows for parent in row["parents"]},
        {(row["id"], child) for row in rows for child in row["children"]},
    )


def test_a_suite_has_a_graph_and_a_program_of_wfcommons_for_each_recipe(programs: dict[str, Program]) -> None:
    names = ["montage-100", "rnaseq-100", "montage-100-translated", "rnaseq-100-translated"]
    assert list(programs) == names
    assert programs["montage-100"].sizes["edges"] == 190
    assert programs["rnaseq-100"].sizes["edges"] == 0


def test_edges_on_the_scheduler_are_those_of_the_file(
    client: Client, programs: dict[str, Program], data: Path
) -> None:
    recorder = Recorder(client)
    answer = programs["montage-100"].run(client, Clock())
    client.cluster.scheduler.remove_plugin("edges")
    of_parents, of_children = links(file_of(data, "montage-100"))
    assert {(parent[1], child[1]) for parent, child in recorder.edges} == of_parents == of_children
    assert answer == programs["montage-100"].expected()


def test_edges_of_wfcommons_own_program_are_those_of_the_file(
    client: Client, programs: dict[str, Program], data: Path
) -> None:
    recorder = Recorder(client)
    clock, program = Clock(), programs["montage-100-translated"]
    answer = program.run(client, clock)
    client.cluster.scheduler.remove_plugin("edges")
    assert program.differs(answer, program.expected()) == ""
    assert clock.seconds > 0
    # Dask's keys do not have the tasks' ids, but graphs without these degrees are others.
    of_parents, _ = links(file_of(data, "montage-100"))
    assert degrees(recorder.edges) == degrees(of_parents)
    assert len(recorder.tasks) == program.sizes["tasks"]


def degrees(edges: set[tuple[Any, Any]]) -> list[tuple[int, list[int]]]:
    """Return how many readers each child has, and those of its parents."""
    readers = {key: sum(edge[0] == key for edge in edges) for pair in edges for key in pair}
    children = {child for _, child in edges}
    return sorted(
        (readers[child], sorted(readers[parent] for parent, other in edges if other == child))
        for child in children
    )


@pytest.mark.parametrize("name", ["montage-100", "rnaseq-100"])
def test_answers_under_the_plugin_are_those_without_a_cluster(
    name: str, programs: dict[str, Program]
) -> None:
    with tcp_client(2) as client:
        install(client)
        for _ in range(2):
            assert programs[name].run(client, Clock()) == programs[name].expected()


def test_each_edge_changes_the_answer(
    data: Path, programs: dict[str, Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, graph = programs["montage-100"], workflows.read_graph(file_of(data, "montage-100"))
    right = program.expected()
    for key, task in graph.tasks.items():
        for i in range(len(task.dependencies)):
            fewer = dataclasses.replace(task, dependencies=task.dependencies[:i] + task.dependencies[i + 1 :])
            wrong = JobGraph({**graph.tasks, key: fewer}, graph.wanted)
            monkeypatch.setattr(workflows, "read_graph", lambda _, wrong=wrong: wrong)
            assert program.differs(program.expected(), right)


def test_results_fit_in_memory_and_keep_their_proportions(data: Path, programs: dict[str, Program]) -> None:
    path = file_of(data, "montage-100")
    real, graph = load_record(path).tasks, workflows.read_graph(path)
    n_bytes = [task.nbytes for task in graph.tasks.values()]
    assert 0.9 * workflows.MOST_NBYTES < sum(n_bytes) <= workflows.MOST_NBYTES
    read = [key for key in graph.tasks if key not in graph.wanted]
    ratios = [real[key].nbytes / graph.tasks[key].nbytes for key in read]
    assert max(ratios) == pytest.approx(min(ratios), rel=0.1)


def test_workflows_of_two_processes_are_equal(data: Path, tmp_path: Path) -> None:
    # In this one the order of sets of names shows.
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
        workflows._drive(["generate", str(folder), "rnaseq-1000"], folder, {})
    one, other = (load_record(folder / "rnaseq-1000.json").graphs for folder in folders)
    assert one == other


def test_a_version_that_leaves_out_edges_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workflows, "version", lambda _: "1.1")
    with pytest.raises(UsageError, match=r"1\.2 or later, got 1\.1, whose .* without its parents"):
        SUITE.programs(Options(data=tmp_path))


def test_a_program_that_lacks_wfbench_is_skipped(
    data: Path, programs: dict[str, Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflows, "which", lambda *_, **__: None)
    skipped = {program.name: program.skipped for program in SUITE.programs(Options(data=data))}
    assert "wfbench" in skipped["montage-100-translated"]
    assert skipped["montage-100"] == ""


def test_a_failed_subprocess_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="got 1: IndexError: list index"):
        workflows._drive(["generate"], tmp_path, {})


def test_makespans_in_virtual_time_are_no_shorter_than_the_bound(
    data: Path, programs: dict[str, Program]
) -> None:
    rows = list(simulated(Options(data=data), 1.0))
    assert {row.cluster for row in rows} == {"virtual"}
    assert [(row.program.partition("-")[0], row.workers, row.by) for row in rows] == [
        (recipe, 16, policy) for recipe in ("montage", "rnaseq") for policy in ("dask", "ferroflow")
    ]
    # No schedule is shorter than the tasks on all workers.
    for row in rows:
        (file,) = data.rglob(f"{row.program.partition(',')[0]}.json")
        n_tasks = len(load_record(file).tasks)
        assert row.program.endswith(", tasks of 1 s")
        assert row.seconds >= n_tasks / row.workers
