"""`ferroflow bench` and `ferroflow report`: what is kept, what is told, what is refused."""

from __future__ import annotations

import importlib
import json
import re
import statistics
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bench_rows import row
from command_line import FAILURE, INTERRUPTED, USAGE, answer, assert_one_line, ferroflow
from distributed import Client

from ferroflow_dask.bench import session
from ferroflow_dask.bench.plan import Plan
from ferroflow_dask.bench.rows import append_row
from ferroflow_dask.bench.schema import BenchRecord
from ferroflow_dask.cli.slurm import SlurmOptions
from ferroflow_dask.deploy import local_client

#: The modules; the name of the first in the package is that of the command.
command = importlib.import_module("ferroflow_dask.cli.bench")
runs = importlib.import_module("ferroflow_dask.cli.bench_runs")

TINY = ("wide", "--width", "4", "--depth", "2", "--workers", "2", "--no-processes", "--repeat", "2")


BOTH = ("--policy", "dask", "--policy", "ferroflow")


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
        (("bench", "metg", "--size"), "no option --size here; each size has its own"),
        (("bench", "metg", "--m", "64"), "No such option '--m'"),
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
    answer("bench", "run", *TINY, *BOTH, "--rows", file)
    return file


def test_each_run_leaves_a_row(measured: Path) -> None:
    rows = rows_of(measured)
    # Two repetitions of four lowerings of Dask's, and of ours as it is and in bundles.
    assert len(rows) == 2 * (4 + 2)
    assert {row["status"] for row in rows} == {"ok"}
    assert len({row["invocation"] for row in rows}) == 1
    assert {(row["ops"], row["executed"]) for row in rows} == {(8, 8)}
    assert {row["arguments"]["width"] for row in rows} == {4}
    assert all(list(row) == list(BenchRecord.__dataclass_fields__) for row in rows)


def test_the_report_names_the_best_lowering(measured: Path) -> None:
    told = answer("report", measured).stdout
    times_s: dict[str, list[float]] = {}
    for fields in rows_of(measured):
        if fields["policy"] == "dask":
            times_s.setdefault(fields["lowering"], []).append(fields["makespan_s"])
    best = min(times_s, key=lambda lowering: statistics.median(times_s[lowering]))
    # In the first table, of speed-ups: the one of all samples names every lowering.
    cells = next(line for line in told.splitlines() if line.startswith("| wide")).split(" | ")
    assert cells[2].endswith(f", {best}")
    assert "## Regressions" in told


def test_a_finished_benchmark_runs_nothing_again(measured: Path) -> None:
    before = measured.read_bytes()
    again = answer(
        "bench", "run", *TINY, "--policy", "dask", "--policy", "ferroflow", "--rows", str(measured)
    )
    assert again.exit_code == 0, again.output
    assert measured.read_bytes() == before


def test_an_interrupted_benchmark_keeps_its_rows_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.jsonl"
    arguments = ("bench", "run", *TINY, "--policy", "ferroflow", "--policy", "static", "--rows", str(file))
    run_plan = runs.run_plan

    def interrupted(*args: Any, **options: Any) -> Iterator[BenchRecord]:
        rows = run_plan(*args, **options)
        yield next(rows)
        rows.close()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runs, "run_plan", interrupted)
        first = ferroflow(*arguments)
    assert first.exit_code == INTERRUPTED
    assert f"interrupted; 1 of 8 runs are in {file}" in " ".join(first.stderr.split())
    (kept,) = rows_of(file)
    answer(*arguments)
    assert rows_of(file)[0] == kept
    assert len(rows_of(file)) == 8
    # Those that came later are no pairs with the one before.
    assert [row["invocation"] == kept["invocation"] for row in rows_of(file)] == [True] + [False] * 7


def test_a_cluster_that_fails_to_end_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def failing(*shape: Any) -> Iterator[Client]:
        with local_client(*shape) as client:
            yield client
        raise RuntimeError("it does not end")

    monkeypatch.setattr(session, "local_client", failing)
    file = tmp_path / "rows.jsonl"
    done = answer("bench", "run", *TINY, "--policy", "ferroflow", "--rows", file)
    line = "a cluster did not end cleanly, and may be there still: failed: RuntimeError: it does not end\n"
    assert done.stderr.count(line) == 1
    assert len(rows_of(file)) == 2 * 2


OF_JOBS = ("--cluster", "slurm", "--section", "large", "--jobs", "2")
OF_TWO_KINDS = (*OF_JOBS, "--gpu-jobs", "1")
ROW_OF_JOBS = {"cluster": "slurm", "section": "large", "tls": False}


@pytest.mark.parametrize(
    ("cluster", "place", "n_missing"),
    [
        (("--workers", "2"), {}, 0),
        (("--workers", "2", "--fresh"), {}, 12),
        (("--cluster", "slurm"), {}, 12),
        (OF_JOBS, ROW_OF_JOBS, 0),
        (OF_JOBS, {**ROW_OF_JOBS, "section": "cpu"}, 12),
        (OF_JOBS, {**ROW_OF_JOBS, "section": None, "tls": None}, 12),
        ((*OF_JOBS, "--tls"), ROW_OF_JOBS, 12),
        ((*OF_JOBS, "--tls"), {**ROW_OF_JOBS, "tls": True}, 0),
        (OF_TWO_KINDS, ROW_OF_JOBS, 12),
        (OF_TWO_KINDS, {**ROW_OF_JOBS, "section": "2 × large + 1 × gpu"}, 0),
    ],
    ids=[
        *("the same", "fresh ones", "SLURM jobs", "the same section", "another section", "no section told"),
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

    def planned(plan: Plan, *, done: Collection[Any], **options: Any) -> Iterator[BenchRecord]:
        found.append(plan.n_runs - len(done))
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "run_plan", planned)
    monkeypatch.setattr(SlurmOptions, "workers_and_threads", lambda self: (2, 1))
    file = tmp_path / "rows.jsonl"
    rows = [{**row, "processes": True, **place} for row in rows_of(measured)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ferroflow("bench", "run", *TINY[:5], "--repeat", "2", *BOTH, *cluster, "--rows", file)
    assert found == [n_missing]


def test_rows_of_another_commit_are_not_gone_on_with(measured: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = rows_of(measured)
    file.write_text("".join(json.dumps({**row, "commit": "0123456789ab"}) + "\n" for row in rows))
    line = refusal("bench", "run", *TINY, *BOTH, "--rows", file)
    assert "from another commit, machine or set of versions" in line


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("run",), "name a workload; `ferroflow bench list` names all"),
        (("run", "nonsense"), "unknown workload 'nonsense'; choose one of: "),
        (("run", "wide", "--policy", "nonsense"), "unknown policy 'nonsense'; choose one of: dask, "),
        (("run", "wide", "--costs", "nonsense"), "costs are 'nonsense'; choose of: known, learned, unknown"),
        (("run", "wide", "--repeat", "0"), "--repeat must be from 1 to"),
        (("run", "wide", "--breadth", "3"), "No such option '--breadth'"),
        (("run", "wide", "--width", "many"), "size 'width' of 'wide' is 'many'; it must be int"),
        (("metg", "--pattern", "wide"), "'wide' is no pattern of Task Bench; choose one of: trivial, "),
        (("metg", "--pattern", "foo"), "'foo' is no pattern of Task Bench; choose one of: trivial, "),
        (("metg", "--task-ms", "-1"), "'--task-ms': -1"),
        (("metg", "--task-ms", "inf"), "'--task-ms': inf is no number of milliseconds"),
        (("run", "wide", "--run-timeout", "nan"), "'--run-timeout': nan is no number of seconds"),
        (("run", "wide", "--tls"), "--tls would do nothing without --cluster slurm"),
        (("run", "wide", "--cluster", "slurm", "--threads", "2"), "--threads would start a local cluster"),
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
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "pandas" else name)
    line = refusal("bench", "run", "groupby", "--rows", tmp_path / "rows.jsonl")
    assert "groupby: not without pandas; run in the clone: pip install '.[bench]'" in line
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


def test_a_broken_run_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    monkeypatch.setattr("ferroflow_dask.bench.session.is_in_charge", lambda client, policy: policy == "dask")
    done = ferroflow("bench", "run", *TINY, "--policy", "dask", "--policy", "static", "--rows", file)
    assert done.exit_code == FAILURE
    assert "policy 'static' gave up during the run" in done.stderr
    assert "BROKEN" in done.stdout
    assert {row["policy"] for row in rows_of(file) if row["status"] != "ok"} == {"static"}


def test_broken_runs_are_run_again_if_one_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    arguments = ("bench", "run", *TINY, "--policy", "static", "--rows", file)
    with monkeypatch.context() as patch:
        patch.setattr("ferroflow_dask.bench.session.is_in_charge", lambda client, policy: False)
        assert ferroflow(*arguments).exit_code == FAILURE
    broken = rows_of(file)
    again = ferroflow(*arguments)
    assert again.exit_code == FAILURE
    assert "run them again with --retry-broken" in again.stderr
    assert rows_of(file) == broken
    done = answer(*arguments, "--retry-broken")
    assert f"broken runs that were run again: {len(broken)}" in done.stdout
    assert "BROKEN" not in done.stdout
    assert [row["status"] for row in rows_of(file)[len(broken) :]] == ["ok"] * len(broken)


def test_all_workloads_are_listed() -> None:
    listed = answer("bench", "list").stdout
    assert "stencil_1d (task-bench): " in listed
    assert "--n-heavy 4" in listed


def test_a_metg_curve_is_measured_and_reported(tmp_path: Path) -> None:
    sizes = ("--width", "2", "--steps", "3", "--task-ms", "20", "--task-ms", "1")
    where = ("--workers", "2", "--no-processes", "--repeat", "1", "--policy", "ferroflow")
    done = answer("bench", "metg", *sizes, *where, "--rows", tmp_path / "rows.jsonl")
    assert "METG" in done.stdout
