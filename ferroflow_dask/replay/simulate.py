"""`simulate`: any program on any cluster, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distributed import Client

from ferroflow_dask.graph import Graph
from ferroflow_dask.replay.job import Job
from ferroflow_dask.replay.outcome import Outcome, simulate_job
from ferroflow_dask.replay.sources import Given, job_of_collection, job_of_graph
from ferroflow_dask.topology import Topology, load_topology


def simulate(
    program: Any,
    topology: Topology | str | Path = "this-machine",
    policy: str | Sequence[str] = "ferroflow",
    *,
    workers: int | Sequence[int] | None = None,
    per_host: int | None = None,
    durations_s: Given | None = None,
    nbytes: Given = 0.0,
    client: Client | None = None,
    engine: str = "exact",
    seed: int = 0,
    repeat: int = 1,
    noise: float | None = None,
) -> list[Outcome]:
    """Simulate a program under some policies, on some numbers of workers.

    Parameters
    ----------
    program : Dask collection, list of them, Graph, Model or Job
    topology : Topology, str or pathlib.Path, optional
        A topology, a YAML file, or the name of a preset.
    policy : str or sequence of str, optional
        `dask`, `no-stealing`, or names of ferroflow's policies.
    workers : int or sequence of int, optional
        Numbers of workers; those of the topology if left out.
    per_host : int, optional
        Workers of each host; as in the topology if left out.
    durations_s, nbytes, client : optional
        Of the tasks of a collection, as in `job_of_collection`.
    engine, seed, repeat, noise : optional
        As in `simulate_job`.

    Returns
    -------
    list of Outcome
        For each policy and number of workers, in this order.

    Raises
    ------
    UsageError
        The program, the topology or a policy is not allowed, or a duration is unknown.

    Examples
    --------
    >>> import dask
    >>> x = [dask.delayed(abs)(i) for i in range(8)]
    >>> [found] = simulate(x, "this-machine", "dask", durations_s=1.0)
    >>> 2 <= found.makespan_s < 2.1
    True
    """
    job = job_of(program, durations_s=durations_s, nbytes=nbytes, client=client)
    base = topology if isinstance(topology, Topology) else load_topology(topology)
    policies = [policy] if isinstance(policy, str) else list(policy)
    if workers is None and per_host is None:
        sized = [base]
    else:
        counts = len(base.workers) if workers is None else workers
        sized = [base.with_workers(n, per_host) for n in ([counts] if isinstance(counts, int) else counts)]
    options: dict[str, Any] = {"engine": engine, "seed": seed, "repeat": repeat, "noise": noise}
    return [simulate_job(job, one, name, **options) for name in policies for one in sized]


def job_of(
    program: Any, *, durations_s: Given | None = None, nbytes: Given = 0.0, client: Client | None = None
) -> Job:
    """Return the job of a program; the parameters are those of `simulate`."""
    if isinstance(program, Job):
        return program
    graph = getattr(program, "graph", program)
    if isinstance(graph, Graph):
        return job_of_graph(graph)
    return job_of_collection(program, durations_s=durations_s, nbytes=nbytes, client=client)
