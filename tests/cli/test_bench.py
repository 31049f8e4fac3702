"""`ferroflow bench` and `ferroflow report`: rows that are kept, tables, and input that is refused."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_rows import row
from command_line import FAILURE, INTERRUPTED, USAGE, answer, assert_one_line, ferroflow

from ferroflow_dask.bench.public import workloads
from ferroflow_dask.bench.public.runner import Runs
from ferroflow_dask.bench.public.sides import Rules
from ferroflow_dask.bench.rows import append_row
from ferroflow_dask.bench.schema import BenchRecord, identity_of
from ferroflow_dask.cli.slurm import SlurmOptions

#: The module; its name in the package is that of a command.
runs = importlib.import_module("ferroflow_dask.cli.bench_runs")

TINY = ("stencil_1d", "--width", "4", "--steps", "3", "--task-ms", "1", "--workers", "1", "--repeat", "2")
SIDES = ("dask", "dask-again", "ferroflow")


def refusal(*arguments: str | Path) -> str:
    """Run the command, expect that it refuses its input, and return the line that says why."""
    done = ferroflow(*arguments)
    assert_one_line(done.exit_code, done.stderr, USAGE, "")
    return done.stderr


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (
            ("run", "--dag", "matmul-parallel", "--size", "m=64"),
            "no option --size here; give --matrix-size 64",
        ),
        (("info", "--dag", "wide", "--size=n_fast=8"), "no option --size here; give --n-fast 8"),
        (("run", "--dag", "matmul-parallel", "--m", "64"), "no option --m here; give --matrix-size 64"),
        (
            ("info", "--dag", "wide", "--size", "steps=4"),
            "each size has its own, like --width 8: --help",
        ),
        (("run", "--dag", "wide", "--size"), "each size has its own, like --width 8: --help"),
        (("bench", "run", "matmul-parallel", "--m", "64"), "no option --m here; give --matrix-size 64"),
        (
            ("bench", "run", "matmul-parallel", "--size", "matrix-size=64"),
            "--size here; give --matrix-size 64",
        ),
        (("bench", "run", "imbalanced", "--size", "n_fast=8"), "--size here; give --n-fast 8"),
        (
            ("bench", "run", "wide", "--steps", "3"),
            "none of wide has a size --steps; see: ferroflow bench list",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_sizes_as_other_commands_have_them_are_told_as_they_are_here(
    asked: tuple[str, ...], told: str
) -> None:
    assert told in refusal(*asked)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("bench") / "rows.jsonl"
    answer("bench", "run", *TINY, "--rows", file)
    return file


def test_each_run_leaves_a_row(measured: Path) -> None:
    rows = rows_of(measured)
    assert sorted((row["policy"], row["repetition"]) for row in rows) == [
        (name, n) for name in SIDES for n in range(2)
    ]
    assert {row["status"] for row in rows} == {"ok"}
    assert len({row["invocation"] for row in rows}) == 1
    assert {(row["ops"], row["executed"], row["bound_s"]) for row in rows} == {(12, 12, 0.012)}
    assert {row["arguments"]["width"] for row in rows} == {4}
    assert all(0 < row["efficiency"] <= 1 and 0 <= row["idle_fraction"] < 1 for row in rows)
    assert all(list(row) == list(BenchRecord.__dataclass_fields__) for row in rows)


def test_the_report_has_the_program_with_its_sizes(measured: Path) -> None:
    text = answer("report", measured).stdout
    assert "1 worker × 1 thread, a local cluster" in text
    assert "\n| stencil_1d width=4 steps=3 task_ms=1.0 | 12 | " in text
    assert "| 0.0120 | " in text


def test_a_finished_benchmark_runs_nothing_again(measured: Path) -> None:
    before = measured.read_bytes()
    answer("bench", "run", *TINY, "--rows", measured)
    assert measured.read_bytes() == before


def test_an_interrupted_benchmark_keeps_its_rows_and_goes_on(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.jsonl"
    first, *more = measured.read_text().splitlines(keepends=True)
    made = [BenchRecord(**json.loads(line)) for line in (first, *more)]

    def interrupted(*_: Any, done: Collection[str], **options: Any) -> Iterator[BenchRecord]:
        yield from made[len(done) : len(done) + 1]
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "run_suites", interrupted)
    for n in (1, 2):
        ended = ferroflow("bench", "run", *TINY, "--rows", file)
        assert ended.exit_code == INTERRUPTED
        assert f"interrupted; {n} of 6 runs are in {file}" in " ".join(ended.stderr.split())
    assert file.read_text() == first + more[0]


OF_JOBS = ("--cluster", "slurm", "--section", "large", "--jobs", "2")
OF_TWO_KINDS = (*OF_JOBS, "--gpu-jobs", "1")
ROW_OF_JOBS = {"cluster": "slurm", "section": "large", "tls": False}


@pytest.mark.parametrize(
    ("cluster", "place", "n_missing"),
    [
        ((), {}, 0),
        (("--threads", "2"), {}, 6),
        (("--place", "separate"), {}, 6),
        (("--cluster", "slurm"), {}, 6),
        (OF_JOBS, ROW_OF_JOBS, 0),
        (OF_JOBS, {**ROW_OF_JOBS, "section": "cpu"}, 6),
        (OF_JOBS, {**ROW_OF_JOBS, "section": None, "tls": None}, 6),
        ((*OF_JOBS, "--tls"), ROW_OF_JOBS, 6),
        ((*OF_JOBS, "--tls"), {**ROW_OF_JOBS, "tls": True}, 0),
        (OF_TWO_KINDS, ROW_OF_JOBS, 6),
        (OF_TWO_KINDS, {**ROW_OF_JOBS, "section": "2 × large + 1 × gpu"}, 0),
    ],
    ids=[
        *(
            "the same",
            "more threads",
            "a separate scheduler",
            "SLURM jobs",
            "the same section",
            "another section",
            "no section told",
        ),
        *("encrypted", "both encrypted", "jobs of another section besides", "the same two sections"),
    ],
)
def test_rows_of_other_clusters_are_not_taken_for_those_that_are_asked_for(
    *,
    cluster: tuple[str, ...],
    place: dict[str, Any],
    n_missing: int,
    measured: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[int] = []

    def planned(suites: Any, options: Any, rules: Rules, *, done: Collection[str], **_: Any) -> Iterator[Any]:
        (program,) = suites[0].programs(options)
        found.append(
            sum(Runs(program, rules, "", done)._is_left(side, n) for side in SIDES for n in range(2))
        )
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(runs, "run_suites", planned)
    monkeypatch.setattr(SlurmOptions, "workers_and_threads", lambda self: (1, 1))
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({**row, **place}) + "\n" for row in rows_of(measured)))
    workers = () if "--cluster" in cluster else ("--workers", "1")
    ferroflow("bench", "run", *TINY[:7], *workers, "--repeat", "2", *cluster, "--rows", file)
    assert found == [n_missing]


def test_rows_of_another_commit_are_not_gone_on_with(measured: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = rows_of(measured)
    file.write_text("".join(json.dumps({**row, "commit": "0123456789ab"}) + "\n" for row in rows))
    line = refusal("bench", "run", *TINY, "--rows", file)
    assert "from another commit, machine or set of versions" in line


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("run",), "name a workload; `ferroflow bench list` names all"),
        (("run", "nonsense"), "unknown workload 'nonsense'; choose one of: "),
        (("run", "wide", "--policy", "nonsense"), "unknown policy 'nonsense'; choose one of: dask, "),
        (("run", "wide", "--costs", "nonsense"), "'nonsense' is not one of 'learned', 'known'"),
        (("run", "wide", "--repeat", "0"), "--repeat must be from 1 to"),
        (("run", "wide", "--breadth", "3"), "No such option '--breadth'"),
        (("run", "wide", "--width", "many"), "size 'width' of 'wide' is 'many'; it must be int"),
        (("run", "wide", "--run-timeout", "nan"), "'--run-timeout': nan is no number of seconds"),
        (("run", "wide", "--tls"), "--tls would do nothing without --cluster slurm"),
        (("run", "wide", "--cluster", "slurm", "--threads", "2"), "--threads would start a local cluster"),
        (
            ("run", "wide", "--cluster", "slurm", "--place", "local"),
            "--place would do nothing with --cluster",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_wrong_input_is_told_in_one_line(arguments: tuple[str, ...], told: str, tmp_path: Path) -> None:
    line = refusal("bench", *arguments, "--rows", str(tmp_path / "rows.jsonl"))
    assert told in line
    assert not (tmp_path / "rows.jsonl").exists()


def test_workloads_whose_packages_are_missing_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "find_spec", lambda name: None if name == "pandas" else name)
    line = refusal("bench", "run", "groupby", "--rows", tmp_path / "rows.jsonl")
    assert "groupby needs pandas; run in the clone: pip install '.[bench]'" in line
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    line = refusal("bench", "run", *TINY, "--rows", tmp_path / "nowhere" / "rows.jsonl")
    assert "cannot be written: there is no folder" in line


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "No such file"),
        ("not json\n", "rows.jsonl:1"),
        ('{"a": 1}\n', "rows.jsonl:1"),
        ("", "no rows in"),
    ],
    ids=["there is no file", "not JSON", "foreign", "empty"],
)
def test_files_that_are_not_ours_are_told_in_one_line(content: str | None, told: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    if content is not None:
        file.write_text(content)
    assert told in refusal("report", str(file))


def test_the_schema_is_documented() -> None:
    printed = answer("report", "--schema").stdout
    assert all(f"| `{field}` |" in printed for field in BenchRecord.__dataclass_fields__)
    assert "name a file" in refusal("report")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--page", "nowhere/x.md"), "--page 'nowhere/x.md' cannot be written: there is no folder"),
        (("--page", "x.html"), "--page must end in .md, got 'x.html'"),
        (("--schema",), "--schema reads and writes no file; leave out rows.jsonl"),
    ],
)
def test_a_report_refuses_before_it_prints(
    arguments: tuple[str, ...], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    append_row("rows.jsonl", row())
    done = ferroflow("report", "rows.jsonl", *arguments)
    assert_one_line(done.exit_code, done.stderr, USAGE, re.escape(told))
    assert done.stdout == ""


def test_a_schema_goes_into_no_page() -> None:
    assert "leave out --page" in refusal("report", "--schema", "--page", "x.md")


def test_broken_runs_fail_the_command_and_are_made_again(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.jsonl"
    made = [BenchRecord(**fields) for fields in rows_of(measured)]
    broken = [replace(one, status="hung") if one.policy == "ferroflow" else one for one in made]

    def run_suites(*_: Any, done: Collection[str], **options: Any) -> Iterator[BenchRecord]:
        yield from (one for one in (made if done else broken) if identity_of(one) not in done)

    monkeypatch.setattr(runs, "run_suites", run_suites)
    done = ferroflow("bench", "run", *TINY, "--rows", file)
    assert done.exit_code == FAILURE
    assert "2 of 6 runs do not count; the first: stencil_1d" in done.stderr
    assert "under ferroflow: hung; the same command makes them again" in done.stderr
    assert "**BROKEN**" in done.stdout
    again = answer("bench", "run", *TINY, "--rows", file)
    assert "broken runs that were run again: 2" in again.stdout
    assert "BROKEN" not in again.stdout
    assert len(rows_of(file)) == 6 + 2


def test_a_run_that_goes_on_adds_a_program_that_is_skipped_once(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.jsonl"
    made = [BenchRecord(**fields) for fields in rows_of(measured)]
    lacks = replace(made[0], workload="absent", status="skipped: it needs a moon")
    found = [*made, lacks]

    def run_suites(*_: Any, done: Collection[str], **options: Any) -> Iterator[BenchRecord]:
        yield from (one for one in found if identity_of(one) not in done)

    monkeypatch.setattr(runs, "run_suites", run_suites)
    for _ in range(2):
        ferroflow("bench", "run", *TINY, "--rows", file)
        assert len(rows_of(file)) == 6 + 1
    found[-1] = replace(lacks, status="skipped: it needs a sun")
    ferroflow("bench", "run", *TINY, "--rows", file)
    assert [one["status"] for one in rows_of(file)][6:] == [lacks.status, found[-1].status]


def test_all_workloads_are_listed() -> None:
    listed = answer("bench", "list").stdout
    assert "stencil_1d (task-bench): " in listed
    assert "--n-heavy 4" in listed
