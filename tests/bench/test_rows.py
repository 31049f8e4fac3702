"""Files of rows: what is written is read, what is torn is passed over, all else is refused in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from bench_rows import fields, row

from ferroflow_dask.bench.public.report import report
from ferroflow_dask.bench.rows import append_row, read_rows
from ferroflow_dask.bench.schema import SCHEMA, BenchRecord, schema_table
from ferroflow_dask.exceptions import UsageError

FIRST, SECOND = row(), row(repetition=1, bound_s=None, efficiency=None, status="failed: é | 雪")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with two rows."""
    path = tmp_path / "rows.jsonl"
    for record in (FIRST, SECOND):
        append_row(path, record)
    return path


def written(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps(fields(**changes)) + "\n", encoding="utf-8")
    return path


def refusal(*paths: Path) -> str:
    with pytest.raises(UsageError) as caught:
        read_rows(paths)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_written_is_read(file: Path) -> None:
    assert read_rows([file]) == (FIRST, SECOND)
    assert read_rows([file]).notes == ()


def test_a_row_of_a_failure_that_no_encoding_has_is_not_lost(tmp_path: Path) -> None:
    broken = row(bound_s=None, efficiency=None, status="failed: OSError: no file 'caf\udce9'")
    append_row(tmp_path / "rows.jsonl", broken)
    assert read_rows([tmp_path / "rows.jsonl"]) == (broken,)
    assert b"caf\\udce9" in report([broken]).encode()


def test_rows_of_several_files_come_in_the_order_of_the_files(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    append_row(other, row(repetition=7))
    assert [record.repetition for record in read_rows([other, file])] == [7, 0, 1]


def test_each_row_is_in_the_file_when_append_returns(file: Path) -> None:
    append_row(file, row(repetition=2))
    assert file.read_bytes().count(b"\n") == 3
    assert file.read_bytes().endswith(b"}\n")


@pytest.mark.parametrize("length", [1, 10, 30, 200, -2])
def test_a_torn_last_line_is_passed_over_with_a_note_and_cut_off_by_the_next_row(
    file: Path, length: int
) -> None:
    torn = json.dumps(fields(repetition=2))[:length]
    with file.open("a", encoding="utf-8") as lines:
        lines.write(torn)
    found = read_rows([file])
    assert found == (FIRST, SECOND)
    assert len(found.notes) == 1
    assert str(file) in found.notes[0]
    append_row(file, row(repetition=3))
    assert read_rows([file]) == (FIRST, SECOND, row(repetition=3))


def test_a_broken_run_that_was_made_again_is_left_out_with_a_note(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    broken = row(makespan_s=0.0, efficiency=None, status="hung")
    for record in (broken, broken, FIRST):  # the second try broke alike
        append_row(file, record)
    found = read_rows([file])
    assert found == (FIRST,)
    assert found.notes == (f"{file}: broken runs that were run again: 2; the later rows count.",)


def test_a_broken_run_that_came_last_or_is_of_another_commit_counts(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    records = (row(status="hung", commit="abc"), FIRST, row(status="hung"))
    for record in records:
        append_row(file, record)
    assert read_rows([file]) == records
    assert not read_rows([file]).notes


def test_a_last_line_that_only_lacks_its_newline_is_kept(file: Path) -> None:
    file.write_bytes(file.read_bytes().removesuffix(b"\n"))
    assert read_rows([file]) == (FIRST, SECOND)
    append_row(file, row(repetition=2))
    assert len(read_rows([file])) == 3


def test_a_file_with_only_a_torn_line_has_no_rows_but_can_be_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"schema": "ferr', encoding="utf-8")
    assert re.fullmatch(r"no rows in .*rows\.jsonl; .*", refusal(path))
    assert read_rows([path], may_be_empty=True) == ()
    append_row(path, FIRST)
    assert read_rows([path]) == (FIRST,)


@pytest.mark.parametrize("content", [b"notes\n", b"notes", b'{"a": 1}\n', b"[]", b"\xff\xfe"])
def test_a_foreign_file_is_neither_read_nor_written(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert f"{path}:1: not" in refusal(path)
    with pytest.raises(UsageError, match=r"not a row of ferroflow's"):
        append_row(path, FIRST)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param("", r"rows.jsonl:3: not JSON", id="an empty line"),
        pytest.param(
            '{"schema": "ferroflow-bench/2", ', r":3: not JSON", id="a torn line that is not the last"
        ),
        pytest.param("[" * 100_000, r":3: not JSON", id="brackets without end"),
        pytest.param('{"schema": "other/1"}', r":3: schema is 'other/1'; this release", id="another schema"),
        pytest.param(
            '{"schema": "ferroflow-bench/5"}',
            rf":3: schema is 'ferroflow-bench/5'; this release reads '{SCHEMA}'; measure again",
            id="another version",
        ),
    ],
)
def test_a_line_that_is_no_row_is_refused(line: str, message: str, file: Path) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.write(f"{line}\n")
    assert re.search(message, refusal(file))


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("workload", "", "text, and not empty"),
        ("policy", 3, "text, and not empty"),
        ("lowering", None, "text"),
        ("suite", "", "text, and not empty"),
        ("costs", "guessed", "one of: known, learned, unknown"),
        ("arguments", [], "an object"),
        ("workers", 0, "a whole number, at least 1"),
        ("workers", True, "a whole number, at least 1"),
        ("ops", 1.5, "a whole number, at least 0"),
        ("repetition", -1, "a whole number, at least 0"),
        ("processes", 1, "true or false"),
        ("cluster", "cloud", "one of: local, separate, slurm, virtual, unknown"),
        ("section", 1, "text or null"),
        ("invocation", 1, "text or null"),
        ("tls", "", "true, false or null"),
        ("fresh", 1, "true, false or null"),
        ("makespan_s", "1", "a number, at least 0"),
        ("makespan_s", 10**400, "a number, at least 0"),
        ("makespan_s", 0, "of a run that is ok it is above 0"),
        ("bound_s", False, "a number, at least 0, or null"),
        ("status", "", "text, and not empty"),
        ("versions", {"dask": 1}, "an object of texts"),
    ],
)
def test_a_field_of_the_wrong_type_or_range_is_refused(
    name: str, value: Any, allowed: str, tmp_path: Path
) -> None:
    message = refusal(written(tmp_path / "rows.jsonl", **{name: value}))
    assert message.startswith(f"{tmp_path / 'rows.jsonl'}:1: {name} is {value!r}; ")
    assert allowed in message


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    assert "NaN is no number" in refusal(written(tmp_path / "rows.jsonl", makespan_s=float("nan")))


def test_missing_and_unknown_fields_are_refused(tmp_path: Path) -> None:
    assert "no field 'colour'" in refusal(written(tmp_path / "more.jsonl", colour="red"))
    few = tmp_path / "few.jsonl"
    few.write_text(json.dumps({"schema": SCHEMA}) + "\n", encoding="utf-8")
    assert "field 'workload' is missing" in refusal(few)


def test_no_files_and_unreadable_ones_are_refused(tmp_path: Path) -> None:
    assert refusal().startswith("no rows in no files")
    assert refusal(tmp_path / "nowhere.jsonl") == f"{tmp_path / 'nowhere.jsonl'}: cannot be read: " + (
        "No such file or directory"
    )
    assert "cannot be read: Is a directory" in refusal(tmp_path)


def test_the_same_row_twice_is_refused(file: Path) -> None:
    assert refusal(file, file) == f"{file}:1: this row is already in {file}:1; give each row once"


def test_a_record_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with pytest.raises(UsageError, match=r"ops is 1\.5; it must be a whole number"):
        append_row(path, row(ops=1.5))
    assert not path.exists()
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        append_row(tmp_path / "nowhere" / "rows.jsonl", FIRST)


def test_every_field_of_a_row_is_documented() -> None:
    lines = schema_table().splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert [name for name, _, _ in cells] == [f"`{name}`" for name in BenchRecord.__dataclass_fields__]
    assert all(kind and meaning for _, kind, meaning in cells)
