"""Collections of rows: their chunks as Dask tasks, and results of chunks as a collection of the same type."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from operator import getitem
from typing import Any

import numpy as np
from dask import config
from dask._task_spec import Alias, GraphNode, Task, TaskRef
from dask.base import compute, is_dask_collection
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.typing import Key

from ferroflow_dask.exceptions import BindError, UsageError
from ferroflow_dask.graph.batching import BATCH
from ferroflow_dask.graph.nodes import TensorSpec
from ferroflow_dask.lowering.fitting import Inputs
from ferroflow_dask.lowering.forms import Arrays, Columns, Form, Items, Output, empty

#: Chunks of a pandas DataFrame for each thread, and rows that a chunk has at least.
_CHUNKS_PER_THREAD, _LEAST_ROWS = 4, 32


class FrameSource:
    """A dask DataFrame; the index and the divisions are kept."""

    names: tuple[str, ...] = ()
    form: Form

    def __init__(self, frame: Any) -> None:
        from ferroflow_dask.lowering.frames import Frames  # imports pandas

        self.form = Frames()
        self._frame = frame.optimize()
        #: A chunk of no rows.
        self.meta = frame._meta
        self._first: Any = None

    def check(self, inputs: Inputs, columns: Columns) -> None:
        """Raise `BindError` if the frame lacks columns."""
        from ferroflow_dask.lowering.frames import columns_of

        columns_of(list(self.meta.columns), inputs, columns)

    def chunks(self) -> list[list[TaskRef]]:
        """Return the arguments that make up each chunk."""
        return [[TaskRef(key)] for key in self._frame.__dask_keys__()]

    def examples(self) -> Iterator[Any]:
        """Yield a made-up frame of the right dtypes, then the first rows."""
        # Every other text of it is missing, which functions need not expect.
        yield self._frame._meta_nonempty.ffill()
        if self._first is None:
            found = self._frame.partitions[0].head(2)
            # Only then must other partitions be read.
            self._first = found if len(found) else self._frame.head(2, npartitions=-1)
        yield self._first

    def collect(self, tasks: dict[Key, GraphNode], name: str, meta: Any) -> Any:
        """Return a dask DataFrame of the results of these tasks; `meta` is one without rows."""
        from dask.dataframe import from_graph

        layer = _Layer({**self._frame.__dask_graph__(), **tasks})
        keys = [(name, i) for i in range(self._frame.npartitions)]
        return from_graph(layer, meta, self._frame.divisions, keys, name)


class _Layer(Mapping[Key, Any]):
    """A graph that is named at random: hashing its data would take long."""

    def __init__(self, tasks: dict[Key, Any]) -> None:
        self._tasks, self._token = tasks, uuid.uuid4().hex

    def __getitem__(self, key: Key) -> Any:
        return self._tasks[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def __dask_tokenize__(self) -> str:
        return self._token


class BagSource:
    """A Dask bag."""

    names: tuple[str, ...] = ()
    form: Form | None = Items()

    def __init__(self, bag: Any) -> None:
        self._bag = bag

    def chunks(self) -> list[list[TaskRef]]:
        """Return the arguments that make up each chunk."""
        return [[TaskRef(key)] for key in self._bag.__dask_keys__()]

    def examples(self) -> Iterator[Any]:
        """Yield nothing: what a bag yields is known without."""
        return iter(())

    def collect(self, tasks: dict[Key, GraphNode], name: str, meta: Any) -> Any:  # noqa: ARG002
        """Return a Dask bag of the results of these tasks; `meta` is one without rows."""
        graph = HighLevelGraph.from_collections(name, tasks, dependencies=[self._bag])
        return type(self._bag)(graph, name, self._bag.npartitions)


class DelayedSource:
    """A delayed value, or a list of delayed values: each is a chunk of any form."""

    names: tuple[str, ...] = ()
    form: Form | None = None

    def __init__(self, given: Delayed | Sequence[Delayed]) -> None:
        self._is_one = isinstance(given, Delayed)
        self._values: list[Delayed] = [given] if isinstance(given, Delayed) else list(given)

    def chunks(self) -> list[list[TaskRef]]:
        """Return the arguments that make up each chunk."""
        return [[TaskRef(value.key)] for value in self._values]

    def examples(self) -> Iterator[Any]:
        """Yield nothing: delayed values need no metadata."""
        return iter(())

    def collect(self, tasks: dict[Key, GraphNode], name: str, meta: Any) -> Any:  # noqa: ARG002
        """Return the results of these tasks, as delayed values."""
        graph = HighLevelGraph.from_collections(name, tasks, dependencies=list[Any](self._values))
        found = [Delayed((name, i), graph, layer=name) for i in range(len(self._values))]
        return found[0] if self._is_one else found


class ArraySource:
    """Dask arrays with equal chunks of rows."""

    form: Form = Arrays()
    #: Outputs do not depend on the rows that they belong to.
    meta = None

    def __init__(self, arrays: Mapping[str, Any], is_dict: bool, has_functions: bool) -> None:
        self._arrays = arrays
        self.names = tuple(arrays) if is_dict else ()
        # How many rows functions return is not known.
        self._has_functions = has_functions

    def chunks(self) -> list[list[TaskRef]]:
        """Return the arguments that make up each chunk."""
        n_chunks = len(next(iter(self._arrays.values())).chunks[0])
        return [
            [TaskRef((value.name, i, *(0,) * (value.ndim - 1))) for value in self._arrays.values()]
            for i in range(n_chunks)
        ]

    def specs(self) -> dict[str, TensorSpec]:
        """Return what is known of each input."""
        arrays = self._arrays.items()
        return {name: TensorSpec.of(value.dtype, (BATCH, *value.shape[1:])) for name, value in arrays}

    def examples(self) -> Iterator[Any]:
        """Yield the first rows."""
        found = compute(*(array[:2] for array in self._arrays.values()))
        yield dict(zip(self.names, found, strict=True)) if self.names else found[0]

    def collect(self, tasks: dict[Key, GraphNode], name: str, meta: Any) -> Any:
        """Return Dask arrays of the results of these tasks; `meta` is one without rows, or a dict."""
        from dask.array import Array  # takes long to import

        rows = next(iter(self._arrays.values())).chunks[0]
        rows = (np.nan,) * len(rows) if self._has_functions else rows
        graph = HighLevelGraph.from_collections(name, tasks, dependencies=list(self._arrays.values()))
        parts: Mapping[str | None, Any] = meta if isinstance(meta, Mapping) else {None: meta}
        arrays = {}
        for i, (output, part) in enumerate(parts.items()):
            own, zeros = f"{name}-{i}", (0,) * (part.ndim - 1)
            nodes: dict[Key, GraphNode] = {}
            for chunk in range(len(rows)):
                place = (own, chunk, *zeros)
                source = (name, chunk)
                nodes[place] = (
                    Alias(place, source) if output is None else Task(place, getitem, TaskRef(source), output)
                )
            layers = {**graph.layers, own: MaterializedLayer(nodes)}
            joined = HighLevelGraph(layers, {**graph.dependencies, own: {name}})
            sizes = ((size,) for size in part.shape[1:])
            arrays[output] = Array(joined, own, (rows, *sizes), dtype=part.dtype)
        return arrays if isinstance(meta, Mapping) else arrays[None]


#: A collection whose chunks are rows. `names` are those of the arrays that make up a chunk, and empty if a
#: chunk is one value. `form` is None if only workers see chunks.
RowSource = FrameSource | BagSource | DelayedSource | ArraySource


def source_of(data: Any, batch: int | None) -> RowSource | None:
    """Return the source of rows that are no arrays; None for arrays.

    Raises
    ------
    UsageError
        Chunks of this type cannot be cut.
    """
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(data, pandas.DataFrame):
        return FrameSource(_cut(data, batch))
    if pandas is not None and isinstance(data, pandas.Series):
        raise BindError("data is a Series; pass data.to_frame()")
    if isinstance(data, str | os.PathLike):
        raise UsageError(
            f"data must be a table or arrays, got the path {str(data)!r}; read it first, for example by "
            "dask.dataframe.read_parquet"
        )
    source: RowSource | None = None
    is_list = isinstance(data, list | tuple) and bool(data)
    if isinstance(data, Delayed) or (is_list and all(isinstance(value, Delayed) for value in data)):
        source = DelayedSource(data)
    elif is_dask_collection(data) and hasattr(type(data), "to_dask_array"):
        if not hasattr(data, "columns"):
            raise BindError("data is a Series; pass data.to_frame()")
        source = FrameSource(data)
    elif is_dask_collection(data) and hasattr(type(data), "map_partitions"):
        source = BagSource(data)
    if source is not None and batch is not None:
        raise UsageError(
            f"batch cuts arrays and pandas frames into chunks, and data is a {type(data).__name__}; pass "
            f"batch_size={batch}"
        )
    return source


def _cut(frame: Any, batch: int | None) -> Any:
    """Return a pandas DataFrame as a Dask one, its rows in the same order."""
    from dask.dataframe import from_pandas

    is_sorted = bool(frame.index.is_monotonic_increasing)
    if batch is None:
        n_chunks = _CHUNKS_PER_THREAD * n_threads_here()
        batch = max(_LEAST_ROWS, -(-len(frame) // n_chunks))
    # By default, Dask makes texts of columns of arrays.
    with config.set({"dataframe.convert-string": False}):
        return from_pandas(frame, chunksize=batch, sort=is_sorted)


def n_threads_here() -> int:
    """Return the threads of the default client, or of this machine."""
    from distributed import default_client

    try:
        client = default_client()
    except ValueError:
        client = None
    n_threads = 0 if client is None or client.asynchronous else sum(client.nthreads().values())
    return n_threads or os.cpu_count() or 1


def blank(specs: Mapping[str, TensorSpec], rows: int, has_nulls: bool) -> dict[str, Output]:
    """Return outputs of made-up values."""
    failed = np.zeros(rows, bool) if has_nulls else None
    outputs = {}
    for name, spec in specs.items():
        value = (
            np.fromiter(({} for _ in range(rows)), object, rows) if spec.is_sequence else empty(spec, rows)
        )
        if spec.dtype is not None and spec.dtype.kind == "O":
            value[...] = "a"
        outputs[name] = Output(value, spec, failed)
    return outputs
