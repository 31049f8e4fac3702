"""How our figures look: Dask's theme, and colours that can be told apart with any colour vision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

from bokeh.models import (
    AdaptiveTicker,
    ColumnDataSource,
    CompositeTicker,
    DatetimeAxis,
    FixedTicker,
    HoverTool,
    PanTool,
    ResetTool,
    WheelZoomTool,
)
from bokeh.models.annotations import LegendItem
from bokeh.models.glyph import Glyph
from bokeh.palettes import Blues256, Colorblind8
from bokeh.plotting import figure

#: Okabe and Ito's colours, and hatches where there are more kinds than colours.
COLOURS = tuple(Colorblind8)
HATCHES = ("blank", "right_diagonal_line", "cross", "dot")
#: From few to many; the few are seen on white.
SEQUENCE = tuple(reversed(Blues256[:176]))

BLUE, ORANGE, GREEN, RED, GREY = COLOURS[0], COLOURS[1], COLOURS[3], COLOURS[5], "#b0b0b0"

#: Names beside each other on an axis; of more, each second, third, … is written, and hovering tells all.
_MOST_LABELS = 16


#: Names with a place in the order; what comes after them gets a look by its hash.
_MOST_NAMES = 256


class Palette:
    """A colour and a hatch for each name, in the order in which names come; its memory is bounded."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}

    def __getitem__(self, name: str) -> tuple[str, str]:
        """Return the colour and the hatch of a name."""
        if name in self._index or len(self._index) < _MOST_NAMES:
            index = self._index.setdefault(name, len(self._index))
        else:
            index = crc32(name.encode(errors="replace"))
        return COLOURS[index % len(COLOURS)], HATCHES[index // len(COLOURS) % len(HATCHES)]


def plot(title: str, tooltips: list[tuple[str, str]], **options: Any) -> Any:
    """Return an empty figure with tools that do not get in the way; tooltips show values as text."""
    options = {
        "tools": "",
        "toolbar_location": "above",
        "min_height": 150,
        "sizing_mode": "stretch_both",
        **options,
    }
    is_over_time = options.get("x_axis_type") == "datetime"
    if is_over_time:
        options["x_axis_type"] = None
    root = figure(title=title, **options)
    if is_over_time:
        axis: Any = DatetimeAxis()
        axis.ticker = _time_ticker()
        root.add_layout(axis, "below")
    root.center = []  # grids
    root.add_tools(HoverTool(tooltips=tooltips), PanTool(), WheelZoomTool(), ResetTool())
    root.toolbar.logo = None
    return root


def _time_ticker() -> CompositeTicker:
    """Return ticks from milliseconds to hours; Bokeh's own go on to years, at nine more models an axis."""
    steps = [
        ([1, 2, 5], 10, 0, 500),
        ([1, 2, 5, 10, 15, 20, 30], 60, 1000, 30 * 60_000),
        ([1, 2, 4, 6, 8, 12], 24, 3_600_000, 12 * 3_600_000),
    ]
    return CompositeTicker(
        num_minor_ticks=0,
        tickers=[
            AdaptiveTicker(
                mantissas=mantissas, base=base, min_interval=least_ms, max_interval=most_ms, num_minor_ticks=0
            )
            for mantissas, base, least_ms, most_ms in steps
        ],
    )


def label(axis: Any, names: Mapping[int, str]) -> None:
    """Write names at whole numbers on an axis, as many as there is room for."""
    axis.ticker = FixedTicker(ticks=list(names)[:: -(-len(names) // _MOST_LABELS) or 1])
    axis.major_label_overrides = dict(names)


def draw(root: Any, source: ColumnDataSource, glyph: Glyph, label: str = "", **where: Any) -> Any:
    """Add a glyph to a figure, and to its legend if it has a label; return its renderer.

    A figure's own methods also make glyphs for what is selected and muted, which cost the scheduler as much
    again when a page is opened.
    """
    renderer = root.add_glyph(source, glyph, **where)
    if label:
        root.legend[0].items.append(LegendItem(label={"value": label}, renderers=[renderer]))
    return renderer
