"""Divided bundles: steps that have left a running bundle become bundles and tasks of their own.

The bundle goes on with the steps that it keeps. It yields the values of these under the same item numbers, so
only the readers of the other values are redefined.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dask._task_spec import GraphNode, cull
from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.bundling.bundle import Bundle
from ferroflow_dask.bundling.cut import separate_s
from ferroflow_dask.bundling.graphs import bundles_of, written_task
from ferroflow_dask.bundling.results import Place
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.scheduler import _distributed, _distributed_graphs
from ferroflow_dask.scheduler._distributed_graphs import Failed
from ferroflow_dask.scheduler.changes import attempt
from ferroflow_dask.scheduler.graphs.bundles import cost_s_of, spec_of
from ferroflow_dask.scheduler.graphs.division import Division

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

    from ferroflow_dask.scheduler.core import Core
    from ferroflow_dask.scheduler.graphs.dividing import Dividing
    from ferroflow_dask.scheduler.graphs.splitting import Splitting
    from ferroflow_dask.scheduler.refusals import Refusals

#: Share of a bundle's unstarted steps, as in `bundling.run.Share`.
_HALF = "half"


class Divided:
    """Takes the messages of workers that steps have left a bundle.

    Parameters
    ----------
    core : Core
    splitting : Splitting
    refusals : Refusals
    cluster : callable
        Returns the cluster for which graphs are cut.
    requests : Dividing
    """

    def __init__(
        self,
        core: Core,
        splitting: Splitting,
        refusals: Refusals,
        cluster: Callable[[], ClusterProfile],
        requests: Dividing,
    ) -> None:
        self._scheduler = core.scheduler
        self._view = core.view
        self._decisions = core.decisions
        self._splitting = splitting
        self._bundles = splitting.bundles
        self._refusals = refusals
        self._cluster = cluster
        self._requests = requests

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
            share, reason = self._requests.asked.pop(key, (share, reason))
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
            self._splitting.split_readers(ts, stimulus_id)
        if bundle is None:  # of an installation that has ended
            _distributed.reschedule_from(self._scheduler, key, worker, stimulus_id)
        elif not bundle.returns_results(key) or self._collides(ts, steps):
            is_chain = not bundle.returns_results(key)
            if not self._splitting.split(key, stimulus_id, failed=failure if is_chain else None):
                _distributed.reschedule_from(self._scheduler, key, worker, stimulus_id)
        else:
            leaving = f"{len(steps)} of {len(bundle.tasks)} tasks leave: {reason}"
            self._decisions.note(key, "divided", worker, leaving)
            self._bundles.counts["divided"] += 1
            read_by = self._bundles.values_read(ts, bundle)
            division = Division(ts, bundle, frozenset(steps), read_by, stimulus_id, frozenset(unfinished))
            if failure is not None:
                self._fail(division, failure)
                return
            # Half of the running step is over.
            step_s = max(cost_s_of(ts) / len(bundle.tasks), elapsed_s / (n_ended + 0.5))
            # Without unstarted steps, the bundle's thread will be idle, too.
            n_more = 0 if share == _HALF else 1
            new_items = dict(zip(read, items, strict=True))
            self._free(division, new_items, step_s, refusing=failed, n_more=n_more)
            if failed is None:
                n_left = len(bundle.tasks) - len(steps) - n_ended
                # A late step will probably take as long again.
                left_s = n_left * step_s if share == _HALF else elapsed_s
                self._view.reprice(key, elapsed_s + left_s)
                # It may be forgotten now, or long-running.
                if n_left > 1 and key in self._view.assigned:
                    self._view.divisible[key] = True

    def _may_be_late_again(self, key: Key, share: str, elapsed_s: float) -> None:
        """Look at a bundle again that had no steps to give, less and less often: a later step may wait."""
        if key in self._view.assigned:
            task, _ = self._view.assigned[key]
            if share != _HALF:
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
            groups = division.dealt(tasks, max(1, n_idle // (len(self._requests.asked) + 1)) + n_more)
        shares = {key: (key_split(key), step_s) for key in tasks}
        new = bundles_of(groups, tasks, wanted, shares, bundle.places, token=self._bundles.token())
        rest, turns = division.rest(read), division.turns
        outside = {key for task in tasks.values() for key in task.dependencies}
        values = {
            key: Bundle.of_value(key, rest.place(ts.key, key))
            for key in read
            if key in outside and self._is_new(key)
        }
        new = {
            key: replace(
                one,
                shares_objects=bundle.shares_objects,
                turns=tuple(turns[task.key] for task in one.tasks if task.key in turns),
                size_classes=bundle.size_classes,
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
        specs = dict(self._splitting.specs(single, {key: key for key in tasks}))
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
        self._requests.stuck.freed.update(dict.fromkeys(key for key in specs if key in self._scheduler.tasks))
