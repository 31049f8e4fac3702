"""The command line with `--connect`: running clusters, such that lack something, and what is none."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import dask
import onnx
import pytest
from command_line import FAILURE, SMALL, assert_one_line, command, ferroflow
from distributed import Client
from models import mlp

from ferroflow_dask import install
from ferroflow_dask.scheduler import installed

pytestmark = pytest.mark.cluster


class Cluster:
    """A scheduler and workers, each a process of its own, as one starts them from a shell."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "scheduler.json"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, module: str, *arguments: str, bare_site: Path | None = None) -> None:
        """Start a scheduler or a worker, in an environment of its own if `bare_site` is given."""
        python = [sys.executable]
        environment = dict(os.environ)
        if bare_site is not None:  # -S leaves the real site-packages out
            python.append("-S")
            environment = {
                "PYTHONPATH": str(bare_site),
                "HOME": str(self._folder),
                "PATH": os.environ["PATH"],
            }
        self._processes.append(
            subprocess.Popen(
                [*python, "-m", f"distributed.cli.{module}", *arguments, "--scheduler-file", str(self._file)],
                env=environment,
                cwd=self._folder,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )

    def address(self) -> str:
        """Return the scheduler's address once all workers are there."""
        with Client(scheduler_file=str(self._file), set_as_default=False, timeout=120) as client:
            if len(self._processes) > 1:
                client.wait_for_workers(len(self._processes) - 1, timeout=120)
            return str(client.scheduler.address)

    def close(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            process.wait(timeout=30)


Start = Callable[..., Cluster]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start a scheduler and workers, each in the environment of its site-packages."""
    with ExitStack() as stack:

        def start(scheduler: Path | None, *workers: Path | None) -> Cluster:
            cluster = Cluster(tmp_path_factory.mktemp("cluster"))
            stack.callback(cluster.close)
            host = ("--host", "127.0.0.1", "--port", "0", "--no-dashboard")
            cluster.start("dask_scheduler", *host, bare_site=scheduler)
            for worker in workers:
                cluster.start("dask_worker", "--no-nanny", "--nthreads", "1", bare_site=worker)
            return cluster

        yield start


@pytest.fixture(scope="module")
def cluster(started: Start) -> Cluster:
    """A scheduler and a worker."""
    return started(None, None)


@pytest.fixture(scope="module")
def no_workers(started: Start) -> Cluster:
    """A scheduler without workers."""
    return started(None)


@pytest.fixture(scope="module")
def no_package(started: Start, bare_site: Path) -> Cluster:
    """A scheduler and a worker, both without this package."""
    return started(bare_site, bare_site)


@pytest.fixture(scope="module")
def mixed(started: Start, bare_site: Path) -> Cluster:
    """A scheduler and two workers, one of them without this package."""
    return started(None, None, bare_site)


@pytest.fixture(scope="module")
def bare_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages in which all is installed but this package: links to everything else."""
    site = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    bare = tmp_path_factory.mktemp("site")
    for entry in site.iterdir():
        if not entry.name.startswith(("ferroflow", "_ferroflow", "_editable", "__editable__")):
            (bare / entry.name).symlink_to(entry)
    return bare


def test_a_running_cluster_is_used_and_left_as_it_was(cluster: Cluster) -> None:
    address = cluster.address()
    for policy in ("ferroflow", "dask"):
        done = command("run", *SMALL, "--connect", address, "--policy", policy, "--json")
        record = json.loads(done.stdout)
        assert (record["workers"], record["processes"], record["executed_ops"]) == (1, None, 8)
        is_measured = "measured the costs of this cluster" in done.stderr
        assert done.stderr == "" or (policy == "ferroflow" and is_measured)
    with Client(address, set_as_default=False) as client:
        assert installed(client) is None
        assert client.submit(sum, [1, 2]).result() == 3


def test_random_batches_are_as_many_as_the_running_cluster_has_work_for(
    cluster: Cluster, tmp_path: Path
) -> None:
    onnx.save(mlp(), tmp_path / "mlp.onnx")
    batches = ("--model", str(tmp_path / "mlp.onnx"), "--batch", "3", "--json")
    facts = json.loads(command("run", *batches, "--connect", cluster.address()).stdout)
    assert (facts["threads"], facts["batches"], facts["rows"]) == (1, 4, 12)


def test_a_cluster_on_which_ferroflow_is_installed_stays_so(cluster: Cluster) -> None:
    address = cluster.address()
    with Client(address, set_as_default=False) as client:
        install(client, "ring", threshold=3)
        for policy in ("dask", "static"):
            assert command("run", *SMALL, "--connect", address, "--policy", policy).returncode == 0
        plugin = installed(client)
        assert plugin is not None
        assert (plugin.policy, plugin.options) == ("ring", {"threshold": 3})


@pytest.mark.parametrize("policy", ["ferroflow", "dask"])
def test_a_cluster_without_the_package_is_told_in_one_line(no_package: Cluster, policy: str) -> None:
    address = no_package.address()
    done = command("run", *SMALL, "--connect", address, "--policy", policy)
    message = "the scheduler at .* has no package ferroflow-dask; run there, in a clone: pip install ."
    assert_one_line(done.returncode, done.stderr, FAILURE, message)
    assert no_package.address() == address  # it lives on


@pytest.mark.parametrize("asked", [("run", *SMALL), ("calibrate",)], ids=["run", "calibrate"])
def test_workers_without_the_package_are_told_in_one_line(asked: tuple[str, ...], mixed: Cluster) -> None:
    address = mixed.address()
    done = command(*asked, "--connect", address)
    assert_one_line(
        done.returncode, done.stderr, FAILURE, "the worker at tcp://.* has no package ferroflow-dask"
    )
    assert mixed.address() == address


def test_a_cluster_without_workers_is_told_in_one_line(no_workers: Cluster) -> None:
    done = command("run", *SMALL, "--connect", no_workers.address())
    assert_one_line(done.returncode, done.stderr, FAILURE, "has no workers; start some")


@pytest.mark.parametrize("is_setting", [False, True], ids=["--connect", "Dask's setting"])
def test_one_may_look_at_a_cluster_without_workers(
    is_setting: bool, no_workers: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = no_workers.address()
    if is_setting:
        monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", address)
    to = () if is_setting else ("--connect", address)
    looked = command("top", *to, "--for", "0.1")
    assert (looked.returncode, looked.stderr) == (0, "")
    asked = command("explain", "nothing", *to)
    assert_one_line(asked.returncode, asked.stderr, FAILURE, "explain needs the plugin")


def test_a_scheduler_that_is_configured_and_does_not_answer_is_told_as_such() -> None:
    with dask.config.set({"scheduler-address": "tcp://127.0.0.1:1"}):
        told = ferroflow("top", "--connect-timeout", "1")
    message = (
        "at 'tcp://127.0.0.1:1', as Dask's setting scheduler-address says, within 1 s"
        ".*; --connect ADDRESS names another"
    )
    assert_one_line(told.exit_code, told.stderr, FAILURE, message)
    named = ferroflow("top", "--connect", "tcp://127.0.0.1:1", "--connect-timeout", "1")
    assert_one_line(
        named.exit_code, named.stderr, FAILURE, "no scheduler answers at 'tcp://127.0.0.1:1' within"
    )


def test_a_workers_address_is_not_taken_for_a_schedulers(cluster: Cluster) -> None:
    with Client(cluster.address(), set_as_default=False) as client:
        (worker,) = client.nthreads()
    done = command("run", *SMALL, "--connect", worker)
    message = "there is a Worker; give the address of its scheduler"
    assert_one_line(done.returncode, done.stderr, FAILURE, message)
    with dask.config.set({"scheduler-address": worker}):
        told = ferroflow("top")
    message = (
        "as Dask's setting scheduler-address says, there is a Worker; .*; --connect ADDRESS names another"
    )
    assert_one_line(told.exit_code, told.stderr, FAILURE, message)


def test_run_starts_a_cluster_of_its_own_whatever_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tcp://127.0.0.1:1")
    done = command("run", *SMALL, "--workers", "1", "--granularity", "ops", "--json")
    record = json.loads(done.stdout)
    assert (record["workers"], record["processes"], record["executed_ops"]) == (1, True, 8)


# What is no scheduler


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but nobody listens
        yield unused.getsockname()[1]


@pytest.fixture
def silent_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:  # connects, and then says nothing
        yield listening.getsockname()[1]


@pytest.fixture
def web_port() -> Iterator[int]:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("port", ["closed_port", "silent_port", "web_port"])
def test_what_is_no_scheduler_is_told_in_one_line(port: str, request: pytest.FixtureRequest) -> None:
    address = f"tcp://127.0.0.1:{request.getfixturevalue(port)}"
    done = command("run", *SMALL, "--connect", address, "--connect-timeout", "1")
    assert_one_line(done.returncode, done.stderr, FAILURE, f"no scheduler answers at '{address}' within 1 s")
