"""Plain shuffles: a P2P shuffle of little data becomes plain tasks, which can be bundled.

`ferroflow_dask.bundling.small_shuffles` decides it when a graph is planned. The data of a shuffle behind
another one do not exist then. So the sizes of those that stay are learned, for the next graph that has them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dask.typing import Key

from ferroflow_dask.scheduler.core import Core
from ferroflow_dask.scheduler.features.base import Feature
from ferroflow_dask.scheduler.hooks import Watch

#: States of outputs whose shuffle does not run again.
_ENDED = frozenset({"memory", "erred"})


class PlainShuffles(Feature):
    """Switch of a step of `rewrite`; learns the sizes of the shuffles that stay P2P."""

    name = "plain_shuffles"
    summary = "P2P shuffles of little data become plain tasks"
    parts = ("bundling/small_shuffles",)
    needs = ("bundles",)

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        # Identifiers of shuffles, and the keys of their data, by the key of the barrier.
        self._barriers: dict[Key, tuple[str, list[Key]]] = {}

    def watches(self) -> Iterable[Watch]:
        """Return the barriers of shuffles that have not ended."""
        return (Watch(self._barriers, by_key=True, changed=self._changed),)

    def pending(self) -> Collection[Key]:
        """Return the barriers of shuffles that have not ended."""
        return self._barriers.keys()

    def restart(self) -> None:
        """Forget all shuffles."""
        self._barriers.clear()

    def update_graph(self) -> None:
        """Follow the shuffles of a graph."""
        plan = self.core.parts().graphs.planned()
        if plan is not None:
            tasks = self.core.scheduler.tasks
            for key, shuffle in plan.kept_shuffles.items():
                ts = tasks.get(key)
                if ts is not None and any(one.state not in _ENDED for one in ts.dependents):
                    self._barriers[key] = shuffle

    def _changed(self, key: Key, _: str, finish: str) -> None:
        if finish not in ("memory", "erred", "forgotten"):
            return
        shuffle, sources = self._barriers.pop(key)
        # The barrier runs when all data are sent. Sizes of data that were dropped since are still known.
        found = [ts.nbytes for one in sources if (ts := self.core.scheduler.tasks.get(one)) is not None]
        if finish == "memory" and len(found) == len(sources) and min(found, default=-1) >= 0:
            self.core.learned.record_shuffle(shuffle, float(sum(found)))
