"""Outputs of batch jobs: a part for each partition, a manifest, and in the end one file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ferroflow_dask.array_files import as_numpys
from ferroflow_dask.exceptions import FerroflowError, UsageError
from ferroflow_dask.jobs.columns import appended, arrow
from ferroflow_dask.whole_files import replacing, write_text

SUFFIXES = (".parquet", ".csv", ".npy")
FORMAT, VERSION = "ferroflow job", 1


def is_job_output(path: str | None) -> bool:
    """Return whether a file is written by a batch job, by its suffix."""
    return path is not None and path.endswith(SUFFIXES)


@dataclass(frozen=True)
class Output:
    """Where a job writes.

    Parameters
    ----------
    path : Path
        The file that is there in the end. Until then, parts are in a folder next to it.
    """

    path: Path

    @property
    def folder(self) -> Path:
        """The folder of the parts."""
        return self.path.with_name(f"{self.path.name}.parts")

    def part(self, at: int) -> Path:
        """Return the file of a part."""
        return self.folder / f"{at:06}{self.path.suffix}"

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """Make the folder, or find the parts of an earlier run of the same job.

        Raises
        ------
        UsageError
            The folder has parts of another job.
        FerroflowError
            It cannot be written.
        """
        file = self.folder / "manifest.json"
        wanted = {"format": FORMAT, "version": VERSION, **manifest}
        try:
            self.folder.mkdir(exist_ok=True)
            found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
            if found is None:
                write_text(file, json.dumps(wanted, indent=1))
                return
        except OSError as error:
            raise FerroflowError(f"cannot write {str(self.folder)!r}: {error.strerror or error}") from error
        except ValueError:
            found = {}
        differing = [name for name, value in wanted.items() if found.get(name) != value]
        if differing:
            raise UsageError(
                f"{str(self.folder)!r} has parts of another job (different: {', '.join(differing)}); remove "
                "this folder, or choose another --output"
            )

    def write(self, at: int, table: Any, outputs: Mapping[str, Any]) -> int:
        """Write a part, all of it or nothing, and return its rows.

        Parameters
        ----------
        at : int
            Index of the partition.
        table : pyarrow.Table, dict of columns or None
            What outputs are appended to.
        outputs : mapping of str to array
        """
        arrays = {name: as_numpys(name, value) for name, value in outputs.items()}
        n_rows = len(next(iter(arrays.values())))
        with replacing(self.part(at)) as beside:
            if self.path.suffix == ".npy":
                np.save(beside, next(iter(arrays.values())))
                return n_rows
            is_csv = self.path.suffix == ".csv"
            given = arrow().table({}) if table is None else table
            given = arrow().table(given) if isinstance(given, dict) else given
            whole = appended(given, arrays, is_csv) if given.num_columns else _of_outputs(arrays, is_csv)
            if is_csv:
                from pyarrow import csv

                csv.write_csv(whole, beside, csv.WriteOptions(include_header=at == 0))
            else:
                from pyarrow import parquet

                parquet.write_table(whole, beside)
        return n_rows

    def n_rows(self, at: int) -> int:
        """Return the rows of a finished part."""
        if self.path.suffix == ".npy":
            return len(np.load(self.part(at), mmap_mode="r"))
        if self.path.suffix == ".parquet":
            from pyarrow import parquet

            return int(parquet.read_metadata(self.part(at)).num_rows)
        with self.part(at).open("rb") as file:
            return sum(1 for _ in file) - (at == 0)

    def end(self, n_parts: int) -> None:
        """Make one file of the parts, and remove them."""
        parts = [self.part(at) for at in range(n_parts)]
        try:
            with replacing(self.path) as beside:
                _JOIN[self.path.suffix](parts, beside)
            shutil.rmtree(self.folder)
        except OSError as error:
            raise FerroflowError(f"cannot write {str(self.path)!r}: {error.strerror or error}") from error


def _of_outputs(arrays: Mapping[str, Any], is_flat: bool) -> Any:
    n_rows = len(next(iter(arrays.values())))
    return appended(arrow().table({"": np.zeros(n_rows, bool)}), arrays, is_flat).drop_columns([""])


def _join_arrays(parts: list[Path], target: Path) -> None:
    arrays = [np.load(part, mmap_mode="r") for part in parts]
    shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
    dtype = np.result_type(*arrays) if arrays[0].dtype.kind in "US" else arrays[0].dtype
    whole = np.lib.format.open_memmap(target, "w+", dtype, shape)
    at = 0
    for array in arrays:
        whole[at : at + len(array)] = array
        at += len(array)
    whole.flush()


def _join_texts(parts: list[Path], target: Path) -> None:
    with target.open("wb") as whole:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole)


def _join_tables(parts: list[Path], target: Path) -> None:
    from pyarrow import parquet, unify_schemas

    schemas = [parquet.read_schema(part) for part in parts]
    schema = unify_schemas(schemas, promote_options="permissive").with_metadata(schemas[0].metadata)
    with parquet.ParquetWriter(target, schema) as whole:
        for part in parts:
            whole.write_table(parquet.read_table(part).cast(schema))


_JOIN = {".npy": _join_arrays, ".csv": _join_texts, ".parquet": _join_tables}
