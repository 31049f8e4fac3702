"""Bundles on the scheduler: their tasks, and the values that they return."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from dask._task_spec import Alias, GraphNode, cull
from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.bundling.bundle import Bundle
from ferroflow_dask.bundling.graphs import written_task
from ferroflow_dask.bundling.results import VALUE, Place
from ferroflow_dask.bundling.sequence import bundle_in
from ferroflow_dask.bundling.sharing import Sharing
from ferroflow_dask.bundling.snapshot import BundleFacts

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

    from ferroflow_dask.scheduler.core import Core

#: States of a task that no worker has.
_UNSENT = frozenset({"released", "waiting", "queued", "no-worker"})

#: Tasks of earlier installations that differ from those of their graphs, by scheduler.
_rewritten: WeakKeyDictionary[Any, WeakSet[TaskState]] = WeakKeyDictionary()


class Bundles:
    """The bundles whose tasks the scheduler has.

    Parameters
    ----------
    core : Core
    """

    def __init__(self, core: Core) -> None:
        self._scheduler = core.scheduler
        self._hooks = core.hooks
        self._decisions = core.decisions
        #: Returns a part of a new key, another one each time.
        self.token: Callable[[], str] = lambda: uuid.uuid4().hex
        self._bundles: dict[Key, Bundle] = {}
        # Bundles that have run. Workers may remember the inputs of their readers.
        self._completed: set[Key] = set()
        # For each task in a bundle: the latest bundle that holds it.
        self._holders: dict[Key, Key] = {}
        #: Bundles of several tasks that were created, the tasks in them, bundles that were split, values that
        #: other graphs read from bundles, and tasks that ran again for another graph.
        self.counts = {"created": 0, "tasks": 0, "split": 0, "divided": 0, "shared": 0, "again": 0}

    def __len__(self) -> int:
        return len(self._bundles)

    def __contains__(self, key: Key) -> bool:
        return key in self._bundles

    def keys(self) -> Collection[Key]:
        """Return the keys of all tasks that differ from those of their graph."""
        return self._bundles.keys()

    def get(self, key: Key) -> Bundle | None:
        """Return the bundle that a task runs; None if the task is as its graph has it."""
        return self._bundles.get(key)

    def rewritten(self, keys: Iterable[Key]) -> set[Key]:
        """Return the tasks that differ from those of their graph, also those of earlier installations."""
        earlier: Collection[Any] = _rewritten.get(self._scheduler, ())
        tasks = self._scheduler.tasks
        return {key for key in keys if key in self._bundles or (earlier and tasks.get(key) in earlier)}

    def leave_out(self, dsk: dict[Key, GraphNode], keys: Collection[Key]) -> None:
        """Take tasks that were rewritten out of a graph: they have other dependencies than it says."""
        rewritten = self.rewritten(dsk)
        if rewritten:
            for key in rewritten:
                del dsk[key]
            for key in dsk.keys() - cull(dsk, {*keys}).keys():
                del dsk[key]

    def completed(self, key: Key) -> None:
        """Note that a task has run."""
        if key in self._bundles:
            self._completed.add(key)

    def has_run(self, key: Key) -> bool:
        """Return whether a task has run."""
        return key in self._completed

    def values_read(self, ts: TaskState, bundle: Bundle) -> dict[Key, int]:
        """Return the values of a bundle that other tasks read, with their items."""
        found: dict[Key, int] = {}
        for reader in ts.dependents:
            reading = self._bundles.get(reader.key)
            for holder, item in reading.places.values() if reading is not None else ():
                if holder == ts.key and (value := bundle.exports[item or 0]) is not None:
                    found[value] = item or 0
        return found

    def add(self, bundles: Mapping[Key, Bundle]) -> None:
        """Note the bundles of a graph, whose tasks were created."""
        present = {key: bundle for key, bundle in bundles.items() if key in self._scheduler.tasks}
        self.expect(present)
        for key, bundle in present.items():
            if len(bundle.tasks) > 1:
                self.counts["created"] += 1
                self.counts["tasks"] += len(bundle.tasks)
                self._decisions.note(key, "bundled", "", in_words(bundle))
                self._supply_duration(key)

    def expect(self, bundles: Mapping[Key, Bundle]) -> None:
        """Note bundles whose tasks are about to be created."""
        for key, bundle in bundles.items():
            self.forget(key)  # steps may have left it
            self._bundles[key] = bundle
            if len(bundle.tasks) > 1:
                own = (task.key for task in bundle.tasks if not is_value(task))
                self._holders |= {inner: key for inner in own if inner != key}

    def _supply_duration(self, key: Key) -> None:
        """Give Dask the expected duration of the first bundle of a prefix: adaptive scaling reads it."""
        ts = self._scheduler.tasks[key]
        if ts.prefix.duration_average < 0:
            ts.prefix.duration_average = cost_s_of(ts)

    def forget(self, key: Key) -> None:
        """Forget a task."""
        bundle = self._bundles.pop(key, None)
        self._completed.discard(key)
        for task in bundle.tasks if bundle is not None else ():
            if self._holders.get(task.key) == key:
                del self._holders[task.key]

    def redefined(self, key: Key) -> None:
        """Forget a task that gets another definition."""
        self.forget(key)
        self.note_redefined(key)

    def note_redefined(self, key: Key) -> None:
        """Announce that the definition of a task is about to change."""
        for hook in self._hooks.task_redefined:
            hook(key)

    def clear(self) -> None:
        """Forget all tasks, except that they differ from those of their graphs."""
        found = [self._scheduler.tasks[key] for key in self._bundles if key in self._scheduler.tasks]
        if found:
            _rewritten.setdefault(self._scheduler, WeakSet()).update(found)
        self._bundles.clear()
        self._completed.clear()
        self._holders.clear()

    def holding(self, name: str) -> list[Key]:
        """Return the bundles that hold a task, by the text of its key; O(tasks in bundles)."""
        return [holder for key, holder in self._holders.items() if str(key) == name]

    def original(self, key: Key) -> GraphNode | None:
        """Return a task as its graph has it if it runs in a bundle, or reads from one."""
        bundle = self._bundles.get(self._holders.get(key, key))
        tasks = bundle.tasks if bundle is not None else ()
        return next((task for task in tasks if task.key == key and not is_value(task)), None)

    # Values that another graph reads

    def facts(self, keys: Collection[Key]) -> tuple[dict[Key, Key], dict[Key, BundleFacts]]:
        """Return which bundles hold the tasks, and facts about these bundles; may be called by any thread.

        Facts about bundles whose own keys are among the given ones are added.
        """
        holders = self._holders
        held = {key: holder for key in keys if (holder := holders.get(key)) is not None}
        own = {key for key in keys if key in self._bundles}
        bundles = {
            key: BundleFacts(bundle, self._is_gone(key), self._may_export(key, bundle))
            for key in own.union(held.values())
            if (bundle := self._bundles.get(key)) is not None
        }
        return held, bundles

    def _is_gone(self, key: Key) -> bool:
        """Return whether a bundle has run and its result has been dropped: all of it would run again."""
        ts = self._scheduler.tasks.get(key)
        return key in self._completed and (ts is None or not ts.who_has)

    def _may_export(self, key: Key, bundle: Bundle) -> bool:
        """Return whether a bundle can still return more values."""
        ts = self._scheduler.tasks.get(key)
        if (
            ts is None
            or ts.state not in _UNSENT
            or key in self._completed
            or any(task.key == key for task in bundle.tasks)
        ):
            return False  # a bundle under the key of one of its tasks returns the value of that task
        return all(reader.key in self._bundles for reader in list(ts.dependents))

    def carry_out(self, sharing: Sharing) -> None:
        """Let bundles return the values that a plan needs."""
        new: dict[Key, Bundle] = {}
        for key, exports in sharing.exports.items():
            bundle = self._bundles[key]
            if exports == bundle.exports:
                continue
            new[key] = replace(new.get(key, bundle), exports=exports)
        self.rewrite(new)
        self.counts["shared"] += len(sharing.places)
        self.counts["again"] += sharing.n_again

    def moved_readers(self, ts: TaskState, moved: Mapping[Place, Place]) -> dict[Key, Bundle]:
        """Return the readers of a bundle as they read from other places."""
        return {reader.key: self._bundles[reader.key].reading(moved) for reader in ts.dependents}

    def rewrite(self, bundles: Mapping[Key, Bundle]) -> dict[Key, GraphNode]:
        """Give tasks that have not run new definitions; return them."""
        specs: dict[Key, GraphNode] = {}
        for key, bundle in bundles.items():
            cost_s = cost_s_of(self._scheduler.tasks[key])
            specs[key] = spec_of(key, bundle, cost_s)
            self.note_redefined(key)
        # From here on nothing can fail halfway.
        for key, spec in specs.items():
            self._scheduler.tasks[key].run_spec = spec
            if bundles[key].is_plain(key):
                del self._bundles[key]
            else:
                self._bundles[key] = bundles[key]
        return specs

    def is_splittable(self, key: Key) -> bool:
        """Return whether a task is a bundle whose tasks can run one by one."""
        bundle = self._bundles.get(key)
        return bundle is not None and (len(bundle.tasks) > 1 or bundle.returns_results(key))

    def is_only_value(self, key: Key) -> bool:
        """Return whether a task only gives a value of a bundle its own key."""
        tasks = self._bundles[key].tasks
        return len(tasks) == 1 and is_value(tasks[0])


def is_value(task: GraphNode) -> bool:
    """Return whether a task only stands for a value of a bundle of another graph."""
    return isinstance(task, Alias) and isinstance(task.target, tuple) and task.target[:1] == (VALUE,)


def spec_of(key: Key, bundle: Bundle, cost_s: float) -> GraphNode:
    """Return the task of a bundle with an expected duration [s], or its only task as its graph has it."""
    return bundle.tasks[0] if bundle.is_plain(key) else written_task(key, bundle, cost_s)


def cost_s_of(ts: TaskState) -> float:
    """Return the expected duration of a bundle [s]; 0 for other tasks."""
    bundle = bundle_in(ts.run_spec)
    return bundle.cost_s if bundle is not None else 0.0


def in_words(bundle: Bundle) -> str:
    """Return the number of tasks of a bundle by prefix."""
    prefixes = Counter(key_split(task.key) for task in bundle.tasks)
    return f"{len(bundle.tasks)} tasks: {', '.join(f'{n} {prefix}' for prefix, n in prefixes.most_common())}"
