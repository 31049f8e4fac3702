"""Inputs of batch jobs: tables, arrays and folders of images, in partitions that workers read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ferroflow_dask.exceptions import BindError, UsageError
from ferroflow_dask.graph.nodes import TensorSpec, with_specs
from ferroflow_dask.jobs.columns import arrays_of, arrow
from ferroflow_dask.jobs.images import SUFFIXES, check_images, imagenet

#: Partitions of an input at most, so that files are not opened too often.
_MOST_PARTS = 256
#: A partition has so many batches at least.
_BATCHES = 8
#: Bytes of a row of text, as far as the number of partitions depends on it.
_ROW_NBYTES = 64
_TABLES = (".parquet", ".csv")


class Source(Protocol):
    """An input in partitions."""

    @property
    def files(self) -> tuple[Path, ...]:
        """What is read."""

    @property
    def sizes(self) -> list[int]:
        """Size of each partition, in rows or in bytes."""

    def read(self, at: int) -> tuple[Any, dict[str, Any]]:
        """Return a partition: the table to which outputs are appended (or None), and the inputs."""


def is_job_input(path: str) -> bool:
    """Return whether an input is a table or a folder."""
    return path.endswith(_TABLES) or os.path.isdir(path)


def source_of(
    path: str,
    specs: Mapping[str, TensorSpec],
    batch: int,
    columns: Sequence[str] | None,
    preprocess: str | None,
) -> Source:
    """Return the input in partitions.

    Parameters
    ----------
    path : str
        A `.parquet`, `.csv` or `.npy` file, a folder of `.parquet` files, or a folder of images.
    specs : mapping of str to TensorSpec
        Inputs of the model.
    batch : int
        Rows of a batch.
    columns : sequence of str, optional
        As `map_batches` takes them.
    preprocess : str, optional
        How images are prepared.
    """
    files: tuple[Path, ...] = (Path(path),)
    is_folder = os.path.isdir(path)
    if not (is_folder or os.path.isfile(path)):
        name, is_named, rest = path.partition("=")
        if is_named and os.path.exists(rest):
            raise UsageError(f"a table has names of its own; give --input {rest!r} without '{name}='")
        raise UsageError(f"--input must be a file or a folder, got {path!r}: there is none")
    if is_folder:
        every = sorted(Path(path).iterdir())
        tables = tuple(file for file in every if file.suffix == ".parquet")
        files = tables or tuple(file for file in every if file.suffix.lower() in SUFFIXES)
        if not files:
            raise UsageError(f"--input {path!r} must contain .parquet files or images, got none")
    is_image = is_folder and files[0].suffix != ".parquet"
    if is_image != (preprocess is not None):
        if is_image:
            raise UsageError(f"folders of images need --preprocess imagenet, got {path!r} without it")
        raise UsageError(f"--preprocess is for folders of images, got {path!r}")
    if columns is not None and not files[0].name.endswith(_TABLES):
        raise UsageError(f"--columns is for tables, got {path!r}")
    if columns is not None and len(specs) != 1:
        raise BindError(f"--columns is for models with one input, got {with_specs(specs)}")
    try:
        if is_image:
            check_images()
            cuts = _cuts(len(files), batch)
            return _Images(files, cuts, *_single(specs, path))
        if files[0].suffix == ".npy":
            return _array_source(files, batch, _single(specs, path)[0])
        if files[0].suffix == ".csv":
            return _csv_source(files, specs, batch, columns)
        return _parquet_source(files, specs, batch, columns)
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"--input {path!r} cannot be read: {' '.join(str(error).split())}") from error


def _single(specs: Mapping[str, TensorSpec], path: str) -> tuple[str, TensorSpec]:
    if len(specs) != 1:
        raise BindError(f"--input {path!r} is for models with one input, got {len(specs)}")
    return next(iter(specs.items()))


def _cuts(n_rows: int, batch: int) -> list[tuple[int, int]]:
    """Return partitions of whole batches; they depend on the input only, so that a later run has the same."""
    rows = max(_BATCHES * batch, -(-n_rows // (_MOST_PARTS * batch)) * batch)
    return [(start, min(start + rows, n_rows)) for start in range(0, max(n_rows, 1), rows)]


@dataclass(frozen=True)
class _Rows:
    files: tuple[Path, ...]
    cuts: list[tuple[int, int]]

    @property
    def sizes(self) -> list[int]:
        return [stop - start for start, stop in self.cuts]


@dataclass(frozen=True)
class _Images(_Rows):
    name: str
    spec: TensorSpec

    def read(self, at: int) -> tuple[Any, dict[str, Any]]:
        start, stop = self.cuts[at]
        files = self.files[start:stop]
        table = {"file": [file.name for file in files]}
        return table, {self.name: np.stack([imagenet(file, self.spec) for file in files])}


def _array_source(files: tuple[Path, ...], batch: int, name: str) -> Source:
    array = np.load(files[0], mmap_mode="r", allow_pickle=False)
    if not array.ndim:
        raise BindError(f"input {name!r} must have rows, got a single value in {str(files[0])!r}")
    return _Array(files, _cuts(len(array), batch), name)


@dataclass(frozen=True)
class _Array(_Rows):
    name: str

    def read(self, at: int) -> tuple[Any, dict[str, Any]]:
        start, stop = self.cuts[at]
        array = np.load(self.files[0], mmap_mode="r", allow_pickle=False)
        return None, {self.name: np.array(array[start:stop])}


def _parquet_source(
    files: tuple[Path, ...], specs: Mapping[str, TensorSpec], batch: int, columns: Sequence[str] | None
) -> Source:
    arrow()
    from pyarrow.parquet import ParquetFile

    groups: list[tuple[int, int, int]] = []
    names: list[str] = []
    for at, file in enumerate(files):
        with ParquetFile(file) as opened:
            names = names or [name for name in opened.schema_arrow.names if not name.startswith("__index")]
            metadata = opened.metadata
            groups += [(at, i, metadata.row_group(i).num_rows) for i in range(metadata.num_row_groups)]
    cuts = _cuts(sum(rows for *_, rows in groups), batch)
    from ferroflow_dask.lowering.frames import columns_of

    return _Parquet(files, cuts, groups, columns_of(names, specs, columns), dict(specs))


@dataclass(frozen=True)
class _Parquet(_Rows):
    groups: list[tuple[int, int, int]]
    columns: Mapping[str, Any]
    specs: Mapping[str, TensorSpec]

    def read(self, at: int) -> tuple[Any, dict[str, Any]]:
        start, stop = self.cuts[at]
        pieces: list[Any] = []
        first = 0
        for file, group, rows in self.groups:
            low, high = max(start, first), min(stop, first + rows)
            if low < high or (not pieces and rows == stop == 0):
                path = self.files[file]
                pieces.append(_row_group(path, group, _state(path)).slice(low - first, high - low))
            first += rows
        table = arrow().concat_tables(pieces, promote_options="permissive")
        return table, arrays_of(table, self.columns, self.specs)


def _state(file: Path) -> tuple[str, int, int]:
    """Return what changes if a file is replaced."""
    facts = file.stat()
    return os.path.realpath(file), facts.st_size, facts.st_mtime_ns


@lru_cache(maxsize=2)
def _row_group(file: Path, group: int, state: tuple[str, int, int]) -> Any:  # noqa: ARG001 -- part of the key
    """Return a row group; partitions next to each other read the same one."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as opened:
        return opened.read_row_group(group)


def _csv_source(
    files: tuple[Path, ...], specs: Mapping[str, TensorSpec], batch: int, columns: Sequence[str] | None
) -> Source:
    arrow()
    size = files[0].stat().st_size
    with files[0].open("rb") as file:
        head = len(file.readline())
        cuts: list[tuple[int, int]] = []
        start = head
        for _, wanted in _cuts(max(size - head, 0), batch * _ROW_NBYTES):
            # The part ends with the line in which the bytes end; lines in quotes would be cut.
            file.seek(max(head + wanted - 1, start))
            file.readline()
            if file.tell() > start or not cuts:
                cuts.append((start, file.tell()))
            start = file.tell()
    types = _csv_table(files[0], head, cuts[0], None).schema
    from ferroflow_dask.lowering.frames import columns_of

    return _Csv(files, cuts, head, types, columns_of(types.names, specs, columns), dict(specs))


@dataclass(frozen=True)
class _Csv(_Rows):
    head: int
    types: Any
    columns: Mapping[str, Any]
    specs: Mapping[str, TensorSpec]

    def read(self, at: int) -> tuple[Any, dict[str, Any]]:
        table = _csv_table(self.files[0], self.head, self.cuts[at], self.types)
        return table, arrays_of(table, self.columns, self.specs)


def _csv_table(file: Path, head: int, cut: tuple[int, int], types: Any) -> Any:
    """Return the rows of a CSV file between two places; types are those of the first partition."""
    from pyarrow import BufferReader, csv

    with file.open("rb") as opened:
        content = opened.read(head)
        opened.seek(cut[0])
        content += opened.read(cut[1] - cut[0])
    return csv.read_csv(BufferReader(content), convert_options=csv.ConvertOptions(column_types=types))
