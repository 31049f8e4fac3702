"""Figure drawn by Bokeh: efficiency against the number of workers, and any layout as a picture.

Policies differ by marker and dash too; the colours are Okabe and Ito's, which can be told apart with any
colour vision (bokeh.palettes.Colorblind). Selenium and a browser draw the picture.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ferroflow_dask.exceptions import FerroflowError, UsageError
from ferroflow_dask.whole_files import replacing

_PERCENT = 100
#: Size of a figure [pixels].
_WIDTH, _HEIGHT = 310, 340
#: Device pixels of a picture for each pixel of a figure.
_SCALE = 2
#: The browser's start and drawing may take this long on a busy machine [s].
_TIMEOUT_S = 60
#: Marker and dash of each policy; colours come from the palette, without yellow, which has little contrast.
_STYLES: Sequence[tuple[int, str, Any]] = (
    *((7, "square", "dashed"), (0, "circle", "solid"), (1, "triangle", "dotted")),
    *((3, "diamond", "dotdash"), (4, "inverted_triangle", "dashdot"), (5, "star", [8, 2])),
)


def efficiency_figure(title: str, found: Mapping[str, Mapping[str, Mapping[int, float]]]) -> Any:
    """Return efficiency against the number of workers.

    Parameters
    ----------
    title : str
    found : mapping
        Efficiency, at most 1, by policy, by variant of the graph, and by workers. The first variant is drawn
        with thin lines, the others with thicker ones.
    """
    from bokeh.models import FixedTicker, NumeralTickFormatter, Range1d
    from bokeh.models.annotations import Legend, LegendItem
    from bokeh.palettes import Colorblind
    from bokeh.plotting import figure

    plot: Any = figure(
        width=_WIDTH,
        height=_HEIGHT,
        title=title,
        x_axis_type="log",
        x_axis_label="workers",
        y_axis_label="efficiency [%]",
    )
    items = []
    ticks: set[int] = set()
    for n, (policy, variants) in enumerate(found.items()):
        colour, marker, dash = _STYLES[n % len(_STYLES)]
        for width, (variant, reached) in enumerate(variants.items(), start=1):
            ticks |= reached.keys()
            points = list(reached), [_PERCENT * value for value in reached.values()]
            looks = {"color": Colorblind[8][colour]}
            line = plot.line(*points, line_dash=dash, line_width=1.5 * width, **looks)
            dots = plot.scatter(*points, marker=marker, size=4 + 3 * width, **looks)
            items.append(LegendItem(label=f"{policy}, {variant}", renderers=[line, dots]))
    plot.y_range = Range1d(start=0, end=105)
    plot.x_range = Range1d(start=min(ticks) / 1.15, end=max(ticks) * 1.15)
    plot.xaxis.ticker = FixedTicker(ticks=sorted(ticks))
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    plot.axis.axis_label_text_font_style = "normal"
    plot.outline_line_color = None
    legend = Legend(items=items, orientation="horizontal", location="left", ncols=2, border_line_color=None)
    plot.add_layout(legend, "above")
    return plot


def check_picture(path: str | os.PathLike[str]) -> None:
    """Raise `UsageError` if a file is not named as a picture is."""
    if Path(path).suffix != ".png":
        raise UsageError(f"a picture's name must end in .png, but is {str(path)!r}")


def write_picture(page: Any, path: str | os.PathLike[str]) -> None:
    """Write a layout of Bokeh as one picture, through a browser.

    Raises
    ------
    UsageError
        Selenium or a browser is missing, or the file is not named .png or cannot be written.
    FerroflowError
        The browser failed.
    """
    check_picture(path)
    try:
        from bokeh.io.export import export_png
        from selenium.common.exceptions import WebDriverException
    except ImportError as error:
        raise UsageError("a picture needs selenium; run in the clone: pip install '.[bench]'") from error
    try:
        driver = _browser()
    except (RuntimeError, WebDriverException) as error:
        raise UsageError(
            "a picture needs a browser: install chromium and chromedriver (Debian: apt-get install chromium "
            f"chromium-driver) ({_first_line(error)})"
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
