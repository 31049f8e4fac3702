"""Replays against reality: programs that are recorded under one policy and simulated under both."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client, wait
from simulated_runs import POLICIES, Comparison, calibrated, mean_error, take_turns

from ferroflow_dask.bench.markdown import table
from ferroflow_dask.model import GraphBuilder, Model
from ferroflow_dask.replay import Job, load_record, record, simulate_job
from ferroflow_dask.topology import Topology

#: How long a task sleeps [s].
_NAP_S = 0.01


def _nap(value: Any, seconds: float = _NAP_S) -> Any:
    time.sleep(seconds)
    return value


def _array(client: Client) -> None:
    import dask.array as da

    blocks = da.ones((400, 400), chunks=(40, 40)).map_blocks(_nap, dtype=float)
    client.compute((blocks + blocks.T).sum()).result()


def _frame(client: Client) -> None:
    import dask.dataframe as dd
    import pandas as pd

    rows = pd.DataFrame({"name": list("abcd") * 500, "value": range(2000)})
    frame = dd.from_pandas(rows, npartitions=60).map_partitions(_nap, meta=rows[:0])
    client.compute(frame.groupby("name").value.mean()).result()


def _bag(client: Client) -> None:
    import dask.bag as db

    numbers = db.from_sequence(range(80), npartitions=80).map(_nap)
    client.compute(numbers.sum()).result()


def _futures(client: Client) -> None:
    seconds = np.random.default_rng(0).lognormal(np.log(_NAP_S), 0.7, 120).tolist()
    naps = client.map(_nap, range(120), seconds, pure=False)
    wait(client.submit(sum, naps, pure=False))


def _model(client: Client) -> None:
    import dask.array as da

    rng = np.random.default_rng(0)
    builder = GraphBuilder("layers")
    value = builder.input("x", "float32", ("rows", 256))
    for _ in range(4):
        value = builder.op("Relu", builder.op("MatMul", value, builder.constant(_weights(rng))))
    builder.output(y=value)
    model: Model = builder.build()
    rows = da.ones((40_960, 256), chunks=(512, -1), dtype="float32")
    client.compute(model.map_batches(rows).sum()).result()


def _weights(rng: np.random.Generator) -> np.ndarray[Any, Any]:
    return rng.standard_normal((256, 256)).astype("float32") / 16


#: By name.
PROGRAMS: Mapping[str, Callable[[Client], None]] = {
    "array": _array,
    "frame": _frame,
    "bag": _bag,
    "futures": _futures,
    "onnx": _model,
}


def compare_replays(
    programs: Sequence[str],
    workers: Sequence[int],
    repeat: int,
    *,
    processes: bool = True,
    progress: Callable[[str], object] = lambda _: None,
) -> Iterator[tuple[str, Comparison]]:
    """Yield the policy under which a program of `PROGRAMS` was recorded, and a comparison of its replay.

    The other parameters are those of `simulator.compare`.
    """
    for client, topology in calibrated(workers, processes, progress):
        for name in programs:
            progress(f"{len(topology.workers)} workers: {name}")
            yield from _replayed(topology, name, _recorded(client, PROGRAMS[name], repeat))


def _recorded(client: Client, program: Callable[[Client], None], repeat: int) -> dict[str, list[Job]]:
    """Return the jobs of some runs under each policy."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"

        def run() -> Job:
            with record(client, file):
                program(client)
            return load_record(file)

        return take_turns(client, repeat, run)


def replay_table(found: Sequence[tuple[str, Comparison]]) -> str:
    """Return the comparisons in markdown, and the mean errors under the recorded and the other policy."""
    header = ("program", "workers", "recorded", "replayed", "real [s]", "noise", "simulated [s]", "error")
    rows = [(one.graph, str(one.workers), recorded, one.policy, *one.in_words()) for recorded, one in found]
    lines = [table(header, rows, right=(*header[1:2], *header[4:]))]
    for title, is_same in (("recorded", True), ("other", False)):
        chosen = [one for recorded, one in found if (one.policy == recorded) == is_same]
        lines.append(f"Under the {title} policy: {mean_error(chosen)}")
    return "\n\n".join(lines)


def _replayed(
    topology: Topology, name: str, jobs: Mapping[str, Sequence[Job]]
) -> Iterator[tuple[str, Comparison]]:
    for recorded in POLICIES:
        runs = sorted(jobs[recorded], key=lambda job: job.makespan_s or 0.0)
        for policy in POLICIES:
            found = simulate_job(runs[len(runs) // 2], topology, policy)
            real_s = tuple(job.makespan_s or 0.0 for job in jobs[policy])
            yield recorded, Comparison(name, len(topology.workers), policy, real_s, found.makespan_s)
