"""Reports: a fixed file whole, and what must never be compared, hidden or called fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from bench_rows import row, rows, section

from ferroflow_dask.bench.comparison import Estimate, cases_of, policies_of
from ferroflow_dask.bench.markdown import number, table
from ferroflow_dask.bench.report import report
from ferroflow_dask.bench.rows import read_rows
from ferroflow_dask.bench.schema import BenchRecord
from ferroflow_dask.exceptions import UsageError

DATA = Path(__file__).parents[1] / "data"
DEFAULTS = {
    "imbalanced": {"n_heavy": 4, "heavy_ms": 200.0, "n_fast": 200, "fast_ms": 1.0},
    "merge": {"n": 20_000},
    "stencil_1d": {"width": 16, "steps": 20, "task_ms": 20.0},
}


def speed_up(measured: Sequence[BenchRecord], policy: str = "ferroflow") -> Estimate | None:
    (case,) = cases_of(measured)
    return case.speed_up(policy)


def test_the_report_of_a_fixed_file_is_this_one() -> None:
    # Its times are chosen so that each ratio, interval and mean can be checked in the head.
    expected = (DATA / "bench.md").read_text(encoding="utf-8")
    assert report(read_rows([DATA / "bench.jsonl"]), defaults=DEFAULTS) == expected


# What is compared


def test_stock_dask_is_the_best_of_its_lowerings_by_median() -> None:
    measured = [
        *rows([1.0, 4.0, 4.0], lowering="plain"),
        *rows([3.0, 3.0, 3.0], lowering="clever"),
        *rows([1.5, 1.5, 1.5], policy="ferroflow", lowering="plain"),
    ]
    assert speed_up(measured) == Estimate(2.0, 2.0, 2.0, 3, True)
    assert "3.00 (3.00–3.00), clever" in report(measured)


def test_a_way_in_which_stock_dask_does_not_run_is_named() -> None:
    measured = [
        *rows([2.0] * 5),
        *rows([1.8] * 5, policy="ferroflow"),
        *rows([1.0] * 5, policy="ferroflow", lowering="bundled"),
    ]
    text = report(measured)
    assert "| 2.00 (2.00–2.00) | ▲ 2.00 [2.00, 2.00], bundled |" in text
    assert section(text, "Gains: 1 of 1") == (
        "- merge n=1000, ferroflow, bundled, 4 workers × 1 thread, processes: 2.00 [2.00, 2.00]"
    )
    assert "bundled" not in section(report(measured[:10]), "Gains: 1 of 1")


def test_stock_once_more_is_compared_written_in_the_same_way() -> None:
    measured = [
        *rows([2.0, 2.0], lowering="plain"),
        *rows([1.0, 1.0], lowering="clever"),
        *rows([0.5, 0.5], policy="dask-again", lowering="plain"),
        *rows([1.0, 1.0], policy="dask-again", lowering="clever"),
    ]
    assert speed_up(measured, "dask-again") == Estimate(1.0, 1.0, 1.0, 2, True)
    assert speed_up(measured[:6], "dask-again") is None
    assert "Noise: stock Dask against itself gives 1.00–1.00 on 1 workload; 0 of" in report(measured)


def test_repetitions_are_paired_by_number_whatever_their_order() -> None:
    measured = [*rows([1.0, 2.0, 4.0]), *reversed(rows([0.5, 1.0, 2.0], policy="ferroflow"))]
    assert speed_up(measured) == Estimate(2.0, 2.0, 2.0, 3, True)


def test_repetitions_of_other_seeds_are_not_paired() -> None:
    measured = [*rows([1.0, 2.0, 4.0]), *rows([0.5, 1.0, 2.0], policy="ferroflow", seed=1)]
    assert speed_up(measured) == Estimate(2.0, 0.5, 8.0, 3)


def test_repetitions_of_other_invocations_or_of_unknown_ones_are_not_paired() -> None:
    first = rows([1.0, 2.0, 4.0])
    for invocations in [("a", "b"), (None, None), ("a", None)]:
        stock, ours = (
            [replace(run, invocation=name, makespan_s=run.makespan_s / n) for run in first]
            for n, name in enumerate(invocations, start=1)
        )
        assert speed_up([*stock, *(replace(run, policy="ferroflow") for run in ours)]) == Estimate(
            2.0, 0.5, 8.0, 3
        )


def test_a_sample_of_which_one_run_was_made_again_is_not_paired() -> None:
    measured = [*rows([1.0, 2.0, 4.0]), *rows([0.5, 1.0, 2.0], policy="ferroflow")]
    measured[-1] = replace(measured[-1], invocation="again")
    assert speed_up(measured) == Estimate(2.0, 0.5, 8.0, 3)


def test_the_same_repetitions_of_two_invocations_are_paired_one_by_one() -> None:
    first = [*rows([1.0, 2.0]), *rows([0.5, 1.0], policy="ferroflow")]
    second = [replace(run, invocation="b", makespan_s=4 * run.makespan_s) for run in first]
    assert speed_up([*first, *second]) == Estimate(2.0, 2.0, 2.0, 4, True)


def test_known_costs_are_compared_with_stock_dask_which_knows_none() -> None:
    measured = [*rows([2.0, 2.0]), *rows([1.0, 1.0], policy="ferroflow", costs="known")]
    text = report(measured)
    assert (
        "| merge n=1000 (costs known) | 1.00 | 2.00 (2.00–2.00), costs learned | ▲ 2.00 [2.00, 2.00] |"
        in text
    )


def test_cluster_shapes_have_tables_of_their_own() -> None:
    measured = [*rows([1.0]), *rows([2.0], policy="ferroflow", workers=8)]
    text = report(measured)
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## 4 workers × 1 thread, processes",
        "## 8 workers × 1 thread, processes",
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"machine": "Another"},
        {"cluster": "slurm"},
        {"section": "gpu"},
        {"tls": True},
        {"fresh": True},
        {"versions": {"dask": "2027.1.0"}},
        {"commit": "ffffffffffff"},
    ],
)
def test_rows_of_different_settings_are_not_compared(other: dict[str, object]) -> None:
    text = report([*rows([1.0, 1.0]), *rows([0.5, 0.5], policy="ferroflow", **other)])
    assert "The rows come from 2 settings" in text
    assert "# Setting 2 of 2" in text
    assert "## Gains" not in text


def test_a_report_says_what_the_clusters_were() -> None:
    text = report(rows([1.0], cluster="slurm", section="gpu", tls=True, fresh=True))
    what = "on a cluster of SLURM jobs, section gpu, encrypted, a new one for each run"
    assert f", {what}; dask 2026.8.0, " in text


def test_sections_and_encryption_stay_apart_in_a_report() -> None:
    places = [("cpu", False), ("large", False), ("cpu", True), (None, None)]
    rows_of_all = [
        record
        for section, tls in places
        for policy in ("dask", "ferroflow")
        for record in rows([1.0, 1.0], policy=policy, cluster="slurm", section=section, tls=tls)
    ]
    text = report(rows_of_all)
    assert "The rows come from 4 settings" in text
    described = [line for line in text.splitlines() if line.startswith("4 runs on ")]
    places_told = [line.partition("SLURM jobs")[2].partition(";")[0] for line in described]
    assert places_told == [", section cpu", ", section large", ", section cpu, encrypted", ""]


def test_policies_come_in_the_order_noise_baselines_ours() -> None:
    names = ["static", "ferroflow", "dask@100ms", "dask-again", "dask"]
    measured = [record for name in names for record in rows([1.0], policy=name)]
    assert policies_of(cases_of(measured)) == ("dask-again", "dask@100ms", "static", "ferroflow")


# What is said


@pytest.mark.parametrize(
    ("n", "told"),
    [
        (1, "leave out 1."),
        (3, "leave out 1; with 3 repetitions, about 1 in 4 would by chance."),
        (6, "leave out 1."),
    ],
)
def test_noise_is_held_against_what_chance_does_in_so_few_repetitions(n: int, told: str) -> None:
    text = report([*rows([1.0] * n), *rows([1.0] * n, policy="dask-again")])
    assert f"0 of these intervals {told}\n" in text


def test_what_chance_does_is_told_of_pairs_only() -> None:
    text = report([*rows([1.0] * 3), *rows([1.0] * 3, policy="dask-again", invocation="b")])
    assert "0 of these intervals leave out 1.\n" in text


def test_a_broken_policy_is_broken_however_fast() -> None:
    measured = [
        *rows([1.0, 1.0, 1.0]),
        *rows([0.1, 0.1], policy="ferroflow"),
        row(policy="ferroflow", repetition=2, makespan_s=0.1, status="wrong result: | x", bound_s=None),
    ]
    text = report(measured)
    assert text.index("## **BROKEN**: 1 run of 6") < text.index("## 4 workers")
    assert "| 2 | wrong result: \\| x |" in text
    assert "| merge n=1000 | 1.00 | 1.00 (1.00–1.00) | **BROKEN** |" in text
    assert "Gains" not in text


def test_a_broken_lowering_of_stock_dask_is_not_the_best() -> None:
    measured = [
        *rows([0.1, 0.1], lowering="wrong", status="failed", bound_s=None, efficiency=None),
        *rows([2.0, 2.0], lowering="right"),
        *rows([1.0, 1.0], policy="ferroflow"),
    ]
    assert speed_up(measured) == Estimate(2.0, 2.0, 2.0, 2, True)


def test_without_stock_dask_there_are_no_ratios() -> None:
    text = report(
        [*rows([1.0], status="failed", bound_s=None, efficiency=None), *rows([1.0], policy="ferroflow")]
    )
    assert "| merge n=1000 | 1.00 | **BROKEN** | – |" in text
    assert "Geometric" not in text


def test_gains_and_regressions_are_named_alike_and_baselines_are_neither() -> None:
    measured = [
        *(
            r
            for name, s in [("a", 0.5), ("b", 2.0)]
            for r in rows([s] * 5, workload=name, policy="ferroflow")
        ),
        *(r for name in "ab" for r in rows([1.0] * 5, workload=name)),
        *(r for name in "ab" for r in rows([9.0] * 5, workload=name, policy="static")),
        *rows([1.0, 1.0, 1.0, 1.1, 0.9], workload="c"),
        *rows([1.0, 1.0, 1.0, 0.9, 1.1], workload="c", policy="ferroflow"),
    ]
    text = report(measured)
    assert section(text, "Regressions: 1 of 3") == (
        "- b n=1000, ferroflow, 4 workers × 1 thread, processes: 0.50 [0.50, 0.50]"
    )
    assert section(text, "Gains: 1 of 3") == (
        "- a n=1000, ferroflow, 4 workers × 1 thread, processes: 2.00 [2.00, 2.00]"
    )


def test_no_rows_are_refused_and_notes_are_printed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no rows to report"):
        report([])
    torn = tmp_path / "torn.jsonl"
    torn.write_text((DATA / "bench.jsonl").read_text(encoding="utf-8") + '{"schema', encoding="utf-8")
    assert f"{torn}: the last line was torn" in report(read_rows([torn])).split("\n\n")[1]


def test_what_was_predicted_is_beside_what_came() -> None:
    expected = {"predicted_s": 1.0, "predicted_tasks": 1_010, "predicted_bytes": 500_000}
    measured = [*rows([2.0] * 3), *rows([2.0] * 3, policy="ferroflow", tasks=1_101, **expected)]
    stock, ours = section(report(measured), "4 workers").splitlines()[-2:]
    assert "| – | 101 | 3 | 2.00 | 25% |" in stock
    assert "| 50% | 1,101 (1,010) | 3 | 2.00 (0.500) | 25% |" in ours


def test_numbers_keep_three_digits_and_cells_cannot_break_a_table() -> None:
    values = (0.999, 0.9996, 99.96, 1234.5, 1e-5, -0.5)
    assert [number(value) for value in values] == ["0.999", "1.00", "100", "1,234", "0.0000100", "-0.500"]
    assert table(("a",), [("x\ny|z",)]).splitlines()[2] == "| x y\\|z |"
