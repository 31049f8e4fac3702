"""What heartbeats tell of devices: on the scheduler without asking, in Prometheus, and to the policy."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client, Worker
from in_charge import cluster_of, scheduler_of
from waiting import until

from ferroflow_dask.device_reports import DEVICE_METRIC, DeviceTotals, report_of
from ferroflow_dask.devices.workers import DeviceSpec, device_usage, use_devices
from ferroflow_dask.graph import generate_graph
from ferroflow_dask.lowering import bind_graph, scatter
from ferroflow_dask.virtual import VirtualCluster, VirtualTask

MEMORY_NBYTES = 10**8
PREFIX = "dask_scheduler_ferroflow_device_"


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A client of two workers with devices and one without, all of one process."""
    gpu = {"resources": {"GPU": 1}}
    with cluster_of(gpu, gpu, {}) as client:
        use_devices(client, DeviceSpec("emulated", {"memory_nbytes": MEMORY_NBYTES}))
        graph = generate_graph("matmul-parallel", n_branches=4, ops_per_branch=3, m=16)
        client.compute(bind_graph(scatter(graph, client), {}, gpu_matmul_threshold=1)).result()
        beat(client)
        yield client


def beat(client: Client) -> None:
    async def heartbeat(dask_worker: Worker) -> None:
        await dask_worker.heartbeat()

    client.run(heartbeat)


def shown() -> dict[str, float]:
    prometheus_client = pytest.importorskip("prometheus_client")
    text = prometheus_client.generate_latest(prometheus_client.REGISTRY).decode()
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(PREFIX))
    return {name.removeprefix(PREFIX): float(value) for name, value in lines if "_created" not in name}


def reports(client: Client) -> list[dict[str, Any]]:
    found = map(report_of, scheduler_of(client).workers.values())
    return [report for report in found if report is not None]


@pytest.mark.cluster
def test_the_scheduler_knows_of_each_device_without_asking_and_shows_the_sums(client: Client) -> None:
    found = reports(client)
    assert [report["total_nbytes"] for report in found] == [MEMORY_NBYTES] * 2
    assert len({report["id"] for report in found}) == 2, "each has a device of its own"
    usage = device_usage(client)
    assert usage is not None
    assert usage.ops == sum(report["ops"] for report in found) > 0
    assert usage.to_device == sum(report["to_device"] for report in found) > 0
    metrics = shown()
    assert metrics["ops_total"] == usage.ops
    assert metrics["arrays_to_device_total"] == usage.to_device
    assert metrics["bytes_to_host_total"] == usage.nbytes_to_host
    assert metrics["memory_bytes"] == 2 * MEMORY_NBYTES
    assert metrics["memory_used_bytes"] == sum(report["used_nbytes"] for report in found)


@pytest.mark.cluster
def test_without_devices_nothing_is_told_or_shown() -> None:
    with cluster_of({}) as client:
        assert client.submit(sum, [1, 2]).result() == 3
        beat(client)
        (ws,) = scheduler_of(client).workers.values()
        assert DEVICE_METRIC not in ws.metrics
        assert shown() == {}


@pytest.mark.cluster
def test_who_has_detached_its_device_tells_of_it_no_longer() -> None:
    with cluster_of({"resources": {"GPU": 1}}) as client:
        use_devices(client, DeviceSpec("emulated"))
        client.submit(sum, [1]).result()
        beat(client)
        assert len(reports(client)) == 1
        client.unregister_worker_plugin("ferroflow-devices")
        beat(client)
        assert not reports(client)
        until(lambda: not shown())


def worker(**report: Any) -> Any:
    return SimpleNamespace(metrics={DEVICE_METRIC: report} if report else {})


def test_counts_never_fall_when_devices_go() -> None:
    totals = DeviceTotals()
    first = worker(id="a", ops=5, used_nbytes=70, total_nbytes=100, batches=2, batched_ops=6)
    counters, gauges = totals.of([first, worker(id="b", ops=2, used_nbytes=10, total_nbytes=100), worker()])
    assert counters["device_ops"][1] == 7
    values = {name: value for name, (_, value) in gauges.items()}
    assert values == {
        "device_memory_used_bytes": 80,
        "device_memory_bytes": 200,
        "device_mean_batch_ops": 3.0,
    }
    counters, gauges = totals.of([worker(id="c", ops=1, used_nbytes=1, total_nbytes=100)])  # after a restart
    assert counters["device_ops"][1] == 8
    assert gauges["device_memory_used_bytes"][1] == 1
    counters, gauges = totals.of([])
    assert counters["device_ops"][1] == 8
    assert gauges["device_memory_bytes"][1] == 0


def test_a_device_that_misses_a_report_is_counted_once() -> None:
    totals = DeviceTotals()
    sums = [totals.of([worker(id="a", ops=ops)] if ops else [])[0]["device_ops"][1] for ops in (100, 0, 101)]
    assert sums == [100, 100, 101]


def test_of_devices_that_come_and_go_for_ever_not_all_are_kept() -> None:
    totals = DeviceTotals()
    for n in range(1, 301):
        counters, _ = totals.of([worker(id=f"d{n}", ops=2, used_nbytes=1)])
        assert counters["device_ops"][1] == 2 * n
    assert len(totals._last) < 100


def test_what_some_other_version_does_not_tell_counts_as_nothing() -> None:
    counters, _ = DeviceTotals().of([worker(id="a", ops=3, colour="red")])
    assert (counters["device_ops"][1], counters["device_batches"][1]) == (3, 0)


@pytest.mark.parametrize(
    ("annotations", "may_run_on"),
    [({"ferroflow_cost": {"gpu": 0.002}}, {1}), ({}, {1, 2})],
    ids=["placed as the graph arrives", "placed one by one"],
)
def test_a_full_device_reaches_the_policy(annotations: dict[str, Any], may_run_on: set[int]) -> None:
    """Results of 50 MB, of which the first worker's device has no room for one and the second's for all."""
    resources = {"ferroflow-device": 1.0}
    cluster = VirtualCluster(3, policy="ferroflow", resources={0: resources, 1: resources})
    on_cpu = {"ferroflow_cost": {"cpu": 0.002}}
    # What they are like is learned on the third, which has no device.
    cluster.submit({("made", i): VirtualTask(0.002, nbytes=5 * 10**7) for i in range(3)}, annotations=on_cpu)
    cluster.run()
    full, roomy, _ = cluster.scheduler.workers.values()
    full.metrics[DEVICE_METRIC] = {"used_nbytes": 10**9, "total_nbytes": 10**9}
    roomy.metrics[DEVICE_METRIC] = {"used_nbytes": 0, "total_nbytes": 10**12}
    graph = {("made", i): VirtualTask(0.002, nbytes=5 * 10**7) for i in range(10, 12)}
    cluster.submit(graph, annotations=annotations)
    cluster.run()
    cluster.check()
    ran = {run.key: run.worker for run in cluster.record.executions}
    assert {ran[key] for key in graph} <= may_run_on
