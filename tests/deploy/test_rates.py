"""Rates are measured on several workers, of several hosts if there are some, and in no other's way."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from distributed import Client, Scheduler, SpecCluster, Worker

from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.deploy import Calibration, calibration, calibration_of, rates
from ferroflow_dask.deploy.rates import measure_rates, spread

#: The module; its name in the package is that of the command.
command = importlib.import_module("ferroflow_dask.cli.calibrate")


def on_hosts(*numbers: int) -> dict[str, str]:
    """Return workers such as `a0`, so many of the host `a`, of `b` and so on."""
    names = zip("abcdefgh", numbers, strict=False)
    return {f"{host}{i}": host for host, n in names for i in range(n)}


@pytest.mark.parametrize(
    ("hosts", "rounds"),
    [
        pytest.param(on_hosts(1), [["a0"]], id="one worker"),
        pytest.param(on_hosts(6), [["a0"], ["a1"], ["a2"], ["a3"]], id="one host"),
        pytest.param(on_hosts(3, 2), [["a0", "b0"], ["a1", "b1"]], id="two hosts"),
        pytest.param(on_hosts(1, 3), [["a0", "b0"], ["b1"], ["b2"]], id="two hosts, one of one worker"),
        pytest.param(on_hosts(2, 2, 2), [["a0", "b0", "c0"], ["a1"]], id="three hosts"),
        pytest.param(on_hosts(2, 2, 2, 1, 1), [["a0", "b0", "c0", "d0"]], id="more hosts than are measured"),
        pytest.param({}, [], id="none"),
    ],
)
def test_workers_of_as_many_hosts_as_there_are_come_in_rounds(
    hosts: dict[str, str], rounds: list[list[str]]
) -> None:
    assert spread(hosts) == rounds


@dataclass
class Noting:
    """A client that notes what is measured where, and what it waits for together."""

    submitted: list[tuple[str, int]] = field(default_factory=list)
    waited_for: list[list[tuple[str, int]]] = field(default_factory=list)

    def submit(
        self,
        function: Any,
        measure: rates.Measure,
        repetitions: int,
        *,
        workers: list[str],
        **options: Any,
    ) -> tuple[str, int]:
        (worker,) = workers
        self.submitted.append((worker, repetitions))
        return self.submitted[-1]

    def gather(self, futures: Sequence[tuple[str, int]]) -> list[tuple[str, Mapping[str, float] | None]]:
        assert list(futures) == self.submitted  # nothing else runs meanwhile
        self.waited_for.append(self.submitted)
        self.submitted = []
        return [
            (worker, None if worker == "b0" else {"rate": repetitions}) for worker, repetitions in futures
        ]


@pytest.mark.parametrize(
    ("hosts", "measured"),
    [
        (on_hosts(1), [[("a0", 4)]]),
        (on_hosts(1, 1, 1, 1, 1), [[("a0", 4), ("b0", 4), ("c0", 4), ("d0", 4)]]),
        (on_hosts(2, 2), [[("a0", 2), ("b0", 2)], [("a1", 2), ("b1", 2)]]),
        (on_hosts(4), [[("a0", 2)], [("a1", 2)], [("a2", 2)], [("a3", 2)]]),
    ],
    ids=["one worker", "each on its host", "two by two", "one after another"],
)
def test_those_of_one_host_are_measured_one_after_another_and_share_the_repetitions(
    hosts: dict[str, str], measured: list[list[tuple[str, int]]]
) -> None:
    client: Any = Noting()
    found = measure_rates(client, lambda _: None, hosts)
    assert client.waited_for == measured
    has_rates = {worker: {"rate": n} for several in measured for worker, n in several if worker != "b0"}
    assert found == has_rates  # the other lacks what is measured


def test_what_takes_long_to_open_is_opened_at_once() -> None:
    client: Any = Noting()
    measure_rates(client, lambda _: None, on_hosts(2), opens=True)
    assert client.waited_for == [[("a0", 1), ("a1", 1)], [("a0", 2)], [("a1", 2)]]


@pytest.fixture
def two_host_client() -> Iterator[Client]:
    """Two workers at one address of this machine and one at another."""
    workers = {
        i: {"cls": Worker, "options": {"nthreads": 1, "host": f"127.0.0.{host}", "memory_limit": 0}}
        for i, host in enumerate((1, 1, 2))
    }
    scheduler = {"cls": Scheduler, "options": {"dashboard": False, "dashboard_address": ":0", "port": 0}}
    with SpecCluster(workers, scheduler) as cluster, Client(cluster) as client:
        yield client


@pytest.mark.cluster
def test_a_profile_is_made_of_what_was_measured_on_all(two_host_client: Client) -> None:
    found = calibration_of(two_host_client)
    assert sorted(found.hosts.values()) == ["127.0.0.1", "127.0.0.1", "127.0.0.2"]
    assert found.rates.keys() == found.hosts.keys()
    assert not found.gpu_rates
    for name in ("flop_rate", "memory_bandwidth"):
        measured = [of_one[name] for of_one in found.rates.values()]
        assert getattr(found.profile, name) == statistics.median(measured)
    assert list(found.bandwidths) == ["on one host", "between hosts"]
    assert found.profile.bandwidth == min(found.bandwidths.values())


@pytest.mark.cluster
def test_chains_run_on_each_of_the_workers(two_host_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    began_on: list[str] = []

    def noted(client: Client, dsk: Mapping[Any, Any]) -> float:
        ((_, root), *_) = dsk.values()
        ((worker,),) = client.who_has([root]).values()
        began_on.append(worker)
        return float(len(began_on))

    monkeypatch.setattr(calibration, "_graph_s", noted)
    hosts = rates.hosts_of(two_host_client)
    assert calibration._chain_s(two_host_client, hosts) == 2.0  # the median of 1, 2 and 3
    assert sorted(began_on) == sorted(hosts)


def told(rates_of: Mapping[str, float], hosts: Mapping[str, str], **changes: Any) -> dict[str, str]:
    """Return the table of a calibration by what its lines are of."""
    measured = {
        worker: {"flop_rate": rate * 1e9, "memory_bandwidth": 1e10} for worker, rate in rates_of.items()
    }
    parts = {"rates": measured, "gpu_rates": {}, "bandwidths": {}, **changes}
    return dict(command._told(Calibration(ClusterProfile((1,) * len(hosts)), hosts, **parts)))


def test_the_table_says_on_how_many_workers_and_how_far_they_differ() -> None:
    hosts = on_hosts(2, 3)
    lines = told({"a0": 10.0, "a1": 20.0, "b0": 30.0}, hosts)
    assert lines["rates measured on"] == "3 workers on 2 hosts"
    assert lines["matrix product"] == "20.0 GFLOP/s a thread (10.0–30.0)"
    assert lines["memory"] == "10.0 GB/s a thread"  # all the same
    assert told({"a0": 10.0}, hosts)["rates measured on"] == "1 worker on 1 host"
    assert told({"a0": 10.0, "b0": 11.9}, hosts)["matrix product"] == "10.9 GFLOP/s a thread"
    assert told({"a0": 10.0, "b0": 12.1}, hosts)["matrix product"] == "11.1 GFLOP/s a thread (10.0–12.1)"


def test_the_table_says_what_gpus_do() -> None:
    gpus = {
        worker: {"gpu_flop_rate": rate * 1e12, "gpu_memory_bandwidth": 2e12}
        for worker, rate in {"a0": 1.0, "b0": 2.0, "c0": 3.0}.items()
    }
    lines = told({"d0": 10.0}, on_hosts(1, 1, 1, 1), gpu_rates=gpus)
    assert lines["rates measured on"] == "1 worker on 1 host"
    assert lines["rates of GPUs measured on"] == "3 workers on 3 hosts"
    assert lines["matrix product of GPUs"] == "2,000.0 GFLOP/s a GPU (1,000.0–3,000.0)"
    assert lines["memory of GPUs"] == "2,000.0 GB/s a GPU"
    assert "rates of GPUs measured on" not in told({"d0": 10.0}, on_hosts(1))


def test_the_table_says_what_gets_from_worker_to_worker() -> None:
    both = {"on one host": 2e9, "between hosts": 1.1e8}
    for bandwidths, line in (
        (both, "2,000 MB/s on one host, 110 MB/s between hosts"),
        ({"between hosts": 1.1e8}, "110 MB/s between hosts"),
        ({}, "there is one worker"),
    ):
        assert told({"a0": 1.0}, on_hosts(1), bandwidths=bandwidths)["worker to worker"] == line
