"""Random graphs on random clusters to which things happen, drawn by Hypothesis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from ferroflow_dask.policy import Policy
from ferroflow_dask.virtual import VirtualCluster, VirtualTask

Graph = dict[Any, VirtualTask]


@dataclass(frozen=True)
class Story:
    """What a cluster is, what it is asked for, and what happens to it meanwhile.

    Workers 0 and 1 and the last of those at the start have the resource; worker 0 stays and runs all the
    time, worker 1 never dies, so that every restriction can be met in the end.
    """

    options: dict[str, Any]
    first: Graph
    second: Graph
    second_at_s: float
    happenings: list[tuple[float, str, dict[str, Any]]]

    @property
    def graph(self) -> Graph:
        return self.first | self.second

    def cluster(self, policy: str | Policy) -> VirtualCluster:
        """Make the cluster, with two clients' graphs and with things about to happen."""
        cluster = VirtualCluster(policy=policy, **self.options)
        cluster.submit(self.first, client="a", keep=self.first)
        cluster.at(self.second_at_s, cluster.submit, self.second, client="b", fifo_timeout_s=0.0)
        for at_s, what, arguments in self.happenings:
            cluster.at(at_s, getattr(cluster, what), **arguments)
        return cluster


@st.composite
def annotations(draw: Callable[..., Any], duration_s: float) -> dict[str, Any]:
    drawn: dict[str, Any] = {}
    if draw(st.booleans()):  # a declared cost may be wrong
        drawn["ferroflow_cost"] = duration_s * draw(st.sampled_from([1, 0.5, 4]))
        if draw(st.booleans()):
            drawn["ferroflow_rank"] = draw(st.floats(0, 1))
    kind = draw(st.sampled_from([None, None, None, "workers", "resources", "priority"]))
    if kind == "workers":
        drawn["workers"] = [0, 1] if draw(st.booleans()) else [1]
        drawn["allow_other_workers"] = draw(st.booleans())
    elif kind == "resources":
        drawn["resources"] = {"GPU": 1}
    elif kind == "priority":
        drawn["priority"] = draw(st.integers(-2, 2))
    return drawn


@st.composite
def tasks(draw: Callable[..., Any], earlier: list[Any]) -> VirtualTask:
    inputs = draw(st.lists(st.sampled_from(earlier), max_size=3, unique=True)) if earlier else []
    duration_s = draw(st.sampled_from([0.0, 0.001, 0.01, 0.1]))
    notes = draw(annotations(duration_s))
    failures = int(draw(st.integers(0, 19)) == 19)
    if failures:
        notes["retries"] = 1
    return VirtualTask(duration_s, tuple(inputs), draw(st.sampled_from([0, 100, 10**6])), notes, failures)


@st.composite
def graphs(draw: Callable[..., Any], name: str) -> Graph:
    """Draw a graph of a few groups, in which tasks depend on tasks of earlier groups or of their own."""
    graph: Graph = {}
    for group in range(draw(st.integers(1, 4))):
        for i in range(draw(st.integers(1, 15))):
            graph[f"{name}{group}", i] = draw(tasks(list(graph)))
    return graph


@st.composite
def stories(draw: Callable[..., Any]) -> Story:
    workers = draw(st.integers(3, 6))
    options = {
        "workers": workers,
        "nthreads": draw(st.integers(1, 2)),
        "latency_s": draw(st.sampled_from([0.0005, 0.0, 0.02])),
        "bandwidth": draw(st.sampled_from([1e9, 1e7])),
        "host_bandwidth": draw(st.sampled_from([1e9, 1e10])),
        "workers_per_host": draw(st.integers(1, 3)),
        "resources": {name: {"GPU": 2} for name in (0, 1, workers - 1)},
        "speeds": {name: draw(st.sampled_from([1.0, 0.5, 2.0])) for name in range(workers)},
        "interval_s": 0.05,
        "seed": draw(st.integers(0, 999)),
    }
    happenings: list[tuple[float, str, dict[str, Any]]] = []
    for worker in range(2, workers):
        fate = draw(st.sampled_from(["none", "leaves", "pauses"]))
        if fate == "leaves":
            happenings.append((draw(st.floats(0, 0.3)), "leave", {"worker": worker}))
        elif fate == "pauses":
            happenings.append((draw(st.floats(0, 0.2)), "pause", {"worker": worker}))
            happenings.append((draw(st.floats(0.2, 0.5)), "resume", {"worker": worker}))
    for _ in range(draw(st.integers(0, 2))):
        happenings.append((draw(st.floats(0, 0.3)), "join", {"resources": {"GPU": 1}}))
    return Story(
        options, draw(graphs("a")), draw(graphs("b")), draw(st.sampled_from([0.0, 0.05])), happenings
    )
