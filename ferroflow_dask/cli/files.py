"""Files that commands write: what is wrong with a name is told before anything runs."""

from __future__ import annotations

import os
from pathlib import Path

from ferroflow_dask.exceptions import UsageError


def check_folder(option: str, file: str | os.PathLike[str]) -> None:
    """Raise `UsageError` where a file cannot be: there is no such folder, or the file is one."""
    path = Path(file)
    if not path.parent.is_dir():
        raise UsageError(
            f"{option} {os.fspath(file)!r} cannot be written: there is no folder {str(path.parent)!r}"
        )
    if path.is_dir():
        raise UsageError(f"{option} {os.fspath(file)!r} cannot be written: it is a folder")
