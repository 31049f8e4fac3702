"""Clusters that are busy, that grow, and that have no workers yet: what is cut for them, and what is kept."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, Event
from waiting import soon, wait_for

from ferroflow_dask import Model, install
from ferroflow_dask.bundling.averages import Averages
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.cost import AnalyticCost, estimate
from ferroflow_dask.deploy import load_profile, profile_of, save_profile
from ferroflow_dask.exceptions import ClusterError, KernelError, UsageError
from ferroflow_dask.graph import Builder, Graph, generate_graph, graph_from_onnx
from ferroflow_dask.lowering import scatter
from ferroflow_dask.lowering.bundles import bundle
from ferroflow_dask.scheduler.cost_model import CostModel


@pytest.fixture(autouse=True)
def _nothing_is_kept_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def short(i: int) -> int:
    time.sleep(1e-3)  # together worth more than one bundle, on a machine at rest and under load
    return i + 1


def sum_of_many() -> Any:
    return dask.delayed(sum)([dask.delayed(short)(i) for i in range(60)])


def learn(client: Client) -> None:
    for _ in range(3):
        client.compute(sum_of_many()).result()


@pytest.fixture
def _at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learn of each prefix as ever, but the duration that it has on a machine at rest."""
    of_prefix = CostModel.of_prefix

    def learned(self: CostModel, name: str) -> Averages | None:
        found = of_prefix(self, name)
        return None if found is None else Averages(1e-3, found.nbytes, found.most_nbytes)

    monkeypatch.setattr(CostModel, "of_prefix", learned)


def n_tasks(client: Client) -> int:
    """Return how many tasks the scheduler has."""

    def count(dask_scheduler: Any) -> int:
        return len(dask_scheduler.tasks)

    return int(client.run_on_scheduler(count))


def n_bundles(client: Client) -> int:
    """Return how many tasks a sum of many is on the cluster."""
    future = client.compute(sum_of_many())
    assert future.result() == sum(range(61))
    return n_tasks(client)


@pytest.mark.cluster
def test_a_busy_cluster_is_not_measured_and_nothing_kept_of_it(ferroflow_client: Client) -> None:
    client, event = ferroflow_client, Event()
    waiting = client.map(wait_for, range(10), event=event)
    assert soon(lambda: any(client.processing().values()), 30)
    try:
        profile, is_kept = profile_of(client)
        assert (profile, is_kept) == (ClusterProfile((1, 1, 1)), None)
        assert load_profile(client) is None
    finally:
        event.set()
    client.gather(waiting)
    del waiting


@pytest.mark.cluster
def test_what_was_measured_beside_other_work_is_not_believed(thread_client: Client) -> None:
    save_profile(thread_client, ClusterProfile((1, 1, 1), task_s=1e-5))
    assert load_profile(thread_client) is None


@pytest.mark.cluster
@pytest.mark.usefixtures("_at_rest")
def test_graphs_are_cut_for_the_workers_that_there_are_then(ferroflow_client: Client) -> None:
    client = ferroflow_client
    learn(client)
    before = n_bundles(client)
    client.cluster.scale(1)
    assert soon(lambda: len(client.nthreads()) == 1, 30)
    assert n_bundles(client) < before < 60


@pytest.mark.cluster
@pytest.mark.usefixtures("_at_rest")
def test_without_workers_graphs_wait_in_bundles_and_placing_is_told_so(ferroflow_client: Client) -> None:
    client = ferroflow_client
    learn(client)
    client.cluster.scale(0)
    assert soon(lambda: not client.nthreads(), 30)
    future = client.compute(sum_of_many())
    with pytest.raises(ClusterError, match="there are no workers for the constants of graph 'wide'"):
        scatter(generate_graph("wide", width=2, depth=2), client)
    client.cluster.scale(1)
    assert future.result() == sum(range(61))
    assert n_tasks(client) < 60
    client.cluster.scale(3)  # as the fixture started it


def long_siblings(n: int) -> Graph:
    builder = Builder("siblings")
    root = builder.constant(np.float32([1]), name="root")
    outputs = [builder.op("Slow", root, domain="ferroflow", duration=0.001) for _ in range(n)]
    builder.output(y=builder.op("Sum", *outputs))
    return builder.to_graph()


@pytest.mark.parametrize("n_threads", [1, 2, 4, 8])
def test_no_bundle_of_short_ops_is_longer_than_a_second(n_threads: int) -> None:
    graph = long_siblings(4500)
    seconds = {op.id: 0.0 for op in graph.live_ops} | estimate(graph, AnalyticCost())
    cut = bundle(graph, seconds, ClusterProfile((1,) * n_threads, submit_s=1e-3)).bundles
    lasts_s = sorted(sum(seconds[op.id] for op in ops) for ops in cut)
    assert lasts_s[-1] <= 1.001
    # All threads have as many of them.
    assert sum(last_s > 0.1 for last_s in lasts_s) % n_threads == 0
    guessed = bundle(
        graph, {op.id: 0.001 for op in graph.live_ops[:-1]}, ClusterProfile((1,) * n_threads)
    ).bundles
    assert max(map(len, guessed)) <= 1001


@pytest.mark.cluster
def test_a_graph_that_a_closed_client_has_placed_is_told() -> None:
    with Client(n_workers=1, processes=False, dashboard_address=":0") as client:
        placed = scatter(generate_graph("matmul-chain", n_ops=2, m=4), client)
        assert Model(placed).bind().compute()
    with pytest.raises(
        UsageError, match=r"constants of graph .* scattered by a client that is closed; call scatter"
    ):
        Model(placed).bind()


def test_an_output_that_is_a_sequence_has_no_batches() -> None:
    builder = Builder("sequence")
    x = builder.input("x", "float32", ("batch", 2))
    builder.output(parts=builder.op("SplitToSequence", x, axis=0))
    with pytest.raises((KernelError, UsageError), match=r"output 'parts' .* is a sequence of tensors"):
        Model(builder.to_graph()).map_batches(np.zeros((4, 2), np.float32))


@pytest.mark.parametrize("model", [None, 3, [1]])
def test_what_is_no_model_is_told(model: Any) -> None:
    with pytest.raises(UsageError, match=r"load_onnx takes a file's path or URL, .* and not"):
        graph_from_onnx(model)


@pytest.mark.cluster
def test_a_setting_that_makes_no_sense_is_told_before_it_is_sent(thread_client: Client) -> None:
    with (
        dask.config.set({"ferroflow.latency": "soon"}),
        pytest.raises(UsageError, match=r"ferroflow.latency is 'soon', which is no time"),
    ):
        install(thread_client)
