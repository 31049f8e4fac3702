"""Held parts of graphs: which shuffles of unknown size are held."""

from __future__ import annotations

from typing import Any

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from random_shuffles import graph_of, n_barriers

from ferroflow_dask.bundling.ordering import dependents_of
from ferroflow_dask.bundling.rewrite import rewrite
from ferroflow_dask.bundling.shuffles import groups_of, unfused
from ferroflow_dask.bundling.snapshot import SentGraph, Snapshot, TaskFacts
from ferroflow_dask.cluster_profile import ClusterProfile

CLUSTER = ClusterProfile((1,) * 4, memory_nbytes=10**9)


def frame(name: str) -> Any:
    rows = pd.DataFrame({"key": range(40), name: range(40)})
    return dd.from_pandas(rows, npartitions=4, sort=False)


@pytest.mark.parametrize("most", [10, 10**9], ids=["small", "large"])
def test_a_join_with_a_large_side_is_p2p_as_are_the_shuffles_before_its_other_side(most: int) -> None:
    options = {"shuffle_method": "p2p", "broadcast": False}
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        first = frame("a").merge(frame("b"), on="key", **options)
        graph, keys = graph_of(first.merge(frame("c"), left_on="b", right_on="c", **options))
    sent = SentGraph(graph, frozenset(keys))
    tasks = unfused(graph)
    shuffles = [shuffle for group in groups_of(tasks) for shuffle in group]
    outputs = {task.key for shuffle in shuffles for task in shuffle.unpacks}
    behind = outputs | dependents_of(outputs, tasks)
    (late,) = (shuffle for shuffle in shuffles if not behind.isdisjoint(shuffle.sources(tasks)))
    (known,) = (one for one in shuffles if one is not late and one.unpacks == late.unpacks)
    facts = dict.fromkeys(known.sources(tasks), TaskFacts(nbytes=most, holders=("tcp://a",)))
    plan = rewrite(sent, Snapshot(CLUSTER, tasks=facts), "1")
    assert bool(plan.held) == (most <= 10)
    assert n_barriers(plan.tasks) == (4 if most > 10 else 0)


@pytest.mark.parametrize("n_threads", [2, 100])
def test_what_parts_read_together_does_not_tie_them(n_threads: int) -> None:
    def add(rows: Any, other: Any) -> Any:
        return rows.assign(n=len(other))

    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        read = frame("read")
        shuffled = [frame(name).shuffle("key", force=True) for name in "ab"]
        both = [
            dd.map_partitions(add, one, read, meta=one._meta.assign(n=1), align_dataframes=False)
            for one in shuffled
        ]
        graph, keys = graph_of(dd.concat(both, axis=0, interleave_partitions=False))
    cluster = ClusterProfile((1,) * n_threads, memory_nbytes=10**9)
    plan = rewrite(SentGraph(graph, frozenset(keys)), Snapshot(cluster), "1")
    first, second = (part.wanted for part in (one.rest for one in plan.held))
    assert first.isdisjoint(second)
    assert first | second == frozenset(keys)
