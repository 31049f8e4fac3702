"""Panel of a page: a title, what it shows, and a content that is brought up to date."""

from __future__ import annotations

from abc import ABC, abstractmethod
from html import escape
from typing import Any, ClassVar

from bokeh.models import ColumnDataSource, CustomJS, TapTool
from distributed.utils import log_errors

from ferroflow_dask.dashboard import style

#: Sends a click to the scheduler by value: numbers of rows change while a click is on its way.
_CHOOSE = """
const [i] = cb_obj.indices
if (i == null) return
chosen.data = {task: [kind == "task" ? source.data[column][i] : ""],
               worker: [kind == "worker" ? source.data[column][i] : ""]}
cb_obj.indices = []
"""


def choice() -> ColumnDataSource:
    """Return what holds the key of the task or the address of the worker that was clicked last."""
    return ColumnDataSource({"task": [""], "worker": [""]})


class Figure(ABC):
    """A panel of a page; `update` brings it up to date, and sends only what has changed.

    Parameters
    ----------
    recorder : Recorder or Recording
    chosen : ColumnDataSource, optional
        Where clicks on tasks and workers are noted; without it nothing can be clicked.
    **options
        Of the content.
    """

    #: What it is called, which question it answers, and what a click does.
    title: ClassVar[str]
    help: ClassVar[str]
    click: ClassVar[str] = ""

    root: Any
    content: Any
    source: Any

    def __init__(self, recorder: Any, chosen: ColumnDataSource | None = None, **options: Any) -> None:
        self.recorder = recorder
        self.chosen = chosen
        self._head = style.text()
        self.content = self.make(options)
        self.root = style.panel(self._head, self.content)
        self.note("")

    @abstractmethod
    def make(self, options: dict[str, Any]) -> Any:
        """Return the model that is shown; it is called once."""

    @abstractmethod
    def refresh(self) -> None:
        """Bring the content up to date."""

    @log_errors
    def update(self) -> None:
        """Bring the panel up to date."""
        self.refresh()

    def note(self, told: str) -> None:
        """Write something behind the title."""
        help_text = escape(f"{self.help} {self.click}" if self.click and self.chosen else self.help)
        head = f"<b>{escape(self.title)}</b><span>{style.html(told)}</span>"
        shown = f'<div class="head">{head}<i title="{help_text}">{help_text}</i></div>'
        set_text(self._head, shown)

    def show(self, is_there: bool) -> None:
        """Show the panel, or let it take no room while there is nothing in it."""
        if self.root.visible != is_there:
            self.root.visible = is_there

    def on_click(self, root: Any, renderer: Any, kind: str, column: str) -> None:
        """Let glyphs of a figure choose the task or the worker in a column of their source."""
        if self.chosen is None:
            return
        root.add_tools(TapTool(renderers=[renderer]))
        source = renderer.data_source
        args = {"source": source, "chosen": self.chosen, "kind": kind, "column": column}
        source.selected.js_on_change("indices", CustomJS(args=args, code=_CHOOSE))


class Text(Figure):
    """A panel of text."""

    #: Height from which on it is scrolled [pixels].
    most_height: ClassVar[int | None] = 240

    def make(self, options: dict[str, Any]) -> Any:
        """Return an empty text."""
        styles = (
            {} if self.most_height is None else {"max-height": f"{self.most_height}px", "overflow": "auto"}
        )
        return style.text(styles=styles, **options)

    def write(self, text: str) -> None:
        """Show a text; none hides the panel."""
        set_text(self.content, text)
        self.show(bool(text))


def set_text(div: Any, text: str) -> None:
    """Change a text if it differs."""
    if div.text != text:
        div.text = text
