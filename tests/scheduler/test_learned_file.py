"""Files of learned numbers: exported, restored, shared by schedulers, and left alone if they are damaged."""

from __future__ import annotations

import errno
import json
import logging
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from learned_numbers import keep, seconds_of, task, taught, teach
from mutated_files import learned_numbers, mutated
from waiting import until

from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.scheduler import learned_file
from ferroflow_dask.scheduler.cost_model import CostModel
from ferroflow_dask.scheduler.learned import Learned
from ferroflow_dask.scheduler.learned_file import MOST_NBYTES, LearnedFile, as_json, read_numbers

#: Mutated files of a run of the tests.
N_MUTATED = 300


# Export and restoration

_NAMES = st.text(max_size=4)
_TASKS = st.lists(
    st.tuples(
        _NAMES,
        st.none() | _NAMES,
        st.floats(0, 1e6),
        st.integers(0, 2**50),
        st.lists(st.integers(0, 2**50), max_size=2),
        st.sampled_from("ab"),
    ),
    max_size=30,
)


@given(_TASKS)
def test_a_restored_model_expects_the_same_of_all_tasks(tasks: Any) -> None:
    costs, other = CostModel(), CostModel()
    for name, kind, seconds, nbytes, reads, worker in tasks:
        costs.record(task(name, kind=kind, reads=tuple(reads)), seconds, nbytes, worker)
    exported = json.loads(json.dumps(costs.exported()))
    other.restore(exported)
    assert other.means() == costs.means()
    assert {name: other.of_prefix(name) for name in costs.names()} == {
        name: costs.of_prefix(name) for name in costs.names()
    }
    assert {kind: other.of_kind(task("f", kind=kind)) for kind in exported["kinds_s"]} == exported["kinds_s"]
    assert [*other.exported()["prefixes"]] == [*costs.exported()["prefixes"]]
    again = CostModel()
    again.restore(other.exported())
    assert again.exported() == other.exported()


def test_what_is_known_stays_and_counts_as_used_later() -> None:
    learned, file = taught("f", "g", seconds=1.0), taught("f", "h", seconds=5.0)
    learned.record_shuffle("b", 1.0)
    file.record_shuffle("b", 2.0)
    file.record_shuffle("a", 3.0)
    learned.pause_s, file.pause_s, file.round_trip_s, file.separate = 1e-3, 2e-3, 3e-3, {"s"}
    learned.restore(file.exported())
    assert seconds_of(learned) == {"h": 5.0, "f": 1.0, "g": 1.0}
    assert [*learned.exported()["prefixes"]] == ["h", "f", "g"]
    assert [*learned.shuffled.items()] == [("a", 3.0), ("b", 1.0)]
    assert (learned.pause_s, learned.round_trip_s, learned.separate) == (1e-3, 3e-3, {"s"})


def test_a_machine_of_another_speed_is_learned_soon() -> None:
    learned = Learned()
    learned.restore(taught("f", seconds=1.0, n=1000).exported())
    for worker in "ab":  # the first task on a worker counts as the first one, as on every new cluster
        learned.costs.record(task("f"), 100.0, 8, worker)
    assert seconds_of(learned) == {"f": 1.0}
    teach(learned, "f", 0.1, n=5)
    assert seconds_of(learned)["f"] < 0.5


# Files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "learned.json"


def test_a_file_has_all_numbers(path: Path) -> None:
    learned = taught("f", "g\ud800\n")
    learned.costs.record(task("h", kind="MatMul 3×4"), 2.0, 8, "a")
    learned.pause_s, learned.round_trip_s, learned.separate = 1e-3, 2e-3, {"b", "a"}
    learned.record_shuffle("s", 1e6)
    keep(path, learned)
    assert read_numbers(path) == learned.exported()
    assert json.loads(path.read_text())["version"] == 1


def test_nothing_is_written_of_nothing(path: Path) -> None:
    keep(path, Learned())
    assert not path.exists()


def test_two_schedulers_keep_the_numbers_of_both_and_the_later_ones_of_the_same_prefix(path: Path) -> None:
    keep(path, taught("first"))
    one, other = Learned(), Learned()
    files = {name: LearnedFile(path) for name in ("one", "other")}
    files["one"].read_into(one)
    files["other"].read_into(other)
    teach(one, "both", 1.0)
    teach(one, "of one", 1.0)
    teach(other, "both", 2.0)
    teach(other, "first", 3.0, n=50)
    one.separate, other.separate = {"a"}, {"b"}
    files["other"].write(other.exported())
    files["one"].write(one.exported())
    found = Learned()
    found.restore(read_numbers(path))
    # The first scheduler has restored "first", but not learned it again.
    assert seconds_of(found) == {
        "first": pytest.approx(3.0, rel=0.05),
        "both": 1.0,
        "of one": 1.0,
    }
    teach(other, "both", 2.0, n=50)
    files["other"].write(other.exported())
    found = Learned()
    found.restore(read_numbers(path))
    assert seconds_of(found)["both"] == 2.0
    assert [*read_numbers(path)["prefixes"]] == ["first", "of one", "both"]
    assert read_numbers(path)["separate"] == ["a", "b"]


def test_numbers_of_an_installation_without_a_file_are_written_by_the_next_one(path: Path) -> None:
    keep(path, taught("f", seconds=1.0))
    keep(path, taught("f", seconds=2.0))
    assert read_numbers(path)["prefixes"]["f"][0]["mean_s"] == 2.0


def test_a_write_that_comes_after_the_last_one_does_nothing(path: Path) -> None:
    file = LearnedFile(path)
    file.write(taught("f").exported(), is_last=True)
    file.write(taught("g").exported())  # a thread may be late
    assert [*read_numbers(path)["prefixes"]] == ["f"]


def test_a_file_that_was_removed_gets_only_numbers_learned_since(path: Path) -> None:
    keep(path, taught("old"))
    learned, file = Learned(), LearnedFile(path)
    file.read_into(learned)
    path.unlink()
    file.write(learned.exported())
    assert not path.exists()
    teach(learned, "new", 1.0)
    file.write(learned.exported())
    assert [*read_numbers(path)["prefixes"]] == ["new"]


_WRITER = """
import sys
from pathlib import Path
from ferroflow_dask.scheduler.learned import Learned
from ferroflow_dask.scheduler.learned_file import LearnedFile
file, learned = LearnedFile(Path(sys.argv[1])), Learned()
for i in range(150):
    means = {"size_nbytes": 1.0, "mean_s": float(i), "mean_nbytes": 1.0, "most_nbytes": 1.0}
    counts = {"n_cold": 1, "n_warm": i, "n_sized": i}
    learned.costs.restore({"kinds_s": {}, "prefixes": {f"{sys.argv[2]} {i}": [means | counts]}})
    file.write(learned.exported())
"""


def test_the_file_is_whole_while_two_processes_write_it(path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, str(path), name]) for name in ("one", "two")]
    n_read = 0
    until(lambda: path.exists() or all(one.poll() is not None for one in writers))
    while any(writer.poll() is None for writer in writers):
        n_read += bool(read_numbers(path)["prefixes"])
    assert [writer.returncode for writer in writers] == [0, 0]
    assert n_read > 1
    assert {name.split()[0] for name in read_numbers(path)["prefixes"]} == {"one", "two"}
    assert [*path.parent.iterdir()] == [path]


def test_a_file_has_at_most_4_mb_of_the_prefixes_used_last(path: Path) -> None:
    learned = taught("like")
    (like,) = learned.exported()["prefixes"].values()
    numbers = learned.exported() | {
        "separate": ["alone"],
        "kinds_s": {f"{'k' * 300} {i}": 1.0 for i in range(10_000)},
        "prefixes": {f"{'é' * 50} {i}": like for i in range(10_000)},
    }
    text = as_json(numbers)
    assert 0.98 * MOST_NBYTES < len(text.encode()) <= MOST_NBYTES
    path.write_text(text)
    found = read_numbers(path)
    assert found["separate"] == ["alone"]
    for section in ("kinds_s", "prefixes"):
        kept = [*found[section].items()]
        assert 1000 < len(kept) < 10_000
        assert kept == [*numbers[section].items()][-len(kept) :]
    assert as_json(numbers) == text


def test_a_name_that_has_no_room_is_left_out() -> None:
    (like,) = taught("like").exported()["prefixes"].values()
    numbers = learned_file.EMPTY | {"prefixes": {"x" * MOST_NBYTES: like}}
    assert json.loads(as_json(numbers))["prefixes"] == {}


# Damaged files


def whole(**changes: Any) -> str:
    return json.dumps(json.loads(as_json(taught("f").exported())) | changes)


def of_f(**changes: Any) -> str:
    (sizes,) = taught("f").exported()["prefixes"].values()
    return whole(prefixes={"f": [sizes[0] | changes]})


#: Contents of files with the reason for which they are not read.
DAMAGED = {
    "": "must be a JSON file",
    "[]": "format must be 'ferroflow learned numbers'",
    whole(version=2): "version must be 1, got 2",
    whole(pause_s=-1): "pause_s must be a finite number, at least 0, got -1",
    whole(shuffled={"s": 1e300}): r"the size of shuffle 's' must be at most 1.15292e\+18, got 1e\+300",
    whole(separate=[3]): "separate must be a text, got 3",
    whole(kinds_s={"k": None}): "the duration of kind 'k' must be a finite number, at least 0, got None",
    whole(prefixes={"f": []}): "prefix 'f' must have means, got none",
    of_f(mean_s=10**400): "prefix 'f': mean_s must be a finite number",
    of_f(mean_s=1e300): r"prefix 'f': mean_s must be at most 1e\+09, got 1e\+300",
    of_f(mean_nbytes=float("nan")): "prefix 'f': mean_nbytes must be a finite number, at least 0, got nan",
    of_f(n_warm=True): "prefix 'f': n_warm must be a number of tasks, got True",
    of_f(n_sized=2**60): "prefix 'f': n_sized must be a number of tasks",
    whole(separate=["x" * MOST_NBYTES]): "must have at most 4,000,000 bytes, got more",
}


@pytest.mark.parametrize("content", DAMAGED, ids=DAMAGED.values())
def test_a_damaged_file_is_left_alone_with_one_line(
    content: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text(content)
    with pytest.raises(UsageError, match=DAMAGED[content]):
        read_numbers(path)
    learned, file = taught("g"), LearnedFile(path)
    with caplog.at_level(logging.WARNING):
        file.read_into(learned)
        file.write(learned.exported())
        file.write(taught("h").exported(), is_last=True)
    (record,) = caplog.records
    line = record.getMessage()
    assert line.startswith(f"ferroflow: the learned numbers in {path} could not be read (")
    assert line.endswith("); the file is left alone")
    assert line.isprintable()
    assert path.read_text() == content
    assert [*learned.exported()["prefixes"]] == ["g"]


def test_a_file_that_another_program_damages_is_left_alone(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learned, file = taught("f"), LearnedFile(path)
    file.read_into(learned)
    file.write(learned.exported())
    path.write_text("{")
    teach(learned, "f", 5.0)
    with caplog.at_level(logging.WARNING):
        for is_last in (False, True):
            file.write(learned.exported(), is_last=is_last)
    assert len(caplog.records) == 1
    assert path.read_text() == "{"


def test_mutated_files_are_read_or_left_alone_with_one_line(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    n_left_alone = 0
    for number in range(N_MUTATED):
        content = mutated(learned_numbers(), random.Random(f"kept {number}"))
        path.write_bytes(content)
        learned, file = taught("g"), LearnedFile(path)
        with caplog.at_level(logging.WARNING):
            file.read_into(learned)
        lines = [record.getMessage() for record in caplog.records]
        caplog.clear()
        assert len(lines) == file.is_closed, number
        assert all(line.isprintable() and len(line) < 3000 for line in lines), number
        if file.is_closed:
            n_left_alone += 1
            file.write(learned.exported(), is_last=True)
            assert path.read_bytes() == content
    assert 0 < n_left_alone < N_MUTATED


def test_a_full_disk_is_logged_once_and_tried_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    learned, file = taught("f"), LearnedFile(path)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(learned_file, "write_text", full)
        file.write(learned.exported())
        file.write(learned.exported())
    (record,) = caplog.records
    message = "ferroflow: the learned numbers could not be written to %s (No space left on device)"
    assert record.getMessage() == message % path
    file.write(learned.exported())
    assert [*read_numbers(path)["prefixes"]] == ["f"]
