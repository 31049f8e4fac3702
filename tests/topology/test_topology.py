"""Topologies: routes, sizes, YAML, errors of one line, and measures of real clusters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import yaml
from command_line import answer
from distributed import Client

import ferroflow_dask.topology
from ferroflow_dask import ClusterProfile, install, installed, uninstall
from ferroflow_dask.deploy import Calibration
from ferroflow_dask.deploy.measured import measured_topology
from ferroflow_dask.exceptions import TopologyError, UnknownNameError
from ferroflow_dask.replay import Job, JobGraph, simulate
from ferroflow_dask.topology import (
    Group,
    Host,
    Link,
    Topology,
    Worker,
    load_topology,
    preset_names,
    topology_from_dict,
    topology_from_yaml,
)
from ferroflow_dask.virtual import VirtualTask

FOLDER = Path(ferroflow_dask.topology.__file__).parent
FAST, SLOW = Link(1e-6, 1e10), Link(1e-2, 1e7)


def tree() -> Topology:
    """Return two sites: the first with two racks of two hosts, the second with a rack of one."""
    hosts = [Host(f"{rack}{i}", 4, (Worker(2),), rack, Link(1e-5, 1e9)) for rack in "ab" for i in range(2)]
    hosts.append(Host("c0", 4, (Worker(1),), "c", Link(1e-5, 1e9)))
    racks = [
        Group("a", "east", Link(1e-4, 2e9)),
        Group("b", "east", Link(1e-4, 2e9)),
        Group("c", "west", FAST),
    ]
    return Topology(hosts, racks, [Group("east", link=SLOW), Group("west", link=FAST)])


@pytest.mark.parametrize(
    ("source", "destination", "latency_s", "bandwidth", "n_links"),
    [
        pytest.param(0, 0, 1e-5, 1e10, 1, id="one host"),
        pytest.param(0, 1, 2e-5, 1e9, 2, id="one rack"),
        pytest.param(0, 2, 2.2e-4, 1e9, 4, id="two racks"),
        pytest.param(0, 4, 2e-5 + 1e-4 + 1e-6 + 1e-2 + 1e-6, 1e7, 6, id="two sites"),
    ],
)
def test_a_route_has_the_links_up_to_the_common_place(
    source: int, destination: int, latency_s: float, bandwidth: float, n_links: int
) -> None:
    topology = tree()
    there, back = topology.route(source, destination), topology.route(destination, source)
    assert (there.latency_s, there.bandwidth, len(there.links)) == (
        pytest.approx(latency_s),
        bandwidth,
        n_links,
    )
    assert min(topology.bandwidths[link] for link in there.links) == bandwidth
    if source != destination:
        assert set(there.links).isdisjoint(back.links)  # each direction has its own


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_valid_and_survives_the_way_to_yaml(name: str) -> None:
    schema = yaml.safe_load((FOLDER / "schema.yaml").read_text(encoding="utf-8"))
    document = yaml.safe_load((FOLDER / "presets" / f"{name}.yaml").read_text(encoding="utf-8"))
    jsonschema.validate(document, schema)
    topology = load_topology(name)
    jsonschema.validate(topology.as_dict(), schema)
    assert topology_from_dict(topology.as_dict()) == topology
    assert topology.name == name
    assert topology_from_yaml(yaml.safe_dump(topology.as_dict())) == topology


@pytest.mark.parametrize("n", [1, 3, 8, 21])
def test_more_workers_are_on_copies_of_the_hosts(n: int) -> None:
    narval = load_topology("narval")
    resized = narval.with_workers(n)
    assert len(resized.workers) == n
    assert resized.hosts[0].name == "nc-0"
    assert len(narval.with_workers(100).hosts) == 13
    assert len(narval.with_workers(100, per_host=2).hosts) == 50
    resized.route(0, len(resized.hosts) - 1)


def test_the_scheduler_keeps_its_host_without_workers() -> None:
    topology = replace(tree(), scheduler="c0", client="c0").with_workers(1)
    assert [(host.name, len(host.workers)) for host in topology.hosts] == [("a0", 1), ("c0", 0)]


def test_a_profile_and_a_topology_say_the_same() -> None:
    profile = ClusterProfile((2, 1), task_s=1e-3, round_trip_s=4e-3, submit_s=2e-2, bandwidth=3e8)
    back = Topology.of_profile(profile).profile()
    assert back.threads == profile.threads
    assert back.bandwidth == profile.bandwidth
    assert back.task_s == pytest.approx(profile.task_s)
    assert back.round_trip_s == pytest.approx(profile.round_trip_s)


HOST = "{name: a, workers: [{}], link: {latency_s: 0, bandwidth: 1}}"


BAD = {
    "no YAML": ("[", "must be a YAML document"),
    "a number": ("3", "the topology must be a mapping, got 3"),
    "no version": ("hosts: []", "must have the field 'version'"),
    "other version": ("version: 2\nhosts: []", "version of the topology must be 1, got 2"),
    "no workers": ("version: 1\nhosts: []", "must have a worker, got none"),
    "unknown field": ("version: 1\nhost: []", "did you mean 'hosts'"),
    "device": (f"version: 1\nhosts: [{HOST}]\nscheduler: b", "scheduler must be the name of a host, got 'b'"),
    "no bandwidth": (
        "version: 1\nhosts: [{name: a, workers: [{}], link: {latency_s: 0, bandwidth: 0}}]",
        "bandwidth of a link must be a finite number above 0, got 0",
    ),
    "speed": ("version: 1\nhosts: [{name: a, workers: [{speed: .inf}]}]", "must be a finite number, got inf"),
    "no route": (
        "version: 1\nhosts: [{name: a, count: 2, workers: [{}]}]",
        "a route between all hosts, got none from 'a-0' to 'a-1'; add `link`",
    ),
    "same names": (f"version: 1\nhosts: [{HOST}, {HOST}]", "used once, got 'a' twice"),
    "rack": ("version: 1\nhosts: [{name: a, workers: [{}], rack: r}]", "must be the name of a rack, got 'r'"),
    "a million hosts": (
        "version: 1\nhosts: [{name: a, count: 1000000, workers: [{}]}]",
        "count of entry 1 of hosts of the topology must be a whole number from 1 to 100,000",
    ),
    "many workers": (
        "version: 1\nhosts: [{name: a, count: 50000, workers: [{count: 50000}]}]",
        "must have at most 100,000 workers",
    ),
    "aliases": ("version: 1\nhosts: &a [*a, *a]", "aliases are not allowed in a topology; line 2"),
    "deep": ("version: 1\nhosts: " + "[" * 5000, "must be a YAML document"),
    "runtime": (f"version: 1\nhosts: [{HOST}]\nruntime: {{submit_s: -1}}", "submit_s of a runtime must be"),
    "noise": (f"version: 1\nhosts: [{HOST}]\nruntime: {{noise: 1}}", "noise must be less than 1, got 1"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_a_bad_topology_gets_one_line(text: str, message: str) -> None:
    with pytest.raises(TopologyError) as raised:
        topology_from_yaml(text)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_gets_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'narval'"):
        load_topology("narwal")
    with pytest.raises(TopologyError, match="must be a YAML file"):
        load_topology(tmp_path / "none.yaml")
    large = tmp_path / "large.yaml"
    large.write_text("#" * (2**20 + 1))
    with pytest.raises(TopologyError, match="at most 1,048,576 bytes"):
        load_topology(large)


SLEEPS = {("t", i): VirtualTask(0.05, core_share=0.0) for i in range(80)}


def calibration(client: Client) -> Calibration:
    """Return a calibration without measuring."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    profile = ClusterProfile(tuple(worker["nthreads"] for worker in workers.values()), bandwidth=2e8)
    hosts = {address: worker["host"] for address, worker in workers.items()}
    return Calibration(profile, hosts, {}, {}, {"on one host": 2e8})


@pytest.mark.cluster
def test_a_cluster_of_processes_becomes_a_topology(process_client: Client) -> None:
    install(process_client)
    try:
        topology = measured_topology(process_client, calibration(process_client))
        assert installed(process_client) is not None  # again
    finally:
        uninstall(process_client)
    (host,) = topology.hosts
    runtime = topology.runtime
    assert len(host.workers) == len(process_client.nthreads())
    assert 1 <= host.cores < 10_000
    assert host.inside.bandwidth == 2e8
    # The scheduler is in the client's process: it has the time of both.
    assert runtime.client_task_s == 0
    costs = (
        runtime.submit_s,
        runtime.graph_task_s,
        runtime.of_message("task-finished"),
        runtime.worker_task_s,
    )
    assert all(1e-7 < seconds < 0.5 for seconds in costs)
    assert 0 < runtime.noise <= 0.5
    assert topology_from_dict(topology.as_dict()) == topology
    for found in simulate(Job((JobGraph(SLEEPS, tuple(SLEEPS)),)), topology, ["dask", "ferroflow"]):
        assert found.bound_s < found.makespan_s < 20 * found.bound_s


def test_the_threads_of_one_process_share_its_time(thread_client: Client) -> None:
    topology = measured_topology(thread_client, calibration(thread_client))
    runtime = topology.runtime
    assert runtime.graph_task_s == runtime.worker_task_s == runtime.of_message("task-finished") > 0


def test_calibrate_writes_a_topology_that_simulate_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "here.yaml"
    local = ("--workers", "2", "--threads", "1", "--no-processes")
    answer("calibrate", *local, "--topology", file)
    assert len(load_topology(file).workers) == 2
    assert (tmp_path / "ferroflow-dask" / "topology.yaml").read_text() == file.read_text()
    for name in (str(file), "calibrated"):
        shown = answer("simulate", "--dag", "imbalanced", "--topology", name, "--workers", "2,4").output
        assert "imbalanced on calibrated" in shown
