"""How figures look: colours for light and dark backgrounds, axes, and the frame of a panel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from bokeh.document import Document
from bokeh.layouts import column
from bokeh.models import (
    AdaptiveTicker,
    ColumnDataSource,
    CompositeTicker,
    CustomJS,
    DatetimeAxis,
    DatetimeTickFormatter,
    FixedTicker,
    GlobalInlineStyleSheet,
    HoverTool,
    InlineStyleSheet,
    PanTool,
    ResetTool,
    WheelZoomTool,
)
from bokeh.models.annotations import Title
from bokeh.models.glyph import Glyph
from bokeh.models.widgets import Div
from bokeh.palettes import Blues256, Colorblind8
from bokeh.plotting import figure
from distributed.utils import color_of

#: Colours of lines that can be told apart with any colour vision; and brighter ones, for white and for black.
COLOURS = tuple(Colorblind8)
BLUE, ORANGE, GREEN, RED, GREY = "#2a86c8", "#e69f00", "#009e73", "#d55e00", "#9a9a9a"
#: From few to many: the few can be told from white, the many from black.
SEQUENCE = tuple(reversed(Blues256[20:200]))

#: Names beside each other on an axis; of more, each second, third, … is written, and hovering tells all.
_MOST_LABELS = 16
#: From this width on, panels stand beside each other [pixels].
_WIDE = 1000

#: Colours of the page, which all panels inherit.
_THEME = """
:root { --ff-ink: #222; --ff-faint: #666; --ff-line: #ddd; --ff-fill: #eee; --ff-panel: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ff-ink: #e6e6e6; --ff-faint: #a8a8a8; --ff-line: #444; --ff-fill: #333; --ff-panel: #1d1d1d; }
  html { color-scheme: dark; }
  html, body { background: #121212; }
  .navbar ul, .dropdown-content { background-color: #2b2b2b; }
  .navbar li a { color: #e6e6e6; }
  #navbar-toggle-icon img { filter: invert(1); }
}
"""
#: The grid of the page: 12 columns, or one where there is no room. Panels take the room of hidden neighbours.
_GRID = f"""
:host {{ display: flex !important; flex-flow: row wrap !important; gap: 10px; width: 100%;
  align-items: flex-start; }}
.ff-12 {{ flex: 1 1 100% !important; }} .ff-8 {{ flex: 2 1 calc(66.6% - 10px) !important; }}
.ff-6 {{ flex: 1 1 calc(50% - 10px) !important; }} .ff-4 {{ flex: 1 1 calc(33.3% - 10px) !important; }}
@media (max-width: {_WIDE}px) {{ .ff-12, .ff-8, .ff-6, .ff-4 {{ flex: 1 1 100% !important; }} }}
"""
_PANEL = """
:host { background: var(--ff-panel, #fff); border: 1px solid var(--ff-line, #ddd); border-radius: 6px;
  padding: 6px 8px; box-sizing: border-box; min-width: 0; overflow: hidden; }
"""
_TEXT = """
:host { color: var(--ff-ink, #222); font: 13px Helvetica, Arial, sans-serif; box-sizing: border-box;
  color-scheme: light dark; }
.bk-clearfix { width: 100%; }
.head { display: flex; gap: 10px; align-items: baseline; white-space: nowrap; overflow: hidden; }
.head b { font-size: 15px; }
.head i { color: var(--ff-faint, #666); font-style: normal; font-size: 12px; overflow: hidden;
  text-overflow: ellipsis; cursor: help; }
.swatch { display: inline-block; width: 10px; height: 10px; margin: 0 3px 0 6px; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 2px 8px 2px 0; white-space: nowrap; }
th { color: var(--ff-faint, #666); font-weight: normal; position: sticky; top: 0;
  background: var(--ff-panel, #fff); }
td.n, th.n { text-align: right; }
td.bar { background: linear-gradient(to right, var(--bar) var(--part), transparent var(--part)) no-repeat
  left / calc(100% - 6px) 100%; }
[data-task], [data-worker] { cursor: pointer; }
a[data-task], a[data-worker] { color: #2a86c8; }
[data-task]:hover, tr[data-worker]:hover { text-decoration: underline; }
pre { margin: 4px 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.bad { color: #d55e00; font-weight: bold; }
.faint { color: var(--ff-faint, #666); }
.tiles { display: flex; flex-wrap: wrap; gap: 4px 28px; align-items: baseline; }
.tiles div { display: flex; flex-direction: column; }
.tiles span { font-size: 12px; color: var(--ff-faint, #666); }
.tiles b { font-size: 20px; white-space: nowrap; }
.tiles div:first-child b { font-size: 28px; }
@media (max-width: 1000px) { .tiles { column-gap: 14px; } }
.progress { height: 12px; margin-top: 6px; background: var(--ff-fill, #eee); border-radius: 6px;
  overflow: hidden; display: flex; }
"""

#: Axes and titles are drawn on canvases, which style sheets do not reach.
_PAINT = """
const dark = window.matchMedia("(prefers-color-scheme: dark)")
const names = ["axis_label_text_color", "major_label_text_color", "axis_line_color", "major_tick_line_color",
  "label_text_color", "title_text_color"]
const paint = () => {
  const ink = dark.matches ? "#dddddd" : "#333333"
  for (const model of root.document._all_models.values()) {
    const found = {}
    for (const name of names) if (name in model.properties) found[name] = ink
    if (model.type == "Title") found.text_color = ink
    if (Object.keys(found).length) model.setv(found, {sync: false})
  }
}
dark.addEventListener("change", paint)
paint()
"""
#: Tables say by attributes which task or worker a cell or a row is about.
_CLICKS = """
window.addEventListener("click", (event) => {
  for (const element of event.composedPath()) {
    const {task, worker} = element.dataset ?? {}
    if (task != null || worker != null) {
      chosen.data = {task: [task ?? ""], worker: [worker ?? ""]}
      return
    }
  }
})
"""


def page_of(panels: Sequence[tuple[Any, int]], chosen: ColumnDataSource | None = None) -> tuple[Any, Any]:
    """Return a grid of panels, each so many of 12 columns wide, and what prepares its document."""
    for root, width in panels:
        root.css_classes = [*root.css_classes, f"ff-{width}"]
    sheets = [GlobalInlineStyleSheet(css=_THEME), InlineStyleSheet(css=_GRID)]
    grid = column([root for root, _ in panels], sizing_mode="stretch_width", stylesheets=sheets)

    def prepare(document: Document) -> None:
        scripts = [CustomJS(args={"root": grid}, code=_PAINT)]
        if chosen is not None:
            scripts.append(CustomJS(args={"chosen": chosen}, code=_CLICKS))
        document.js_on_event("document_ready", *scripts)

    return grid, prepare


def panel(head: Div, content: Any) -> Any:
    """Return a frame with a head and a content."""
    sheets = [InlineStyleSheet(css=_PANEL)]
    return column(head, content, sizing_mode="stretch_width", stylesheets=sheets)


def text(**options: Any) -> Div:
    """Return an empty text, in which keys of tasks are no formulas."""
    sheets: list[Any] = [InlineStyleSheet(css=_TEXT)]
    return Div(text="", sizing_mode="stretch_width", stylesheets=sheets, disable_math=True, **options)


def plot(title: str, tooltips: list[tuple[str, str]], *, n_times: int = 6, **options: Any) -> Any:
    """Return an empty figure with tools that do not get in the way; tooltips show values as text.

    A time axis has about `n_times` labels.
    """
    options = {
        "tools": "",
        "toolbar_location": "right",
        "sizing_mode": "stretch_width",
        "height": 220,
        "outline_line_color": None,
        **options,
    }
    is_over_time = options.get("x_axis_type") == "datetime"
    if is_over_time:
        options["x_axis_type"] = None
    # Not text: Bokeh makes no title of it while another thread has turned the checks of properties off.
    root = figure(title=Title(text=title) if title else None, **options)
    if is_over_time:
        axis: Any = DatetimeAxis(formatter=_time_formatter())
        axis.ticker = _time_ticker(n_times)
        root.add_layout(axis, "below")
    root.center = []  # grids
    root.add_tools(HoverTool(tooltips=tooltips), PanTool(), WheelZoomTool(), ResetTool())
    root.toolbar.logo = None
    root.toolbar.autohide = True
    for axis in root.axis:
        axis.major_label_text_font_size = "12px"
        axis.axis_label_text_font_size = "12px"
        axis.axis_label_text_font_style = "normal"
        axis.minor_tick_line_color = None
    return root


def _time_formatter() -> DatetimeTickFormatter:
    """Return a format that fits in a line: Bokeh's own adds the date below."""
    clock = "%H:%M:%S"
    return DatetimeTickFormatter(
        milliseconds=f"{clock}.%3N", seconds=clock, minsec=clock, minutes=clock, hourmin=clock, hours=clock
    )


def _time_ticker(n_times: int) -> CompositeTicker:
    """Return ticks from milliseconds to hours; Bokeh's own go on to years, at nine more models an axis."""
    steps = [
        ([1, 2, 5], 10, 0, 500),
        ([1, 2, 5, 10, 15, 20, 30], 60, 1000, 30 * 60_000),
        ([1, 2, 4, 6, 8, 12], 24, 3_600_000, 12 * 3_600_000),
    ]
    return CompositeTicker(
        num_minor_ticks=0,
        desired_num_ticks=n_times,
        tickers=[
            AdaptiveTicker(
                mantissas=mantissas,
                base=base,
                min_interval=least_ms,
                max_interval=most_ms,
                num_minor_ticks=0,
            )
            for mantissas, base, least_ms, most_ms in steps
        ],
    )


def label(axis: Any, names: Mapping[int, str]) -> None:
    """Write names at whole numbers on an axis, as many as there is room for."""
    axis.ticker = FixedTicker(ticks=list(names)[:: -(-len(names) // _MOST_LABELS) or 1])
    axis.major_label_overrides = dict(names)


def draw(root: Any, source: ColumnDataSource, glyph: Glyph, **where: Any) -> Any:
    """Add a glyph to a figure; return its renderer.

    A figure's own methods also make glyphs for what is selected and muted, which cost the scheduler as much
    again when a page is opened.
    """
    return root.add_glyph(source, glyph, **where, nonselection_glyph=None)


def task_colour(name: str) -> str:
    """Return the colour that Dask's dashboard gives to tasks of a prefix."""
    return str(color_of(name))


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def html(value: str) -> str:
    """Return text as HTML, whatever it looks like."""
    return value if isinstance(value, Html) else escape(value)


def task_link(key: str) -> Html:
    """Return a key that can be clicked."""
    return Html(f'<a data-task="{escape(key)}">{escape(key)}</a>')


def swatch(colour: str) -> Html:
    """Return a small square."""
    return Html(f'<span class="swatch" style="background:{colour}"></span>')


def table(heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; numbers stand on the right, below heads that begin with `#`."""
    heads = list(heads)
    marks = [' class="n"' if head.startswith("#") else "" for head in heads]
    line = "".join(
        f"<th{mark}>{html(head.lstrip('#'))}</th>" for mark, head in zip(marks, heads, strict=True)
    )
    lines = [
        "".join(f"<td{mark}>{html(cell)}</td>" for mark, cell in zip(marks, row, strict=True)) for row in rows
    ]
    return f"<table><tr>{line}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
