"""Arrays that are mapped from files: another process maps the file as well, instead of getting the bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferroflow_dask.exceptions import ModelError


@dataclass(frozen=True, slots=True)
class FileArray:
    """Where an array is in a file.

    Parameters
    ----------
    path : str
    dtype : numpy.dtype
    offset : int
        Of the first byte [B].
    shape : tuple of int
    size : int
        Of the file [B].
    modified_ns : int
        When the file was changed.
    """

    path: str
    dtype: np.dtype[Any]
    offset: int
    shape: tuple[int, ...]
    size: int
    modified_ns: int

    @property
    def is_here(self) -> bool:
        """Whether this process can read the same file."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        is_same = (found.st_size, found.st_mtime_ns) == (self.size, self.modified_ns)
        return is_same and os.access(self.path, os.R_OK)

    def open(self) -> NDArray[Any]:
        """Return the array.

        Raises
        ------
        ModelError
            The file is not here, or has changed.
        """
        if not self.is_here:
            raise ModelError(
                f"{self.path}: must be the file that the model was loaded from, but is missing here or has "
                "changed; load the model again"
            )
        return np.asarray(np.memmap(self.path, self.dtype, "r", self.offset, self.shape))


def in_file(array: Any) -> FileArray | None:
    """Return where an array is mapped from; None if it is in memory, or its file is gone."""
    owner = array
    while isinstance(owner, np.ndarray) and isinstance(owner.base, np.ndarray):
        owner = owner.base
    if not isinstance(owner, np.memmap) or owner.filename is None or not array.flags.c_contiguous:
        return None
    # A view of a part of the mapped array begins elsewhere in the file.
    addresses = [one.__array_interface__["data"][0] for one in (array, owner)]
    try:
        path = os.path.realpath(owner.filename)
        facts = os.stat(path)
    except OSError:
        return None
    offset = owner.offset + addresses[0] - addresses[1]
    return FileArray(path, array.dtype, offset, array.shape, facts.st_size, facts.st_mtime_ns)
