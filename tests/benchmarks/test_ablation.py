"""Ablation: ratios of each feature, the table in the documentation, and the program."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import ablation_virtual
import pytest
from ablation import (
    BEGIN,
    CLASSES,
    END,
    LEAST_GAIN,
    Ratio,
    ablation_table,
    gains,
    lines_of,
    noise_line,
    pays,
    put_between,
    real_ratios,
)
from bench_rows import row
from command_line import answer, ferroflow
from measure_features import main as program
from overhead_graphs import Graph

from ferroflow_dask.bench.workloads import get_workload
from ferroflow_dask.scheduler.features import found_features
from ferroflow_dask.scheduler.features.prefetch import Prefetch
from ferroflow_dask.scheduler.features.samples import Samples
from ferroflow_dask.scheduler.features.sharing import Sharing
from ferroflow_dask.virtual import VirtualTask

DOCUMENT = Path(__file__).parents[2] / "docs" / "mechanisms.md"


def chains() -> Iterator[Graph]:
    yield {
        ("step", n, i): VirtualTask(0.01, (("step", n - 1, i),) if n else (), nbytes=28)
        for n in range(10)
        for i in range(4)
    }


@pytest.fixture
def _only_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation_virtual, "GROUPS", {"narrow graphs": chains})
    monkeypatch.setattr(ablation_virtual, "_CPU_SIZES", {2: 100})


def test_the_documentation_has_a_row_for_each_feature_which_pays_or_has_a_reason() -> None:
    _, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    rows = [line.split("|")[1:-1] for line in rest.partition(END)[0].splitlines() if line.startswith("| `")]
    by_name = {cells[0].strip().strip("`"): [cell.strip() for cell in cells[1:]] for cells in rows}
    kinds = {kind.name: kind for kind in found_features() if kind.__module__.startswith("ferroflow_dask.")}
    assert by_name.keys() == kinds.keys()
    for name, (_, *measured, _, reason) in by_name.items():
        assert reason == (kinds[name].reason or "–")
        found = [float(number) for cell in measured for number in re.findall(r"^[\d.]+", cell)]
        assert kinds[name].reason or max(found, default=0.0) >= LEAST_GAIN, name


def test_programs_are_workloads_of_sizes_that_these_have() -> None:
    for programs in CLASSES.values():
        for one in programs:
            sizes = get_workload(one.workload).arguments(one.sizes)
            assert one.sizes.items() <= sizes.items()


def test_real_ratios_are_those_of_the_same_program() -> None:
    rows = [
        row(
            policy=policy,
            makespan_s=seconds,
            repetition=repetition,
            scheduler_cpu_s=cpu_s,
            first_result_s=seconds / 2,
            messages=int(100 * seconds),
        )
        for repetition in range(5)
        for policy, seconds, cpu_s in (
            ("ferroflow", 1.0, 0.1),
            ("ferroflow-again", 1.1, 0.1),
            ("ferroflow-without-prefetch", 2.0, 0.3),
        )
    ]
    found = {(one.feature, one.measure): one for one in real_ratios(rows, ["prefetch", "sharing"])}
    assert found["prefetch", "time"] == Ratio("prefetch", "merge", "time", 2.0, 2.0, 2.0)
    assert found["prefetch", "CPU time"].value == pytest.approx(3.0)
    assert found["prefetch", "first result"].value == found["prefetch", "messages"].value == 2.0
    assert found["", "time"].value == pytest.approx(1.1)
    assert not any(one.feature == "sharing" for one in found.values())
    assert "1.10 to 1.10" in noise_line(list(found.values()))
    assert pays(Prefetch, [one for one in found.values() if one.feature == "prefetch"])


def test_a_gain_within_the_noise_is_none() -> None:
    ratios = [
        Ratio("samples", "maps", "time", 1.3, 0.9, 1.6),
        Ratio("samples", "frames", "time", 1.02, 1.01, 1.03),
        Ratio("samples", "trees", "tasks", 1.04),
    ]
    assert [one.group for one in gains(ratios)] == ["trees", "frames"]
    assert not pays(Samples, ratios)
    row_of = next(line for line in ablation_table(ratios).splitlines() if "`samples`" in line)
    cells = [cell.strip() for cell in row_of.split("|")[1:-1]]
    assert cells[2:9] == ["1.02 [1.01, 1.03]: frames", "–", "–", "–", "1.04: trees", "–", "–"]


@pytest.mark.usefixtures("_only_chains")
def test_prefetch_gains_in_chains_that_are_not_bundled_if_messages_are_late() -> None:
    found = list(ablation_virtual.virtual_ratios(["prefetch", "bundles", "metrics"], ["narrow graphs"]))
    values = {(one.feature, one.group): one.value for one in found if one.measure == "time"}
    assert values["prefetch", "narrow graphs, late messages, not bundled"] > 1.3
    assert values["prefetch", "narrow graphs, late messages"] == pytest.approx(1.0, abs=0.05)
    assert ("bundles", "narrow graphs, not bundled") not in values
    tasks = {one.group: one.value for one in found if (one.feature, one.measure) == ("bundles", "tasks")}
    assert tasks["narrow graphs, late messages"] == pytest.approx(10)
    assert not any(one.feature == "metrics" for one in found)


@pytest.mark.usefixtures("_only_chains")
def test_the_command_prints_a_row_for_each_feature_and_replaces_that_of_a_document(tmp_path: Path) -> None:
    document = tmp_path / "table.md"
    document.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n", encoding="utf-8")
    narrow = ("--feature", "lean_transitions", "--class", "narrow graphs", "--virtual")
    result = answer("features", *narrow, "--write", document, command=program)
    assert "0 runs" in result.stderr
    text = document.read_text(encoding="utf-8")
    assert text.startswith(f"before\n\n{BEGIN}\n\n| feature |")
    assert text.endswith(f"{END}\n\nafter\n")
    assert result.stdout.strip() in text
    assert "Measured: 20" in text


def test_a_document_without_a_place_for_the_table_is_told_in_a_line(tmp_path: Path) -> None:
    (document := tmp_path / "table.md").write_text("no place", encoding="utf-8")
    result = ferroflow("features", "--virtual", "--write", document, command=program)
    assert result.exit_code == 2
    assert "must have the place of a table; it has no lines <!-- ablation: begin -->" in result.stderr


def test_the_lines_of_a_feature_are_those_of_all_its_modules() -> None:
    assert lines_of(Prefetch) > lines_of(Sharing) > 50
    with pytest.raises(ValueError, match="no lines"):
        put_between(END + BEGIN, "table")
