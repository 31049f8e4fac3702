"""Functions of the plain tasks that stand for P2P shuffles and rechunks; they run on workers.

Frames become Arrow tables and frames again by the functions that P2P uses, so that rows, dtypes and index are
those that P2P returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from distributed.shuffle import _arrow

from ferroflow_dask.bundling.sequence import TOPIC, running_worker

#: The rows of an input partition, sorted by output partition, and where those of each output partition are.
#: Slices of a table would each be sent with the buffers of the whole table.
Pieces = tuple[Any, dict[int, slice]]
#: Position of a chunk in an array.
Index = tuple[int, ...]


def split_frame(frame: Any, column: str, partition: int, drop_column: bool) -> Pieces:
    """Split an input partition by output partition.

    Parameters
    ----------
    frame : pandas.DataFrame
    column : str
        Has the output partition of each row.
    partition : int
        Number of the input partition, by which output partitions are sorted.
    drop_column : bool
        Whether the output lacks `column`.
    """
    import numpy as np
    import pyarrow as pa
    from dask.dataframe.dispatch import to_pyarrow_table_dispatch

    if frame.columns.name is not None or getattr(frame, "attrs", None):
        # The join inside P2P drops both.
        frame = frame.rename_axis(columns=None)
        frame.attrs = {}
    table = to_pyarrow_table_dispatch(frame, preserve_index=True)
    numbers = pa.array(np.full(len(table), partition, dtype=np.uint32))
    table = table.append_column(_arrow._INPUT_PARTITION_ID_COLUMN, numbers).sort_by(column)
    outputs, starts = np.unique(np.asarray(table[column]), return_index=True)
    stops = [*starts[1:].tolist(), len(table)]
    rows = map(slice, starts.tolist(), stops)
    return table.drop_columns([column]) if drop_column else table, dict(
        zip(outputs.tolist(), rows, strict=True)
    )


def split_to_merge(
    frame: Any, on: Any, column: str, n_partitions: int, partition: int, *, is_index: bool, drop_column: bool
) -> Pieces:
    """Split an input partition of a join by the hash of its keys.

    Parameters
    ----------
    frame : pandas.DataFrame
    on : str, list or pandas object
        What is joined on, as `dask.dataframe` gives it.
    column : str
        Name of the column of hashes.
    n_partitions : int
        Number of output partitions.
    partition, drop_column
        As in `split_frame`.
    is_index : bool
        Whether the index is joined on.
    """
    import numpy as np
    from dask.dataframe.dask_expr import _shuffle as expressions
    from dask.dataframe.shuffle import partitioning_index

    keys = (
        frame.index.to_frame(name="_index") if is_index else expressions._select_columns_or_index(frame, on)
    )
    numeric = {
        name: np.float64 for name, dtype in keys.dtypes.items() if expressions._is_numeric_cast_type(dtype)
    }
    if numeric:
        keys = keys.astype(numeric, errors="ignore")
    hashed = frame.assign(**{column: partitioning_index(keys, n_partitions)})
    return split_frame(hashed, column, partition, drop_column)


def gather_pieces(shuffle: str, most_nbytes: float, split: Sequence[Pieces]) -> Sequence[Pieces]:
    """Return what the input partitions were split into.

    Parameters
    ----------
    shuffle : str
        Identifier of the shuffle. It is reported if there are more data than `most_nbytes` [B].
    most_nbytes : float
    split : sequence of Pieces
    """
    _check_size(shuffle, most_nbytes, sum(table.nbytes for table, _ in split))
    return split


def _check_size(shuffle: str, most_nbytes: float, nbytes: float) -> None:
    worker = running_worker() if nbytes > most_nbytes else None
    if worker is not None:
        worker.log_event(TOPIC, {"shuffle": shuffle, "nbytes": nbytes})


def unpack_frame(
    gathered: Sequence[Pieces], partition: int, meta: Any, column: str, drop_column: bool
) -> Any:
    """Return an output partition.

    Parameters
    ----------
    gathered : sequence of Pieces
        From `gather_pieces`.
    partition : int
        Number of the output partition.
    meta : pandas.DataFrame
        An empty input partition.
    column : str
        Column of output partitions.
    drop_column : bool
        Whether the output lacks `column`.
    """
    found = [(table, rows[partition]) for table, rows in gathered if partition in rows]
    if not found:
        return meta.drop(columns=column) if drop_column else meta.copy()
    shards = [table.slice(rows.start, rows.stop - rows.start) for table, rows in found]
    return _arrow.convert_shards(shards, meta, column, drop_column)


def unpack_merged(
    left: tuple[Sequence[Pieces], Any, str, bool],
    right: tuple[Sequence[Pieces], Any, str, bool],
    partition: int,
    options: Mapping[str, Any],
) -> Any:
    """Return an output partition of a join.

    Parameters
    ----------
    left, right : tuple
        The gathered pieces, and `meta`, `column` and `drop_column` of `unpack_frame`.
    partition : int
    options : mapping of str to object
        Of `dask.dataframe.multi.merge_chunk`.
    """
    from dask.dataframe.multi import merge_chunk

    frames = [unpack_frame(gathered, partition, *rest) for gathered, *rest in (left, right)]
    return merge_chunk(*frames, **options)


def gather_chunks(
    shuffle: str, most_nbytes: float, chunks: Sequence[Any], indices: Sequence[Index]
) -> dict[Index, Any]:
    """Return chunks by their positions; `shuffle` and `most_nbytes` as in `gather_pieces`."""
    _check_size(shuffle, most_nbytes, sum(getattr(chunk, "nbytes", 0) for chunk in chunks))
    return dict(zip(indices, chunks, strict=True))


def unpack_chunk(chunks: Mapping[Index, Any], recipe: Sequence[Sequence[tuple[int, slice]]]) -> Any:
    """Return a chunk of a rechunked array.

    Parameters
    ----------
    chunks : mapping of tuple of int to array
    recipe : sequence of sequence of (int, slice)
        For each axis the old chunks that the new one consists of, and which part of each.
    """
    import numpy as np
    from dask.array.core import concatenate3

    parts = np.empty([len(axis) for axis in recipe], dtype=object)
    for place in product(*(range(len(axis)) for axis in recipe)):
        old, slices = zip(*(axis[i] for axis, i in zip(recipe, place, strict=True)), strict=True)
        parts[place] = chunks[old][slices]
    return concatenate3(parts.tolist())
