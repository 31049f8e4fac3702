"""Figures drawn by Bokeh: speed-ups, scaling and METG curves of benchmark rows, and FlexFlow's evaluation.

Policies differ by marker and dash too; the colours are Okabe and Ito's, which can be told apart with any
colour vision (bokeh.palettes.Colorblind). Whiskers are ranges of runs; those of speed-ups 95 % intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, NumeralTickFormatter, Range1d
from bokeh.models.annotations import Legend, LegendItem, Span, Whisker
from bokeh.palettes import Colorblind
from bokeh.plotting import figure

from ferroflow_dask.bench.comparison import AGAIN, STOCK, Case, Sample, is_ours, policies_of
from ferroflow_dask.bench.estimates import Estimate
from ferroflow_dask.bench.metg import THRESHOLD, Curve

_PERCENT, _MS_PER_S = 100, 1e3
#: Sizes [pixels]: of one of three figures side by side, of one alone, of a bar with the gap to the next,
#: of what is around the bars, and of a letter of an axis label.
_WIDTH, _HEIGHT, _WIDE, _BAR, _FRAME, _LETTER = 420, 340, 1260, 15, 150, 7
#: Ticks of a speed-up on its logarithmic axis.
_SPEED_UPS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10, 20, 50)


@dataclass(frozen=True, slots=True)
class Style:
    """How a policy is drawn."""

    colour: str
    marker: str
    dash: Any


# Yellow (2) has too little contrast with the paper.
_STYLES: Mapping[str, Style] = {
    "dask": Style(Colorblind[8][7], "square", "dashed"),
    "ferroflow": Style(Colorblind[8][0], "circle", "solid"),
    "dask@100ms": Style(Colorblind[8][1], "triangle", "dotted"),
    "random": Style(Colorblind[8][3], "diamond", "dotdash"),
    "static": Style(Colorblind[8][4], "inverted_triangle", "dashdot"),
    "no-stealing": Style(Colorblind[8][5], "star", [8, 2]),
    "dask-again": Style(Colorblind[8][6], "hex", [2, 2]),
}


def styles_of(policies: Sequence[str]) -> dict[str, Style]:
    """Return a style for each policy: always the same for those that are known, else one that is free."""
    free = [style for name, style in _STYLES.items() if name not in policies] or list(_STYLES.values())
    others = {name: free[i % len(free)] for i, name in enumerate(n for n in policies if n not in _STYLES)}
    return {name: _STYLES.get(name) or others[name] for name in policies}


def order(policies: Iterable[str]) -> list[str]:
    """Return policies in the order of legends: stock Dask, other baselines, ours."""
    return sorted(set(policies), key=lambda name: (is_ours(name), name != STOCK, name))


# Speed-ups


def speed_up_bars(title: str, cases: Mapping[str, Case]) -> Any:
    """Return bars of the speed-ups of all policies over stock Dask; None if there are none.

    Parameters
    ----------
    title : str
    cases : mapping
        Of one cluster shape, by the name to show.
    """
    policies = order(policies_of(cases.values()))
    bars: dict[str, list[dict[str, Any]]] = {policy: [] for policy in policies}
    ticks: dict[float, str] = {}
    place = 0.0  # from the top down, with a gap after each workload
    for name, case in cases.items():
        found = [(policy, ratio) for policy in policies if (ratio := case.speed_up(policy)) is not None]
        if not found:
            continue
        ticks[place + (len(found) - 1) / 2] = name
        for policy, ratio in found:
            bars[policy].append({"place": place, "workload": name, **_bar(policy, case, ratio)})
            place += 1
        place += 1
    if not ticks:
        return None
    all_bars = [bar for own in bars.values() for bar in own]
    plot = _figure(
        f"Speed-up over the best stock Dask, {title}",
        x_axis_label="median time of stock Dask / median time (above 1: faster; whiskers: 95 % intervals)",
        x_axis_type="log",
        x_range=Range1d(
            start=min(0.8, 0.93 * min(bar["low"] for bar in all_bars)),
            end=max(1.25, 1.07 * max(bar["high"] for bar in all_bars)),
        ),
        y_range=Range1d(start=place - 1, end=-1),
        width=_WIDE,
        height=_FRAME + round(_BAR * place),
        min_border_left=20 + _LETTER * max(map(len, ticks.values())),
    )
    items = []
    styles = styles_of(policies)
    tips = [("", "@workload, @policy"), ("speed-up", "@shown"), ("time", "@time"), ("stock dask", "@dask")]
    for policy, own in bars.items():
        if own:
            options = {"left": 1, "height": 0.85, "color": styles[policy].colour, "alpha": 0.8}
            boxes = plot.hbar(y="place", right="ratio", source=_source(own), **options)
            _whisker(plot, boxes, dimension="width", base="place", colour="#404040")
            plot.add_tools(HoverTool(renderers=[boxes], tooltips=tips))
            items.append((_noise_or(policy), [boxes]))
    plot.add_layout(Span(location=1, dimension="height", line_color="black", line_width=1.5))
    _legend(plot, items, columns=8)
    plot.xaxis.ticker = FixedTicker(ticks=list(_SPEED_UPS))
    plot.xaxis.formatter = NumeralTickFormatter(format="0.[00]")
    plot.yaxis.ticker = FixedTicker(ticks=list(ticks))
    plot.yaxis.major_label_overrides = ticks
    plot.ygrid.grid_line_color = None
    return plot


def _bar(policy: str, case: Case, ratio: Estimate) -> dict[str, Any]:
    return {
        "ratio": ratio.value,
        "low": ratio.value if ratio.low is None else ratio.low,
        "high": ratio.value if ratio.high is None else ratio.high,
        "policy": policy,
        "shown": str(ratio),
        "time": _time(case.of(policy)),
        "dask": _time(case.stock),
    }


def _noise_or(policy: str) -> str:
    return f"{policy} (noise)" if policy == AGAIN else policy


def _time(sample: Sample | None) -> str:
    if sample is None:
        return ""
    low, high = sample.range_s
    written = f", {sample.lowering}" if sample.lowering else ""
    return f"{sample.median_s:.4g} s ({low:.4g}–{high:.4g} s), {len(sample.runs)} runs{written}"


# Scaling


def scaling_figures(name: str, cases: Mapping[int, Case]) -> list[Any]:
    """Return throughput, efficiency and steal rate of a workload, its cases given by worker threads."""
    cases = dict(sorted(cases.items()))
    throughput = _against_workers(name, cases, "Throughput", "ops/s", _ops_per_s)
    known = [(n, bound) for n, case in cases.items() if (bound := _bound_ops_per_s(case)) is not None]
    if known:
        line = throughput.line(*zip(*known, strict=True), color="black", line_dash="dotted", line_width=1.5)
        throughput.legend[0].items.append(LegendItem(label="bound", renderers=[line]))
        throughput.y_range.end = max(throughput.y_range.end, *(1.05 * bound for _, bound in known))
    efficiency = _against_workers(name, cases, "Efficiency", "bound / time [%]", _efficiency)
    efficiency.y_range = Range1d(start=0, end=105)
    steals = _against_workers(name, cases, "Steal rate", "confirmed steals per second", _steals_per_s)
    return [throughput, efficiency, steals]


def _ops_per_s(sample: Sample) -> list[float]:
    return [run.ops / run.makespan_s for run in sample.runs]


def _efficiency(sample: Sample) -> list[float]:
    return [_PERCENT * run.efficiency for run in sample.runs if run.efficiency is not None]


def _steals_per_s(sample: Sample) -> list[float]:
    return [run.steals_confirmed / run.makespan_s for run in sample.runs]


def _bound_ops_per_s(case: Case) -> float | None:
    sample = next((one for one in (case.stock, *case.samples) if one and not one.is_broken), None)
    bound_s = sample.median_of("bound_s") if sample else None
    return sample.runs[0].ops / bound_s if sample and bound_s else None


def _against_workers(
    name: str, cases: Mapping[int, Case], title: str, unit: str, values_of: Callable[[Sample], list[float]]
) -> Any:
    plot = _figure(f"{title}: {name}", x_axis_label="worker threads", y_axis_label=unit, x_axis_type="log")
    items = []
    policies = order({STOCK, *policies_of(cases.values())} - {AGAIN})
    highest = 0.0
    value_label = "@y{0,0.[0]} (@low{0,0.[0]}–@high{0,0.[0]})"
    for policy, style in styles_of(policies).items():
        points = []
        for n, case in cases.items():
            sample = case.of(policy)
            if values := values_of(sample) if sample else []:
                low, high = min(values), max(values)
                labels = {"policy": policy, "cluster": str(case.shape)}
                points.append({"x": n, "y": median(values), "low": low, "high": high, **labels})
                highest = max(highest, high)
        if points:
            tips = [("", "@policy"), ("cluster", "@cluster"), (unit, value_label)]
            line, dots = _curve(plot, points, style, tips)
            _whisker(plot, dots, dimension="height", base="x", colour=style.colour)
            items.append((policy, [line, dots]))
    _workers_axis(plot, list(cases), "0")
    plot.y_range = Range1d(start=0, end=1.05 * highest or 1)
    plot.yaxis.formatter = NumeralTickFormatter(format="0,0.[0]")
    _legend(plot, items)
    return plot


def efficiency_figure(title: str, found: Mapping[str, Mapping[str, Mapping[int, float]]]) -> Any:
    """Return efficiency against the number of workers.

    Parameters
    ----------
    title : str
    found : mapping
        Efficiency, at most 1, by policy, by variant of the graph, and by workers. The first variant is drawn
        with thin lines, the others with thicker ones.
    """
    plot = _figure(title, x_axis_label="workers", y_axis_label="efficiency [%]", x_axis_type="log", width=310)
    items: list[tuple[str, list[Any]]] = []
    ticks: set[int] = set()
    styles = styles_of(list(found))
    for policy, variants in found.items():
        for width, (variant, reached) in enumerate(variants.items(), start=1):
            ticks |= reached.keys()
            points = [{"x": n, "y": _PERCENT * value} for n, value in reached.items()]
            marks = _curve(plot, points, styles[policy], width=1.5 * width, size=4 + 3 * width)
            items.append((f"{policy}, {variant}", marks))
    plot.y_range = Range1d(start=0, end=105)
    _workers_axis(plot, sorted(ticks), "0,0")
    _legend(plot, items, columns=2)
    return plot


# METG


def metg_figure(title: str, curves: Sequence[Curve]) -> Any:
    """Return efficiency against granularity, with a mark at each METG(50 %)."""
    plot = _figure(
        f"Efficiency and METG(50 %): {title}",
        x_axis_label="mean task granularity, makespan × threads / tasks [ms]",
        y_axis_label="efficiency [%]",
        x_axis_type="log",
        width=_WIDE,
        height=_HEIGHT + 60,
    )
    items = []
    # Several curves of one policy, which differ in lowering or costs, go by their labels.
    names = [curve.policy for curve in curves]
    labels = names if len(set(names)) == len(names) else [curve.label for curve in curves]
    styles = styles_of(labels)
    for curve, label in zip(curves, labels, strict=True):
        points = [
            {"x": _MS_PER_S * granularity_s, "y": _PERCENT * reached, "size": size, "label": curve.label}
            for granularity_s, reached, size in zip(
                curve.granularity_s, curve.efficiency, curve.sizes, strict=True
            )
        ]
        tips = [("", "@label"), (curve.swept, "@size"), ("granularity", "@x{0.[000]} ms")]
        marks = _curve(plot, points, styles[label], [*tips, ("efficiency", "@y{0.[0]} %")])
        found = curve.result.granularity_s
        if found is not None:
            where = [_MS_PER_S * found], [_PERCENT * THRESHOLD]
            options = {"marker": "x", "size": 14, "line_width": 3, "color": styles[label].colour}
            marks.append(plot.scatter(*where, **options))
        metg = "no METG" if found is None else f"{_MS_PER_S * found:.3g} ms"
        items.append((f"{curve.label}: {metg}", marks))
    plot.add_layout(Span(location=_PERCENT * THRESHOLD, dimension="width", line_dash="dotted"))
    plot.y_range = Range1d(start=0, end=105)
    plot.xaxis.formatter = NumeralTickFormatter(format="0.[000]")
    plot.xaxis.ticker = FixedTicker(ticks=[m * 10.0**e for e in range(-3, 6) for m in (1, 1.5, 2, 3, 5, 7)])
    _legend(plot, items, columns=2)
    return plot


# What all have


def _figure(title: str, **options: Any) -> Any:
    tools = "pan,wheel_zoom,box_zoom,reset,save"
    plot: Any = figure(**{"width": _WIDTH, "height": _HEIGHT, "title": title, "tools": tools, **options})
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.title.text_font_size = "11pt"
    plot.axis.axis_label_text_font_style = "normal"
    plot.axis.axis_label_text_font_size = "10pt"
    plot.axis.major_label_text_font_size = "10pt"
    plot.axis.minor_tick_line_color = None
    plot.grid.grid_line_color = "#E5E5E5"
    plot.outline_line_color = None
    return plot


def _source(points: Sequence[Mapping[str, Any]]) -> ColumnDataSource:
    return ColumnDataSource({name: [point[name] for point in points] for name in points[0]})


def _curve(
    plot: Any,
    points: Sequence[Mapping[str, Any]],
    style: Style,
    tooltips: Sequence[tuple[str, str]] = (),
    *,
    width: float = 2,
    size: int = 9,
) -> list[Any]:
    """Draw a line with a mark at each point, and return both."""
    source = _source(points)
    line = plot.line("x", "y", source=source, color=style.colour, line_dash=style.dash, line_width=width)
    dots = plot.scatter("x", "y", source=source, color=style.colour, marker=style.marker, size=size)
    if tooltips:
        plot.add_tools(HoverTool(renderers=[dots], tooltips=list(tooltips)))
    return [line, dots]


def _workers_axis(plot: Any, ticks: Sequence[int], form: str) -> None:
    plot.x_range = Range1d(start=ticks[0] / 1.15, end=ticks[-1] * 1.15)
    plot.xaxis.ticker = FixedTicker(ticks=list(ticks))
    plot.xaxis.formatter = NumeralTickFormatter(format=form)


def _whisker(plot: Any, marks: Any, *, dimension: Any, base: str, colour: str) -> None:
    """Draw a line from the column `low` to the column `high` of marks, hidden when these are."""
    whisker: Any = Whisker(
        level="overlay",
        source=marks.data_source,
        dimension=dimension,
        base=base,
        lower="low",
        upper="high",
        line_color=colour,
    )
    for head in (whisker.lower_head, whisker.upper_head):
        head.size = 6
        head.line_color = colour
    plot.add_layout(whisker)
    marks.js_link("visible", whisker, "visible")


def _legend(plot: Any, items: Sequence[tuple[str, list[Any]]], columns: int = 4) -> None:
    """Put a legend above the figure, where it hides nothing; a click on an entry hides it."""
    legend: Any = Legend(
        items=[LegendItem(label=label, renderers=renderers) for label, renderers in items],
        orientation="horizontal",
        location="left",
        ncols=columns,
        click_policy="hide",
        border_line_color=None,
        label_text_font_size="9pt",
    )
    legend.padding = 0
    plot.add_layout(legend, "above")
