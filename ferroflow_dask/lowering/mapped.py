"""Large weights in files: workers that can read the files map them, and the bytes do not travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from distributed import Client, default_client

from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.mapped import FileArray, in_file
from ferroflow_dask.lowering.sealed import large_constants

#: Weights in files of less than this in all travel as bytes [B].
_LEAST = 2**28

#: Other weights that travel each time a model of large files is tried out on a worker [B].
_MOST_SENT = 2**24

#: Whether all workers of a cluster read some files, by client; paths and workers are the key.
_answers: WeakKeyDictionary[Client, dict[Any, bool]] = WeakKeyDictionary()


class Travelling:
    """An array in a file on its way to a worker: there, it is the mapped array.

    Not for Dask graphs, which the scheduler unpickles and pickles again.

    Parameters
    ----------
    file : FileArray
    """

    def __init__(self, file: FileArray) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return open_file, (self.file,)


def open_file(file: FileArray) -> Any:
    """Return the array in a file."""
    return file.open()


def arrived(value: Any) -> Any:
    """Return a value, or the array if it is in a file."""
    return value.open() if isinstance(value, FileArray) else value


def files_of(graph: Graph, client: Client | None = None) -> dict[str, FileArray]:
    """Return the large constants of a graph that workers map from files; see `files_of_arrays`."""
    large = large_constants(graph).items()
    return files_of_arrays({name: source.value for name, source in large if not source.is_scattered}, client)


def files_of_arrays(values: Mapping[str, Any], client: Client | None = None) -> dict[str, FileArray]:
    """Return the arrays that workers map from files, by name; none if they are small in all.

    Parameters
    ----------
    values : mapping of str to array
    client : Client, optional
        Of the cluster. The default is the default client; without one, only this process is asked.
    """
    found = {name: file for name, value in values.items() if (file := in_file(value)) is not None}
    if sum(values[name].nbytes for name in found) < _LEAST:
        return {}
    return found if _are_read(found, client) else {}


def client_of_files(values: Mapping[str, Any]) -> Client | None:
    """Return the default client if its workers map nearly all of these arrays from files, which are large."""
    try:
        client = default_client()
    except ValueError:
        return None
    if client.asynchronous or client.status != "running" or not client.nthreads():
        return None
    files = files_of_arrays(values, client)
    rest_nbytes = sum(value.nbytes for name, value in values.items() if name not in files)
    return client if files and rest_nbytes <= _MOST_SENT else None


def _are_read(files: Mapping[str, FileArray], client: Client | None) -> bool:
    by_path = {file.path: file for file in files.values()}
    if not all(file.is_here for file in by_path.values()):
        return False
    if client is None:
        try:
            client = default_client()
        except ValueError:
            return True
    if client.asynchronous or client.status != "running":
        return not client.asynchronous
    key = (tuple(by_path.values()), tuple(sorted(client.nthreads())))
    answers = _answers.setdefault(client, {})
    if key not in answers:
        answers[key] = all(client.run(_all_here, list(by_path.values())).values())
    return answers[key]


def _all_here(files: list[FileArray]) -> bool:
    return all(file.is_here for file in files)
