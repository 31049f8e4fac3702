"""A cluster is measured once, and what was measured is kept for clusters like it."""

from __future__ import annotations

import errno
import importlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from distributed import Client, Future, LocalCluster, Scheduler, SpecCluster, Worker, wait
from waiting import until

from ferroflow_dask.cli import main
from ferroflow_dask.clients import workers_of
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.deploy import (
    calibrate,
    calibration,
    load_durations,
    load_profile,
    profile_of,
    profiles_file,
    rates,
    save_durations,
    save_profile,
)
from ferroflow_dask.devices import DeviceRunner
from ferroflow_dask.devices.emulated import EmulatedDevice
from ferroflow_dask.exceptions import ClusterError
from ferroflow_dask.scheduler import install, uninstall

#: The package has a function of the same name.
install_module = importlib.import_module("ferroflow_dask.scheduler.installation")

pytestmark = pytest.mark.cluster
LOCAL = ("--workers", "2", "--no-processes")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_what_is_measured_is_of_the_right_order(process_client: Client) -> None:
    profile = calibrate(process_client)
    assert profile.threads == (1, 1)
    # No more than that the units are right: the machine may be busy.
    assert 1e-5 <= profile.task_s < 10
    assert 1e-5 <= profile.round_trip_s < 10
    assert profile.submit_s < 10
    assert 1e6 < profile.bandwidth < 1e12
    assert 1e8 < profile.flop_rate < 1e13
    assert 1e8 < profile.memory_bandwidth < 1e12
    limits = [worker["memory_limit"] for worker in workers_of(process_client).values()]
    assert profile.memory_nbytes == min(limits)


def test_what_is_copied_on_a_device_is_larger_than_its_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    device = EmulatedDevice(memory_nbytes=2**30, sleep=lambda _seconds: None)
    monkeypatch.setattr(rates, "device_here", lambda: DeviceRunner(device))
    assert rates.device_rates(2)
    assert 2 * 2**26 < device.peak_nbytes < 2**28  # a sixteenth of its memory, and the copy


@pytest.mark.parametrize("limits", [("1TiB", 0), (0, 0)], ids=["one", "none"])
def test_workers_without_a_limit_of_memory_do_not_lift_that_of_others(limits: tuple[str | int, ...]) -> None:
    # The worker is in this process, which it would pause for if it had less.
    options = [{"nthreads": 1, "memory_limit": limit} for limit in limits]
    workers = {i: {"cls": Worker, "options": of_one} for i, of_one in enumerate(options)}
    scheduler = {"cls": Scheduler, "options": {"dashboard": False, "dashboard_address": ":0", "port": 0}}
    with SpecCluster(workers, scheduler) as cluster, Client(cluster) as client:
        found = [worker["memory_limit"] for worker in workers_of(client).values()]
        assert sorted(map(bool, found)) == sorted(map(bool, limits))
        assert calibrate(client).memory_nbytes == max(found)


def test_workers_that_leave_meanwhile_are_not_waited_for(
    thread_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph_s, cluster = calibration._graph_s, thread_client.cluster
    before = set(thread_client.nthreads())

    def all_leave(client: Client, dsk: dict[Any, Any]) -> float:
        if before & set(client.nthreads()):
            cluster.scale(0)
            until(lambda: not client.nthreads())
            cluster.scale(2)
            client.wait_for_workers(2, timeout=60)
        return graph_s(client, dsk)

    monkeypatch.setattr(calibration, "_graph_s", all_leave)
    profile = calibrate(thread_client)
    assert len(profile.threads) == 3
    assert profile.flop_rate > 0


def test_who_is_to_fetch_may_leave(thread_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def others_leave(data: Future) -> None:
        wait(data)
        ((source,),) = thread_client.who_has([data]).values()
        others = set(thread_client.nthreads()) - {source}
        if others:
            thread_client.retire_workers(list(others))

    monkeypatch.setattr(rates, "wait", others_leave)
    assert rates.bandwidths(thread_client, 0.0) == {"on one host": 1e12}  # nobody is left to send to


def test_a_profile_is_kept_for_clusters_like_it(thread_client: Client) -> None:
    assert load_profile(thread_client) is None
    profile, is_kept = profile_of(thread_client)
    assert is_kept
    assert profile_of(thread_client) == (profile, None)
    install(thread_client)  # other overheads
    assert load_profile(thread_client) is None
    uninstall(thread_client)
    assert load_profile(thread_client) == profile


def cluster_of(*addresses: str, nthreads: int = 1, memory_limit: int = 2**30) -> dict[str, Any]:
    hosts = {address: address.partition("://")[2].partition(":")[0] for address in addresses}
    return {
        address: {"host": host, "nthreads": nthreads, "memory_limit": memory_limit}
        for address, host in hosts.items()
    }


NODES = ("tcp://10.0.0.1:4", "tcp://10.0.0.2:5")
ON_TWO_NODES = cluster_of(*NODES)
HERE = cluster_of("tcp://127.0.0.1:4", "tcp://127.0.0.1:5")


#: Two clusters, or one seen from two machines, and whether one is like the other.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, bool]] = {
    "other nodes": (ON_TWO_NODES, cluster_of("tcp://10.0.0.7:8", "tcp://10.0.0.7:9"), True),
    "fewer workers": (ON_TWO_NODES, cluster_of("tcp://10.0.0.1:4"), False),
    "encrypted": (ON_TWO_NODES, cluster_of("tls://10.0.0.1:4", "tls://10.0.0.2:5"), False),
    "more threads": (ON_TWO_NODES, cluster_of(*NODES, nthreads=2), False),
    "no limit of memory": (ON_TWO_NODES, cluster_of(*NODES, memory_limit=0), False),
    "nodes and local": (ON_TWO_NODES, HERE, False),
    "nodes": (ON_TWO_NODES, None, True),
    "local": (HERE, None, False),
    "in one process": (cluster_of("inproc://10.0.0.1/7/1"), None, False),
    "local by name": (cluster_of("tcp://localhost:4"), None, False),
    "nodes by name": (cluster_of("tcp://node-7:4"), None, True),
}


@pytest.mark.parametrize(("one", "other", "is_like_it"), PAIRS.values(), ids=PAIRS)
def test_a_cluster_is_like_another(
    monkeypatch: pytest.MonkeyPatch, one: dict[str, Any], other: dict[str, Any] | None, is_like_it: bool
) -> None:
    node = "login" if other else "another"
    assert (identity(monkeypatch, one) == identity(monkeypatch, other or one, node)) == is_like_it


def test_another_distributed_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(monkeypatch, ON_TWO_NODES)
    monkeypatch.setattr(calibration, "version", lambda _: "1.0")
    assert identity(monkeypatch, ON_TWO_NODES) != before


def identity(monkeypatch: pytest.MonkeyPatch, workers: dict[str, Any], node: str = "login") -> str:
    with monkeypatch.context() as patch:
        patch.setattr("platform.node", lambda: node)
        patch.setattr(calibration, "workers_of", lambda _: workers)
        patch.setattr(calibration, "gpu_workers", lambda _: [])
        patch.setattr(calibration, "installed", lambda _: None)
        return calibration._identity(None)


def test_the_last_clusters_are_kept() -> None:
    names = [f"cluster {i}" for i in range(40)]
    for name in [*names, names[10]]:
        calibration._keep(profiles_file(), name, {"of": name})
    assert list(json.loads(profiles_file().read_text())) == [*names[8:10], *names[11:], names[10]]


def test_of_two_that_keep_something_at_once_neither_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    read, both_have_read = calibration._read, threading.Barrier(2)

    def slow_read(path: Path) -> dict[str, Any]:
        kept = read(path)
        with suppress(threading.BrokenBarrierError):  # they never do
            both_have_read.wait(0.3)
        return kept

    monkeypatch.setattr(calibration, "_read", slow_read)
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda name: calibration._keep(profiles_file(), name, {}), ["one", "other"]))
    assert sorted(json.loads(profiles_file().read_text())) == ["one", "other"]


def test_where_files_cannot_be_locked_something_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert calibration._keep(profiles_file(), "one", {})


@pytest.mark.parametrize("content", ["no JSON", "[]", '{"other": 1}'])
def test_a_broken_file_holds_no_profile_and_no_durations(thread_client: Client, content: str) -> None:
    profiles_file().parent.mkdir(parents=True)
    profiles_file().write_text(content)
    assert load_profile(thread_client) is None
    save_profile(thread_client, ClusterProfile((1, 2)))
    assert load_profile(thread_client) == ClusterProfile((1, 2))
    durations_file = profiles_file().with_name("durations.json")
    durations_file.write_text(content)
    assert load_durations(thread_client) == {}
    save_durations(thread_client, {"a": 1.0})
    assert load_durations(thread_client) == {"a": 1.0}


@pytest.mark.parametrize("command", [("calibrate",), ("run", "--dag", "wide")])
def test_what_cannot_be_kept_is_said(
    command: tuple[str, ...], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))

    def says_so() -> bool:
        shown = CliRunner().invoke(main, [*command, *LOCAL])
        assert shown.exit_code == 0, shown.output
        assert command[0] == "run" or "one more task" in shown.stdout
        return "could not be kept in" in shown.stderr

    # On a busy machine a measurement may be implausible; then nothing is to be kept.
    assert any(says_so() for _ in range(3))


def test_a_cluster_without_workers_is_refused() -> None:
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        pytest.raises(ClusterError, match="no workers to measure"),
    ):
        calibrate(client)


def test_workers_that_lack_the_package_are_told(
    ferroflow_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_profile(ferroflow_client, ClusterProfile((1,) * 3))  # that it is known makes no difference

    def one_lacks_it(found: dict[str, Any]) -> dict[str, Any]:
        return {**found, "tcp://there:1": PackageNotFoundError()}

    monkeypatch.setattr(install_module, "answers", one_lacks_it)
    with pytest.raises(ClusterError, match="the worker at tcp://there:1 has no package ferroflow-dask; run"):
        calibrate(ferroflow_client)


def test_the_command_keeps_what_run_then_uses() -> None:
    shown = CliRunner().invoke(main, ["calibrate", *LOCAL, "--json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    measured = found.pop("measured")
    profile = ClusterProfile.from_dict(found)
    assert profile.threads == (1, 1)
    assert {**found, **rates.medians(measured["rates"])} == found
    assert min(measured["bandwidths"].values()) == profile.bandwidth
    ran = CliRunner().invoke(main, ["run", "--dag", "wide", *LOCAL])
    assert ran.exit_code == 0, ran.output
    assert "measured the costs of this cluster" not in ran.output


def test_run_measures_a_cluster_that_it_does_not_know_and_says_so() -> None:
    first, *others = (
        CliRunner().invoke(main, ["run", "--dag", dag, *LOCAL]) for dag in ("wide", "wide", "matmul-chain")
    )
    kept = f"kept in {profiles_file()}; delete this file to measure again\n"
    assert first.stderr == f"measured the costs of this cluster; {kept}"
    assert [other.stderr for other in others] == ["", ""]  # once for all graphs


def test_run_learns_how_long_ops_take(cache: Path) -> None:
    matmul = ("run", "--dag", "matmul-chain", "--n-ops", "3", "--granularity", "ops", *LOCAL)
    found: list[float] = []
    for _ in range(2):
        assert CliRunner().invoke(main, matmul).exit_code == 0
        (kept,) = json.loads((cache / "ferroflow-dask" / "durations.json").read_text()).values()
        found += kept.values()
    first, second = found
    assert 0 < first < 10
    assert second != first
