"""Files that are replaced as a whole: a write that fails leaves what was there before."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the name of a file to write; it takes the place of `path` unless the context ends in an error.

    Parameters
    ----------
    path : path-like
        A link stays one: what it points to is replaced. What is no file (a pipe), what must not be written,
        and what lies in a folder where no other can be made, is written in place.

    Raises
    ------
    OSError
        The folder is missing, or the disk is full, ….
    """
    target = Path(os.path.realpath(path))
    is_there = target.exists()
    may_be_replaced = target.is_file() and os.access(target, os.W_OK) and os.access(target.parent, os.W_OK)
    if is_there and not may_be_replaced:
        yield target
        return
    beside = target.with_name(f".{uuid.uuid4().hex}-{target.name}")  # the suffix says the format
    try:
        yield beside
        if is_there:
            shutil.copymode(target, beside)
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write UTF-8 to a file, all of it or nothing; raises `OSError`."""
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8")
