"""The page in a real browser, against live clusters of worker processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import dask
import pytest
import waiting
from browser import chromium, n_documents, opened, sources, texts
from distributed import Client, Event, LocalCluster
from in_charge import until

import ferroflow_dask

pytestmark = pytest.mark.cluster

#: First column of each figure's data, and what grows in it.
FIGURES = {"victim": "steals", "key": "key", "worker": "worker", "time": "time", "level": "done"}

soon = partial(waiting.soon, within_s=30.0)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    chromium()
    with (
        LocalCluster(
            n_workers=4,
            threads_per_worker=1,
            dashboard_address="127.0.0.1:0",
            silence_logs=logging.ERROR,
        ) as cluster,
        Client(cluster, set_as_default=False) as found,
    ):
        yield found


@pytest.fixture(autouse=True)
def _installed(client: Client) -> Iterator[None]:
    ferroflow_dask.install(client)
    yield
    ferroflow_dask.uninstall(client)


def page(client: Client, name: str = "ferroflow") -> str:
    return f"http://127.0.0.1:{client.cluster.scheduler.http_server.port}/{name}"


def skewed(client: Client, n: int = 40) -> None:
    """Run tasks that are stolen: all are where their input is."""

    def load(is_all_known: Event) -> int:
        is_all_known.wait()
        return 1

    def work(_: int, i: int) -> int:
        time.sleep(0.2 if i % 4 == 0 else 0.01)
        return i

    # Or the root could end before the others come: then they would be a graph of their own.
    is_all_known = Event(client=client)
    root = client.submit(load, is_all_known, pure=False, workers=[next(iter(client.nthreads()))])
    futures = client.map(work, [root] * n, range(n), pure=False)
    until(lambda: all(future.key in client.cluster.scheduler.tasks for future in futures))
    is_all_known.set()
    client.gather(futures)


def steals(client: Client) -> int:
    return int(client.cluster.scheduler.extensions["stealing"].steals["confirmed"])


def shown_steals(driver: Any) -> int:
    return int(sum(sources(driver)["victim"]["steals"]))


def test_every_figure_grows_while_a_graph_runs(client: Client) -> None:
    with opened(page(client)) as driver:
        assert soon(lambda: set(FIGURES) <= set(sources(driver)))
        assert "nothing has run since this page was opened" in texts(driver)
        before = {name: len(data[FIGURES[name]]) for name, data in sources(driver).items()}
        graph = ferroflow_dask.generate("imbalanced", n_heavy=4, heavy_ms=300.0, n_fast=100)
        client.compute(graph.bind()).result()
        skewed(client)
        assert steals(client) > 0
        for name in ("victim", "key", "time", "level"):
            assert soon(lambda name=name: len(sources(driver)[name][FIGURES[name]]) > before[name]), name
        assert len(sources(driver)["worker"]["worker"]) == 4
        assert soon(lambda: shown_steals(driver) == steals(client))
        assert soon(lambda: "steal confirmed" in texts(driver))
        assert soon(lambda: "41 of 41 tasks took " in texts(driver))


def test_two_tabs_and_the_way_from_status_and_back(client: Client) -> None:
    with opened(page(client, "status")) as driver, opened(page(client)) as other:
        assert soon(lambda: n_documents(driver) > 0)  # Dask's page is drawn, and its links stay in place
        link = driver.find_element("link text", "Ferroflow")
        link.click()
        for tab in (driver, other):
            assert soon(lambda tab=tab: set(FIGURES) <= set(sources(tab)))
        skewed(client)
        for tab in (driver, other):
            assert soon(lambda tab=tab: shown_steals(tab) == steals(client) > 0)
        driver.find_element("link text", "Status").click()
        assert soon(lambda: "status" in driver.current_url)
        assert soon(lambda: n_documents(driver) > 0)


def test_the_page_survives_uninstall_restart_and_a_worker_that_leaves(client: Client) -> None:
    with opened(page(client)) as driver:
        assert soon(lambda: "ferroflow schedules this cluster" in texts(driver))
        ferroflow_dask.uninstall(client)
        assert soon(lambda: "Dask schedules this cluster" in texts(driver))
        skewed(client, 12)
        ferroflow_dask.install(client)
        assert soon(lambda: "ferroflow schedules this cluster" in texts(driver))
        client.restart()
        skewed(client)
        assert soon(lambda: shown_steals(driver) == steals(client) > 0)
        gone = next(iter(client.nthreads()))
        client.retire_workers([gone])
        assert soon(lambda: len(sources(driver)["worker"]["worker"]) == 3)
        skewed(client, 12)
        client.cluster.scale(5)  # where the one that left may still count
        assert soon(lambda: len(sources(driver)["worker"]["worker"]) == len(client.nthreads()) > 3)


@pytest.mark.parametrize("plot", ["steals", "timeline", "queues", "rates", "levels", "decisions"])
def test_each_figure_is_a_page_of_its_own(client: Client, plot: str) -> None:
    with opened(page(client, f"individual-ferroflow-{plot}"), 800, 600) as driver:
        assert soon(lambda: n_documents(driver) == 1)


def test_hostile_names_are_text() -> None:
    chromium()
    hostile = "<img src=x onerror=document.title='pwned'><script>document.title='pwned'</script>"
    with (
        dask.config.set({"distributed.scheduler.validate": False}),
        LocalCluster(
            n_workers=0, processes=False, dashboard_address="127.0.0.1:0", silence_logs=logging.ERROR
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        cluster.worker_spec[f"<b>{hostile}"] = cluster.new_spec
        cluster.worker_spec[f"<i>{hostile}"] = cluster.new_spec
        cluster.sync(cluster._correct_state)
        ferroflow_dask.install(client)
        with opened(page(client)) as driver:
            assert soon(lambda: set(FIGURES) <= set(sources(driver)))
            root = client.submit(int, key=f"{hostile}-root")
            futures = [client.submit(_slowly, root, key=f"{hostile}-{i}") for i in range(8)]
            client.gather(futures)
            assert soon(lambda: any(hostile in key for key in sources(driver)["key"]["key"]))
            assert soon(lambda: "&lt;img src=x" in texts(driver))
            canvas = driver.find_element("css selector", "body")
            driver.execute_script("arguments[0].scrollIntoView()", canvas)
            assert driver.title == "Dask: ferroflow"
            assert not driver.find_elements("css selector", "img[src='x']")


def _slowly(_: int) -> None:
    time.sleep(0.05)
