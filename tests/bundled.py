"""Graphs of short named tasks, gates at which tasks wait, and a cluster that bundles on the first run."""

from __future__ import annotations

import itertools
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dask
import pytest
from assume_short import assume_short
from distributed.diagnostics.plugin import SchedulerPlugin
from one_loop import Cluster, on_cluster
from waiting import comes

from ferroflow_dask.policy import stealing
from ferroflow_dask.scheduler import extension_on
from ferroflow_dask.scheduler.graphs.graphs import Graphs

#: How often each task ran in this process, by its key.
CALLS: Counter[str] = Counter()
_GATES: dict[str, Gate] = {}
#: A worker's thread waits no longer at a gate, so that a failing test ends [s].
_LONGEST_S = 20.0


class PlannedError(Exception):
    """An exception that a task raises on purpose; its argument is the task's key."""


# What tasks call: functions of this module, since workers unpickle them by name


def add(key: str, *values: int) -> int:
    """Return the sum of the values, and one more."""
    CALLS[key] += 1
    return sum(values) + 1


def fail(key: str, *values: int) -> int:
    """Raise an exception."""
    CALLS[key] += 1
    raise PlannedError(key)


def fail_once(key: str, *values: int) -> int:
    """Raise an exception when the task runs for the first time."""
    if not CALLS[key]:
        fail(key)
    return add(key, *values)


def fail_first(key: str, *values: int) -> int:
    """Raise an exception in the first of the tasks that call this function since `CALLS` was cleared."""
    CALLS["fail_first"] += 1
    return fail(key) if CALLS["fail_first"] == 1 else add(key, *values)


def end_worker_once(key: str, path: str, *values: int) -> int:
    """End the worker's process, unless it has been ended already."""
    if not Path(path).exists():
        Path(path).touch()
        os._exit(1)
    return add(key, *values)


def wait_at(key: str, gate: str, *values: int) -> int:
    """Wait until a gate opens."""
    _GATES[gate].reached.set()
    _GATES[gate].opened.wait(_LONGEST_S)
    return add(key, *values)


def wait_if_first(key: str, gate: str, *values: int) -> int:
    """Wait until a gate opens, in the first of the tasks that call this function."""
    if next(_GATES[gate].calls):
        return add(key, *values)
    return wait_at(key, gate, *values)


# Graphs


def task(key: str, *values: Any, function: Callable[..., Any] = add) -> Any:
    """Return a delayed task that knows its key."""
    return dask.delayed(function)(key, *values, dask_key_name=key)


def apart(key: str, *values: Any, function: Callable[..., Any] = add) -> Any:
    """Return a task that stays separate."""
    with dask.annotate(ferroflow_bundle=False):
        return task(key, *values, function=function)


def chain(prefix: str, start: Any, n: int = 12, **functions: Callable[..., Any]) -> list[Any]:
    """Return tasks of which each reads the one before; `at_3=fail` lets the task 3 call another function."""
    tasks: list[Any] = []
    for i in range(n):
        tasks.append(task(f"{prefix}-{i}", tasks[-1] if tasks else start, **_function(i, functions)))
    return tasks


def leaves(prefix: str, n: int = 30, **functions: Callable[..., Any]) -> list[Any]:
    """Return tasks that read nothing; `at_3=fail` as in `chain`."""
    return [task(f"{prefix}-{i}", i, **_function(i, functions)) for i in range(n)]


def _function(i: int, functions: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    return {"function": functions[f"at_{i}"]} if f"at_{i}" in functions else {}


def fork(start: Any = 0, **functions: Callable[..., Any]) -> tuple[list[Any], list[Any]]:
    """Return a chain, and three separate outputs that read its end: it is a bundle with a key of its own."""
    inner = chain("inc", start, **functions)
    return inner, [apart(f"out-{i}", inner[-1], i) for i in range(3)]


def keys_of(*collections: Any) -> set[Any]:
    """Return all keys of the graphs of collections."""
    return {key for one in collections for key in one.__dask_graph__()}


@dataclass(eq=False)
class Gate:
    """Gate at which tasks wait; `through` is the function of such a task."""

    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    opened: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)
    calls: Iterator[int] = field(default_factory=itertools.count)

    def task(self, key: str, *values: Any) -> Any:
        """Return a delayed task that waits."""
        return dask.delayed(wait_at)(key, self.name, *values, dask_key_name=key)

    def future(self, client: Any, key: str = "gate-0") -> Any:
        """Submit a task that waits; what reads it is not sent to a worker."""
        return client.submit(wait_at, key, self.name, key=key)

    def open(self) -> None:
        """Let the tasks go on."""
        self.opened.set()


@contextmanager
def gates() -> Iterator[Callable[[], Gate]]:
    """Make gates, which open at the end."""
    made: list[Gate] = []

    def make() -> Gate:
        made.append(Gate())
        _GATES[made[-1].name] = made[-1]
        return made[-1]

    try:
        yield make
    finally:
        for gate in made:
            gate.open()
            del _GATES[gate.name]


# Clusters


@dataclass(frozen=True)
class Created:
    """A task as it was just after its graph had arrived."""

    priority: tuple[int, ...]
    annotations: dict[str, Any]
    expected_s: float
    group: str


class Seen(SchedulerPlugin):
    """Notes the tasks of graphs."""

    name = "seen"
    ferroflow_bundles = True

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.tasks: dict[Any, Created] = {}
        #: Keys of P2P shuffles, also of those that replaced a held part.
        self.barriers: set[str] = set()

    def transition(self, key: Any, *_: Any, **__: Any) -> None:
        if isinstance(key, str) and key.startswith("shuffle-barrier"):
            self.barriers.add(key)

    def update_graph(self, scheduler: Any, *, tasks: list[Any], **_: Any) -> None:
        for ts in map(self._scheduler.tasks.__getitem__, tasks):
            self.tasks[ts.key] = Created(
                ts.priority or (), dict(ts.annotations or {}), ts.prefix.duration_average, ts.group.name
            )


class Bundling(Cluster):
    """A cluster whose graphs are watched."""

    seen: Seen

    @property
    def keys(self) -> set[Any]:
        """Keys of the tasks of all graphs since the last `forget_seen`."""
        return set(self.seen.tasks)

    def forget_seen(self) -> None:
        """Look at the next graphs only."""
        self.seen.tasks.clear()
        self.seen.barriers.clear()

    @property
    def bundles(self) -> Any:
        return self.stealing.graphs.bundles

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.bundles.counts)

    def bundle_of(self, prefix: str) -> Any:
        """Return the key of the only bundle of a prefix."""
        found = (key for key in self.keys if str(key).startswith(f"('bundle-{prefix}-"))
        (key,) = found
        return key

    async def values(self, *collections: Any, **options: Any) -> list[Any]:
        """Compute collections and release them."""
        found: list[Any] = await self.client.gather(self.client.compute(list(collections), **options))
        return found

    async def is_empty(self) -> None:
        """Wait until the scheduler has forgotten all tasks."""
        await comes(lambda: not self.scheduler.tasks)


def take_all_for_short(patch: pytest.MonkeyPatch) -> None:
    """Bundle tasks of all prefixes, until the patch is undone; none is late, however busy the machine is."""
    patch.setattr(Graphs, "learned", Graphs.learned)  # so that it is restored
    assume_short()
    patch.setattr(stealing, "_LATE_S", 60.0)
    CALLS.clear()


def on_bundling_cluster(test: Callable[[Bundling], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run a test on a fresh cluster, and assert that nothing is left on the scheduler after it."""

    async def run(cluster: Cluster) -> None:
        bundling = Bundling(cluster.scheduler, cluster.workers, cluster.client)
        bundling.seen = Seen(cluster.scheduler)
        cluster.scheduler.add_plugin(bundling.seen)
        try:
            await test(bundling)
        except BaseException:
            for gate in _GATES.values():
                gate.open()  # else workers wait for their threads
            raise
        await bundling.is_empty()
        cluster.scheduler.validate_state()
        extension = extension_on(cluster.scheduler)
        if extension is not None:
            await comes(lambda: not any(extension.parts.kept().values()))
            assert extension.error is None
            assert not extension.graphs.bundles._holders

    on_cluster(run, **options)
