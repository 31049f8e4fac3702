"""Found strategies on two processes of this machine, against one session and against `granularity="auto"`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from distributed import Client, wait
from strategy_account import Account, measured, predicted

from ferroflow_dask.bench.markdown import table
from ferroflow_dask.clients import ask_workers, workers_of
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.cost import CostModel
from ferroflow_dask.deploy.calibration import calibration_of
from ferroflow_dask.deploy.local import local_client
from ferroflow_dask.deploy.measured import measured_topology
from ferroflow_dask.deploy.parts import WorkerCost
from ferroflow_dask.graph import FERROFLOW_DOMAIN, Graph, random_inputs
from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.model import Model
from ferroflow_dask.scheduler import install
from ferroflow_dask.search import ENDLESS, Choice, Problem, Simulation, search, simulate, time_spent
from ferroflow_dask.simulation import Machine
from ferroflow_dask.strategy import partition, whole_on

#: The matrix product that shows what two processes reach together: size, and products of a measurement.
_GEMM, _PRODUCTS = 1024, 10
#: Operators that stay what they are if parts sleep: they cut, join and send.
_MOVERS = frozenset({"Identity", "Slice", "Concat"})


@dataclass(slots=True)
class Measured:
    """A model, computed in several ways.

    Parameters
    ----------
    model : str
    predicted_s : float
        By the search, of the found strategy [s].
    nbytes_moved, n_tasks : int
        Of the found strategy.
    together : list of float
        How many times the products of one process two processes compute in the same time.
    seconds : dict of str to list of float
        Durations by way: `whole`, `auto`, `found`; `whole (sleeping)` and `found (sleeping)` [s].
    cpu_s : dict of str to list of float
        Likewise the CPU time of the worker that needs most of it [s]. Other programs change it less.
    predicted, accounts : dict of str to Account
        By way, where the time should go, and where it went in each run.
    """

    model: str
    predicted_s: float
    nbytes_moved: int
    n_tasks: int = 0
    together: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)
    predicted: dict[str, Account] = field(default_factory=dict)
    accounts: dict[str, list[Account]] = field(default_factory=dict)

    def median_s(self, way: str) -> float:
        """Return the median duration of a way [s]."""
        return statistics.median(self.seconds[way])

    @property
    def speedup(self) -> float:
        """Of the found strategy over the fastest other way."""
        return min(self.median_s("whole"), self.median_s("auto")) / self.median_s("found")

    @property
    def cpu_speedup(self) -> float:
        """Speed-up of the found strategy over one session, if each worker had a core of its own."""
        return statistics.median(self.cpu_s["whole"]) / statistics.median(self.cpu_s["found"])

    @property
    def sleeping_speedup(self) -> float:
        """Of the found strategy if each part sleeps."""
        return self.median_s("whole (sleeping)") / self.median_s("found (sleeping)")


def measure(
    models: Mapping[str, Callable[[], Graph]],
    repeat: int,
    seconds: float,
    progress: Callable[[str], object] = lambda _: None,
) -> Iterator[Measured]:
    """Yield each model, computed in several ways that take turns on two processes of one thread.

    Parameters
    ----------
    models : mapping of str to callable
    repeat : int
        Runs of each way; one more is not counted.
    seconds : float
        Budget of a search [s].
    progress : callable, optional
        Called with a line on the progress.
    """
    for one in searched(models, seconds, progress):
        problem, best = one.problem, one.best
        row = Measured(one.name, best.makespan_s, best.nbytes_moved)
        row.predicted = dict.fromkeys(("found", "found (sleeping)"), predicted(problem, best))
        one_device = simulate(problem, [Choice((), (0,))] * problem.n_nodes)
        row.predicted["whole"] = predicted(problem, one_device)
        ways = _ways(one)
        row.n_tasks = len(ways["found"]().__dask_graph__())
        progress(f"{one.name}: measuring")
        _take_turns(row, one.client, ways, repeat)
        yield row


class Searched(NamedTuple):
    """A model, and the fastest strategy that a search has found for two processes of one thread."""

    name: str
    graph: Graph
    problem: Problem
    best: Simulation
    client: Client
    cost: WorkerCost
    profile: ClusterProfile


def searched(
    models: Mapping[str, Callable[[], Graph]], seconds: float, progress: Callable[[str], object]
) -> Iterator[Searched]:
    """Yield each model with a found strategy, while the processes are there; see `measure`."""
    with local_client(2) as client:
        install(client)
        progress("calibrating")
        found = calibration_of(client)
        machine = Machine.of_topology(measured_topology(client, found))
        cost = WorkerCost(client)
        for name, make in models.items():
            progress(f"{name}: searching")
            graph = make()
            cost.fit(graph)
            problem = Problem(graph, machine, cost)
            best = search(problem, steps=ENDLESS, spent=time_spent(seconds, time.monotonic)).best
            yield Searched(name, graph, problem, best, client, cost, found.profile)


def _ways(one: Searched) -> dict[str, Callable[[], Any]]:
    """Return for each way a function that returns a collection."""
    graph, client, strategy = one.graph, one.client, one.problem.strategy(one.best.choices)
    inputs = random_inputs(graph)
    whole = Model(graph).scatter(client)
    in_parts = Model(graph).scatter(client, strategy)
    ways: dict[str, Callable[[], Any]] = {
        "whole": lambda: whole.bind(inputs, granularity="whole"),
        "auto": lambda: whole.bind(inputs, profile=one.profile, granularity="auto"),
        "found": lambda: in_parts.bind(inputs),
    }
    for way, chosen in (("whole (sleeping)", whole_on(graph)), ("found (sleeping)", strategy)):
        parts = partition(graph, chosen.on(numbered(client)))
        asleep = Model(sleeping(parts, one.cost)).scatter(client)
        ways[way] = partial(asleep.bind, inputs)
    return ways


def numbered(client: Client) -> dict[str, str]:
    """Return the addresses of workers by their numbers."""
    return {str(i): address for i, address in enumerate(workers_of(client))}


def sleeping(parts: Graph, cost: CostModel) -> Graph:
    """Return a graph whose computing ops sleep as long as they cost. What moves is as large as before."""

    def asleep(op: Op) -> Op:
        if op.op_type in _MOVERS:
            return op
        spec = parts.spec(op.outputs[0])
        inputs = tuple(name for name in op.operands if name not in parts.constants)
        attributes = {
            "duration": cost.seconds(op, parts) or 0.0,
            "shape": list(spec.shape or ()),
            "dtype": "float32" if spec.dtype is None else spec.dtype.name,
        }
        return replace(
            op, op_type="Slow", domain=FERROFLOW_DOMAIN, inputs=inputs, captured=(), attributes=attributes
        )

    opsets = {**parts.opsets, FERROFLOW_DOMAIN: 1}
    ops = tuple(asleep(op) for op in parts.ops)
    read = {name for op in ops for name in op.operands}
    sources = tuple(source for source in parts.sources if source.is_input or source.name in read)
    return replace(parts, ops=ops, sources=sources, opsets=opsets)


def _take_turns(row: Measured, client: Client, ways: Mapping[str, Callable[[], Any]], repeat: int) -> None:
    workers = list(workers_of(client))
    expected: dict[str, Any] = {}
    client.get_task_stream()  # from now on, the scheduler keeps the times of tasks
    for turn in range(repeat + 1):
        alone_s = max(_products(client, workers[:1]))
        pair_s = max(_products(client, workers))
        if turn:
            row.together.append(2 * alone_s / pair_s)
        for way, collection in ways.items():
            bound = collection()
            before_s = ask_workers(client, time.process_time)
            start_s = time.time()  # the clock of Dask's task stream
            found = client.compute(bound).result()
            stop_s = time.time()
            after_s = ask_workers(client, time.process_time)
            if turn:
                row.seconds.setdefault(way, []).append(stop_s - start_s)
                row.cpu_s.setdefault(way, []).append(max(after_s[one] - before_s[one] for one in workers))
                reads = bound.__dask_graph__().get_all_dependencies()
                records = client.get_task_stream(start=start_s)
                row.accounts.setdefault(way, []).append(measured(records, reads, start_s, stop_s))
            elif "sleeping" not in way:
                expected = expected or found
                for name, value in expected.items():
                    np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-3 * np.abs(value).max())


def _products(client: Client, workers: Sequence[str]) -> list[float]:
    futures = [client.submit(_gemm_s, workers=[worker], pure=False) for worker in workers]
    wait(futures)
    found: list[float] = client.gather(futures)
    return found


def _gemm_s() -> float:
    matrix = np.random.default_rng(0).standard_normal((_GEMM, _GEMM), dtype=np.float32)
    result = matrix @ matrix
    start = time.perf_counter()
    for _ in range(_PRODUCTS):
        np.matmul(matrix, matrix, out=result)
    return time.perf_counter() - start


def accounts_table(rows: Sequence[Measured]) -> str:
    """Return in markdown where the time goes: as predicted, and in the fastest run."""
    header = ("model", "way", "compute [s]", "transfers [s]", "Dask [s]", "waiting [s]", "compute in all [s]")
    lines = []
    for row in rows:
        for way, expected in row.predicted.items():
            seconds = row.seconds[way]
            fastest = row.accounts[way][seconds.index(min(seconds))]
            names = [part.name for part in fields(Account)]
            cells = [f"{getattr(expected, name):.3f} → {getattr(fastest, name):.3f}" for name in names]
            lines.append((row.model, way, *cells))
    return table(header, lines, right=header[2:])


def strategies_table(rows: Sequence[Measured]) -> str:
    """Return measured models in markdown."""
    header = (
        "model",
        "two GEMMs",
        "whole [s]",
        "auto [s]",
        "found [s]",
        "speed-up",
        "of two GEMMs",
        "by CPU time",
        "predicted [s]",
        "sleeping",
        "tasks",
    )
    lines = []
    for row in rows:
        together = statistics.median(row.together)
        span = f"{together:.2f} ({min(row.together):.2f}–{max(row.together):.2f})"
        times = [f"{row.median_s(way):.3f}" for way in ("whole", "auto", "found")]
        share = f"{row.speedup / together:.0%}"
        more = (
            f"{row.cpu_speedup:.2f}",
            f"{row.predicted_s:.3f}",
            f"{row.sleeping_speedup:.2f}",
            str(row.n_tasks),
        )
        lines.append((row.model, span, *times, f"{row.speedup:.2f}", share, *more))
    return table(header, lines, right=header[2:])
