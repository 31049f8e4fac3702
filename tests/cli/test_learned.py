"""`ferroflow learned`: the table of a file of learned numbers, and its removal."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import USAGE, answer, assert_one_line, ferroflow

from ferroflow_dask.scheduler.learned_file import EMPTY, as_json


@pytest.fixture
def file(tmp_path: Path) -> Path:
    def sizes(*means: tuple[float, float]) -> list[dict[str, float]]:
        return [
            {"size_nbytes": size, "mean_s": mean_s, "mean_nbytes": 2 * size, "most_nbytes": 2 * size}
            | {"n_cold": 1, "n_warm": 2, "n_sized": 1234}
            for size, mean_s in means
        ]

    prefixes = {"add": sizes((0.0, 0.001), (2.0**20, 0.05)), "red \x1b[31m": sizes((2.0**10, 2.0))}
    path = tmp_path / "learned.json"
    path.write_text(as_json(EMPTY | {"round_trip_s": 0.002, "separate": ["s"], "prefixes": prefixes}))
    return path


def test_the_longest_tasks_come_first(file: Path) -> None:
    head, columns, *rows = (line.rstrip() for line in answer("learned", "show", file).output.splitlines())
    assert head == "2 prefixes · 0 operator kinds · 1 prefixes never bundled · round trip 2.00 ms"
    assert columns.split("  ")[0].strip() == "prefix"
    assert [[*filter(None, map(str.strip, row.split("  ")))] for row in rows] == [
        ["red \\x1b[31m", "1.00 kiB", "1,234", "2.00 s", "2.00 kiB"],
        ["add", "1.00 MiB", "1,234", "50.00 ms", "2.00 MiB"],
        ["add", "0 B", "1,234", "1.00 ms", "0 B"],
    ]


def test_one_prefix_is_shown_alone(file: Path) -> None:
    rows = answer("learned", "show", file, "--prefix", "add").output.splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["add", "add"]


def test_a_file_is_removed(file: Path) -> None:
    assert answer("learned", "clear", file).output == f"removed {file}: 2 prefixes\n"
    assert not file.exists()


@pytest.mark.parametrize("command", ["show", "clear"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "a file of learned numbers must be a file, got '.*learned.json': No such file"),
        ("x = 3", "a file of learned numbers must be a JSON file, got '.*learned.json'"),
        ('{"format": "ferroflow record", "version": 1}', "format must be 'ferroflow learned numbers', got"),
        ('{"format": "ferroflow learned numbers", "version": 2}', "version must be 1, got 2"),
    ],
)
def test_another_file_is_refused_in_one_line(
    command: str, content: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "learned.json"
    if content is not None:
        path.write_text(content)
    result = ferroflow("learned", command, path)
    assert_one_line(result.exit_code, result.stderr, USAGE, message)
    assert path.exists() == (content is not None)


def test_a_prefix_that_is_not_in_the_file_is_refused_in_one_line(file: Path) -> None:
    result = ferroflow("learned", "show", file, "--prefix", "mul")
    assert_one_line(
        result.exit_code, result.stderr, USAGE, "--prefix must be one of the 2 in '.*', got 'mul'"
    )
