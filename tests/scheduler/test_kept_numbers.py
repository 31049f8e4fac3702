"""Learned numbers outlive a scheduler in a file: when it is read and written, and where it may not be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import pytest
from distributed import Client, LocalCluster
from in_charge import assert_stock, stealing_of
from learned_numbers import keep, taught
from one_loop import Cluster, on_cluster
from waiting import comes, until

from ferroflow_dask import install, installed, uninstall
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.scheduler.features import kept_numbers
from ferroflow_dask.scheduler.graphs.samples import Samples
from ferroflow_dask.scheduler.learned_file import read_numbers


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "learned.json"


def with_file(path: Path) -> dict[str, Any]:
    return {"ferroflow.learned": str(path)}


async def run_tasks(cluster: Cluster) -> None:
    assert await cluster.client.gather(cluster.map(4)) == [*range(4)]


def clock_of(cluster: Cluster) -> Any:
    (feature,) = (one for one in cluster.stealing.features if one.name == "kept_numbers")
    return feature._clock


def test_numbers_are_written_when_the_scheduler_closes(path: Path) -> None:
    on_cluster(run_tasks, config=with_file(path))
    assert "pause" in read_numbers(path)["prefixes"]

    async def test(cluster: Cluster) -> None:
        assert "pause" in cluster.stealing.costs.means()

    on_cluster(test, config=with_file(path))


def test_numbers_are_written_at_uninstall_and_not_afterwards(path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        clock = clock_of(cluster)
        assert clock.is_running()
        await run_tasks(cluster)
        await uninstall(cluster.client)
        assert not clock.is_running()
        assert "pause" in read_numbers(path)["prefixes"]
        path.unlink()

    on_cluster(test, config=with_file(path))
    assert not path.exists()


def test_numbers_are_written_by_the_clock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_numbers, "_EVERY_S", 0.02)

    async def test(cluster: Cluster) -> None:
        await run_tasks(cluster)
        await comes(lambda: path.exists() and "pause" in read_numbers(path)["prefixes"])

    on_cluster(test, config=with_file(path))


def test_a_plugin_that_has_failed_writes_nothing(path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        await run_tasks(cluster)
        clock = clock_of(cluster)
        cluster.stealing.guard.fail(ZeroDivisionError("planned"))
        await comes(lambda: not clock.is_running())
        await run_tasks(cluster)

    on_cluster(test, config=with_file(path))
    assert not path.exists()


def test_the_next_installation_keeps_its_numbers_and_the_file(path: Path) -> None:
    keep(path, taught("f", "pause", seconds=50.0))

    async def test(cluster: Cluster) -> None:
        assert cluster.stealing.costs.means()["pause"][0] == 50.0
        await run_tasks(cluster)
        known = cluster.stealing.costs.means()
        assert known["pause"][0] < 50.0
        await install(cluster.client)
        assert cluster.stealing.costs.means() == known
        assert read_numbers(path)["prefixes"].keys() == {"f", "pause"}

    on_cluster(test, config=with_file(path))


def test_without_a_file_the_feature_is_off(thread_client: Client) -> None:
    install(thread_client)
    assert installed(thread_client).features["kept_numbers"] == "the setting ferroflow.learned names no file"
    assert all(one.name != "kept_numbers" for one in stealing_of(thread_client).features)


#: Places where no file can be, with the error.
WRONG_PLACES = {
    "nowhere/learned.json": "there is no folder '.*nowhere' where the scheduler runs$",
    "folder": "it must be a file, and that is none$",
    "a file/learned.json": "there is no folder '.*a file' where",
    "/proc/learned.json": "its folder cannot be written: ",
}


@pytest.mark.parametrize("place", WRONG_PLACES)
def test_a_place_for_no_file_is_one_line_at_install_and_the_cluster_runs(
    place: str, tmp_path: Path, thread_client: Client
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "a file").touch()
    install(thread_client)
    before = stealing_of(thread_client)
    with dask.config.set(with_file(tmp_path / place)), pytest.raises(UsageError) as caught:
        install(thread_client, "static")
    assert caught.match(f"^the setting ferroflow.learned is '.*'; {WRONG_PLACES[place]}")
    assert "\n" not in str(caught.value)
    assert stealing_of(thread_client) is before
    uninstall(thread_client)
    with dask.config.set(with_file(tmp_path / place)), pytest.raises(UsageError):
        install(thread_client)
    assert thread_client.submit(sum, [1, 2]).result() == 3
    assert_stock(thread_client)


# Real clusters


@contextmanager
def real_cluster() -> Iterator[Client]:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        install(client)
        until(stealing_of(client).graphs._capable.are_all)
        yield client


def run_graph(client: Client) -> int:
    """Run a program, and return how many of its tasks were in bundles."""
    before = stealing_of(client).graphs.bundles.counts["tasks"]
    x = da.ones((1000, 1000), chunks=(100, 100))
    assert (x + x.T).sum().compute() == 2e6
    return int(stealing_of(client).graphs.bundles.counts["tasks"] - before)


@pytest.mark.cluster
def test_a_new_cluster_cuts_its_first_graph_as_a_warm_one_does(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[Any] = []
    stock = Samples.wait

    async def wait(self: Samples, keys: Any, *args: Any) -> None:
        sampled.append(keys)
        await stock(self, keys, *args)

    monkeypatch.setattr(Samples, "wait", wait)
    with dask.config.set(with_file(path)):
        with real_cluster() as client:
            run_graph(client)
            assert len(sampled) == 1
            until(lambda: run_graph(client) > 100)  # its first tasks may have been held up
            warm = run_graph(client)
        with real_cluster() as client:
            assert run_graph(client) > 0.9 * warm > 90
        assert len(sampled) == 1
    with real_cluster() as client:
        run_graph(client)
    assert len(sampled) == 2
