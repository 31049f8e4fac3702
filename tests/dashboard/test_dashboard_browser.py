"""The page in a real browser, against live clusters of worker processes."""

from __future__ import annotations

import gc
import html
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import dask
import pytest
import waiting
from bokeh.core.property.validation import validate
from browser import chromium, close_all, n_documents, opened, sources, texts
from distributed import Client
from in_charge import run_stolen, served
from waiting import until

import ferroflow_dask
from ferroflow_dask import explain
from ferroflow_dask.dashboard import recorder as recorders

pytestmark = [
    pytest.mark.cluster,
    # Bokeh's own, for a page that left while it was sent something.
    pytest.mark.filterwarnings("ignore:coroutine 'WSHandler.send_message' was never awaited:RuntimeWarning"),
]

#: First column of each figure's data, and what grows in it.
FIGURES = {"victim": "steals", "key": "key", "time": "time", "level": "done"}

#: Where each figure has a page of its own.
PLOTS = [
    "overview",
    "failures",
    "timeline",
    "workers",
    "rates",
    "levels",
    "steals",
    "bundles",
    "decisions",
    "features",
]

soon = partial(waiting.soon, within_s=30.0)


@contextmanager
def started() -> Iterator[Client]:
    chromium()
    with (
        # After this time Dask closes a worker that it has missed once, even if it only restarts again.
        dask.config.set({"distributed.deploy.lost-worker-timeout": "1h"}),
        served(4, processes=True) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with started() as found:
        yield found
    close_all()
    gc.collect()  # what Bokeh did not send, here, where its warning is ignored


@pytest.fixture(name="new_client")
def _new_client() -> Iterator[Client]:
    """A client of a cluster that has run nothing yet."""
    with started() as found:
        ferroflow_dask.install(found)
        yield found


@pytest.fixture(autouse=True)
def _installed(client: Client) -> Iterator[None]:
    ferroflow_dask.install(client)
    yield
    ferroflow_dask.uninstall(client)
    # Pages that were closed are forgotten after 15 seconds; until then they record for the next test.
    scheduler = client.cluster.scheduler
    if recorders._recorders.pop(scheduler, None) is not None:
        scheduler.remove_plugin(name=recorders.Recorder.name)


def page(client: Client, name: str = "ferroflow") -> str:
    return f"http://127.0.0.1:{client.cluster.scheduler.http_server.port}/{name}"


def skewed(client: Client, n: int = 40) -> None:
    run_stolen(client, n)


def steals(client: Client) -> int:
    return int(client.cluster.scheduler.extensions["stealing"].steals["confirmed"])


def shown_steals(driver: Any) -> int:
    return int(sum(sources(driver)["victim"]["steals"]))


def n_workers(driver: Any) -> int:
    return texts(driver).count('<tr data-worker="')


def test_every_figure_grows_while_a_graph_runs(client: Client) -> None:
    with opened(page(client)) as driver:
        assert soon(lambda: set(FIGURES) <= set(sources(driver)))
        assert "nothing has run since this page was opened" in texts(driver)
        before = {name: len(sources(driver)[name][grows]) for name, grows in FIGURES.items()}
        graph = ferroflow_dask.generate("imbalanced", n_heavy=4, heavy_ms=300.0, n_fast=100)
        client.compute(graph.bind()).result()
        skewed(client)
        assert steals(client) > 0
        for name in ("victim", "key", "time", "level"):
            assert soon(lambda name=name: len(sources(driver)[name][FIGURES[name]]) > before[name]), name
        assert soon(lambda: n_workers(driver) == 4)
        assert soon(lambda: shown_steals(driver) == steals(client))
        assert soon(lambda: "steal confirmed" in texts(driver))
        assert soon(lambda: "41 of 41" in texts(driver))


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
        assert soon(lambda: n_workers(driver) == 3)
        skewed(client, 12)
        client.cluster.scale(5)  # where the one that left may still count
        assert soon(lambda: n_workers(driver) == len(client.nthreads()) > 3)


#: In this order, and with a head each; `found` also looks into the roots of Bokeh's models.
PANELS = ["Ferroflow", "Timeline", "Workers", "Rates", "Progress by level", "Steals", "Decisions", "Features"]
FOUND = """
const found = (selector) => {
  const elements = []
  const search = (root) => {
    elements.push(...root.querySelectorAll(selector))
    for (const element of root.querySelectorAll("*")) if (element.shadowRoot) search(element.shadowRoot)
  }
  search(document)
  return elements
}
"""


def panels(driver: Any) -> list[str]:
    """The titles of the panels that take room on the page."""
    script = (
        "return found('.head b').filter((one) => one.getClientRects().length).map((one) => one.innerText)"
    )
    return list(driver.execute_script(FOUND + script))


def click(driver: Any, selector: str) -> None:
    """Click the first such element once it is drawn; it may be drawn anew at any time."""
    script = f"{FOUND} const [one] = found(arguments[0]); one?.click(); return Boolean(one)"
    assert soon(lambda: driver.execute_script(script, selector)), selector


def test_the_legend_of_steals_has_the_numbers_of_the_cells(new_client: Client) -> None:
    def drawn() -> list[int]:
        return list(
            driver.execute_script(
                """
                const found = []
                const walk = (view) => {
                  if (view.model.type == "ColorBar") found.push(...view._axis_view.model.ticker.ticks)
                  for (const child of view.children ? view.children() : []) walk(child)
                }
                for (const view of Bokeh.index) walk(view)
                return found
                """
            )
        )

    def is_drawn() -> bool:
        cells = sources(driver)["victim"]["steals"]
        return bool(cells) and max(cells) > 1 and max(drawn(), default=0) == max(cells)

    with opened(page(new_client)) as driver:
        until(lambda: n_documents(driver))
        skewed(new_client)
        skewed(new_client)
        assert soon(is_drawn)


@pytest.mark.parametrize(("width", "height"), [(1400, 900), (800, 600)])
def test_panels_without_content_take_no_room_and_nothing_is_wider_than_the_page(
    new_client: Client, width: int, height: int
) -> None:
    with opened(page(new_client), width, height) as driver:
        assert soon(lambda: panels(driver) == ["Ferroflow", "Workers", "Features"])
        script = "return found('.head').map((one) => one.getBoundingClientRect().width).filter((one) => one)"
        whole, workers, _ = driver.execute_script(FOUND + script)
        assert workers == pytest.approx(whole, abs=2), "it has the room of its hidden neighbour"
        skewed(new_client)
        assert soon(lambda: panels(driver) == PANELS)
        assert driver.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
        helps = driver.execute_script(f"{FOUND} return found('.head i').map((one) => one.title)")
        assert len(helps) == 11
        assert all(helps)


def test_a_click_on_a_failed_task_or_a_worker_opens_all_about_it(client: Client) -> None:
    def boom(i: int) -> int:  # in here, since workers cannot import this file
        if i == 3:
            raise ValueError("row 3 is <bad>")
        return i

    futures = client.map(boom, range(6), key="boom")
    until(lambda: all(future.done() for future in futures))
    with opened(page(client)) as driver:
        # The failure was before the page.
        assert soon(lambda: "ValueError(&#x27;row 3 is &lt;bad&gt;&#x27;)" in texts(driver))
        assert "Selected" not in panels(driver)
        click(driver, f"a[data-task='{futures[3].key}']")
        assert soon(lambda: "Selected" in panels(driver))
        shown = html.unescape(texts(driver))
        assert "in boom" in shown  # the traceback
        assert all(decision.reason in shown for decision in explain(client, futures[3]))
        click(driver, "tr[data-worker]")
        assert soon(lambda: re.search(r"worker \d+ <a", texts(driver)))
        click(driver, "a[data-task='']")
        assert soon(lambda: "Selected" not in panels(driver))


def test_a_click_on_a_bar_of_the_timeline_explains_its_task(client: Client) -> None:
    with opened(page(client)) as driver:
        assert soon(lambda: "Ferroflow" in panels(driver))
        future = client.submit(time.sleep, 0.5, key="slow", pure=False)
        future.result()
        assert soon(lambda: "Timeline" in panels(driver))
        driver.execute_script(
            """
            for (const document of Bokeh.documents)
              for (const model of document._all_models.values())
                if (model.type == "ColumnDataSource" && model.data.key && model.data.ms)
                  model.selected.indices = [0]
            """
        )
        assert soon(lambda: "task slow" in texts(driver))
        assert "first of" in texts(driver) or "next best" in texts(driver)


def test_the_page_is_drawn_although_checks_of_bokeh_were_left_off(client: Client) -> None:
    validate(False)  # for good, as it may happen while two schedulers of a process have pages open
    try:
        with opened(page(client)) as driver:
            assert soon(lambda: "Ferroflow" in panels(driver))
    finally:
        validate(True)


def test_the_page_follows_the_dark_theme(client: Client) -> None:
    def ink(driver: Any) -> set[str]:
        return set(
            driver.execute_script(
                """
                if (!window.Bokeh || !Bokeh.documents.length) return []
                return [...Bokeh.documents[0]._all_models.values()]
                  .map((model) => model.major_label_text_color).filter((colour) => colour)
                """
            )
        )

    def background(driver: Any) -> str:
        return str(driver.execute_script("return getComputedStyle(document.body).backgroundColor"))

    with opened(page(client)) as driver:
        assert soon(lambda: ink(driver) == {"#333333"})
        theme = [{"name": "prefers-color-scheme", "value": "dark"}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": theme})
        assert soon(lambda: ink(driver) == {"#dddddd"})
        assert background(driver) == "rgb(18, 18, 18)"


HOSTILE = "<img src=x onerror=document.title='pwned'><script>document.title='pwned'</script>"
#: Keeps what a page is sent.
KEEP_MESSAGES = """
window.sent = []
const Stock = window.WebSocket
window.WebSocket = class extends Stock {
  constructor(...given) {
    super(...given)
    this.addEventListener("message", (event) => { if (typeof event.data == "string") sent.push(event.data) })
  }
}
"""


def html_sent(message: Any) -> Iterator[str]:
    """Yield what a message to a page has for it to show as HTML."""
    if isinstance(message, list):
        for one in message:
            yield from html_sent(one)
    elif isinstance(message, dict):
        for name, value in message.items():
            if isinstance(value, str):
                if name == "text" or (name == "new" and message.get("attr") == "text"):
                    yield value
            else:
                yield from html_sent(value)


def shows_text(driver: Any) -> bool:
    """Assert that the page has the hostile name as text only; return whether the page was sent it."""
    sent = driver.execute_script("return sent.splice(0)")
    for message in sent:
        for shown in html_sent(json.loads(message)) if message.startswith("{") else ():
            assert "<img" not in shown
    assert not driver.execute_script(f"{FOUND} return found('img[src=x]')")
    assert "pwned" not in driver.title
    return any("onerror" in message for message in sent)


def test_hostile_names_are_text() -> None:
    chromium()

    def fail(_: int) -> None:
        raise ValueError(HOSTILE)

    with dask.config.set({"distributed.scheduler.validate": False}), served(0) as client:
        cluster = client.cluster
        cluster.worker_spec[f"<b>{HOSTILE}"] = cluster.new_spec
        cluster.worker_spec[f"<i>{HOSTILE}"] = cluster.new_spec
        cluster.sync(cluster._correct_state)
        ferroflow_dask.install(client)
        with opened(page(client)) as driver:
            kept = driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": KEEP_MESSAGES})
            driver.get(page(client))
            assert soon(lambda: set(FIGURES) <= set(sources(driver)))
            root = client.submit(int, key=f"{HOSTILE}-root")
            futures = [client.submit(_slowly, root, key=f"{HOSTILE}-{i}") for i in range(8)]
            futures.append(client.submit(fail, root, key=f"{HOSTILE}-failed"))
            until(lambda: all(future.done() for future in futures))
            assert soon(lambda: any(HOSTILE in key for key in sources(driver)["key"]["key"]))
            assert soon(lambda: "&lt;img src=x" in texts(driver))
            click(driver, "a[data-task]")
            assert soon(lambda: "Selected" in panels(driver))
            click(driver, "tr[data-worker]")
            assert soon(lambda: "worker &lt;" in texts(driver))
            assert shows_text(driver)
            assert driver.title == "Dask: ferroflow"
            n_hostile = 0
            for plot in PLOTS:  # each figure is a page of its own
                driver.get(page(client, f"individual-ferroflow-{plot}"))
                assert soon(lambda: n_documents(driver) == 1), plot
                n_hostile += shows_text(driver)
            assert n_hostile > 3
            driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", kept)


def _slowly(_: int) -> None:
    time.sleep(0.05)
