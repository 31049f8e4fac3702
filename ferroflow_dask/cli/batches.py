"""Batch inference on the command line: `ferroflow run --batch`."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distributed import Client, wait

from ferroflow_dask.bench.markdown import count
from ferroflow_dask.cli.graphs import scatter_shown
from ferroflow_dask.cli.progress import batches_shown
from ferroflow_dask.exceptions import BindError
from ferroflow_dask.graph import Graph, random_inputs
from ferroflow_dask.lowering.batches import how_batched, map_batches
from ferroflow_dask.lowering.scattering import on_all_workers
from ferroflow_dask.lowering.sources import is_dask_array
from ferroflow_dask.memory import check_memory

#: Batches for each thread of the cluster, where inputs are drawn at random.
_BATCHES = 4
_NUMBER_NBYTES = 8


def draw_inputs(graph: Graph, seed: int, rows: int | None = None) -> dict[str, Any]:
    """Return random inputs, as `random_inputs`; raise `UsageError` if they are larger than memory."""
    of_rows = "" if rows is None else f" of {rows:,} rows"
    or_batch = "" if rows is None else ", or a smaller --batch"
    needed = sum(_drawn_nbytes(spec.shape or (), rows) for spec in graph.inputs.values())
    check_memory(f"random inputs{of_rows}", needed, f"give smaller ones with --input{or_batch}")
    return random_inputs(graph, seed, rows)


def _drawn_nbytes(shape: Sequence[int | str | None], rows: int | None) -> int:
    """Return the size of an input as it is drawn, in double precision [B]."""
    sizes = [dim if isinstance(dim, int) else 1 for dim in shape]
    if rows is not None:
        sizes[:1] = [rows]
    return _NUMBER_NBYTES * math.prod(sizes)


def are_drawn(graph: Graph, given: Mapping[str, Any]) -> bool:
    """Return whether a graph's inputs are drawn at random: none is given but, maybe, in place of defaults."""
    return bool(graph.inputs) and graph.inputs.keys().isdisjoint(given)


def in_batches(
    graph: Graph, given: Mapping[str, Any], batch: int, n_threads: Callable[[], int], *, seed: int
) -> dict[str, Any]:
    """Return the inputs as Dask arrays of batches, once it is known that they fit the graph.

    Parameters
    ----------
    graph : Graph
        Its defaults are constants; those in whose place something is given go with every batch as they are.
    given : mapping of str to array
        If these are no inputs but such defaults, the inputs are drawn at random.
    batch : int
        Rows.
    n_threads : callable
        Returns for how many threads they are drawn.
    seed : int
    """
    if not (graph.inputs or given):
        raise BindError(f"graph {graph.name!r} has no inputs, of which batches could be made")
    inputs = dict(given)
    if are_drawn(graph, given):
        inputs = {**draw_inputs(graph, seed, _BATCHES * n_threads() * batch), **given}
    whole = graph.defaults.keys() if graph.inputs else ()
    rows = {len(value) if value.ndim else 0 for name, value in inputs.items() if name not in whole}
    if len(rows) > 1:
        raise BindError(
            f"inputs of {sorted(rows)} rows make no batches; --batch takes each of them as rows, so all "
            "must have as many (in Python, map_batches takes others whole)"
        )
    from dask.array import from_array

    arrays = {
        name: value if name in whole else from_array(value, chunks=(batch, *(-1,) * (value.ndim - 1)))
        for name, value in inputs.items()
    }
    try:
        map_batches(graph, arrays)
    except BindError as error:
        if len(graph.inputs) == 1:
            raise
        which = "all inputs without a default" if whole else "all inputs"
        raise BindError(
            f"{error} (--batch takes {which} as rows; in Python, map_batches takes others whole)"
        ) from error
    return arrays


def run_batches(
    graph: Graph,
    arrays: Mapping[str, Any],
    client: Client,
    *,
    repeat: int,
    shows_progress: bool = False,
    on_run: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compute a model on batches of those inputs that are Dask arrays; return outputs, and how fast it was.

    The inputs are on the cluster, those that go whole with every batch on all workers, and the model is open
    there, before the clock starts.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sending large graph")  # it is what was asked for
        batched = {name: value for name, value in arrays.items() if is_dask_array(value)}
        batched = dict(zip(batched, client.persist(list(batched.values())), strict=True))
    wait(list(batched.values()))
    whole = {name: value for name, value in arrays.items() if name not in batched}
    arrays = {**batched, **(on_all_workers(whole, client) if whole else {})}
    scattered = scatter_shown(graph, client, is_shown=shows_progress)
    makespans_s, results = [], []
    for _ in range(repeat + 1):  # the first run opens the model
        found = map_batches(scattered, arrays)
        outputs = list(found.values()) if isinstance(found, dict) else [found]
        on_run()
        with batches_shown(client, is_shown=shows_progress) as watch:
            start = time.perf_counter()
            futures = client.compute(outputs)
            watch(outputs[0].name, outputs[0].numblocks[0])
            results = client.gather(futures)
            makespans_s.append(time.perf_counter() - start)
    first = next(iter(batched.values()))
    n_rows, n_batches = len(first), len(first.chunks[0])
    median_s = statistics.median_low(makespans_s[1:])
    facts = {
        "model": graph.name,
        "workers": len(client.nthreads()),
        "threads": sum(client.nthreads().values()),
        "rows": n_rows,
        "batches": n_batches,
        "batching": how_batched(scattered, arrays),
        "makespan_s": median_s,
        "makespans_s": makespans_s[1:],
        "rows_per_s": n_rows / median_s,
    }
    return dict(zip(graph.outputs, results, strict=True)), facts


def batches_in_words(facts: Mapping[str, Any]) -> str:
    """Return in a line how fast batches were."""
    where = count(facts["workers"], "worker")
    done = f"{count(facts['rows'], 'row')} in {count(facts['batches'], 'batch', 'batches')}"
    rate = f"{facts['makespan_s']:.3f} s = {facts['rows_per_s']:,.0f} rows/s"
    return f"{facts['model']} · whole model in each of {where}: {done} in {rate}; {facts['batching']}"
