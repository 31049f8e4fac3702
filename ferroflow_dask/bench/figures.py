"""Figures of benchmark rows, drawn by Bokeh: speed-ups, scaling and METG curves.

Policies differ by marker and dash too; the colours are Okabe and Ito's, which can be told apart with any
colour vision (bokeh.palettes.Colorblind). Whiskers are ranges of runs; those of speed-ups 95 % intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, NumeralTickFormatter, Range1d
from bokeh.models.annotations import Legend, LegendItem, Span, Whisker
from bokeh.palettes import Colorblind
from bokeh.plotting import figure

from ferroflow_dask.bench.comparison import AGAIN, STOCK, Case, Sample, is_ours, policies_of
from ferroflow_dask.bench.estimates import Estimate, median
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


def order(policies: Sequence[str]) -> list[str]:
    """Return policies in the order of legends: stock Dask, other baselines, ours."""
    return sorted(set(policies), key=lambda name: (is_ours(name), name != STOCK, name))


# Speed-ups


@dataclass(frozen=True, slots=True)
class _Bar:
    """The speed-up of a policy on a workload, and where it is drawn."""

    place: float
    name: str
    policy: str
    case: Case
    ratio: Estimate


def speed_up_bars(title: str, cases: Mapping[str, Case]) -> Any:
    """Return bars of the speed-ups of all policies over stock Dask; None if there are none.

    Parameters
    ----------
    title : str
    cases : mapping
        Of one cluster shape, by the name to show.
    """
    policies = order(policies_of(cases.values()))
    bars, ticks = _placed(cases, policies)
    if not bars:
        return None
    top = bars[-1].place + 1
    plot = _figure(
        f"Speed-up over the best stock Dask, {title}",
        x_axis_label="median time of stock Dask / median time (above 1: faster; whiskers: 95 % intervals)",
        x_axis_type="log",
        y_range=Range1d(start=top, end=-1),
        width=_WIDE,
        height=_FRAME + round(_BAR * (top + 1)),
        min_border_left=20 + _LETTER * max(map(len, ticks.values())),
    )
    items = []
    styles = styles_of(policies)
    for policy in policies:
        own = [bar for bar in bars if bar.policy == policy]
        if not own:
            continue
        source = ColumnDataSource(_bar_columns(own))
        boxes = plot.hbar(
            y="place",
            left=1,
            right="ratio",
            height=0.85,
            source=source,
            color=styles[policy].colour,
            alpha=0.8,
        )
        _whisker(plot, boxes, dimension="width", base="place", colour="#404040")
        tips = [
            ("", "@workload, @policy"),
            ("speed-up", "@shown"),
            ("time", "@time"),
            ("stock dask", "@dask"),
        ]
        _hover(plot, boxes, tips)
        items.append((_noise_or(policy), [boxes]))
    plot.add_layout(Span(location=1, dimension="height", line_color="black", line_width=1.5))
    _legend(plot, items, columns=8)
    _ratio_axes(plot, bars, ticks)
    return plot


def _ratio_axes(plot: Any, bars: Sequence[_Bar], names: Mapping[float, str]) -> None:
    ends = [
        end for bar in bars for end in (bar.ratio.value, bar.ratio.low, bar.ratio.high) if end is not None
    ]
    plot.x_range = Range1d(start=min(0.8, 0.93 * min(ends)), end=max(1.25, 1.07 * max(ends)))
    plot.xaxis.ticker = FixedTicker(ticks=list(_SPEED_UPS))
    plot.xaxis.formatter = NumeralTickFormatter(format="0.[00]")
    plot.yaxis.ticker = FixedTicker(ticks=list(names))
    plot.yaxis.major_label_overrides = names
    plot.ygrid.grid_line_color = None


def _placed(cases: Mapping[str, Case], policies: Sequence[str]) -> tuple[list[_Bar], dict[float, str]]:
    """Return bars from the top down, a gap after each workload, and the workloads' names by their middles."""
    bars: list[_Bar] = []
    ticks: dict[float, str] = {}
    place = 0.0
    for name, case in cases.items():
        found = [(policy, ratio) for policy in policies if (ratio := case.speed_up(policy)) is not None]
        if not found:
            continue
        ticks[place + (len(found) - 1) / 2] = name
        for policy, ratio in found:
            bars.append(_Bar(place, name, policy, case, ratio))
            place += 1
        place += 1
    return bars, ticks


def _noise_or(policy: str) -> str:
    return f"{policy} (noise)" if policy == AGAIN else policy


def _bar_columns(bars: Sequence[_Bar]) -> dict[str, list[Any]]:
    lows = [bar.ratio.value if bar.ratio.low is None else bar.ratio.low for bar in bars]
    highs = [bar.ratio.value if bar.ratio.high is None else bar.ratio.high for bar in bars]
    return {
        "place": [bar.place for bar in bars],
        "ratio": [bar.ratio.value for bar in bars],
        "low": lows,
        "high": highs,
        "workload": [bar.name for bar in bars],
        "policy": [bar.policy for bar in bars],
        "shown": [str(bar.ratio) for bar in bars],
        "time": [_time(bar.case.of(bar.policy)) for bar in bars],
        "dask": [_time(bar.case.stock) for bar in bars],
    }


def _time(sample: Sample | None) -> str:
    if sample is None:
        return ""
    low, high = sample.range_s
    written = f", {sample.lowering}" if sample.lowering else ""
    return f"{sample.median_s:.4g} s ({low:.4g}–{high:.4g} s), {len(sample.runs)} runs{written}"


# Scaling


@dataclass(frozen=True, slots=True)
class Scaling:
    """One workload on clusters of several sizes: its cases by threads in all."""

    name: str
    cases: dict[int, Case] = field(default_factory=dict)


def scaling_figures(scaling: Scaling) -> list[Any]:
    """Return throughput, efficiency and steal rate against the number of workers."""
    policies = order([STOCK, *policies_of(scaling.cases.values())])
    policies = [policy for policy in policies if policy != AGAIN]
    throughput = _against_workers(scaling, policies, "Throughput", "ops/s", _ops_per_s)
    bounds = [(n, _bound_ops_per_s(case)) for n, case in sorted(scaling.cases.items())]
    known = [(n, bound) for n, bound in bounds if bound is not None]
    if known:
        line = throughput.line(*zip(*known, strict=True), color="black", line_dash="dotted", line_width=1.5)
        throughput.legend[0].items.append(LegendItem(label="bound", renderers=[line]))
        throughput.y_range.end = max(throughput.y_range.end, *(1.05 * bound for _, bound in known))
    efficiency = _against_workers(scaling, policies, "Efficiency", "bound / time [%]", _efficiency)
    efficiency.y_range = Range1d(start=0, end=105)
    steals = _against_workers(scaling, policies, "Steal rate", "confirmed steals per second", _steals_per_s)
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
    scaling: Scaling,
    policies: Sequence[str],
    title: str,
    unit: str,
    values_of: Callable[[Sample], list[float]],
) -> Any:
    plot = _figure(
        f"{title}: {scaling.name}", x_axis_label="worker threads", y_axis_label=unit, x_axis_type="log"
    )
    items = []
    styles = styles_of(policies)
    for policy in policies:
        source = ColumnDataSource(_points(scaling, policy, values_of))
        if not source.data["n"]:
            continue
        style = styles[policy]
        line = plot.line("n", "middle", source=source, color=style.colour, line_dash=style.dash, line_width=2)
        dots = plot.scatter("n", "middle", source=source, color=style.colour, marker=style.marker, size=9)
        _whisker(plot, dots, dimension="height", base="n", colour=style.colour)
        values = "@middle{0,0.[0]} (@low{0,0.[0]}–@high{0,0.[0]})"
        _hover(plot, dots, [("", "@policy"), ("cluster", "@cluster"), (unit, values)])
        items.append((policy, [line, dots]))
    ticks = sorted(scaling.cases)
    plot.xaxis.ticker = FixedTicker(ticks=ticks)
    plot.x_range = Range1d(start=ticks[0] / 1.15, end=ticks[-1] * 1.15)
    highest = max((max(marks[-1].data_source.data["high"]) for _, marks in items), default=1)
    plot.y_range = Range1d(start=0, end=1.05 * highest or 1)
    plot.yaxis.formatter = NumeralTickFormatter(format="0,0.[0]")
    plot.xaxis.formatter = NumeralTickFormatter(format="0")
    _legend(plot, items)
    return plot


def _points(
    scaling: Scaling, policy: str, values_of: Callable[[Sample], list[float]]
) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [] for name in ("n", "middle", "low", "high", "policy", "cluster")}
    for n, case in sorted(scaling.cases.items()):
        sample = case.of(policy)
        values = values_of(sample) if sample else []
        if not values:
            continue
        columns["n"].append(n)
        columns["middle"].append(median(values))
        columns["low"].append(min(values))
        columns["high"].append(max(values))
        columns["policy"].append(_noise_or(policy))
        columns["cluster"].append(str(case.shape))
    return columns


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
        style = styles[policy]
        for width, (variant, points) in enumerate(variants.items(), start=1):
            ticks |= points.keys()
            x, y = list(points), [_PERCENT * value for value in points.values()]
            line = plot.line(x, y, color=style.colour, line_dash=style.dash, line_width=1.5 * width)
            dots = plot.scatter(x, y, color=style.colour, marker=style.marker, size=4 + 3 * width)
            items.append((f"{policy}, {variant}", [line, dots]))
    plot.y_range = Range1d(start=0, end=105)
    plot.x_range = Range1d(start=min(ticks) / 1.15, end=max(ticks) * 1.15)
    plot.xaxis.ticker = FixedTicker(ticks=sorted(ticks))
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
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
    for curve, style in zip(curves, _styles(curves), strict=True):
        source = ColumnDataSource(
            {
                "granularity": [_MS_PER_S * value for value in curve.granularity_s],
                "efficiency": [_PERCENT * value for value in curve.efficiency],
                "size": list(curve.sizes),
                "label": [curve.label] * len(curve.sizes),
            }
        )
        line = plot.line(
            "granularity", "efficiency", source=source, color=style.colour, line_dash=style.dash, line_width=2
        )
        dots = plot.scatter(
            "granularity", "efficiency", source=source, color=style.colour, marker=style.marker, size=9
        )
        tips = [("", "@label"), (curve.swept, "@size"), ("granularity", "@granularity{0.[000]} ms")]
        _hover(plot, dots, [*tips, ("efficiency", "@efficiency{0.[0]} %")])
        found = curve.result.granularity_s
        if found is None:
            items.append((f"{curve.label}: no METG", [line, dots]))
            continue
        ms = _MS_PER_S * found
        mark = plot.scatter(
            [ms], [_PERCENT * THRESHOLD], marker="x", size=14, line_width=3, color=style.colour
        )
        items.append((f"{curve.label}: {ms:.3g} ms", [line, dots, mark]))
    plot.add_layout(Span(location=_PERCENT * THRESHOLD, dimension="width", line_dash="dotted"))
    plot.y_range = Range1d(start=0, end=105)
    plot.xaxis.formatter = NumeralTickFormatter(format="0.[000]")
    plot.xaxis.ticker = FixedTicker(ticks=[m * 10.0**e for e in range(-3, 6) for m in (1, 1.5, 2, 3, 5, 7)])
    _legend(plot, items, columns=2)
    return plot


def _styles(curves: Sequence[Curve]) -> list[Style]:
    # Several curves of one policy, which differ in lowering or costs, go by their labels.
    names = [curve.policy for curve in curves]
    labels = names if len(set(names)) == len(names) else [curve.label for curve in curves]
    styles = styles_of(labels)
    return [styles[label] for label in labels]


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


def _hover(plot: Any, renderer: Any, tooltips: list[tuple[str, str]]) -> None:
    plot.add_tools(HoverTool(renderers=[renderer], tooltips=tooltips))


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
