"""Rows of tools: events, stories, dumps, versions, remote calls, settings."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import dask
from distributed import Client, Environ, UploadFile, wait

from matrix.row import row
from matrix.tasks import fail_for, inc, noting_inc, outcomes, pause_ms, runs, wait_until
from matrix.trial import STOCK, Trial


@row("story, dump_cluster_state", "B", "wanted keys are present, a file is written", covers=(
    "Client.story", "Client.dump_cluster_state",
))  # fmt: skip
def stories(trial: Trial) -> Any:
    keys = [f"story-{i}" for i in range(40)]
    futures = trial.client.map(inc, range(40), key=keys)
    wait(futures)
    story = trial.client.story(futures[7])
    path = Path(trial.folder, "dump")
    trial.client.dump_cluster_state(str(path), exclude=("events", "log"))
    data = gzip.decompress(next(Path(trial.folder).glob("dump*")).read_bytes())
    return bool(story), all(key.encode() in data for key in keys)


@row(
    "get_events, subscribe_topic, unsubscribe_topic",
    "B",
    "an own topic; events of workers",
    covers=("Client.get_events", "Client.subscribe_topic", "Client.unsubscribe_topic"),
)
def topics(trial: Trial) -> Any:
    client, seen = trial.client, []
    client.subscribe_topic("matrix-own", lambda event: seen.append(event[1]))
    values = client.gather(client.map(inc, range(40)))
    for i in range(3):
        client.log_event("matrix-own", i)
    wait_until(lambda: len(seen) == 3)
    client.unsubscribe_topic("matrix-own")
    return (
        values,
        seen,
        [msg for _, msg in client.get_events("matrix-own")][-3:],
        [type(found).__name__ for found in map(client.get_events, trial.workers)],
    )


@row(
    "recreate_error_locally, recreate_task_locally", "B", "a failing step with inputs: its function is called"
)
def recreated(trial: Trial) -> Any:
    from distributed.recreate_tasks import ReplayTaskClient

    base = trial.client.map(inc, range(40))
    futures = trial.client.map(fail_for, base, failing=frozenset({8}))
    wait(futures)
    client = ReplayTaskClient(trial.client)
    try:
        client.recreate_error_locally(futures[7])
    except Exception as error:  # noqa: BLE001 -- any is an observation
        return type(error).__name__, error.args, client.recreate_task_locally(futures[3])
    return "no error"


def _is_written(client: Any, path: Path) -> bool:
    """Write the scheduler file; return False if Dask cannot: some heartbeats bring tuples as keys."""
    try:
        client.write_scheduler_file(str(path))
    except TypeError:
        client.scheduler_file = None
        return False
    return True


@row("get_versions, write_scheduler_file, dashboard_link", "", "files and texts", covers=(
    *("Client.get_versions", "Client.write_scheduler_file", "Client.dashboard_link"),
    *("Client.loop", "Client.sync", "Client.current", "Client.as_current", "default_client"),
    *("LocalCluster", "Scheduler"),
))  # fmt: skip
def versions(trial: Trial) -> Any:
    from distributed import default_client

    client = trial.client
    futures = client.map(inc, range(40))
    path = Path(trial.folder, "scheduler.json")
    wait_until(lambda: _is_written(client, path))
    found = client.get_versions()
    current = Client.current() is client, default_client() is client
    with client.as_current():
        current += (Client.current() is client,)
    return (
        sorted(found), "workers" in json.loads(path.read_text()), current, client.gather(futures),
        "8787" in client.dashboard_link or client.dashboard_link.endswith("/status"),
    )  # fmt: skip


def _identity(dask_worker: Any) -> int:
    return int(dask_worker.state.nthreads)


def _n_tasks(dask_scheduler: Any) -> bool:
    return len(dask_scheduler.tasks) > 0


@row(
    "run, run_on_scheduler while bundles run",
    "",
    "values of functions",
    covers=("Client.run", "Client.run_on_scheduler"),
)
def remote_calls(trial: Trial) -> Any:
    futures = trial.client.map(pause_ms, range(60), ms=2)
    has_tasks = wait_until(lambda: trial.client.run_on_scheduler(_n_tasks))
    found = sorted(trial.client.run(_identity).values()), has_tasks
    return found, trial.client.gather(futures)


def _from_upload(x: int) -> int:
    import matrix_uploaded

    return int(matrix_uploaded.VALUE) + x


def _environ(x: int) -> str | None:
    return os.environ.get("MATRIX_SET")


@row(
    "upload_file, UploadFile",
    "",
    "between two graphs: the new code is used by the next one",
    covers=("Client.upload_file", "UploadFile"),
    cluster={},
)
def uploads(trial: Trial) -> Any:
    import sys

    client, path, found = trial.client, Path(trial.folder, "matrix_uploaded.py"), []
    for value in (1, 2):
        sys.modules.pop("matrix_uploaded", None)
        path.write_text(f"VALUE = {value}\n")
        if value == 1:
            client.upload_file(str(path))
        else:
            client.register_plugin(UploadFile(str(path)))
        found.append(client.gather(client.map(_from_upload, range(40), pure=False)))
    sys.modules.pop("matrix_uploaded", None)
    return found


@row(
    "Environ",
    "",
    "a variable is set on workers that start again",
    covers=("Environ", "Nanny"),
    needs_processes=True,
)
def environ(trial: Trial) -> Any:
    trial.client.register_plugin(Environ({"MATRIX_SET": "seven"}))
    return trial.client.gather(trial.client.map(_environ, range(40), pure=False))


def _programs(trial: Trial) -> Any:
    """Run the programs of `map`."""
    client = trial.client
    futures = client.map(noting_inc, range(60), folder=trial.folder)
    second = client.map(inc, futures)
    failing = client.map(fail_for, range(30), failing=frozenset({3}), pure=False)
    tree = dask.delayed(sum)([dask.delayed(inc)(i) for i in range(30)])
    return client.gather(second), outcomes(failing), client.compute(tree, sync=True), runs(trial.folder)


@row(
    "worker-saturation",
    "B",
    "the programs of `map`",
    settings={"distributed.scheduler.worker-saturation": float("inf")},
)
def saturation(trial: Trial) -> Any:
    return _programs(trial)


@row(
    "work-stealing: false",
    "",
    "the programs of `map`",
    settings={"distributed.scheduler.work-stealing": False},
)
def no_stealing(trial: Trial) -> Any:
    return _programs(trial)


@row(
    "default-task-durations, allowed-failures",
    "B",
    "the programs of `map`",
    settings={
        "distributed.scheduler.default-task-durations": {"noting_inc": "10ms", "inc": "1ms"},
        "distributed.scheduler.allowed-failures": 0,
    },
)
def durations(trial: Trial) -> Any:
    return _programs(trial)


@row(
    "workers with 4 threads, nthreads=1",
    "B",
    "the programs of `map`",
    cluster={"n_workers": 1, "threads_per_worker": 4},
)
def threads(trial: Trial) -> Any:
    return _programs(trial)


@row("validate off", "B", "the programs of `map`", settings={
    "distributed.scheduler.validate": False, "distributed.worker.validate": False,
})  # fmt: skip
def no_validation(trial: Trial) -> Any:
    return _programs(trial)


@row(
    "Security with TLS",
    "B",
    "the programs of `map`",
    covers=("Security",),
    cluster={"protocol": "tls://", "security": True},
)
def tls(trial: Trial) -> Any:
    return _programs(trial)


@row(
    "graph submitted while the plugin is installed, uninstalled",
    "",
    "values; each task runs at most twice",
    cluster={},
)
def installed_meanwhile(trial: Trial) -> Any:
    import ferroflow_dask

    def install() -> None:
        if trial.policy != STOCK:
            ferroflow_dask.install(trial.client)

    def uninstall() -> None:
        if trial.policy != STOCK:
            ferroflow_dask.uninstall(trial.client)

    found = []
    for i, change in enumerate((uninstall, install, uninstall)):
        futures = trial.client.map(noting_inc, range(100), folder=trial.folder, pure=False, name=f"graph-{i}")
        change()
        found.append(trial.client.gather(futures))
    install()
    return found, max(runs(trial.folder).values()) <= 6


@row(
    "fine performance metrics, Prometheus, MemorySampler, Computation",
    "O",
    "samples, the code of computations",
)
def metrics(trial: Trial) -> Any:
    from distributed.diagnostics import MemorySampler

    sampler = MemorySampler()
    n_before = len(trial.scheduler.computations)
    with sampler.sample("matrix", client=trial.client, interval=0.01):
        values = trial.client.gather(trial.client.map(pause_ms, range(60), ms=2))
    computations = list(trial.scheduler.computations)[n_before:]
    return values, len(sampler.samples["matrix"]) > 0, len(computations) <= 1
