"""Random DAGs on random clusters to which things happen: each task runs as often as it must."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from random_clusters import Story, stories

from ferroflow_dask.virtual import Outcome, VirtualCluster, VirtualTask


def least_runs(cluster: VirtualCluster, key: Any, task: VirtualTask) -> int:
    """Return how often a task must have been started: once, and again after each failure or loss."""
    ends = [e.outcome for e in cluster.record.executions if e.key == key]
    return 1 + min(task.failures, ends.count(Outcome.FAILED)) + ends.count(Outcome.LOST)


def check_run(story: Story, policy: str) -> VirtualCluster:
    cluster, graph = story.cluster(policy), story.graph
    cluster.run(max_events=2000 + 400 * len(graph))
    cluster.check()
    dead = {worker.name for worker in cluster.workers if not worker.is_alive}
    for key, task in graph.items():
        n, least = cluster.record.n_started[key], least_runs(cluster, key, task)
        # Where no worker died nothing is lost, and nothing runs once more than it must.
        assert n >= least, key
        assert n == least or dead, key
    assert cluster.n_steals <= len(graph)
    return cluster


@pytest.mark.parametrize(
    ("policy", "n_examples"), [("ferroflow", 150), ("ring", 50), ("random", 30), ("static", 30)]
)
def test_random_runs_end_well(policy: str, n_examples: int) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=n_examples)
    @given(stories())
    def runs_end_well(story: Story) -> None:
        cluster = check_run(story, policy)
        seen["steals"] += cluster.n_steals
        seen["lost"] += sum(e.outcome is Outcome.LOST for e in cluster.record.executions)

    runs_end_well()
    assert seen["lost"] > 0 or n_examples < 100  # what so few examples hold is up to Hypothesis
    assert (seen["steals"] > 0) == (policy in ("ferroflow", "ring"))


@settings(max_examples=10)
@given(stories())
def test_a_random_run_repeats(story: Story) -> None:
    def timeline() -> list[tuple[Any, int, float, float]]:
        cluster = story.cluster("ferroflow")
        cluster.run()
        return cluster.record.timeline()

    assert timeline() == timeline()
