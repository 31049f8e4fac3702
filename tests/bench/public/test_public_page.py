"""The page of public runs: made from a summary, equal to the byte, losses like gains."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from bench_rows import row
from command_line import answer

from ferroflow_dask.bench.public.page import cause, page, picture
from ferroflow_dask.bench.public.summary import read_summary, summarize
from ferroflow_dask.bench.rows import append_row
from ferroflow_dask.bench.schema import BenchRecord
from ferroflow_dask.exceptions import UsageError


def runs(program: str, seconds: dict[str, list[float]], **more: Any) -> list[BenchRecord]:
    return [
        row(suite="tpch", workload=program, policy=policy, repetition=n, makespan_s=one, bound_s=None, **more)
        for policy, durations in seconds.items()
        for n, one in enumerate(durations)
    ]


FAST = {"dask": [2.0, 2.2, 2.1], "dask-again": [2.1, 2.0, 2.2], "ferroflow": [1.0, 1.1, 1.05]}
SLOW = {"dask": [1.0, 1.1, 1.05], "dask-again": [1.0, 1.1, 1.05], "ferroflow": [2.0, 2.2, 2.1]}


def some_rows() -> list[BenchRecord]:
    return [
        *runs("q01", FAST),
        *runs("q02", SLOW),
        *runs("q03", {"dask": [1.0], "ferroflow": [1.0]}),
        row(suite="tpch", workload="q03", policy="ferroflow", repetition=1, status="wrong answer: 1 row"),
        row(suite="tpch", workload="q04", status="skipped: it needs a moon"),
        *runs("q01", {"threads": [0.5, 0.5, 0.5]}),
        *runs("q01", {"dask": [3.0], "ferroflow": [2.0]}, fresh=True, costs="unknown"),
        *runs("q01", {"ray": [4.0]}, lowering="as usual"),
        *runs("blast", {"dask": [10.0], "ferroflow": [8.0]}, cluster="virtual", workers=256),
    ]


def test_ratios_are_those_of_the_rows() -> None:
    programs = {one.program: one for one in summarize(some_rows(), "2026-11").programs}
    assert programs["q01"].ours == pytest.approx((2.0, 2.0, 2.0), rel=0.1)
    assert programs["q01"].again is not None
    assert programs["q01"].again[0] == pytest.approx(1.0, rel=0.1)
    assert programs["q01"].first == (1.5, None, None)
    assert programs["q01"].anchors == {"threads": pytest.approx(4.2)}
    assert programs["q01"].measures["messages"] == 1
    assert programs["q02"].is_loss
    assert not programs["q01"].is_loss
    assert programs["q03"].ours is None, "a side that is broken once has no ratio"
    assert programs["q03"].broken == {"ferroflow": "wrong answer: 1 row"}


def test_the_page_has_losses_broken_programs_and_reasons() -> None:
    text = page(summarize(some_rows(), "2026-11"), "benchmarks.svg")
    assert "| q01 | 101 | 101 | 2.10 | " in text
    assert "▲ 2.00" in text
    assert "▼ 0.50" in text
    assert "Losses:\n\n- q02: ▼ 0.50" in text
    assert "**BROKEN**" in text
    assert "- tpch q03, ferroflow: wrong answer: 1 row" in text
    assert "- tpch q04, dask: it needs a moon" in text
    assert "| q01 | ray | as usual | 4.00 |" in text
    assert "| blast | 256 | 10.0 | 8.00 | 1.25 |" in text
    assert "tpch | 3 | 0.98" in text


def test_planted_delays_are_counted() -> None:
    noise = [0.97, 1.02, 1.0, 1.03, 0.98, 1.01, 0.99, 1.04, 0.96]
    steady = {"dask": [2 * one for one in noise], "dask-again": [2 * one for one in reversed(noise)]}
    wild = {"dask": [1.0] * 9, "dask-again": [0.5, 1.0, 2.0] * 3}
    summary = summarize([*runs("q01", steady), *runs("q02", wild)], "2026-11")
    assert "25% of the median is marked as slower in 1 of 2 programs above 0.5 s" in page(summary, "")
    assert [one.planted_small for one in summary.programs] == pytest.approx([1 / 1.05, 1 / 1.05], rel=0.02)
    assert "planted" not in page(summarize(runs("q01", FAST), "2026-11"), "")


def test_a_loss_has_the_measures_that_became_worse() -> None:
    rows = [*runs("q02", {"dask": [1.0, 1.0]}), *runs("q02", {"ferroflow": [2.0, 2.0]}, messages=4_000)]
    (program,) = summarize(rows, "2026-11").programs
    assert cause(program).endswith("; worse: messages 0.25")


def test_the_picture_has_a_mark_for_each_program() -> None:
    drawing = ElementTree.fromstring(picture(summarize(some_rows(), "2026-11")))
    names = [one.text for one in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert [name for name in names if name and name.startswith("tpch")] == ["tpch q02", "tpch q01"]
    assert len(list(drawing.iter("{http://www.w3.org/2000/svg}circle"))) == 2


def test_the_same_summary_gives_the_same_bytes(tmp_path: Path) -> None:
    rows = tmp_path / "public.jsonl"
    for one in some_rows():
        append_row(rows, one)
    answer("report", rows, "--page", tmp_path / "first.md")
    summary = tmp_path / "first.json"
    answer("report", summary, "--page", tmp_path / "second.md")
    assert summary.read_bytes() == (tmp_path / "second.json").read_bytes()
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()
    first, second = ((tmp_path / f"{name}.md").read_text() for name in ("first", "second"))
    assert first == second.replace("second.svg", "first.svg")


def test_the_page_of_the_documentation_is_that_of_its_summary() -> None:
    docs = Path(__file__).parents[3] / "docs"
    summary = read_summary(docs / "benchmarks.json")
    assert page(summary, "benchmarks.svg") == (docs / "benchmarks.md").read_text(encoding="utf-8")
    assert picture(summary) == (docs / "benchmarks.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["machine", "commit", "workers"])
def test_rows_of_several_places_are_refused(name: str) -> None:
    other = row(policy="ferroflow", **{name: 7 if name == "workers" else "other"})
    with pytest.raises(UsageError, match="rows must be of one machine"):
        summarize([row(), other], "2026-11")


@pytest.mark.parametrize(
    ("content", "message"),
    [("[]", "format must be"), ('{"format": "ferroflow-benchmarks", "version": 1}', "a summary must be")],
)
def test_a_file_that_is_no_summary_is_refused(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(content)
    with pytest.raises(UsageError, match=message):
        read_summary(file)
