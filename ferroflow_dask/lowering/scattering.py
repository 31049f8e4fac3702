"""Put a graph's constants on a cluster once, before it is computed any number of times."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ferroflow_dask.annotations import SCATTERED_PREFIX
from ferroflow_dask.clients import check_synchronous, is_address
from ferroflow_dask.exceptions import ClusterError, UsageError
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import Source
from ferroflow_dask.lowering.mapped import Travelling, files_of

if TYPE_CHECKING:
    from distributed import Client, Future

#: Constants that are copied together if the caller follows [B]: a tenth of a second on a slow network.
_GROUP_NBYTES = 2**24


def scatter(graph: Graph, client: Client, on_copied: Callable[[int, int], object] | None = None) -> Graph:
    """Copy the constants of a graph to the workers and return a graph that refers to the copies.

    See `ferroflow_dask.Model.scatter`. A graph without other constants than scattered ones is
    returned as it is. A constant that only ops with a worker read is copied to those workers, others to all
    workers.

    Parameters
    ----------
    graph : Graph
    client : distributed.Client
    on_copied : callable, optional
        Called several times with the bytes that are copied by then, and with all bytes.
    """
    check_synchronous(client, "scatter")
    constants = [source for source in graph.sources if not (source.is_input or source.is_scattered)]
    if not constants:
        return graph
    if not client.nthreads():
        raise ClusterError(
            f"there are no workers for the constants of graph {graph.name!r}; start some first"
        )
    readers: dict[str, set[str]] = {}
    for op in graph.ops:
        for value in op.operands:
            readers.setdefault(value, set()).add(op.worker)
    by_workers: dict[frozenset[str], dict[int, Any]] = {}
    # Between threads nothing is pickled, nor copied.
    files = (
        {} if str(getattr(client.scheduler, "address", "")).startswith("inproc") else files_of(graph, client)
    )
    for source in constants:
        workers = frozenset(readers.get(source.name, ()))
        where = workers if all(map(is_address, workers)) else frozenset[str]()
        file = files.get(source.name)
        by_workers.setdefault(where, {})[source.id] = source.value if file is None else Travelling(file)
    scattered: dict[int, Future[Any]] = {}
    nbytes = {source.id: int(getattr(source.value, "nbytes", 0)) for source in constants}
    for workers, values in by_workers.items():
        for group in _groups(values, nbytes) if on_copied else [values]:
            scattered |= on_all_workers(group, client, sorted(workers))
            if on_copied is not None:
                on_copied(sum(nbytes[source_id] for source_id in scattered), sum(nbytes.values()))
    return replace(
        graph,
        sources=tuple(
            _scattered(source, scattered[source.id]) if source.id in scattered else source
            for source in graph.sources
        ),
    )


def _groups(values: Mapping[int, Any], nbytes: Mapping[int, int]) -> Iterator[dict[int, Any]]:
    """Yield values in groups that are large enough to be copied together."""
    group: dict[int, Any] = {}
    for source_id, value in values.items():
        group[source_id] = value
        if sum(nbytes[known] for known in group) >= _GROUP_NBYTES:
            yield group
            group = {}
    if group:
        yield group


def on_all_workers(
    values: Mapping[Any, Any], client: Client, workers: Sequence[str] = ()
) -> dict[Any, Future[Any]]:
    """Copy values to workers, where they stay as long as the Futures that are returned; see `scatter`.

    Parameters
    ----------
    values : mapping
    client : distributed.Client
    workers : sequence of str, optional
        Their addresses; all workers if there are none.
    """
    # Each has a key of its own: equal constants stay two, as the graph has them.
    keys = {name: f"{SCATTERED_PREFIX}{uuid.uuid4().hex}" for name in values}
    in_files = {keys[name]: value for name, value in values.items() if isinstance(value, Travelling)}
    others = {keys[name]: value for name, value in values.items() if keys[name] not in in_files}
    futures: dict[str, Future[Any]] = {}
    if others:
        futures |= client.scatter(others, workers=list(workers) or None, broadcast=True)
    # Each worker maps the file; to broadcast would be to send the bytes from worker to worker.
    for worker in workers or client.nthreads() if in_files else ():
        futures |= client.scatter(in_files, workers=[worker])
    return {name: futures[key] for name, key in keys.items()}


def check_scattered(graph: Graph) -> None:
    """Raise `UsageError` if a graph's constants were scattered by a client that is closed."""
    for source in graph.sources:
        if source.is_scattered and getattr(source.value.client, "status", "closed") != "running":
            raise UsageError(
                f"the constants of graph {graph.name!r} were scattered by a client that is closed; "
                "call scatter again with an open client"
            )


def _scattered(source: Source, future: Future[Any]) -> Source:
    return replace(source, value=future, is_scattered=True, known=source.value if source.is_small else None)
