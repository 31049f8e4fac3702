"""A file is replaced as a whole or stays as it was."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordings import EMPTY

from ferroflow_dask.array_files import write_outputs
from ferroflow_dask.dashboard import report
from ferroflow_dask.exceptions import FerroflowError
from ferroflow_dask.whole_files import replacing, write_text


def test_a_file_is_replaced_once_it_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    write_text(file, "old")
    file.chmod(0o640)
    with replacing(file) as beside:
        beside.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_write_that_fails_changes_nothing(is_there: bool, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    if is_there:
        file.write_text("old")

    def interrupted() -> None:
        with replacing(file) as beside:
            beside.write_text("ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"] * is_there


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    for text in ("first", "second"):
        write_text(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "real").read_text() == text


def test_a_pipe_is_written_in_place(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=write_text, args=(tmp_path / "pipe", "told"))
    writer.start()
    assert (tmp_path / "pipe").read_text() == "told"
    writer.join()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anything")
def test_what_must_not_be_written_is_not(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("old")
    file.chmod(0o400)
    with pytest.raises(PermissionError):
        write_text(file, "new")
    assert file.read_text() == "old"


def _cut(*_: object, **__: object) -> Any:
    raise OSError("the disk is full")


def test_outputs_that_cannot_be_written_leave_those_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "y.npz"
    write_outputs(str(file), {"y": np.arange(3)})
    monkeypatch.setattr(np.lib.format, "write_array", _cut)
    with pytest.raises(FerroflowError, match=r"--output '.*' cannot be written: the disk is full"):
        write_outputs(str(file), {"y": np.arange(4)})
    with np.load(file) as kept:
        assert kept["y"].tolist() == [0, 1, 2]
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "write",
    [
        lambda path: report.write_report(path, "title", [], {}, EMPTY),
        lambda path: report.write_trace(path, EMPTY),
    ],
    ids=["report", "trace"],
)
def test_pages_that_cannot_be_written_leave_nothing(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.write_text

    def half(path: Path, text: str, **options: Any) -> int:
        real(path, text[: len(text) // 2], **options)
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="the disk is full"):
        write(tmp_path / "page")
    assert not list(tmp_path.iterdir())
