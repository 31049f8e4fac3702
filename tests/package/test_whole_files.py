"""A file is replaced as a whole or stays as it was."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

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
