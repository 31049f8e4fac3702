"""Panels and reports while another thread has turned Bokeh's checks off, for the whole process."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from bokeh.core.json_encoder import serialize_json
from bokeh.core.property.validation import validate
from bokeh.document import Document
from in_charge import served
from tornado.ioloop import PeriodicCallback
from waiting import pause

import ferroflow_dask
from ferroflow_dask.cli.looks import Looks
from ferroflow_dask.dashboard.charts import Levels, Rates
from ferroflow_dask.dashboard.figure import Figure, choice
from ferroflow_dask.dashboard.figures import StealFlow, Timeline
from ferroflow_dask.dashboard.tables import Bundles, Decisions, Details, Failures, Features, Overview, Workers

PANELS = [
    Overview,
    Details,
    Failures,
    Timeline,
    Workers,
    Rates,
    Levels,
    StealFlow,
    Bundles,
    Decisions,
    Features,
]


def content(panel: Figure) -> str:
    """What a browser gets of a panel, with models numbered from zero."""
    document = Document()
    document.add_root(panel.root)
    numbers: dict[str, int] = {}
    text = serialize_json(document.to_json())
    return re.sub(r'"p\d+"', lambda found: str(numbers.setdefault(found[0], len(numbers))), text)


@pytest.mark.parametrize("kind", PANELS)
def test_a_panel_is_the_same_if_it_is_made_while_checks_are_off(kind: type[Figure]) -> None:
    with validate(False):
        made = kind(None, choice())
    assert content(made) == content(kind(None, choice()))


def without_checks() -> None:
    """Do as a page of Dask's dashboard that takes long to bring up to date."""
    with validate(False):
        time.sleep(0.05)


def test_a_report_has_its_colours_while_pages_are_brought_up_to_date(tmp_path: Path) -> None:
    with served(2, set_as_default=True) as client:
        ferroflow_dask.install(client)
        page = PeriodicCallback(without_checks, 1)
        client.sync(_called, page.start)
        looks = Looks(is_live=False, report=str(tmp_path / "report.html"), trace=None)
        with looks.at(client) as kept:
            client.gather(client.map(pause, range(4)))
            kept("title", ["line"])
        client.sync(_called, page.stop)
    text = (tmp_path / "report.html").read_text(encoding="utf-8").replace("&quot;", '"')
    assert re.search(r'"fill_color":\{"type":"field","field":"colour"', text)
    assert not re.search(r'"type":"value","value":("colour"|"edge"|\{)', text)


async def _called(function: object) -> None:
    assert callable(function)
    function()
