"""Page of public runs: Markdown and one picture, made from a summary and nothing else.

The same summary gives the same bytes. Losses are printed like gains, and sorted with them in the picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from statistics import geometric_mean
from typing import Any

from ferroflow_dask.bench.markdown import BROKEN, NOTHING, count, number, percent, table, text
from ferroflow_dask.bench.public.base import SKIPPED
from ferroflow_dask.bench.public.policies import AGAIN, OURS, STOCK
from ferroflow_dask.bench.public.ratios import ENOUGH, Ratio, coverage, is_above, is_below
from ferroflow_dask.bench.public.summary import PLANTED, PLANTED_SMALL, ProgramSummary, Summary
from ferroflow_dask.printable import printable

#: Signs of an interval that lies wholly above or below 1.
_FASTER, _SLOWER = "▲", "▼"
#: Of the picture [pixels].
_WIDTH, _LEFT, _ROW = 900, 330, 16
_TICKS = (0.25, 0.5, 0.7, 1, 1.4, 2, 4, 8, 16, 32)
_COLOURS = {True: "#0072b2", False: "#d55e00"}
_MEASURES = {
    "first_result_s": "first result",
    "started_s": "first task",
    "scheduler_cpu_s": "scheduler CPU",
    "worker_cpu_s": "worker CPU",
    "peak_worker_memory": "memory",
    "bytes_moved": "bytes",
    "messages": "messages",
}
#: Planted delays are looked for in programs that take longer [s].
_LONG_S = 0.5
#: A measure below this is named as a cause of a loss.
_WORSE = 0.9


def page(summary: Summary, picture: str) -> str:
    """Return the page in Markdown; `picture` is the file name of the picture beside it, if there is one."""
    return printable("\n\n".join(_parts(summary, picture))) + "\n"


def _parts(summary: Summary, picture: str) -> Iterator[str]:
    yield "# Benchmarks"
    yield _method(summary)
    if picture:
        yield f"![Duration under stock Dask divided by duration under the plugin, by program]({picture})"
    yield from tables(summary)


def tables(summary: Summary) -> Iterator[str]:
    """Yield the tables of a summary, without the description of the method."""
    suites: dict[str, list[ProgramSummary]] = {}
    for program in summary.programs:
        if not program.broken.get("dask", "").startswith(SKIPPED):
            suites.setdefault(program.suite, []).append(program)
    yield "## Geometric means"
    yield _means(suites)
    for name, programs in suites.items():
        yield f"## {name}"
        if source := summary.sources.get(name, programs[0].source):
            yield source
        yield _durations(programs)
        yield "Other measures, stock Dask divided by the plugin:"
        yield _measures(programs)
        if any(program.alone for program in programs):
            yield "Median durations without stock Dask [s]:"
            yield _by_name(programs, "alone", number)
        if any(program.anchors for program in programs):
            yield "Stock Dask's duration divided by that of the same computation without a cluster:"
            yield _by_name(programs, "anchors", _plain)
        if losses := [program for program in programs if program.is_loss]:
            yield "Losses:"
            yield "\n".join(f"- {text(program.program)}: {cause(program)}" for program in losses)
    yield from _others(summary.others)
    yield from _not_run(summary.programs)


def _method(summary: Summary) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in summary.versions.items())
    rounds = max((program.runs for program in summary.programs), default=0)
    place = "in a process of its own" if summary.cluster == "separate" else "in the process of the client"
    idle = max((program.idle or 0.0 for program in summary.programs), default=0.0)
    return "\n".join(
        (
            "`ferroflow bench public` runs programs that others wrote. It prints losses like gains.",
            "",
            f"- Machine: {summary.machine}. {versions}.",
            f"- Commit {summary.commit or 'unknown'}, {summary.date}.",
            f"- Each side has a cluster of its own with {count(summary.workers, 'worker')} of one thread. "
            f"The scheduler runs {place}.",
            "- The sides are stock Dask, stock Dask again, and stock Dask after `install(client)`.",
            f"- Each program runs once on a new or unused cluster, then in at most {rounds} rounds. A seed "
            "gives the order of the sides.",
            "- A ratio is stock Dask's duration divided by that of the other side, as median over the "
            "rounds. Above 1, the other side is faster.",
            f"- Brackets are intervals for the median, of ordered ratios. {_FASTER} and {_SLOWER} mark "
            f"intervals without 1. {covers(rounds)}",
            f"- The column *again* shows stock Dask against itself, which is the noise. {noise(summary)}",
            *_planted(summary),
            "- All answers are compared after the clock has stopped. A wrong answer, a hang, an error or a "
            "task that ran twice makes a program broken.",
            f"- The processes of idle sides are stopped. They took at most {percent(idle)} of the CPU time.",
            "- TPC-H queries are derived from TPC-H. They are not comparable with published TPC-H results.",
        )
    )


def noise(summary: Summary) -> str:
    """Return how many intervals of stock Dask against itself leave out 1, and how many would by chance."""
    again = [one for one in summary.programs if one.again is not None and one.again[1] is not None]
    n_wrong = sum(is_above(one.again) or is_below(one.again) for one in again)
    line = f"{n_wrong} of {len(again)} of these intervals leave out 1."
    enough = [one for one in again if one.runs >= ENOUGH]
    if not enough or len(enough) == len(again):
        return line
    n_wrong = sum(is_above(one.again) or is_below(one.again) for one in enough)
    return f"{line} With at least {ENOUGH} rounds: {n_wrong} of {len(enough)}."


def covers(rounds: int) -> str:
    """Return how often intervals cover the median."""
    if rounds >= ENOUGH:
        return f"They cover it at least 95 times in 100, from {ENOUGH} rounds on."
    often = round(100 * coverage(rounds, 0)) if rounds else 0
    return f"Those of {count(rounds, 'round')} are ranges, which cover it {often} times in 100."


def _planted(summary: Summary) -> Iterator[str]:
    """Yield how well planted delays are found."""
    long = [
        one for one in summary.programs if one.planted and one.runs >= ENOUGH and (one.stock_s or 0) > _LONG_S
    ]
    if not long:
        return
    n_found = sum(is_below(one.planted) for one in long)
    by_suite: dict[str, list[float]] = {}
    for one in summary.programs:
        if one.planted_small is not None:
            by_suite.setdefault(one.suite, []).append(one.planted_small)
    means = ", ".join(f"{name} {geometric_mean(ratios):.3f}" for name, ratios in by_suite.items())
    yield (
        f"- Two delays were planted in stock Dask again. One of {percent(PLANTED)} of the median is marked "
        f"as slower in {n_found} of {len(long)} programs above {_LONG_S:g} s. One of "
        f"{percent(PLANTED_SMALL)} gives these geometric means: {means}."
    )


def _means(suites: Mapping[str, Sequence[ProgramSummary]]) -> str:
    header = ("suite", "programs", "again", "plugin", "worst", "best", "first run", "losses", "broken")
    lines = []
    for name, programs in suites.items():
        ours = [program.ours[0] for program in programs if program.ours]
        again = [program.again[0] for program in programs if program.again]
        first = [program.first[0] for program in programs if program.first]
        lines.append(
            (
                name,
                str(len(programs)),
                _mean(again),
                _mean(ours),
                _plain(min(ours, default=None)),
                _plain(max(ours, default=None)),
                _mean(first),
                str(sum(program.is_loss for program in programs)),
                str(sum(OURS in program.broken for program in programs)),
            )
        )
    return table(header, lines, right=header[1:])


def _mean(ratios: Sequence[float]) -> str:
    return _plain(geometric_mean(ratios) if ratios else None)


def _durations(programs: Sequence[ProgramSummary]) -> str:
    has_bounds = any(program.bound_s for program in programs)
    sides = list(dict.fromkeys(name for program in programs for name in program.sides))
    bounds = ["bound [s]"] * has_bounds
    header = (
        *("program", "tasks", "tasks, plugin", *bounds, "stock [s]", "again", "plugin"),
        *(*sides, "first run"),
    )
    lines = [
        (
            program.program,
            f"{program.tasks[0]:,}",
            f"{program.tasks[1]:,}",
            *([number(program.bound_s)] * has_bounds),
            BROKEN if STOCK in program.broken else number(program.stock_s),
            BROKEN if AGAIN in program.broken else _ratio(program.again),
            BROKEN if OURS in program.broken else _ratio(program.ours),
            *(BROKEN if name in program.broken else _ratio(program.sides.get(name)) for name in sides),
            _ratio(program.first),
        )
        for program in programs
    ]
    return table(header, lines, right=header[1:])


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return NOTHING
    value, low, high = ratio
    if low is None or high is None:
        return f"{value:.2f}"
    sign = f"{_FASTER} " if is_above(ratio) else f"{_SLOWER} " if is_below(ratio) else ""
    return f"{sign}{value:.2f} [{low:.2f}, {high:.2f}]"


def _plain(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def _measures(programs: Sequence[ProgramSummary]) -> str:
    header = ("program", *_MEASURES.values(), "bundles")
    lines = [
        (
            program.program,
            *(_plain(program.measures.get(name)) for name in _MEASURES),
            NOTHING if program.bundled is None else "on" if program.bundled else "off",
        )
        for program in programs
    ]
    return table(header, lines, right=header[1:-1])


def _by_name(programs: Sequence[ProgramSummary], kind: str, words: Callable[[Any], str]) -> str:
    """Return a table of a field of programs that has values by name."""
    values = {program.program: getattr(program, kind) for program in programs if getattr(program, kind)}
    names = list(dict.fromkeys(name for own in values.values() for name in own))
    lines = [(program, *(words(own.get(name)) for name in names)) for program, own in values.items()]
    return table(("program", *names), lines, right=names)


def cause(program: ProgramSummary) -> str:
    """Return the measures that became worse, for a program that the plugin makes slower."""
    names = {**_MEASURES, "client_cpu_s": "client CPU", "created_s": "arrival of the first graph"}
    worse = sorted((ratio, name) for name, ratio in program.measures.items() if ratio < _WORSE)
    listed = ", ".join(f"{names[name]} {ratio:.2f}" for ratio, name in worse if name in names)
    return f"{_ratio(program.ours)}; worse: {listed or 'no measure'}"


def _others(others: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the tables of peers, and of makespans in virtual time."""
    peers = [one for one in others if one["cluster"] != "virtual"]
    if peers:
        yield "## Other schedulers"
        durations = [number(one["seconds"]) if one["status"] == "ok" else one["status"] for one in peers]
        names = [(one["program"], one["by"], one["way"]) for one in peers]
        rows = [(*name, duration) for name, duration in zip(names, durations, strict=True)]
        yield table(("program", "scheduler", "way", "duration [s]"), rows, right=("duration [s]",))
    virtual: dict[tuple[str, int], dict[str, float]] = {}
    for one in others:
        if one["cluster"] == "virtual":
            virtual.setdefault((one["program"], one["workers"]), {})[one["by"]] = one["seconds"]
    if virtual:
        yield "## Simulated makespans"
        yield "Workflows in virtual time, with one thread for each worker:"
        header = ("workflow", "workers", "stock [s]", "plugin [s]", "ratio")
        lines = []
        for (name, workers), seconds in virtual.items():
            stock, ours = seconds.get("dask"), seconds.get("ferroflow")
            ratio = stock / ours if stock and ours else None
            lines.append((name, f"{workers:,}", number(stock), number(ours), _plain(ratio)))
        yield table(header, lines, right=header[1:])


def _not_run(programs: Sequence[ProgramSummary]) -> Iterator[str]:
    lines = [
        f"- {text(program.suite)} {text(program.program)}, {text(side)}: {text(reason.removeprefix(SKIPPED))}"
        for program in programs
        for side, reason in program.broken.items()
    ]
    if lines:
        yield "## Broken, or not run"
        yield "\n".join(lines)


def picture(summary: Summary) -> str:
    """Return a picture of all ratios in SVG: sorted, with intervals, on a logarithmic axis."""
    rated = sorted(
        (program for program in summary.programs if program.ours), key=lambda program: _value(program.ours)
    )
    low = min(0.5, *(_value(program.ours) for program in rated)) if rated else 0.5
    high = max(2.0, *(_value(program.ours) for program in rated)) if rated else 2.0
    height = _ROW * (len(rated) + 3)

    def x(value: float) -> float:
        part = (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
        return _LEFT + (_WIDTH - _LEFT - 20) * min(1.0, max(0.0, part))

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="11" fill="#808080">'
    ]
    for tick in (tick for tick in _TICKS if low <= tick <= high):
        weight = 2 if tick == 1 else 0.5
        lines.append(
            f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{_ROW}" y2="{height - 2 * _ROW}" '
            f'stroke="#808080" stroke-width="{weight}"/>'
            f'<text x="{x(tick):.1f}" y="{height - _ROW}" text-anchor="middle">{tick:g}</text>'
        )
    for n, program in enumerate(rated):
        lines.append(_mark(program, _ROW * (n + 1.7), x))
    lines.append(
        f'<text x="{_LEFT}" y="{height - 2}">stock Dask divided by the plugin; right of 1 is faster</text>'
    )
    return "\n".join([*lines, "</svg>"]) + "\n"


def _value(ratio: Ratio | None) -> float:
    assert ratio is not None
    return ratio[0]


def _mark(program: ProgramSummary, y: float, x: Any) -> str:
    value = _value(program.ours)
    _, low, high = program.ours or (value, None, None)
    colour = _COLOURS[value >= 1]
    name = escape(printable(text(f"{program.suite} {program.program}")))
    return (
        f'<text x="{_LEFT - 8}" y="{y + 3:.1f}" text-anchor="end">{name}</text>'
        f'<line x1="{x(low or value):.1f}" x2="{x(high or value):.1f}" y1="{y:.1f}" y2="{y:.1f}" '
        f'stroke="{colour}" stroke-width="2"/>'
        f'<circle cx="{x(value):.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{value:.2f}</title></circle>'
    )
