"""Plots: the page holds the data and needs no network; a picture's missing parts are told in one line."""

from __future__ import annotations

import builtins
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_rows import rows
from browser import chromium
from command_line import USAGE, assert_one_line, ferroflow
from evaluate import main as program
from flexflow_plot import flexflow_plot
from flexflow_training import Compared, Trained

from ferroflow_dask.bench import plots
from ferroflow_dask.bench.comparison import cases_of
from ferroflow_dask.bench.figures import (
    efficiency_figure,
    metg_figure,
    scaling_figures,
    speed_up_bars,
    styles_of,
)
from ferroflow_dask.bench.metg import metg_from_rows
from ferroflow_dask.bench.plots import write_html, write_png
from ferroflow_dask.bench.rows import read_rows
from ferroflow_dask.exceptions import UsageError

DATA = Path(__file__).parents[1] / "data" / "bench.jsonl"


def labels(plot: Any) -> list[str]:
    return [item.label.value for item in plot.legend[0].items]


def glyph_data(plot: Any, i: int = 0) -> dict[str, list[Any]]:
    data: dict[str, list[Any]] = plot.legend[0].items[i].renderers[-1].data_source.data
    return data


def test_the_page_holds_the_data_and_needs_no_network(tmp_path: Path) -> None:
    page = tmp_path / "plots.html"
    write_html(read_rows([DATA]), page, {})
    text = page.read_text(encoding="utf-8")
    (written,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)
    drawn = json.dumps(json.loads(written), ensure_ascii=False)
    for expected in (
        "Speed-up over the best stock Dask, 8 workers × 1 thread, processes",
        "merge n=1000",
        "2.00 [1.60, 2.00]",
        "Efficiency and METG(50 %): stencil_1d 8 × 5",
        "ferroflow, learned: 20 ms",
    ):
        assert expected in drawn
    assert not re.search(r"<(script|link)[^>]+(src|href)=", text)


def test_efficiency_over_workers_has_a_line_for_each_policy_and_variant() -> None:
    found = {"dask": {"1 s": {64: 0.5, 256: 0.25}}, "ferroflow": {"0.1 s": {64: 0.4}, "1 s": {64: 0.9}}}
    plot = efficiency_figure("stencil", found)
    assert labels(plot) == ["dask, 1 s", "ferroflow, 0.1 s", "ferroflow, 1 s"]
    assert glyph_data(plot) == {"x": [64, 256], "y": [50.0, 25.0]}
    assert plot.xaxis.ticker.ticks == [64, 256]


def test_bars_start_at_one_and_have_the_interval() -> None:
    measured = [*rows([1.0, 2.0, 4.0]), *rows([0.5, 1.0, 2.0], policy="ferroflow")]
    plot = speed_up_bars("here", {"merge": cases_of(measured)[0]})
    assert labels(plot) == ["ferroflow"]
    data = glyph_data(plot)
    assert (data["ratio"], data["low"], data["high"]) == ([2.0], [2.0], [2.0])
    assert data["shown"] == ["2.00 [2.00, 2.00]"]
    assert plot.renderers[0].glyph.left == 1
    assert list(plot.yaxis[0].major_label_overrides.values()) == ["merge"]


def test_one_repetition_has_a_bar_without_an_interval() -> None:
    measured = [*rows([2.0]), *rows([1.0], policy="ferroflow")]
    data = glyph_data(speed_up_bars("here", {"merge": cases_of(measured)[0]}))
    assert (data["low"], data["high"], data["shown"]) == ([2.0], [2.0], ["2.00"])


def test_throughput_efficiency_and_steals_are_drawn_against_workers() -> None:
    measured = [
        record
        for workers, bound_s in [(4, 1.0), (8, 0.5)]
        for policy, s in [("dask", 2.0), ("ferroflow", 1.0)]
        for record in rows([s, s, 2 * s], workers=workers, policy=policy, bound_s=bound_s)
    ]
    cases = {case.shape.workers: case for case in cases_of(measured)}
    throughput, efficiency, steals = scaling_figures("merge", cases)
    assert labels(throughput) == ["dask", "ferroflow", "bound"]
    data = glyph_data(throughput, 1)
    assert (data["x"], data["y"]) == ([4, 8], [100.0, 100.0])
    assert (data["low"], data["high"]) == ([50.0, 50.0], [100.0, 100.0])
    assert list(glyph_data(throughput, 2)["y"]) == [100.0, 200.0]
    assert glyph_data(efficiency, 1)["y"] == [100.0, 50.0]
    assert glyph_data(steals, 0)["y"] == [1.5, 1.5]
    assert [plot.yaxis[0].axis_label for plot in (throughput, efficiency, steals)] == [
        "ops/s",
        "bound / time [%]",
        "confirmed steals per second",
    ]


def test_metg_curves_are_marked_where_they_cross() -> None:
    curves = [curve for curve in metg_from_rows(read_rows([DATA]), {}) if curve.policy == "dask"]
    plot = metg_figure("stencil", curves)
    assert labels(plot) == ["dask, learned: 40 ms"]
    assert glyph_data(plot) == {"x": [40.0], "y": [50.0]}


def test_policies_have_styles_of_their_own() -> None:
    names = ["dask", "dask-again", "random", "ferroflow", "ferroflow-fixed", "mine"]
    styles = styles_of(names)
    for aspect in ("colour", "marker"):
        assert len({getattr(style, aspect) for style in styles.values()}) == len(names)
    assert styles["dask"] == styles_of(["dask", "mine"])["dask"]


@pytest.mark.parametrize("write", [write_html, write_png])
def test_nothing_to_plot_is_refused(write: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no rows to plot"):
        write([], tmp_path / "plots.png", {})
    with pytest.raises(UsageError, match="nothing to plot: there is no policy beside stock dask"):
        write(rows([1.0]), tmp_path / "plots.png", {})


def test_a_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("selenium")
    chromium()
    picture = tmp_path / "plots.png"
    write_png(read_rows([DATA]), picture, {})
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content[12:16] == b"IHDR"
    assert (
        min(int.from_bytes(content[i : i + 4]) for i in (16, 20)) > 500
    )  # two figures side by side, and more
    assert [*tmp_path.iterdir()] == [picture]


def test_a_picture_has_the_name_of_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must end in \.png"):
        write_png(read_rows([DATA]), tmp_path / "plots.svg", {})


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        write_html(read_rows([DATA]), tmp_path / "nowhere" / "plots.html", {})


def refusal_of_a_picture(folder: Path) -> str:
    with pytest.raises(UsageError) as caught:
        write_png(read_rows([DATA]), folder / "plots.png", {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_selenium_a_picture_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("selenium"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert refusal_of_a_picture(tmp_path).startswith(
        "a picture needs selenium; run in the clone: pip install"
    )


def test_without_a_browser_a_picture_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("selenium")

    def no_browser() -> Any:
        raise RuntimeError("firefox is not installed or not present on PATH")

    monkeypatch.setattr(plots, "_browser", no_browser)
    assert refusal_of_a_picture(tmp_path).startswith("a picture needs a browser: install chromium")


def test_bokeh_is_imported_only_to_draw() -> None:
    code = "import sys, ferroflow_dask.bench.plots; print('bokeh.plotting' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert done.stdout == "False\n"


def test_flexflow_is_drawn_beside_the_ideal_and_the_paper() -> None:
    def trained(speed: float) -> Trained:
        return Trained(speed, 0, 0, 1.0, fits=True, microbatches=1, in_flight=1, recomputed=0.0)

    found = [
        Compared("NMT", "flexflow-k80", n, 10.0, trained(n * 5), trained(n * 4), trained(n * 9), 1)
        for n in (16, 64)
    ]
    (line,) = flexflow_plot(found).children
    (plot,) = line.children
    assert plot.title.text == "NMT"
    entries = {item.label.value: item.renderers[0].data_source.data for item in plot.legend[0].items}
    claim = entries.pop("the paper's gain, K80")
    assert {name: list(data["y"]) for name, data in entries.items()} == {
        "data-parallel, K80": [50, 50],
        "expert, K80": [40, 40],
        "found, K80": [90, 90],
        "ideal": [100, 100],
    }
    # 1.7 to 2.4 times the speed of data-parallel training, at 64 devices, but at most the ideal.
    assert (*claim["x0"], *claim["y0"], *claim["y1"]) == (64, 50 * 1.7, 100)


def test_a_picture_has_its_name_before_anything_runs() -> None:
    refused = ferroflow("flexflow", "--plot", "plot.svg", command=program)
    assert_one_line(refused.exit_code, refused.stderr, USAGE, "a picture's name must end in .png")
