"""`/ferroflow` on a scheduler's own dashboard, and each of its figures as an individual plot.

The one file that touches names of distributed's dashboard that are not public (`tests/test_dashboard.py`
names them). A second application with all of Dask's pages and ours takes the first place among the
scheduler's; Dask's own stays behind it, and is the first one again when ours is taken away. Browsers keep
what they have open.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from bokeh.layouts import column, row
from bokeh.server.tornado import BokehTornado
from distributed import Scheduler
from distributed.dashboard import scheduler as dask_pages
from distributed.dashboard.components import add_periodic_callback
from distributed.dashboard.components.scheduler import BOKEH_THEME, env
from distributed.dashboard.core import BokehApplication
from distributed.utils import log_errors
from tornado.ioloop import IOLoop

from ferroflow_dask.dashboard.charts import Decisions, Levels, Rates
from ferroflow_dask.dashboard.figures import Figure, Notice, Queues, StealFlow, Timeline
from ferroflow_dask.dashboard.recorder import start_recording, stop_recording
from ferroflow_dask.dashboard.screen import Screen

_PAGE = "ferroflow"
_PLOTS: dict[str, tuple[type[Figure], str]] = {
    "individual-ferroflow-steals": (StealFlow, "Ferroflow Steals"),
    "individual-ferroflow-timeline": (Timeline, "Ferroflow Timeline"),
    "individual-ferroflow-queues": (Queues, "Ferroflow Queues"),
    "individual-ferroflow-rates": (Rates, "Ferroflow Rates"),
    "individual-ferroflow-levels": (Levels, "Ferroflow Levels"),
    "individual-ferroflow-decisions": (Decisions, "Ferroflow Decisions"),
}
#: Behind `status`.
_PLACE = 1

#: Where a scheduler's http_application keeps ours while it is not shown: browsers may have pages of it open.
_KEPT = "ferroflow_pages"


@log_errors
def page(scheduler: Scheduler, extra: dict[str, Any], doc: Any) -> None:
    """Fill a document with the page."""
    doc.title = "Dask: ferroflow"
    notice, levels, flow, rates, queues, timeline, decisions = _add(
        scheduler, doc, Notice, Levels, StealFlow, Rates, Queues, Timeline, Decisions
    )
    top = row(flow, timeline, sizing_mode="stretch_both", min_height=240)
    middle = row(queues, rates, levels, sizing_mode="stretch_both", min_height=320)
    doc.add_root(column(notice, top, middle, decisions, sizing_mode="stretch_both"))
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(extra)
    doc.theme = BOKEH_THEME


@log_errors
def plot_alone(figure: type[Figure], scheduler: Scheduler, _extra: dict[str, Any], doc: Any) -> None:
    """Fill a document with one figure."""
    doc.title = f"Dask: {figure.__name__}"
    doc.add_root(*_add(scheduler, doc, figure))
    doc.theme = BOKEH_THEME


def _add(scheduler: Scheduler, doc: Any, *kinds: type[Figure]) -> list[Any]:
    """Return the models of figures that are brought up to date while the document is open."""
    context = doc.session_context
    who = f"page {context.id}"
    recorder = start_recording(scheduler, who)
    doc.on_session_destroyed(lambda _context: stop_recording(scheduler, who))

    def is_watched() -> bool:
        # A session outlives its browser for a while.
        return context.session is None or context.session.connection_count > 0

    figures = [kind(recorder, sizing_mode="stretch_both") for kind in kinds]
    screen = Screen(recorder, figures, is_watched)
    screen.update()
    add_periodic_callback(doc, screen, Screen.interval)
    return [figure.root for figure in figures]


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
