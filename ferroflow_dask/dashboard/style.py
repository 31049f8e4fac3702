"""How our figures look: Dask's theme, and colours that can be told apart with any colour vision."""

from __future__ import annotations

from typing import Any

from bokeh.models import HoverTool, PanTool, ResetTool, WheelZoomTool
from bokeh.palettes import Blues256, Colorblind8
from bokeh.plotting import figure

#: Okabe and Ito's colours, and hatches where there are more kinds than colours.
COLOURS = tuple(Colorblind8)
HATCHES = ("blank", "right_diagonal_line", "cross", "dot")
#: From none to many.
SEQUENCE = tuple(reversed(Blues256[:224]))

BLUE, ORANGE, GREEN, RED, GREY = COLOURS[0], COLOURS[1], COLOURS[3], COLOURS[5], "#b0b0b0"

#: Names on an axis beyond this number would overlap; then hovering tells them.
MOST_LABELS = 40


class Palette:
    """A colour and a hatch for each name, in the order in which names come."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}

    def __getitem__(self, name: str) -> tuple[str, str]:
        """Return the colour and the hatch of a name."""
        index = self._index.setdefault(name, len(self._index))
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
    root = figure(title=title, **options)
    root.add_tools(HoverTool(tooltips=tooltips), PanTool(), WheelZoomTool(), ResetTool())
    root.toolbar.logo = None
    root.xgrid.visible = root.ygrid.visible = False
    return root
