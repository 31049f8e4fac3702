"""Held parts of graphs: they are planned as soon as the sizes of the data of their shuffles are known.

The task of a held part is never sent: Dask finds no worker for it. Once its inputs exist, or some of them
show that there are too many data for plain tasks, the part is planned. The tasks of the plan replace it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dask.typing import Key

from ferroflow_dask.bundling.bundle import Bundle
from ferroflow_dask.bundling.ordering import needed_by
from ferroflow_dask.bundling.plan import Plan
from ferroflow_dask.bundling.rewrite import revalidate, rewrite
from ferroflow_dask.bundling.small_shuffles import DataSize
from ferroflow_dask.bundling.snapshot import Snapshot
from ferroflow_dask.bundling.stages import Held
from ferroflow_dask.scheduler._distributed_graphs import replace_task
from ferroflow_dask.scheduler.changes import FAILURES
from ferroflow_dask.scheduler.graphs.arrival import Knowledge, Snapshots

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

    from ferroflow_dask.scheduler.core import Core
    from ferroflow_dask.scheduler.graphs.splitting import Splitting

logger = logging.getLogger("ferroflow_dask")

#: States of a held task in which it can be replaced.
_HELD = frozenset({"waiting", "no-worker"})
#: Parts of more tasks are planned in a thread.
_FEW_TASKS = 200
#: Other graphs may create or release tasks meanwhile. After so many plans the part is split.
_ATTEMPTS = 3
_STIMULUS = "ferroflow-stage"


@dataclass(slots=True, eq=False)
class _Part:
    """A held part.

    Parameters
    ----------
    held : Held
    bundle : Bundle
        As it was when the task was created.
    sizes : dict of Key to list of DataSize
        Those that an input is a part of.
    is_asked : bool
        Whether it is about to be planned.
    """

    held: Held
    bundle: Bundle
    sizes: dict[Key, list[DataSize]]
    is_asked: bool = False


class Stages:
    """Plans the held parts of graphs.

    Parameters
    ----------
    core : Core
    splitting : Splitting
    knowledge : Knowledge
    created : callable
        Called with a plan whose tasks were created.
    """

    def __init__(
        self, core: Core, splitting: Splitting, knowledge: Knowledge, created: Callable[[Plan], object]
    ) -> None:
        self._scheduler = core.scheduler
        self._guard = core.guard
        self._held = core.held
        self._learned = core.learned
        self._splitting = splitting
        self._bundles = splitting.bundles
        self._knowledge = knowledge
        self._snapshots = Snapshots(core.scheduler, splitting.bundles, knowledge)
        self._created = created
        # By the key of their task, as in `core.held`.
        self._parts: dict[Key, _Part] = {}
        self._inputs = core.held_inputs
        self.counts = {"held": 0, "planned": 0, "split": 0}

    def add(self, plan: Plan) -> None:
        """Hold parts of a graph whose tasks were created, and learn the sizes of its shuffles."""
        for shuffle, nbytes in plan.measured.items():
            self._learned.record_shuffle(shuffle, nbytes)
        for part in plan.held:
            bundle = self._bundles.get(part.name)
            if bundle is not None and part.name in self._scheduler.tasks:
                self._add(part, bundle)

    def _add(self, held: Held, bundle: Bundle) -> None:
        sizes: dict[Key, list[DataSize]] = {}
        for sources, most_nbytes in held.sources:
            one = DataSize(len(sources), most_nbytes)
            for key in sources:
                sizes.setdefault(key, []).append(one)
        self._parts[held.name] = _Part(held, bundle, sizes)
        self._held[held.name] = None
        self.counts["held"] += 1
        for key in held.inputs:
            self._inputs.setdefault(key, set()).add(held.name)
            ts = self._scheduler.tasks.get(key)
            if ts is not None and ts.who_has:
                self.input_changed(key, "", "memory")

    def clear(self) -> None:
        """Forget all parts."""
        self._parts.clear()
        self._held.clear()
        self._inputs.clear()

    def input_changed(self, key: Key, _: str, finish: str) -> None:
        """Note a transition of an input: it may show that there are too many data for plain tasks."""
        if finish != "memory":
            return
        nbytes = self._scheduler.tasks[key].nbytes
        for name in tuple(self._inputs[key]):
            part = self._parts[name]
            for one in part.sizes.pop(key, ()) if nbytes >= 0 else ():
                one.add(nbytes)
                if one.expected_nbytes > one.most_nbytes:
                    self._ask(name, part)
            if not part.sizes:  # other inputs say nothing of a shuffle
                self._ask(name, part)

    def part_changed(self, key: Key, _: str, finish: str) -> None:
        """Note a transition of the task of a held part: without a worker, it has all its inputs."""
        if finish == "forgotten":
            self._forget(key)
        elif finish == "no-worker":
            self._ask(key, self._parts[key])

    def _forget(self, name: Key) -> None:
        part = self._parts.pop(name)
        self._held.pop(name, None)
        for key in part.held.inputs:
            names = self._inputs.get(key, set())
            names.discard(name)
            if not names:
                self._inputs.pop(key, None)

    def _ask(self, name: Key, part: _Part) -> None:
        if not part.is_asked:
            part.is_asked = True
            self._scheduler.loop.add_callback(self._plan, name)

    async def _plan(self, name: Key) -> None:
        """Plan a part, and replace its task; a failure ends the plugin, which splits the part."""
        if self._guard.error is not None:
            return
        try:
            await self._plan_part(name)
        except FAILURES as error:
            self._guard.fail(error)

    async def _plan_part(self, name: Key) -> None:
        part, ts = self._parts.get(name), self._scheduler.tasks.get(name)
        if part is None or ts is None:
            return
        part.is_asked = False
        for _ in range(_ATTEMPTS):
            if ts.state not in _HELD:
                return
            plan = None
            try:
                plan = await self._planned(part, ts)
            except FAILURES:
                logger.warning("ferroflow: a part of a graph could not be planned", exc_info=True)
            if self._parts.get(name) is not part or self._scheduler.tasks.get(name) is not ts:
                return
            if plan is None:
                break
            if ts.state in _HELD and self._is_valid(plan, ts, part):
                self._replace(ts, plan)
                return
        if ts.state in _HELD:
            self._forget(name)
            self.counts["split"] += 1
            self._splitting.split(name, _STIMULUS)

    async def _planned(self, part: _Part, ts: TaskState) -> Plan | None:
        """Return the plan of a part; None if tasks of other graphs read it, or it was changed."""
        rest, wanted = part.held.rest, frozenset(reader.key for reader in ts.dependents)
        if not wanted <= rest.wanted or not self._is_same(ts.key, part):
            return None
        name, token = ts.key, self._bundles.token()

        def make() -> Plan:
            needed = replace(rest, wanted=wanted, tasks=needed_by({*wanted}, dict(rest.tasks)))
            return rewrite(needed, self._without(name, wanted, self._snapshots.for_plan(needed)), token)

        if len(rest.tasks) <= _FEW_TASKS:
            return make()
        return await asyncio.get_running_loop().run_in_executor(None, make)

    def _is_same(self, name: Key, part: _Part) -> bool:
        """Return whether a part is as it was held, except that clients may need less of it."""
        bundle, before = self._bundles.get(name), part.bundle
        return (
            bundle is not None
            and bundle.places.items() <= before.places.items()
            and set(map(id, bundle.tasks)) <= set(map(id, before.tasks))
        )

    def _is_valid(self, plan: Plan, ts: TaskState, part: _Part) -> bool:
        wanted = plan.graph.wanted
        return (
            wanted == {reader.key for reader in ts.dependents}
            and self._is_same(ts.key, part)
            and revalidate(plan, self._without(ts.key, wanted, self._snapshots.for_check(plan)))
        )

    @staticmethod
    def _without(name: Key, wanted: frozenset[Key], snapshot: Snapshot) -> Snapshot:
        """Return a snapshot as if the tasks of a held part did not exist."""
        return replace(
            snapshot,
            tasks={key: one for key, one in snapshot.tasks.items() if key not in wanted},
            held={key: holder for key, holder in snapshot.held.items() if holder != name},
            bundles={key: one for key, one in snapshot.bundles.items() if key != name and key not in wanted},
        )

    def _replace(self, ts: TaskState, plan: Plan) -> None:
        """Replace the task of a held part by those of a plan."""
        self._forget(ts.key)
        self.counts["planned"] += 1
        self._bundles.forget(ts.key)
        self._bundles.carry_out(plan.sharing)
        existing = {reader.key for reader in ts.dependents}
        for key in (ts.key, *existing):
            self._bundles.redefined(key)
        self._bundles.expect(plan.bundles)
        *common, last = ts.priority or (0,)
        most = max(plan.order.values(), default=0.0) + 1
        replace_task(
            self._scheduler,
            ts,
            {key: task for key, task in plan.tasks.items() if key not in existing},
            {key: task for key, task in plan.tasks.items() if key in existing},
            _STIMULUS,
            priorities={key: (*common, last + place / most) for key, place in plan.order.items()},
        )
        self._created(plan)
