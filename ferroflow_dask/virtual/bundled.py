"""Arriving graphs of a virtual scheduler: planned and created as the plugin does it, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from itertools import count

from ferroflow_dask.bundling.averages import Averages
from ferroflow_dask.bundling.plan import Plan, Until
from ferroflow_dask.bundling.rewrite import revalidate, unchanged
from ferroflow_dask.bundling.snapshot import FEATURES, SentGraph
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.scheduler.extension import FerroflowStealing
from ferroflow_dask.scheduler.graphs.arrival import Snapshots
from ferroflow_dask.virtual.samples import ClientMessages
from ferroflow_dask.virtual.sent import planned

Create = Callable[[Plan], None]


class Bundler:
    """Bundles graphs for a cluster, by all features of `rewrite` but those in `without`."""

    def __init__(
        self,
        stealing: FerroflowStealing,
        cluster: ClusterProfile,
        run: Callable[..., None],
        messages: ClientMessages,
        without: Collection[str],
    ) -> None:
        graphs, tokens = stealing.graphs, count()
        self._bundles, self._samples = graphs.bundles, graphs.samples
        self._run, self._messages = run, messages
        self._knows = replace(
            graphs.knowledge, cluster=lambda: cluster, on=FEATURES.difference(without, {"stages"})
        )
        self._snapshots = Snapshots(stealing.scheduler, graphs.bundles, self._knows)
        graphs.bundles.token = lambda: str(next(tokens))  # the same in every run
        graphs.receive()

    def arrives(self, graph: SentGraph, known: Mapping[str, Averages], create: Create) -> None:
        """Plan a graph by learned and `known` averages, and create its tasks, first those of a sample."""
        snapshot = self._snapshots.for_plan(graph)
        snapshot = replace(snapshot, learned={**snapshot.learned, **known})
        plan = planned(graph, snapshot, self._bundles.token())
        self._run(self._carry_out, plan, known, create)

    def _carry_out(self, plan: Plan, known: Mapping[str, Averages], create: Create) -> None:
        if not revalidate(plan, self._snapshots.for_check(plan)):
            plan = unchanged(plan.graph)
        self._bundles.carry_out(plan.sharing)
        self._bundles.leave_out(tasks := dict(plan.tasks), plan.wanted)
        self._bundles.expect(plan.bundles)
        create(replace(plan, tasks=tasks))
        self._bundles.add(plan.bundles)
        if plan.rest is not None and plan.until is not None:
            go_on = partial(self.arrives, plan.rest, known, create)
            expected_s = partial(self._expected_s, plan.until)
            self._messages.wait(self._samples, plan.until.keys, expected_s, go_on)

    def _expected_s(self, until: Until) -> float:
        return until.expected_s(self._knows.learned() or {}, self._knows.cluster())
