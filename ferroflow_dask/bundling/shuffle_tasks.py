"""Functions of the plain tasks that stand for P2P shuffles and rechunks; they run on workers.

Frames become Arrow tables and frames again by the functions that P2P uses, so that rows, dtypes and index are
those that P2P returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from distributed.shuffle import _arrow

from ferroflow_dask.bundling.sequence import TOPIC, running_worker

if TYPE_CHECKING:
    from ferroflow_dask.bundling.shuffles import Recipe

#: The rows of an input partition, sorted by output partition, and where those of each output partition are.
#: Slices of a table would each be sent with the buffers of the whole table.
Pieces = tuple[Any, dict[int, slice]]
#: Those of one output partition, as a table; None if there are none.
Shard = Any
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


def gathered_shards(gathered: Sequence[Pieces], partition: int) -> list[Shard]:
    """Return the shards of an output partition from what `gather_pieces` returned."""
    found = [(table, rows[partition]) for table, rows in gathered if partition in rows]
    return [table.slice(rows.start, rows.stop - rows.start) for table, rows in found]


def split_apart(split: Callable[..., Pieces], *args: Any, **options: Any) -> dict[int, Shard]:
    """Return the shards of an input partition, given a function above that splits it, and its arguments.

    Each is a copy. A slice has the size of its table for Dask, and keeps it in memory.
    """
    import numpy as np
    import pyarrow as pa

    table, rows = split(*args, **options)
    return {output: table.take(pa.array(np.arange(one.start, one.stop))) for output, one in rows.items()}


def shard_of(shards: Mapping[int, Shard], partition: int) -> Shard:
    """Return the shard of an output partition."""
    return shards.get(partition)


def direct_shards(
    shuffle: str, most_nbytes: float, n_outputs: int, shards: Sequence[Shard]
) -> Sequence[Shard]:
    """Return the shards of an output partition, of which each input partition has one.

    Parameters
    ----------
    shuffle, most_nbytes
        As in `gather_pieces`. All output partitions are taken to be as large as this one.
    n_outputs : int
    shards : sequence of Shard
    """
    _check_size(shuffle, most_nbytes, n_outputs * sum(one.nbytes for one in shards if one is not None))
    return shards


def _check_size(shuffle: str, most_nbytes: float, nbytes: float) -> None:
    worker = running_worker() if nbytes > most_nbytes else None
    if worker is not None:
        worker.log_event(TOPIC, {"shuffle": shuffle, "nbytes": nbytes})


def unpack_frame(shards: Sequence[Shard], meta: Any, column: str, drop_column: bool) -> Any:
    """Return an output partition.

    Parameters
    ----------
    shards : sequence of Shard
        In the order of the input partitions.
    meta : pandas.DataFrame
        An empty input partition.
    column : str
        Column of output partitions.
    drop_column : bool
        Whether the output lacks `column`.
    """
    found = [one for one in shards if one is not None]
    if not found:
        return meta.drop(columns=column) if drop_column else meta.copy()
    return _arrow.convert_shards(found, meta, column, drop_column)


def unpack_merged(
    left: tuple[Sequence[Shard], Any, str, bool],
    right: tuple[Sequence[Shard], Any, str, bool],
    options: Mapping[str, Any],
) -> Any:
    """Return an output partition of a join.

    Parameters
    ----------
    left, right : tuple
        The arguments of `unpack_frame`.
    options : mapping of str to object
        Of `dask.dataframe.multi.merge_chunk`.
    """
    from dask.dataframe.multi import merge_chunk

    return merge_chunk(unpack_frame(*left), unpack_frame(*right), **options)


def gather_chunks(
    shuffle: str, most_nbytes: float, chunks: Sequence[Any], indices: Sequence[Index]
) -> dict[Index, Any]:
    """Return chunks by their positions; `shuffle` and `most_nbytes` as in `gather_pieces`."""
    _check_size(shuffle, most_nbytes, sum(getattr(chunk, "nbytes", 0) for chunk in chunks))
    return dict(zip(indices, chunks, strict=True))


def piece_of(chunk: Any, slices: tuple[slice, ...]) -> Any:
    """Return the part of an old chunk that a new chunk gets: a copy, as a view keeps the chunk in memory."""
    part = chunk[slices]
    return part.copy() if part.shape != chunk.shape and hasattr(part, "copy") else part


def gathered_parts(chunks: Mapping[Index, Any], recipe: Recipe) -> list[Any]:
    """Return the parts of a new chunk from what `gather_chunks` returned."""
    return [chunks[old][slices] for old, slices in parts_of(recipe)]


def parts_of(recipe: Recipe) -> Iterator[tuple[Index, tuple[slice, ...]]]:
    """Yield the positions of the old chunks that a new chunk consists of, and which part of each."""
    for part in product(*recipe):
        yield tuple(old for old, _ in part), tuple(at for _, at in part)


def direct_parts(shuffle: str, most_nbytes: float, n_outputs: int, parts: Sequence[Any]) -> Sequence[Any]:
    """Return the parts of a new chunk; the other arguments are as in `direct_shards`."""
    _check_size(shuffle, most_nbytes, n_outputs * sum(getattr(part, "nbytes", 0) for part in parts))
    return parts


def unpack_chunk(parts: Sequence[Any], shape: Sequence[int]) -> Any:
    """Return a chunk of a rechunked array.

    Parameters
    ----------
    parts : sequence of array
        In the order of `parts_of`.
    shape : sequence of int
        Number of parts along each axis.
    """
    import numpy as np
    from dask.array.core import concatenate3

    grid = np.empty(shape, dtype=object)
    for place, part in zip(np.ndindex(*shape), parts, strict=True):
        grid[place] = part
    return concatenate3(grid.tolist())
