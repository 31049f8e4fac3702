"""Plots of benchmark rows: a page that needs no network, or a picture.

Bokeh is imported when something is drawn; so is selenium, which a picture needs, with a browser.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ferroflow_dask.bench.comparison import Case, Defaults, by_setting, by_shape, cases_of, named
from ferroflow_dask.bench.metg import Curve, metg_from_rows
from ferroflow_dask.bench.schema import BenchRecord
from ferroflow_dask.exceptions import FerroflowError, UsageError
from ferroflow_dask.whole_files import replacing, write_text

_TITLE = "ferroflow benchmark"
#: Between figures [pixels].
_GAP = 24
#: Device pixels of a picture for each pixel of a figure.
_SCALE = 2
#: The browser's start and drawing may take this long on a busy machine [s].
_TIMEOUT_S = 60


def write_html(rows: Sequence[BenchRecord], path: str | os.PathLike[str], defaults: Defaults) -> None:
    """Write a page of plots with all that it needs inside; the parameters are those of `write_png`."""
    page = _page(rows, defaults)
    from bokeh.embed import file_html
    from bokeh.resources import INLINE

    try:
        write_text(path, file_html(page, INLINE, _TITLE))
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error


def write_png(rows: Sequence[BenchRecord], path: str | os.PathLike[str], defaults: Defaults) -> None:
    """Write the plots as one picture, through a browser.

    Parameters
    ----------
    rows : sequence of BenchRecord
    path : path-like
    defaults : mapping
        Sizes of each workload by default; those are not named.

    Raises
    ------
    UsageError
        The rows have nothing to plot, selenium or a browser is missing, or the file is not named .png or
        cannot be written.
    FerroflowError
        The browser failed.
    """
    write_picture(_page(rows, defaults, has_tools=False), path, "; or write a page with --html")


def check_picture(path: str | os.PathLike[str]) -> None:
    """Raise `UsageError` if a file is not named as a picture is."""
    if Path(path).suffix != ".png":
        raise UsageError(f"a picture's name must end in .png, but is {str(path)!r}")


def write_picture(page: Any, path: str | os.PathLike[str], otherwise: str = "") -> None:
    """Write a layout of Bokeh as one picture, through a browser.

    What it raises is as for `write_png`; `otherwise` ends the error if selenium or a browser is missing.
    """
    check_picture(path)
    try:
        from bokeh.io.export import export_png
        from selenium.common.exceptions import WebDriverException
    except ImportError as error:
        raise UsageError(
            f"a picture needs selenium; run in the clone: pip install '.[bench]'{otherwise}"
        ) from error
    try:
        driver = _browser()
    except (RuntimeError, WebDriverException) as error:
        raise UsageError(
            "a picture needs a browser: install chromium and chromedriver (Debian: apt-get install chromium "
            f"chromium-driver){otherwise} ({_first_line(error)})"
        ) from error
    try:
        with replacing(path) as beside:
            export_png(page, filename=beside, webdriver=driver, scale_factor=_SCALE, timeout=_TIMEOUT_S)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from error
    except (RuntimeError, WebDriverException) as error:
        raise FerroflowError(f"{path}: the browser drew no picture: {_first_line(error)}") from error
    finally:
        driver.quit()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _browser() -> Any:
    from bokeh.io.webdriver import create_chromium_webdriver, create_firefox_webdriver

    # Chromium refuses to start its sandbox for root, as in containers; the page is our own.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    try:
        return create_chromium_webdriver(options, scale_factor=_SCALE)
    except RuntimeError:
        return create_firefox_webdriver(scale_factor=_SCALE)


def _page(rows: Sequence[BenchRecord], defaults: Defaults, *, has_tools: bool = True) -> Any:
    if not rows:
        raise UsageError("no rows to plot; 'ferroflow bench' writes some")
    from bokeh.layouts import column, row

    settings = by_setting(rows)
    lines: list[list[Any]] = []
    for n, own in enumerate(settings.values(), start=1):
        setting = f", setting {n}" if len(settings) > 1 else ""
        lines += _lines(own, defaults, setting)
    if not lines:
        raise UsageError(
            "nothing to plot: there is no policy beside stock dask, no workload on clusters of several sizes "
            "and no METG curve"
        )
    for plot in (plot for line in lines for plot in line if not has_tools):
        plot.toolbar_location = None
    return column(*(row(*line) for line in lines), spacing=_GAP)


def _lines(rows: Sequence[BenchRecord], defaults: Defaults, setting: str) -> Iterator[list[Any]]:
    """Yield figures that stand side by side."""
    from ferroflow_dask.bench import figures

    cases = cases_of(rows)
    for shape, own in by_shape(cases).items():
        bars = figures.speed_up_bars(f"{shape}{setting}", {named(case, defaults): case for case in own})
        if bars is not None:
            yield [bars]
    scalings: dict[str, dict[int, Case]] = {}
    for case in cases:
        kind = "processes" if case.shape.processes else "in one process"
        threads = f", {case.shape.threads} threads each" if case.shape.threads > 1 else ""
        name = f"{named(case, defaults)}, {kind}{setting}{threads}"
        scalings.setdefault(name, {})[case.shape.n_threads] = case
    for name, scaling in scalings.items():
        if len(scaling) > 1:
            yield figures.scaling_figures(name, scaling)
    patterns: dict[str, list[Curve]] = {}
    for curve in metg_from_rows(rows, defaults):
        patterns.setdefault(f"{curve.title}, {curve.kernel}, {curve.shape}", []).append(curve)
    for title, curves in patterns.items():
        yield [figures.metg_figure(f"{title}{setting}", curves)]
