"""A headless Chromium for tests, driven by Selenium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

#: What Bokeh says of figures that have no data yet, and of addresses that Dask's pages do not have.
_HARMLESS = ("favicon",)


def chromium() -> str:
    """Return Chromium's path; skip the test where it, or its driver, is not installed."""
    found = shutil.which("chromium"), shutil.which("chromedriver")
    if not all(found):
        why = "chromium or chromedriver is not installed"
        pytest.fail(why) if os.environ.get("FERROFLOW_REQUIRE_CHROMIUM") else pytest.skip(why)
    return str(found[1])


#: Browsers that show no page.
_idle: list[Any] = []


@contextmanager
def opened(url: str, width: int = 1600, height: int = 1000) -> Iterator[Any]:
    """Open a page in a browser, which may have shown others; expect that it logs no error."""
    driver = _idle.pop() if _idle else _started()
    try:
        driver.set_window_size(width, height)
        driver.get(url)
        yield driver
        assert not errors(driver)
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        driver.get("about:blank")
        errors(driver)  # of connections that it closed; the next page has no errors yet
    except BaseException:
        driver.quit()
        raise
    _idle.append(driver)


def close_all() -> None:
    """End all browsers that show no page."""
    while _idle:
        _idle.pop().quit()


def _started() -> Any:
    driver_path = chromium()
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
    driver.set_page_load_timeout(60)
    return driver


def errors(driver: Any) -> list[str]:
    """Return what the page's console has of errors since this was last asked."""
    entries = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    return [message for message in entries if not any(word in message for word in _HARMLESS)]


def sources(driver: Any) -> dict[str, dict[str, Any]]:
    """Return the data of the page's figures, by their first column."""
    found: dict[str, dict[str, Any]] = driver.execute_script(
        """
        const found = {};
        if (!window.Bokeh) return found;
        for (const document of Bokeh.documents)
          for (const model of document._all_models.values())
            if (model.type == "ColumnDataSource") {
              const data = {};
              for (const [name, values] of Object.entries(model.data)) data[name] = Array.from(values);
              found[Object.keys(data)[0]] = data;
            }
        return found;
        """
    )
    return found


def n_documents(driver: Any) -> int:
    """Return how many of Bokeh's documents the page shows: none while it loads."""
    return int(driver.execute_script("return window.Bokeh ? Bokeh.documents.length : 0"))


def texts(driver: Any) -> str:
    """Return the text of the page's titles and tables, as Bokeh has it."""
    return str(
        driver.execute_script(
            """
            const found = [];
            if (!window.Bokeh) return "";
            for (const document of Bokeh.documents)
              for (const model of document._all_models.values())
                if (model.type == "Div" || model.type == "Title") found.push(model.text);
            return found.join("\\n");
            """
        )
    )
