"""Run a workload's instance as a measured run does, and note what Dask was given."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from distributed import Client
from distributed.diagnostics.plugin import SchedulerPlugin
from in_charge import scheduler_of
from waiting import until

from ferroflow_dask.bench.workloads import Instance, Request, Workload

#: Of the clusters on which instances run, which have one thread a worker.
THREADS = 2


class Submitted(SchedulerPlugin):
    """Notes the keys and annotations of all tasks that a scheduler is given."""

    ferroflow_bundles = True

    def __init__(self) -> None:
        self.name = "submitted"
        self.keys: set[Any] = set()
        self.annotations: dict[str, dict[Any, Any]] = {}

    def update_graph(self, scheduler: Any, *, tasks: Any, annotations: Any, **_: Any) -> None:
        self.keys.update(tasks)
        for name, values in annotations.items():
            self.annotations.setdefault(name, {}).update(values)


@dataclass(frozen=True)
class Ran:
    """An instance that was computed, and what it took."""

    instance: Instance
    results: Sequence[Any]
    submitted: Submitted


class Cluster:
    """What workloads may touch, of a cluster in this process."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.n_workers = THREADS
        self.scaled: list[int] = []

    def scale(self, n: int) -> None:
        self.scaled.append(n)
        self.client.cluster.scale(n)
        until(lambda: len(self.client.nthreads()) == n)

    @contextmanager
    def listening(self) -> Iterator[Submitted]:
        scheduler = scheduler_of(self.client)
        scheduler.add_plugin(submitted := Submitted())
        yield submitted
        scheduler.remove_plugin(submitted.name)

    def run(self, instance: Instance) -> Ran:
        """Do as a measured run does."""
        with ExitStack() as stack:
            submitted = stack.enter_context(self.listening())
            if instance.restore is not None:
                stack.callback(instance.restore, self)
            if instance.prepare is not None:
                instance.prepare(self)
            futures = instance.submit(self.client)
            if instance.during is not None:
                instance.during(self)
            collect = instance.collect or (lambda client, given: client.gather(list(given)))
            results = collect(self.client, futures)
            del futures
        gc.collect()  # collections may hold futures in cycles
        tasks = scheduler_of(self.client).tasks
        until(lambda: not tasks)  # or the test's time limit ends it
        return Ran(instance, results, submitted)


def build(workload: Workload, **request: Any) -> Instance:
    given = {"seed": 1, "salt": "a", "n_threads": THREADS, **request}
    arguments = workload.arguments(given.pop("arguments", {}), is_small=True)
    return workload.build(Request(arguments=arguments, **given))
