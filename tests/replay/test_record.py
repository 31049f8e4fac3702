"""Records of real runs: what is in them, how they are replayed, and what is no record."""

from __future__ import annotations

import json
import operator
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import pytest
from distributed import Client

from ferroflow_dask import install, uninstall
from ferroflow_dask.exceptions import ClusterError, UsageError
from ferroflow_dask.replay import load_record, record, simulate
from ferroflow_dask.replay.record import Recorder


@pytest.fixture(params=["dask", "ferroflow"])
def client(request: pytest.FixtureRequest, thread_client: Client) -> Iterator[Client]:
    if request.param == "ferroflow":
        install(thread_client)
    yield thread_client
    if request.param == "ferroflow":
        uninstall(thread_client)


def matrix() -> Any:
    x = da.random.default_rng(0).random((60, 60), chunks=(10, 10))
    return (x @ x.T).sum()


def test_a_run_is_recorded_and_runs_again(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    for _ in range(2):  # the second time durations are known, so tasks are bundled
        with record(client, path):
            expr = matrix()
            client.compute(expr).result()
    job = load_record(path)
    text = path.read_text()
    assert len(job.tasks) >= 100  # tasks inside bundles are among them
    assert len(job.graphs) == 1
    assert job.makespan_s is not None
    assert 0 < job.work_s < sum(job.threads) * job.makespan_s * 1.5
    assert set(json.loads(text)) == {
        *("format", "version", "policy", "threads", "core_share", "queued_share", "makespan_s"),
        *("graphs", "tasks", "transfers"),
    }
    for policy in ("dask", "ferroflow"):
        [found] = simulate(job, "this-machine", policy)
        assert found.makespan_s >= found.bound_s


def test_tasks_inside_bundles_are_recorded(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    for turn in range(2):
        values = [dask.delayed(operator.add)(i, turn, dask_key_name=f"part-{turn}-{i}") for i in range(60)]
        total = dask.delayed(sum)(values, dask_key_name=f"whole-{turn}")
        with record(client, path):
            assert client.compute(total).result() == sum(range(60)) + 60 * turn
    job = load_record(path)
    assert {f"part-1-{i}" for i in range(60)} | {"whole-1"} <= set(job.tasks)
    assert len(job.tasks["whole-1"].dependencies) == 60
    assert job.graphs[0].wanted == ("whole-1",)


def test_delivered_values_are_recorded_one_by_one_although_their_bundle_has_not_ended(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.gather(client.map(operator.neg, range(100), pure=False))  # now its duration is known
    monkeypatch.setattr(Recorder, "_bundle_ended", lambda *_: None)
    with record(client, tmp_path / "job.json"):
        futures = client.map(operator.neg, range(100, 200), pure=False)
        client.gather(futures)
    job = load_record(tmp_path / "job.json")
    assert {future.key for future in futures} == set(job.tasks)
    assert len(job.graphs[0].wanted) == 100


def test_a_record_that_lacks_a_task_is_not_written(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("no bundle")

    monkeypatch.setattr(Recorder, "_bundle", fail)

    def recorded() -> None:
        with record(client, tmp_path / "job.json"):
            client.submit(operator.neg, 1, pure=False).result()

    with pytest.raises(ClusterError, match="a record must have all tasks, got an error: no bundle"):
        recorded()
    assert not list(tmp_path.iterdir())


def test_a_graph_that_waits_for_another_one_is_recorded_so(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    with record(client, path):
        first = client.submit(operator.add, 1, 2, pure=False)
        first.result()
        second = client.submit(operator.add, first, 2, pure=False)
        second.result()
    job = load_record(path)
    assert [graph.waits for graph in job.graphs] == [False, True]
    assert job.tasks[second.key].dependencies == (first.key,)
    [found] = simulate(job, "this-machine", "dask")
    by_key = {one.key: one for one in found.timeline}
    assert by_key[first.key].stop_s <= by_key[second.key].start_s


def test_a_record_without_tasks_gets_one_line(thread_client: Client, tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="a record must have a task, got none"),
        record(thread_client, tmp_path / "job.json"),
    ):
        pass
    with (
        pytest.raises(UsageError, match="the folder of a record must exist"),
        record(thread_client, tmp_path / "none" / "job.json"),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_record_tells_computing_from_sleeping_and_from_waiting_for_a_core(
    process_client: Client, tmp_path: Path
) -> None:
    def compute(seconds: float) -> None:
        end_s = time.thread_time() + seconds
        while time.thread_time() < end_s:
            pass

    def shares(function: Any) -> tuple[float, float]:
        with record(process_client, tmp_path / "job.json"):
            process_client.gather(
                process_client.map(function, [0.05 + n / 1e6 for n in range(24)], pure=False)
            )
        document = json.loads((tmp_path / "job.json").read_text())
        return document["core_share"], document["queued_share"]

    assert shares(time.sleep)[0] < 0.3
    computed, waited = shares(compute)
    assert computed > 0.1
    # However busy the machine is: what computes has a core or waits for one.
    assert computed + waited > 0.7


GOOD: dict[str, Any] = {
    "format": "ferroflow record",
    "version": 1,
    "policy": "dask",
    "threads": [1, 1],
    "core_share": 1.0,
    "makespan_s": 2.0,
    "graphs": [{"waits": False, "delay_s": 0.0}],
    "tasks": [["a", 0, 1.0, 100, [], 0, 0.0, False], ["b", 0, 1.0, 0, [0], 0, 1.0, True]],
    "transfers": [],
}


def test_a_small_record_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(GOOD))
    job = load_record(path)
    assert (job.name, job.policy, job.threads) == ("job", "dask", (1, 1))
    assert (job.makespan_s, job.work_s) == (2.0, 2.0)
    assert job.tasks["b"].dependencies == ("a",)
    assert job.tasks["a"].core_share == 1
    path.write_text(json.dumps(GOOD | {"core_share": 0.1}))
    assert load_record(path).tasks["a"].core_share == 0.1
    path.write_text(json.dumps(GOOD | {"core_share": 0.25, "queued_share": 0.5}))
    half = load_record(path).tasks["a"]
    assert (half.duration_s, half.core_share) == (job.tasks["a"].duration_s / 2, 0.5)


def with_task(at: int, value: Any) -> dict[str, Any]:
    row = list(GOOD["tasks"][1])
    row[at] = value
    return GOOD | {"tasks": [GOOD["tasks"][0], row]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("", "must be a JSON file", id="empty"),
        pytest.param("[" * 100_000, "must be a JSON file", id="deep"),
        pytest.param("[]", "format must be 'ferroflow record', got []", id="foreign"),
        pytest.param(json.dumps(GOOD | {"version": 9}), "version must be 1, got 9", id="newer"),
        pytest.param(json.dumps(GOOD | {"tasks": 3}), "tasks must be a list, got 3", id="tasks"),
        pytest.param(json.dumps(GOOD | {"tasks": []}), "a job must have a task", id="no tasks"),
        pytest.param(json.dumps(GOOD | {"tasks": [[1]]}), "task 0 must be a list of key, graph", id="row"),
        pytest.param(json.dumps(with_task(0, "a")), "each key of tasks must be used once", id="same key"),
        pytest.param(json.dumps(with_task(1, 7)), "graph of task 1 must be from 0 to 0, got 7", id="graph"),
        pytest.param(json.dumps(with_task(2, -1)), "duration of task 1 must be a finite", id="duration"),
        pytest.param(json.dumps(with_task(4, [1])), "must be an earlier task, got 1", id="cycle"),
        pytest.param(json.dumps(GOOD | {"threads": [10**9]}), "at most 100,000 in all", id="threads"),
        pytest.param(json.dumps(GOOD | {"core_share": 2}), "core_share must be at most 1, got 2", id="share"),
        pytest.param(
            json.dumps(GOOD | {"core_share": 0.7, "queued_share": 0.6}),
            "core_share and queued_share must be at most 1 together",
            id="shares",
        ),
        pytest.param(json.dumps(GOOD | {"makespan_s": None}), "makespan_s must be a finite", id="makespan"),
    ],
)
def test_what_is_no_record_gets_one_line(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(content)
    with pytest.raises(UsageError) as raised:
        load_record(path)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    with pytest.raises(UsageError, match="a record must be a file"):
        load_record(tmp_path / "none.json")
