"""Random programs: the same outcomes on a stock cluster and on ours, which bundles most of their tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest
from dask.typing import Key
from random_programs import compare

from ferroflow_dask.bundling import rewrite
from ferroflow_dask.bundling.fixed import fixed_tasks, lone_tasks
from ferroflow_dask.bundling.graphs import BundledGraph
from ferroflow_dask.bundling.sequence import NO_WORK
from ferroflow_dask.scheduler.graphs.graphs import Graphs

pytestmark = pytest.mark.cluster

N_PROGRAMS = 60
#: Least share of the tasks in bundles, among those that may be in one.
LEAST = 0.8


@pytest.fixture
def bundled(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts of the tasks of all graphs that may be in bundles, and of those that are."""
    monkeypatch.setattr(Graphs, "learned", Graphs.learned)  # `compare` replaces it
    counts: Counter[str] = Counter()
    stock = rewrite.bundle_graph

    def counting(
        tasks: Any, wanted: Collection[Key], *args: Any, alone: Collection[Key], **options: Any
    ) -> BundledGraph:
        found = stock(tasks, wanted, *args, alone=alone, **options)
        separate = fixed_tasks(tasks).union(lone_tasks(tasks), alone, wanted)
        may_be = {key for key, task in tasks.items() if key not in separate and not isinstance(task, NO_WORK)}
        inside = [bundle for bundle in found.bundles.values() if len(bundle.tasks) > 1]
        counts["may be"] += len(may_be)
        counts["are"] += len(may_be & {task.key for bundle in inside for task in bundle.tasks})
        return found

    monkeypatch.setattr(rewrite, "bundle_graph", counting)
    return counts


@pytest.mark.filterwarnings("ignore")  # of NumPy and pandas about what random programs compute
def test_random_programs_have_the_same_outcomes(bundled: Counter[str]) -> None:
    differences, counts = compare(range(N_PROGRAMS))
    assert not differences
    assert min(counts[name] for name in ("created", "split", "shared", "again")) > 0
    assert bundled["are"] >= LEAST * bundled["may be"]
