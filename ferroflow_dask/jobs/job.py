"""A model over the partitions of an input, on a cluster; finished partitions are not done again."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from distributed import Client, as_completed

from ferroflow_dask.exceptions import BindError, UsageError
from ferroflow_dask.graph.batching import BATCH
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import TensorSpec
from ferroflow_dask.jobs.outputs import SUFFIXES, Output
from ferroflow_dask.jobs.sources import Source, source_of
from ferroflow_dask.kernels.choice import check_supported, provider_names
from ferroflow_dask.lowering.batch_model import BatchModel, RunModel, Trial, batch_model

#: Takes the rows done, and how many there are to be.
Update = Callable[[float, float | None], None]
_SUFFIX_NAMES = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"


@dataclass(frozen=True)
class Job:
    """A model, an input in partitions and where the outputs go.

    Parameters
    ----------
    graph : Graph
    model : BatchModel
        The graph as it takes batches.
    source : Source
    output : Output
    batch : int
        Rows of a batch.
    manifest : mapping
        What makes two runs the same job.
    """

    graph: Graph
    model: BatchModel
    source: Source
    output: Output
    batch: int
    manifest: Mapping[str, Any]


def job_of(
    graph: Graph,
    path: str,
    output: str,
    *,
    batch: int,
    columns: Sequence[str] | None = None,
    preprocess: str | None = None,
) -> Job:
    """Return a job, once it is known that its first rows fit the model.

    Parameters
    ----------
    graph : Graph
    path, columns, preprocess
        As in `source_of`.
    output : str
        A `.parquet`, `.csv` or `.npy` file.
    batch : int
        Rows of a batch.

    Raises
    ------
    UsageError
        The input cannot be read, or does not fit, or the output has another suffix.
    """
    target = Path(output)
    if target.suffix not in SUFFIXES:
        raise UsageError(f"--output must end in {_SUFFIX_NAMES} for --input {path!r}, got {output!r}")
    if target.suffix == ".npy" and len(graph.outputs) != 1:
        raise UsageError(
            f"--output must end in .parquet or .csv for {len(graph.outputs)} outputs, got {output!r}"
        )
    check_supported(graph)
    source = source_of(path, graph.inputs, batch, columns, preprocess)
    _, arrays = source.read(0)
    first = {name: value[:batch] for name, value in arrays.items()}
    if not len(next(iter(first.values()))):
        raise BindError(f"--input {path!r} must have rows, got none")
    specs = {name: TensorSpec(value.dtype, (BATCH, *value.shape[1:])) for name, value in first.items()}
    trial = Trial(first=lambda n: [value[:n] for value in first.values()])
    model = batch_model(graph, specs, {}, provider_names(None), trial)
    options = [batch, None if columns is None else list(columns), preprocess]
    manifest = {"model": _digest_of(graph), "input": _identity(source), "options": options}
    return Job(graph, model, source, Output(target), batch, manifest)


def _identity(source: Source) -> str:
    """Return a digest of names, sizes and times of change of the files."""
    digest = hashlib.sha256()
    for file in source.files:
        facts = file.stat()
        digest.update(f"{file.name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _digest_of(graph: Graph) -> str:
    """Return a digest of the operators and weights of a graph."""
    digest = hashlib.sha256(repr((dict(graph.inputs), graph.outputs, dict(graph.opsets))).encode())
    for op in graph.topological_order:
        digest.update(repr((op.kind, op.inputs, op.outputs)).encode())
        for name, value in sorted(op.attributes.items()):
            # An empty list has no type, and needs none.
            empty = isinstance(value, list | tuple) and not value
            digest.update(name.encode() + (b"" if empty else _attribute(name, value)))
    for name, value in sorted(graph.constants.items()):
        digest.update(f"{name} {value.dtype} {value.shape}".encode())
        digest.update(repr(value.tolist()).encode() if value.dtype == object else _bytes(value))
    return digest.hexdigest()


def _bytes(value: Any) -> Any:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _attribute(name: str, value: Any) -> bytes:
    message: bytes = onnx.helper.make_attribute(name, value).SerializeToString(deterministic=True)
    return message


def run_job(job: Job, scattered: Graph, client: Client, update: Update) -> dict[str, int]:
    """Compute the partitions that are missing, and make one file of all.

    Parameters
    ----------
    job : Job
    scattered : Graph
        The job's graph with its constants on the cluster.
    client : Client
    update : callable
        Is called after each partition.

    Returns
    -------
    dict of str to int
        `rows` and `partitions` of the job, and of these `computed_rows` and `computed_partitions`.
    """
    sizes = job.source.sizes
    job.output.begin(job.manifest)
    missing = [at for at in range(len(sizes)) if not job.output.part(at).exists()]
    finished = set(range(len(sizes))) - set(missing)
    rows = sum(job.output.n_rows(at) for at in finished)
    done_rows, done_size, total_size = 0, 0, sum(sizes[at] for at in missing)
    values = {source.name: source.value for source in scattered.sources}
    weights = {name: values[name] for name in job.model.weights}
    work = client.scatter(_Work(job.model.run, job.source, job.output, job.batch), broadcast=True)
    run = uuid.uuid4().hex
    futures = {client.submit(_part, work, weights, at, key=f"batch-job-{run}-{at}"): at for at in missing}
    try:
        for future in as_completed(futures):
            done_rows += future.result()
            done_size += sizes[futures[future]]
            # Where sizes are bytes, the rows are estimated.
            update(done_rows, done_rows * total_size / done_size if done_size else None)
    finally:
        client.cancel(list(futures))
    job.output.end(len(sizes))
    return {
        "rows": rows + done_rows,
        "partitions": len(sizes),
        "computed_rows": done_rows,
        "computed_partitions": len(missing),
    }


@dataclass(frozen=True)
class _Work:
    """What workers need for each partition."""

    run: RunModel
    source: Source
    output: Output
    batch: int


def _part(work: _Work, weights: Mapping[str, Any], at: int) -> int:
    """Read, compute and write a partition; return its rows."""
    table, arrays = work.source.read(at)
    ordered = [arrays[name] for name in work.run.inputs]
    n_rows = len(ordered[0])
    bounds = [*range(0, n_rows, work.batch), n_rows]
    found = [work.run(weights, *(value[i:j] for value in ordered)) for i, j in pairwise(bounds)]
    outputs = {
        name: np.concatenate([results[k] for results in found])
        for k, name in enumerate(work.run.graph.outputs)
    }
    return work.output.write(at, table, outputs)
