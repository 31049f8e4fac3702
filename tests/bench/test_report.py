"""Reports: a fixed file whole, and what must never be compared, hidden or called fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from bench_rows import row, rows, section

from ferroflow_dask.bench.markdown import number, table
from ferroflow_dask.bench.public.ratios import Ratio
from ferroflow_dask.bench.public.report import report
from ferroflow_dask.bench.public.summary import ProgramSummary, summarize
from ferroflow_dask.bench.rows import read_rows
from ferroflow_dask.bench.schema import BenchRecord
from ferroflow_dask.exceptions import UsageError

DATA = Path(__file__).parents[1] / "data"


def program(measured: Sequence[BenchRecord]) -> ProgramSummary:
    (found,) = summarize(measured, "").programs
    return found


def speed_up(measured: Sequence[BenchRecord]) -> Ratio | None:
    return program(measured).ours


def test_the_report_of_a_fixed_file_is_this_one() -> None:
    # Its times are chosen so that each ratio, interval and mean can be checked in the head.
    expected = (DATA / "bench.md").read_text(encoding="utf-8")
    assert report(read_rows([DATA / "bench.jsonl"])) == expected


# What is compared


def test_repetitions_are_paired_by_number_whatever_their_order() -> None:
    measured = [*rows([1.0, 2.0, 4.0]), *reversed(rows([0.5, 1.0, 2.0], policy="ferroflow"))]
    assert speed_up(measured) == (2.0, 2.0, 2.0)


def test_repetitions_of_other_seeds_are_not_compared() -> None:
    assert speed_up([*rows([1.0, 2.0, 4.0]), *rows([0.5, 1.0, 2.0], policy="ferroflow", seed=1)]) is None


@pytest.mark.parametrize("invocations", [("a", "b"), (None, None), ("a", None)])
def test_repetitions_of_other_calls_are_paired_if_there_are_no_others(
    invocations: tuple[str | None, str | None],
) -> None:
    stock, ours = (
        rows([n, 2 * n, 4 * n], invocation=name) for n, name in zip((2.0, 1.0), invocations, strict=True)
    )
    ours = [replace(run, policy="ferroflow") for run in ours]
    assert speed_up([*stock, *ours]) == (2.0, 2.0, 2.0)


def test_the_same_repetitions_of_two_invocations_are_paired_one_by_one() -> None:
    first = [*rows([1.0, 2.0]), *rows([0.5, 1.0], policy="ferroflow")]
    second = [replace(run, invocation="b", makespan_s=4 * run.makespan_s) for run in first]
    assert speed_up([*first, *second]) == (2.0, 2.0, 2.0)


def test_rounds_that_one_side_lacks_are_left_out() -> None:
    measured = [*rows([1.0, 2.0, 400.0]), *rows([0.5, 1.0], policy="ferroflow")]
    assert speed_up(measured) == (2.0, 2.0, 2.0)


def test_lowerings_are_programs_of_their_own_and_no_other_schedulers() -> None:
    measured = [
        *rows([3.0], lowering="plain"),
        *rows([2.0], lowering="clever"),
        *rows([1.5], policy="ferroflow", lowering="plain"),
        *rows([1.0], policy="ray", lowering="as usual"),
    ]
    text = report(measured)
    assert "| merge (plain) | 101 | 101 | 1.00 | 3.00 | – | 2.00 | – |" in text
    assert "| merge (clever) | 101 | 0 | 1.00 | 2.00 | – | – | – |" in text
    assert "| merge | ray | as usual | 1.00 |" in text


def test_known_costs_are_not_taken_for_learned_ones() -> None:
    measured = [*rows([2.0]), *rows([1.0], policy="ferroflow", costs="known")]
    names = {one.program: one.ours for one in summarize(measured, "").programs}
    assert names == {"merge": None, "merge (costs known)": None}


@pytest.mark.parametrize(
    "other",
    [
        {"machine": "Another"},
        {"cluster": "slurm"},
        {"section": "gpu"},
        {"tls": True},
        {"workers": 8},
        {"threads_per_worker": 2},
        {"processes": False},
        {"versions": {"dask": "2027.1.0"}},
        {"commit": "ffffffffffff"},
    ],
)
def test_rows_of_different_settings_are_not_compared(other: dict[str, object]) -> None:
    text = report([*rows([1.0, 1.0]), *rows([0.5, 0.5], policy="ferroflow", **other)])
    assert "The rows come from 2 settings" in text
    assert "# Setting 2 of 2" in text
    assert "| ▲ " not in section(text, "Setting 2 of 2")
    assert "2.00 [" not in text


def test_a_report_says_what_the_clusters_were() -> None:
    text = report(rows([1.0], cluster="slurm", section="gpu", tls=True))
    assert ", 4 workers × 1 thread, SLURM jobs, section gpu, encrypted; dask 2026.8.0, " in text


def test_runs_in_virtual_time_belong_to_the_setting_of_the_others() -> None:
    text = report([*rows([1.0]), *rows([8.0], cluster="virtual", workers=256, workload="blast")])
    assert "settings" not in text
    assert "| blast | 256 | 8.00 |" in text


# What is said


def test_sizes_that_differ_are_part_of_the_names_of_programs() -> None:
    sizes = [{"n": 1, "p": 2}, {"n": 3, "p": 2}]
    measured = [run for arguments in sizes for run in rows([1.0], arguments=arguments)]
    assert [one.program for one in summarize(measured, "").programs] == ["merge n=1", "merge n=3"]


def test_other_policies_have_columns_with_intervals_and_what_has_no_cluster_has_none() -> None:
    measured = [
        *rows([2.0, 2.0]),
        *rows([4.0, 4.0], policy="static"),
        *rows([1.0, 1.0], policy="ferroflow-without-prefetch"),
        *rows([0.5, 0.5], policy="threads"),
    ]
    text = report(measured)
    assert "| plugin | static | ferroflow-without-prefetch | first run |" in text
    assert "| – | ▼ 0.50 [0.50, 0.50] | ▲ 2.00 [2.00, 2.00] | – |" in text
    assert text.endswith("| program | threads |\n| --- | ---: |\n| merge | 4.00 |\n")


def test_a_broken_policy_is_broken_however_fast() -> None:
    measured = [
        *rows([1.0, 1.0, 1.0]),
        *rows([0.1, 0.1], policy="ferroflow"),
        row(policy="ferroflow", repetition=2, makespan_s=0.1, status="wrong result: | x", bound_s=None),
    ]
    text = report(measured)
    assert "| merge | 101 | 101 | 1.00 | 1.00 | – | **BROKEN** | – |" in text
    assert section(text, "Broken, or not run") == "- rsds merge, ferroflow: wrong result: \\| x"
    assert "▲ 10" not in text


def test_without_stock_dask_there_are_durations_and_no_ratios() -> None:
    text = report([*rows([2.0, 4.0], policy="ferroflow"), *rows([1.0], policy="device")])
    assert "| program | ferroflow | device |\n| --- | ---: | ---: |\n| merge | 3.00 | 1.00 |" in text
    assert "| rsds | 1 | – | – | – | – | – | 0 | 0 |" in text


def test_no_rows_are_refused_and_notes_are_printed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no rows to report"):
        report([])
    torn = tmp_path / "torn.jsonl"
    torn.write_text((DATA / "bench.jsonl").read_text(encoding="utf-8") + '{"schema', encoding="utf-8")
    assert f"\n\n{torn}: the last line was torn" in report(read_rows([torn]))


def test_numbers_keep_three_digits_and_cells_cannot_break_a_table() -> None:
    values = (0.999, 0.9996, 99.96, 1234.5, 1e-5, -0.5)
    assert [number(value) for value in values] == ["0.999", "1.00", "100", "1,234", "0.0000100", "-0.500"]
    assert table(("a",), [("x\ny|z",)]).splitlines()[2] == "| x y\\|z |"
