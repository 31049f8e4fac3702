"""Divisions on the scheduler: steps of running bundles become bundles and tasks of their own.

A worker divides a bundle when the scheduler asks, or when a step fails. The bundle goes on with the steps
that it keeps. It yields the values of these under the same item numbers, so only the readers of the other
values are redefined.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dask._task_spec import Alias, GraphNode, cull
from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.bundling.bundle import Bundle
from ferroflow_dask.bundling.cut import separate_s
from ferroflow_dask.bundling.graphs import bundles_of, written_task
from ferroflow_dask.bundling.results import VALUE, Place
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.scheduler import _distributed, _distributed_graphs
from ferroflow_dask.scheduler._distributed_graphs import Failed
from ferroflow_dask.scheduler.changes import attempt
from ferroflow_dask.scheduler.graphs.bundles import Bundles, cost_s_of, spec_of
from ferroflow_dask.scheduler.graphs.division import Division
from ferroflow_dask.scheduler.graphs.stuck import Stuck
from ferroflow_dask.scheduler.graphs.worker_runs import DIVIDE, NARROW

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

    from ferroflow_dask.scheduler.core import Core
    from ferroflow_dask.scheduler.refusals import Refusals

#: Share of a bundle's unstarted steps, as in `bundling.run.Share`.
HALF = "half"
#: States of a bundle that has not ended.
_AHEAD = frozenset({"waiting", "queued", "no-worker", "processing"})


class Dividing:
    """Divides running bundles.

    Parameters
    ----------
    core : Core
    bundles : Bundles
    refusals : Refusals
    cluster : callable
        Returns the cluster for which graphs are cut.
    may_send : callable
        Returns whether a worker understands the messages, by its address.
    """

    def __init__(
        self,
        core: Core,
        bundles: Bundles,
        refusals: Refusals,
        cluster: Callable[[], ClusterProfile],
        may_send: Callable[[str], bool],
    ) -> None:
        self._scheduler = core.scheduler
        self._guard = core.guard
        self._view = core.view
        self._decisions = core.decisions
        self._bundles = bundles
        self._refusals = refusals
        self._cluster = cluster
        self._may_send = may_send
        # The shares and reasons of the divisions that workers have not answered, by bundle.
        self._asked: dict[Key, tuple[str, str]] = {}
        core.view.dividing = self._asked
        # Bundles of which some values are needed no longer.
        self._narrowed: dict[Key, None] = {}
        #: Divisions that workers were asked for.
        self.n_asked = 0
        self.stuck = Stuck(core, bundles, self.ask, may_send)

    # Requests

    def ask(self, key: Key, share: str, reason: str) -> bool:
        """Ask a worker for steps of a bundle that it runs; return whether it is asked now."""
        ts, bundle = self._scheduler.tasks.get(key), self._bundles.get(key)
        if ts is None or ts.processing_on is None or bundle is None or key in self._asked:
            return False
        if len(bundle.tasks) < 2 or not bundle.returns_results(key):
            return False
        if not self._may_send(ts.processing_on.address):
            return False
        self._asked[key] = share, reason
        self._view.divisible.pop(key, None)
        self.n_asked += 1
        message = {"op": DIVIDE, "key": key, "run_id": ts.run_id, "share": share}
        self._scheduler.worker_send(ts.processing_on.address, {**message, "stimulus_id": "ferroflow-divide"})
        return True

    def ask_all_on(self, address: str, reason: str) -> None:
        """Ask a worker for all steps that it has not started."""
        ws = self._scheduler.workers.get(address)
        for ts in list(ws.processing) if ws is not None else ():
            self.ask(ts.key, "all", reason)

    def may_have_seceded(self, key: Key) -> None:
        """Ask for all steps of a bundle if it is long-running."""
        ts = self._scheduler.tasks.get(key)
        if ts is not None and ts.processing_on is not None and ts in ts.processing_on.long_running:
            self.stuck.seceded(key, ts.processing_on.address)
            self.ask(key, "all", "a step has seceded")

    def left(self, key: Key, address: str) -> None:
        """Stop a bundle that left `processing` without a result: its worker starts no further step."""
        self._asked.pop(key, None)
        if key in self._bundles and self._may_send(address):
            message = {"op": NARROW, "key": key, "run_id": None, "exports": ()}
            self._scheduler.worker_send(address, message)

    def ended(self, key: Key) -> None:
        """Note that a task has ended."""
        self._asked.pop(key, None)
        self.stuck.ended(key)

    def restarted(self) -> None:
        """Forget all tasks: the cluster restarts."""
        self._asked.clear()
        self._narrowed.clear()
        self.stuck.restarted()

    def forgotten(self, key: Key) -> None:
        """Note that a task is forgotten, before its bundle is: it may have read a value of a running one."""
        self.ended(key)
        bundle = self._bundles.get(key)
        for holder, _ in bundle.places.values() if bundle is not None else ():
            if holder not in self._bundles or self._scheduler.tasks[holder].state not in _AHEAD:
                continue
            if not self._narrowed:
                self._scheduler.loop.add_callback(self._guard(self._narrow))
            self._narrowed[holder] = None

    def _narrow(self) -> None:
        narrowed, self._narrowed = self._narrowed, {}
        for key in narrowed:
            ts, bundle = self._scheduler.tasks.get(key), self._bundles.get(key)
            if ts is None or bundle is None or ts.state not in _AHEAD or not bundle.returns_results(key):
                continue
            exports = tuple(self._read(ts, bundle))
            if not exports and ts.processing_on is None:
                continue  # Dask forgets it
            # A later graph computes the other values again.
            present = tuple(one if one in exports else None for one in bundle.exports)
            delivered = tuple(one for one in bundle.delivered if one in exports)
            rest = replace(bundle, exports=present, delivered=delivered)
            if is_unsent := ts.processing_on is None:
                kept = cull({task.key: task for task in bundle.tasks}, {*exports})
                rest = replace(rest, tasks=tuple(task for task in bundle.tasks if task.key in kept))
            elif self._may_send(ts.processing_on.address):
                message = {"op": NARROW, "key": key, "run_id": ts.run_id, "exports": exports}
                self._scheduler.worker_send(ts.processing_on.address, message)
            self._bundles.expect({key: rest})
            if is_unsent:
                self._bundles.rewrite({key: rest})

    def _read(self, ts: TaskState, bundle: Bundle) -> dict[Key, int]:
        """Return the values of a bundle that other tasks read, with their items."""
        found: dict[Key, int] = {}
        for reader in ts.dependents:
            reading = self._bundles.get(reader.key)
            for holder, item in reading.places.values() if reading is not None else ():
                if holder == ts.key and (value := bundle.exports[item or 0]) is not None:
                    found[value] = item or 0
        return found

    # Answers

    def received(self, *, key: Key, worker: str, **message: Any) -> None:
        """Take a worker's message that steps have left a bundle; an exception would close its stream."""
        attempt(partial(self._received, key, worker, **message), f"the division of {key!r} failed")

    def _received(
        self,
        key: Key,
        worker: str,
        *,
        run_id: int,
        steps: Collection[Key],
        stimulus_id: str,
        read: Collection[Key] = (),
        unfinished: Collection[Key] = (),
        items: Collection[int] = (),
        n_ended: int = 0,
        elapsed_s: float = 0.0,
        failed: Key | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> None:
        share, reason = "", "a step failed or moves"
        if failed is None:
            share, reason = self._asked.pop(key, (share, reason))
        ts, bundle = self._scheduler.tasks.get(key), self._bundles.get(key)
        if ts is None or ts.processing_on is None:
            return
        if not steps:
            self._may_be_late_again(key, share, elapsed_s)
            return
        if ts.run_id != run_id or ts.processing_on.address != worker:
            return  # the message overtook a cancellation; the next run has all steps
        failure = None if failed is None or error is None else Failed(failed, worker, error)
        if failure is not None:
            self._bundles.split_readers(ts, stimulus_id)
        if bundle is None:  # of an installation that has ended
            _distributed.reschedule_from(self._scheduler, key, worker, stimulus_id)
        elif not bundle.returns_results(key) or self._collides(ts, steps):
            is_chain = not bundle.returns_results(key)
            if not self._bundles.split(key, stimulus_id, failed=failure if is_chain else None):
                _distributed.reschedule_from(self._scheduler, key, worker, stimulus_id)
        else:
            leaving = f"{len(steps)} of {len(bundle.tasks)} tasks leave: {reason}"
            self._decisions.note(key, "divided", worker, leaving)
            self._bundles.counts["divided"] += 1
            read_outside = self._read(ts, bundle)
            division = Division(
                ts, bundle, frozenset(steps), read_outside, stimulus_id, frozenset(unfinished)
            )
            if failure is not None:
                self._fail(division, failure)
                return
            # Half of the running step is over.
            step_s = max(cost_s_of(ts) / len(bundle.tasks), elapsed_s / (n_ended + 0.5))
            # Without unstarted steps, the bundle's thread will be idle, too.
            n_more = 0 if share == HALF else 1
            new_items = dict(zip(read, items, strict=True))
            self._free(division, new_items, step_s, refusing=failed, n_more=n_more)
            if failed is None:
                n_left = len(bundle.tasks) - len(steps) - n_ended
                # A late step will probably take as long again.
                left_s = n_left * step_s if share == HALF else elapsed_s
                self._view.reprice(key, elapsed_s + left_s)
                # It may be forgotten now, or long-running.
                if n_left > 1 and key in self._view.assigned:
                    self._view.divisible[key] = True

    def _may_be_late_again(self, key: Key, share: str, elapsed_s: float) -> None:
        """Look at a bundle again that had no steps to give, less and less often: a later step may wait."""
        if key in self._view.assigned:
            task, _ = self._view.assigned[key]
            if share != HALF:
                self._view.reprice(key, 2 * max(elapsed_s, task.cost_s))
            self._view.divisible[key] = False

    def _collides(self, ts: TaskState, steps: Collection[Key]) -> bool:
        """Return whether a step's key is that of another graph's task."""
        own = {reader.key for reader in ts.dependents if self._bundles.is_only_value(reader.key)}
        if any(reader.key not in self._bundles for reader in ts.dependents):
            return True  # it cannot be redefined
        return not all(key in own or self._is_new(key) for key in steps)

    def _free(
        self,
        division: Division,
        read: Mapping[Key, int],
        step_s: float,
        *,
        refusing: Key | None,
        n_more: int,
    ) -> None:
        """Run steps that have left a bundle in bundles of their own, or as single tasks if they are long.

        These are for the idle threads, and `n_more` others. If one has refused its worker, it and those that
        depend on it are single tasks.
        """
        ts, bundle, wanted = division.ts, division.bundle, division.wanted
        needed = cull({task.key: task for task in bundle.tasks if task.key in division.steps}, wanted)
        tasks = {task.key: task for task in bundle.tasks if task.key in needed}  # in their order
        groups = [[key] for key in tasks]
        if refusing in tasks and refusing is not None and ts.processing_on is not None:
            self._refusals.add(refusing, ts.processing_on.address)
        if refusing is None and step_s < separate_s(self._cluster()):
            idle = self._scheduler.idle.values()
            n_idle = sum(max(0, ws.nthreads - len(ws.processing)) for ws in idle)
            # Other divisions that are under way have their share of the idle threads.
            groups = division.dealt(tasks, max(1, n_idle // (len(self._asked) + 1)) + n_more)
        shares = {key: (key_split(key), step_s) for key in tasks}
        new = bundles_of(groups, tasks, wanted, shares, bundle.places, token=self._bundles.token())
        rest, turns = division.rest(read), division.turns
        outside = {key for task in tasks.values() for key in task.dependencies}
        values = {
            key: Bundle((Alias(key, (VALUE, key)),), (key,), {(VALUE, key): rest.place(ts.key, key)})
            for key in read
            if key in outside and self._is_new(key)
        }
        new = {
            key: replace(
                one,
                shares_objects=bundle.shares_objects,
                turns=tuple(turns[task.key] for task in one.tasks if task.key in turns),
            )
            for key, one in {**values, **new}.items()
        }
        specs = {key: spec_of(key, one, step_s * len(one.tasks)) for key, one in new.items()}
        self._replace(division, rest, new, specs)

    def _is_new(self, key: Key) -> bool:
        """Return whether a step has no task, or only one to be computed again if a failed one is retried."""
        ts = self._scheduler.tasks.get(key)
        return ts is None or (ts.state == "released" and key not in self._bundles)

    def _fail(self, division: Division, failed: Failed) -> None:
        """Make a step fail under its own key, and with it the steps that depend on it."""
        bundle, wanted = division.bundle, division.wanted
        inside = {task.key: task for task in bundle.tasks}
        tasks = cull({key: task for key, task in inside.items() if key in division.steps}, wanted)
        if failed.key not in tasks:  # no task reads what depends on it
            self._replace(replace(division, items={}), division.rest(), {}, {})
            return
        # The steps that it depends on can be computed again, if a client retries it.
        stack = [key for task in tasks.values() for key in task.dependencies]
        while stack:
            key = stack.pop()
            if key in inside and key not in tasks and key not in self._scheduler.tasks:
                tasks[key] = inside[key]
                stack += inside[key].dependencies
        single = replace(bundle, tasks=tuple(task for task in bundle.tasks if task.key in tasks))
        specs = dict(self._bundles.specs(single, {key: key for key in tasks}))
        self._replace(division, division.rest(), {}, specs, failed)

    def _replace(
        self,
        division: Division,
        rest: Bundle,
        new: Mapping[Key, Bundle],
        specs: Mapping[Key, GraphNode],
        failed: Failed | None = None,
    ) -> None:
        """Create the tasks of steps that have left a bundle, and redefine those that read their values."""
        ts, bundles = division.ts, self._bundles
        existing = [key for key in specs if key in self._scheduler.tasks]
        moved: dict[Place, Place] = {
            (ts.key, division.items[key]): (key, None) for key in division.wanted if key in specs
        }
        others = {
            key: reader
            for key, reader in bundles.moved_readers(ts, moved).items()
            if key not in existing and reader is not bundles.get(key)
        }
        readers = bundles.rewrite(others) | {key: specs[key] for key in existing}
        for key in existing:
            bundles.redefined(key)
        bundles.expect({key: one for key, one in new.items() if not one.is_plain(key)})
        bundles.expect({ts.key: rest})
        ts.run_spec = written_task(ts.key, rest, cost_s_of(ts))
        _distributed_graphs.replace_task(
            self._scheduler,
            ts,
            {key: spec for key, spec in specs.items() if key not in existing},
            readers,
            division.stimulus_id,
            keeps=True,
            failed=failed,
            priorities=division.priorities(specs, new),
        )
        self.stuck.freed.update(dict.fromkeys(key for key in specs if key in self._scheduler.tasks))
