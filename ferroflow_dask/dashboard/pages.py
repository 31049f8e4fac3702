"""`/ferroflow` on a scheduler's own dashboard, and each of its figures as an individual plot.

The one file that touches names of distributed's dashboard that are not public.
`tests/dashboard/test_dashboard.py` names them. A second application with all of Dask's pages and ours takes
the first place among the scheduler's. Dask's own stays behind it, and is the first one again when ours is
taken away. Browsers keep what they have open.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from bokeh.core.property.validation import validate
from bokeh.server.tornado import BokehTornado
from distributed import Scheduler
from distributed.dashboard import scheduler as dask_pages
from distributed.dashboard.components import add_periodic_callback
from distributed.dashboard.components.scheduler import BOKEH_THEME, env
from distributed.dashboard.core import BokehApplication
from distributed.utils import log_errors
from tornado.ioloop import IOLoop

from ferroflow_dask.dashboard.charts import Levels, Rates
from ferroflow_dask.dashboard.figure import Figure, choice
from ferroflow_dask.dashboard.figures import StealFlow, Timeline
from ferroflow_dask.dashboard.recorder import start_recording, stop_recording
from ferroflow_dask.dashboard.screen import Screen
from ferroflow_dask.dashboard.style import page_of
from ferroflow_dask.dashboard.tables import (
    Bundles,
    Decisions,
    Details,
    Failures,
    Features,
    Overview,
    Workers,
)

_PAGE = "ferroflow"
#: The panels in the order in which they are read, each with its width in columns of 12: when it is done; what
#: was clicked; what failed; what runs, and why not; how fast and how far; the reasons; the plugin.
_PANELS: dict[type[Figure], int] = {
    Overview: 12,
    Details: 12,
    Failures: 12,
    Timeline: 8,
    Workers: 4,
    Rates: 4,
    Levels: 4,
    StealFlow: 4,
    Bundles: 12,
    Decisions: 12,
    Features: 12,
}
_NAMES: dict[str, type[Figure]] = {
    "overview": Overview,
    "failures": Failures,
    "timeline": Timeline,
    "workers": Workers,
    "rates": Rates,
    "levels": Levels,
    "steals": StealFlow,
    "bundles": Bundles,
    "decisions": Decisions,
    "features": Features,
}
_PLOTS = {
    f"individual-ferroflow-{name}": (figure, f"Ferroflow {name.title()}") for name, figure in _NAMES.items()
}
#: Behind `status`.
_PLACE = 1

#: Where a scheduler's http_application keeps ours while it is not shown: browsers may have pages of it open.
_KEPT = "ferroflow_pages"


@log_errors
def page(scheduler: Scheduler, extra: dict[str, Any], doc: Any) -> None:
    """Fill a document with the page."""
    doc.title = "Dask: ferroflow"
    _fill(scheduler, doc, _PANELS)
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(extra)
    doc.theme = BOKEH_THEME


@log_errors
def plot_alone(figure: type[Figure], scheduler: Scheduler, _extra: dict[str, Any], doc: Any) -> None:
    """Fill a document with one panel, below all about what is clicked in it."""
    doc.title = f"Dask: {figure.title}"
    _fill(scheduler, doc, {Details: 12, figure: 12})
    doc.theme = BOKEH_THEME


def _fill(scheduler: Scheduler, doc: Any, kinds: Mapping[type[Figure], int]) -> None:
    """Fill a document with panels that are brought up to date while it is open."""
    # While Dask's pages are brought up to date, they turn Bokeh's checks off, for the whole process. Two
    # schedulers do so in two threads, and the checks may stay off. Then columns are taken for colours.
    validate(True)
    context = doc.session_context
    who = f"page {context.id}"
    recorder = start_recording(scheduler, who)
    doc.on_session_destroyed(lambda _context: stop_recording(scheduler, who))

    def is_watched() -> bool:
        # A session outlives its browser for a while.
        return context.session is None or context.session.connection_count > 0

    chosen = choice()
    figures = [kind(recorder, chosen) for kind in kinds]
    screen = Screen(recorder, figures, is_watched)
    screen.update()
    add_periodic_callback(doc, screen, Screen.interval)
    grid, prepare = page_of([(figure.root, kinds[type(figure)]) for figure in figures], chosen)
    doc.add_root(grid)
    prepare(doc)


def show_pages(scheduler: Scheduler) -> None:
    """Add the page and the plots to a running scheduler's dashboard, if it has one."""
    applications = scheduler.http_application.applications
    first = next((app for app in applications if isinstance(app, BokehTornado)), None)
    ours = getattr(scheduler.http_application, _KEPT, None)
    if first is None or first is ours:
        return
    told = dask_pages.template_variables(scheduler)  # one object, in all pages
    if _PAGE not in told["pages"]:
        told["pages"].insert(_PLACE, _PAGE)
    known = {plot["url"] for plot in told["plots"]}
    told["plots"] += [{"url": url, "name": name} for url, (_, name) in _PLOTS.items() if url not in known]
    told["plots"].sort(key=lambda plot: plot["name"])
    if ours is None:
        pages = {
            f"/{_PAGE}": page,
            **{f"/{url}": partial(plot_alone, figure) for url, (figure, _) in _PLOTS.items()},
        }
        ours = BokehApplication(
            {**dask_pages.applications, **pages}, scheduler, prefix=first.prefix, template_variables=told
        )
        ours.initialize(IOLoop.current())
        ours.start()
        setattr(scheduler.http_application, _KEPT, ours)
    applications.insert(0, ours)


def hide_pages(scheduler: Scheduler) -> None:
    """Leave the dashboard as it was."""
    ours = getattr(scheduler.http_application, _KEPT, None)
    applications = scheduler.http_application.applications
    if ours is None or ours not in applications:
        return
    applications.remove(ours)
    told = dask_pages.template_variables(scheduler)
    told["pages"][:] = [name for name in told["pages"] if name != _PAGE]
    told["plots"][:] = [plot for plot in told["plots"] if plot["url"] not in _PLOTS]
