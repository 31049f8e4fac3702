"""The sources of a graph as Dask tasks: constants, inputs that are here, and those yet to be computed."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
from dask._task_spec import DataNode, GraphNode, Task, TaskRef
from dask.base import is_dask_collection
from dask.core import flatten
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.typing import Key

from ferroflow_dask.devices import is_on_device
from ferroflow_dask.exceptions import BindError
from ferroflow_dask.graph.inputs import as_array, check_array
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import Source, TensorSpec
from ferroflow_dask.lowering.mapped import files_of, open_file


def is_lazy(value: Any) -> bool:
    """Return whether a value is to be computed by Dask: a collection or a Future."""
    return isinstance(value, TaskRef) or bool(is_dask_collection(value))


def is_dask_array(value: Any) -> bool:
    """Return whether a value is a Dask array; who has one has imported what takes long to."""
    # Another thread may be importing it.
    kind = getattr(sys.modules.get("dask.array"), "Array", None)
    return kind is not None and isinstance(value, kind)


def is_expression(array: Any) -> bool:
    """Return whether a Dask array is one of `array.query-planning`, which has no graph of layers."""
    return not hasattr(array, "__dask_layers__")


def check_lazy(inputs: Mapping[str, Any]) -> None:
    """Raise `BindError` for what Dask computes and no task can take as one array."""
    for name, value in inputs.items():
        if is_dask_array(value):
            check_sizes(name, value)
        elif is_dask_collection(value) and _is_frame(value):
            raise no_array(name, value)


def check_sizes(name: str, array: Any) -> None:
    """Raise `BindError` for a Dask array whose shape is not known."""
    if np.isnan(array.shape).any():
        raise BindError(
            f"input {name!r} has shape {array.shape}; sizes must be known: call compute_chunk_sizes()"
        )


def no_array(name: str, value: Any) -> BindError:
    """Return the error to raise for another lazy value than a Dask array."""
    cure = "dask.array.from_delayed(value, shape, dtype)"
    if _is_frame(value):
        cure = "frame.to_dask_array(lengths=True)"
    return BindError(f"input {name!r} is a {type(value).__name__}, and no Dask array; pass {name}={cure}")


def _is_frame(value: Any) -> bool:
    return hasattr(type(value), "to_dask_array")  # delayed values have any attribute themselves


def checked(value: Any, name: str, spec: TensorSpec, sizes: Mapping[str, tuple[int, str]]) -> Any:
    """Return the value of an input as an array, once it is known to fit; what is on a device stays there.

    Parameters
    ----------
    value : Any
        Of which `np.asarray` makes an array.
    name : str
        Of the input.
    spec : TensorSpec
    sizes : mapping of str to (int, str)
        Of symbolic dimensions, each with the input that it is known from.

    Raises
    ------
    BindError
        Its dtype or shape does not fit.
    """
    array = value if is_on_device(value) else as_array(name, value)
    check_array(name, array, spec, dict(sizes), given=value)
    return array


#: Arrays of at most so many bytes travel in the tasks that read them, if they may: a task of its own costs
#: a message to each worker and back, and what waits for it a round trip. At most so many bytes travel so in
#: all tasks of a graph together.
_EMBEDDED_NBYTES, _ALL_EMBEDDED_NBYTES = 1024, 2**20


def _without_expressions(collection: Any) -> Delayed:
    """Return an array of one chunk, made by Dask's query planning, as a delayed value of the same key."""
    collection = collection.optimize()
    (key,) = flatten([collection.__dask_keys__()])
    name = f"input-{uuid.uuid4().hex}"
    layer = MaterializedLayer(collection.__dask_graph__())
    layer.annotations = None  # those around `bind` are not for what its inputs are computed from
    return Delayed(key, HighLevelGraph({name: layer}, {name: set()}), layer=name)


class SourceReferences:
    """References to sources; makes the task of each source that is not on the cluster yet.

    A source is a task of its own, so that Dask moves it to a worker once however many ops read it; unless it
    is small, and what reads it are bundles. A task is also the check of an input whose dtype nobody knows
    until it is computed: a kernel would take any.

    Parameters
    ----------
    graph : Graph
    inputs : mapping of str to array
    run : str
    embeds : bool, optional
        Whether small arrays are no tasks.
    """

    def __init__(self, graph: Graph, inputs: Mapping[str, Any], run: str, *, embeds: bool = False) -> None:
        self._sources = {source.name: source for source in graph.sources}
        self._inputs = inputs
        self._run = run
        self._left_nbytes = _ALL_EMBEDDED_NBYTES if embeds else 0
        self.nodes: dict[Key, GraphNode] = {}
        #: Inputs that are Dask collections, each of one key.
        self.collections: list[Any] = []
        self._keys: dict[str, Key] = {}
        self._files = files_of(graph)
        # What is known before anything is computed.
        self._sizes: dict[str, tuple[int, str]] = {}
        for name, spec in graph.inputs.items():
            if isinstance(getattr(inputs[name], "dtype", None), np.dtype):
                check_array(name, inputs[name], spec, self._sizes)

    def argument(self, name: str) -> Any:
        """Return what a task that reads a source is given: a reference, or a small array itself."""
        source = self._sources[name]
        value = self._inputs[name] if source.is_input else source.array
        is_array = type(value) is np.ndarray and not value.dtype.hasobject
        if is_array and value.nbytes <= _EMBEDDED_NBYTES and value.nbytes < self._left_nbytes:
            self._left_nbytes -= value.nbytes
            return value
        if name in self._files:
            return Task(None, open_file, self._files[name])
        return self[name]

    def __getitem__(self, name: str) -> TaskRef:
        source = self._sources[name]
        value = self._inputs[name] if source.is_input else source.value
        if source.is_scattered:
            future: TaskRef = value  # whoever holds the tasks that read it keeps it alive
            return future
        if isinstance(value, TaskRef):
            return self._checked(source, value)  # a Future, too
        if is_dask_array(value):
            return TaskRef(self._key_of(name, value))
        if is_dask_collection(value):
            return self._checked(source, TaskRef(self._key_of(name, value)))
        key = (f"source-{self._run}", source.id)
        if key not in self.nodes:
            self.nodes[key] = DataNode(key, value)
        return TaskRef(key)

    def _checked(self, source: Source, value: TaskRef) -> TaskRef:
        if source.spec.dtype is None:  # a sequence or an optional: the kernel checks it
            return value
        key = (f"check-input-{self._run}", source.id)
        if key not in self.nodes:
            self.nodes[key] = Task(key, checked, value, source.name, source.spec, self._sizes)
        return TaskRef(key)

    def _key_of(self, name: str, value: Any) -> Key:
        if name not in self._keys:
            whole = value
            if is_dask_array(value):
                whole = value.rechunk(-1)
                if is_expression(whole):
                    whole = _without_expressions(whole)
            keys = list(flatten([whole.__dask_keys__()]))
            if len(keys) != 1:
                raise BindError(
                    f"input {name!r} is a {type(value).__name__} of {len(keys)} parts; only Dask arrays, "
                    "delayed values and Futures become one array"
                )
            self.collections.append(whole)
            self._keys[name] = keys[0]
        return self._keys[name]
