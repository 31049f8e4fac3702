"""Rows of plugins, logs, task streams, profiles: who follows tasks, and what they see."""

from __future__ import annotations

import contextlib
import io
import logging
from collections import Counter
from pathlib import Path
from typing import Any

from distributed import NannyPlugin, SchedulerPlugin, WorkerPlugin, get_task_stream, performance_report, wait

from matrix.row import row
from matrix.tasks import fail_for, inc, noted, open_gate, outcomes, pass_gate, pause_ms, wait_until
from matrix.trial import Trial

#: Calls of plugins in this process, by the name of the plugin; workers that are processes have their own.
CALLS: Counter[str] = Counter()


class Recording(SchedulerPlugin):
    """Records calls of hooks that do not follow tasks."""

    name = "matrix-recording"

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def start(self, scheduler: Any) -> None:
        self.calls.append("start")

    async def before_close(self) -> None:
        self.calls.append("before_close")

    async def close(self) -> None:
        self.calls.append("close")

    def restart(self, scheduler: Any) -> None:
        self.calls.append("restart")

    def add_worker(self, scheduler: Any, worker: str) -> None:
        self.calls.append(f"add_worker {worker in scheduler.workers}")

    def remove_worker(self, scheduler: Any, worker: str, **kwargs: Any) -> None:
        self.calls.append(f"remove_worker {sorted(kwargs)}")

    def add_client(self, scheduler: Any, client: str) -> None:
        self.calls.append(f"add_client {client in scheduler.clients}")

    def remove_client(self, scheduler: Any, client: str) -> None:
        self.calls.append("remove_client")

    def valid_workers_downscaling(self, scheduler: Any, workers: Any) -> Any:
        self.calls.append("valid_workers_downscaling")
        return workers

    def log_event(self, topic: str, msg: Any) -> None:
        if topic == "matrix-topic":
            self.calls.append(f"log_event {msg}")


@row(
    "register_plugin of a SchedulerPlugin that does not follow tasks",
    "BO",
    "a recording plugin: calls with arguments; bundles stay on",
    cluster={"n_workers": 2},
    covers=(
        *(
            "Client.register_plugin",
            "SchedulerPlugin",
            "SchedulerPlugin.start",
            "SchedulerPlugin.before_close",
        ),
        *("SchedulerPlugin.close", "SchedulerPlugin.restart", "SchedulerPlugin.add_worker"),
        *("SchedulerPlugin.remove_worker", "SchedulerPlugin.add_client", "SchedulerPlugin.remove_client"),
        *(
            "SchedulerPlugin.valid_workers_downscaling",
            "SchedulerPlugin.log_event",
            "SchedulerPlugin.idempotent",
        ),
        "Client.unregister_scheduler_plugin",
    ),
)
def recording_plugin(trial: Trial) -> Any:
    from distributed import Client

    trial.client.register_plugin(Recording())
    plugin = trial.scheduler.plugins[Recording.name]
    values = trial.client.gather(trial.client.map(inc, range(40)))
    trial.cluster.scale(3)
    trial.client.wait_for_workers(3)
    with Client(trial.scheduler.address, set_as_default=False) as second:
        second.log_event("matrix-topic", 7)
        wait_until(lambda: "log_event 7" in plugin.calls)
    wait_until(lambda: "remove_client" in plugin.calls)
    trial.cluster.scale(2)
    wait_until(lambda: len(trial.scheduler.workers) == 2)
    trial.client.unregister_scheduler_plugin(Recording.name)
    return values, Counter(call for call in plugin.calls if not call.startswith("valid_"))


class Counting(SchedulerPlugin):
    """Follows the tasks of a program."""

    name = "matrix-counting"

    def __init__(self, scheduler: Any = None) -> None:
        self.scheduler = scheduler
        self.states: dict[str, list[str]] = {}
        self.arrived: set[str] = set()
        self.missing = 0

    async def start(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        self.missing += finish != "forgotten" and key not in self.scheduler.tasks
        self.states.setdefault(str(key), []).append(finish)

    def update_graph(self, scheduler: Any, *, keys: Any, tasks: Any, **kwargs: Any) -> None:
        self.arrived.update(map(str, tasks))


@row(
    "SchedulerPlugin.transition, update_graph",
    "OS",
    "a counting plugin: 100 tasks by map, and 100 by delayed",
    covers=("SchedulerPlugin.transition", "SchedulerPlugin.update_graph"),
)
def counting_plugin(trial: Trial) -> Any:
    import dask

    trial.client.register_plugin(Counting())
    plugin = trial.scheduler.plugins[Counting.name]
    mapped = trial.client.map(inc, range(100), key=[f"mapped-{i}" for i in range(100)])
    delayed = trial.client.compute([dask.delayed(inc)(i, dask_key_name=f"delayed-{i}") for i in range(100)])
    values = trial.client.gather([*mapped, *delayed])
    memory = Counter(key.split("-")[0] for key, states in plugin.states.items() if "memory" in states)
    trial.client.unregister_scheduler_plugin(Counting.name)
    return values, memory, len(plugin.arrived), plugin.missing


class WorkerCounting(WorkerPlugin):
    """Counts the tasks that a worker finishes."""

    name = "matrix-worker-counting"

    def setup(self, worker: Any) -> None:
        self.worker = worker
        CALLS["setup"] += 1

    def teardown(self, worker: Any) -> None:
        CALLS["teardown"] += 1

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        if finish == "memory" and key in self.worker.state.tasks:
            CALLS[f"memory {str(key).split('-')[0]}"] += 1


@row(
    "WorkerPlugin: setup, transition, teardown",
    "OS",
    "100 tasks by map and by delayed",
    covers=(
        *("WorkerPlugin", "WorkerPlugin.setup", "WorkerPlugin.teardown", "WorkerPlugin.transition"),
        *("WorkerPlugin.idempotent", "Client.unregister_worker_plugin"),
    ),
)
def worker_plugin(trial: Trial) -> Any:
    import dask

    CALLS.clear()
    trial.client.register_plugin(WorkerCounting())
    mapped = trial.client.map(inc, range(100), key=[f"mapped-{i}" for i in range(100)])
    delayed = trial.client.compute([dask.delayed(inc)(i, dask_key_name=f"delayed-{i}") for i in range(100)])
    values = trial.client.gather([*mapped, *delayed])
    trial.client.unregister_worker_plugin(WorkerCounting.name)
    return values, dict(CALLS)


class SetupOnly(WorkerPlugin):
    """Does not follow tasks."""

    name = "matrix-setup-only"

    def setup(self, worker: Any) -> None:
        CALLS["setup"] += 1

    def teardown(self, worker: Any) -> None:
        CALLS["teardown"] += 1


@row("WorkerPlugin without transition", "BO", "`setup` and `teardown`: bundles stay on")
def worker_setup(trial: Trial) -> Any:
    CALLS.clear()
    trial.client.register_plugin(SetupOnly())
    values = trial.client.gather(trial.client.map(inc, range(60)))
    trial.client.unregister_worker_plugin(SetupOnly.name)
    return values, dict(CALLS)


class Noting(NannyPlugin):
    """Does nothing."""

    name = "matrix-nanny"

    def setup(self, nanny: Any) -> None:
        """Start with the nanny."""

    def teardown(self, nanny: Any) -> None:
        """End with the nanny."""


def _count_callback(dask_worker: Any = None) -> None:
    CALLS["callback"] += 1


@row(
    "NannyPlugin, register_worker_callbacks, unregistering",
    "B",
    "bundling resumes after a plugin that follows tasks",
    covers=(
        *(
            "NannyPlugin",
            "NannyPlugin.setup",
            "NannyPlugin.teardown",
            "NannyPlugin.restart",
            "NannyPlugin.idempotent",
        ),
        "Client.register_worker_callbacks",
    ),
    cluster={},
)
def nanny_plugin(trial: Trial) -> Any:
    CALLS.clear()
    trial.client.register_plugin(Counting())
    trial.client.unregister_scheduler_plugin(Counting.name)
    trial.client.register_plugin(Noting())
    trial.client.register_worker_callbacks(_count_callback)
    return trial.client.gather(trial.client.map(inc, range(60))), dict(CALLS)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@row("Compute Failed in the log", "B", "a failing task: the line has its key")
def compute_failed(trial: Trial) -> Any:
    handler, logger = _Lines(), logging.getLogger("distributed.worker")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        keys = [f"logged-{i}" for i in range(40)]
        futures = trial.client.map(fail_for, range(40), failing=frozenset({7}), key=keys)
        wait(futures)
        wait_until(lambda: any("Compute Failed" in line for line in handler.lines))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return [line.splitlines()[:2] for line in handler.lines if "Compute Failed" in line]


@row(
    "forward_logging, unforward_logging, get_worker_logs, get_scheduler_logs",
    "",
    "lines of workers arrive at the client",
    covers=(
        *("Client.forward_logging", "Client.unforward_logging", "Client.get_worker_logs"),
        "Client.get_scheduler_logs",
    ),
)
def forwarded(trial: Trial) -> Any:
    client = trial.client
    client.forward_logging("matrix.forwarded", level="WARNING")
    values = client.gather(client.map(inc, range(40)))
    client.unforward_logging("matrix.forwarded")
    return values, len(client.get_worker_logs()), isinstance(client.get_scheduler_logs(), tuple)


@row(
    "get_task_stream, performance_report",
    "O",
    "entries of the tasks of a map, HTML",
    covers=("get_task_stream", "Client.get_task_stream", "performance_report"),
)
def task_stream(trial: Trial) -> Any:
    keys = [f"stream-{i}" for i in range(60)]
    path = Path(trial.folder, "report.html")
    with performance_report(str(path)), get_task_stream(client=trial.client) as stream:
        futures = trial.client.map(inc, range(60), key=keys)
        wait(futures)
    seen = sorted(str(entry["key"]) for entry in stream.data)
    return [key for key in seen if key in set(keys)], len(seen) == len({*seen}), path.stat().st_size > 10_000


@row(
    "profile, profile(key=)",
    "B",
    "40 tasks of 10 ms: functions under their prefix",
    covers=("Client.profile",),
)
def profile(trial: Trial) -> Any:
    wait(trial.client.map(pause_ms, range(60), ms=15))
    wait_until(lambda: _names(trial.client.profile(key="pause_ms")), 3)
    return "pause_ms" in _names(trial.client.profile()), "pause_ms" in _names(
        trial.client.profile(key="pause_ms")
    )


def _names(state: Any) -> set[str]:
    found = {str((state.get("description") or {}).get("name"))} if state.get("count") else set()
    for child in (state.get("children") or {}).values():
        found |= _names(child)
    return found


@row(
    "call_stack(), call_stack(futures)",
    "T",
    "a waiting step: its frames under its key",
    covers=("Client.call_stack",),
)
def call_stack(trial: Trial) -> Any:
    keys = [f"stack-{i}" for i in range(40)]
    futures = trial.client.map(_gate_or_inc, range(40), folder=trial.folder, key=keys)
    wait_until(lambda: noted(trial.folder))
    every = trial.client.call_stack()
    own = trial.client.call_stack([futures[0]])
    open_gate(trial.folder)
    wait(futures)
    found = [
        sorted({str(key) for stacks in one.values() for key in stacks if "pass_gate" in "".join(stacks[key])})
        for one in (every, own)
    ]
    return found, outcomes(futures)[:1]


def _gate_or_inc(x: int, folder: str) -> int:
    return pass_gate(x, folder) if x == 0 else inc(x)


@row("progress in text", "O", "a graph to its end: its status", covers=("progress",))
def text_progress(trial: Trial) -> Any:
    from distributed.diagnostics.progressbar import TextProgressBar

    futures = trial.client.map(inc, range(60))
    with contextlib.redirect_stdout(io.StringIO()):
        bar = TextProgressBar(futures, scheduler=trial.scheduler.address, loop=trial.client.loop, start=False)
        trial.client.sync(bar.listen)
    return bar.status, trial.client.gather(futures)


@row("progress in text, a task fails", "BO", "its status, and the error")
def failing_progress(trial: Trial) -> Any:
    from distributed.diagnostics.progressbar import TextProgressBar

    futures = trial.client.map(fail_for, range(60), failing=frozenset({30}))
    with contextlib.redirect_stdout(io.StringIO()):
        bar = TextProgressBar(futures, scheduler=trial.scheduler.address, loop=trial.client.loop, start=False)
        trial.client.sync(bar.listen)
    return bar.status in ("error", "finished"), outcomes(futures)[29:32]


class Accepting(Counting):
    """Follows tasks, and accepts bundles."""

    name = "matrix-accepting"
    ferroflow_bundles = True


@row("plugin with ferroflow_bundles = True", "BO", "a plugin that follows tasks and accepts bundles")
def accepting_plugin(trial: Trial) -> Any:
    trial.client.register_plugin(Accepting())
    values = trial.client.gather(trial.client.map(inc, range(60)))
    trial.client.unregister_scheduler_plugin(Accepting.name)
    return values


def _add_plugin(dask_scheduler: Any) -> None:
    dask_scheduler.add_plugin(Counting(dask_scheduler))


@row("plugin added by run", "OS", "a counting plugin that a function adds on the scheduler")
def added_plugin(trial: Trial) -> Any:
    trial.client.run_on_scheduler(_add_plugin)
    plugin = trial.scheduler.plugins[Counting.name]
    values = trial.client.gather(trial.client.map(inc, range(60), key=[f"added-{i}" for i in range(60)]))
    trial.client.unregister_scheduler_plugin(Counting.name)
    return values, sum("memory" in states for states in plugin.states.values())
