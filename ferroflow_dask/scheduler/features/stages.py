"""Stages: a graph behind shuffles of unknown size is planned when their data exist.

`ferroflow_dask.bundling.stages` holds a part of a graph. `ferroflow_dask.scheduler.graphs.stages` plans it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from dask.typing import Key

from ferroflow_dask.scheduler.features.base import Feature
from ferroflow_dask.scheduler.hooks import Watch


class Stages(Feature):
    """Switch of a step of `rewrite`; follows the inputs of the held parts."""

    name = "stages"
    summary = "Shuffles are planned when the sizes of their data are known"
    parts = ("bundling/stages", "scheduler/graphs/stages")
    needs = ("bundles", "plain_shuffles")
    reason = "shuffles behind others become plain tasks in the first run: `tests/scheduler/test_stages.py`"

    def watches(self) -> Iterable[Watch]:
        """Return the inputs of held parts, and their tasks."""
        yield Watch(self.core.held_inputs, by_key=True, changed=self._input_changed)
        yield Watch(self.core.held, by_key=True, changed=self._part_changed)

    def _input_changed(self, key: Key, start: str, finish: str) -> None:
        self.core.parts().graphs.stages.input_changed(key, start, finish)

    def _part_changed(self, key: Key, start: str, finish: str) -> None:
        self.core.parts().graphs.stages.part_changed(key, start, finish)

    def counts(self) -> Mapping[str, int]:
        """Return the number of parts that were held, planned, and split."""
        return self.core.parts().graphs.stages.counts

    def pending(self) -> Collection[Key]:
        """Return the tasks of the held parts."""
        return self.core.held.keys()
