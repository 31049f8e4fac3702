"""What a graph takes without Dask: on plain threads of this process, which costs next to nothing, and on Ray.

They run the same kernels as Dask's workers, and are measured and checked like them. One difference is left:
BLAS is not held to one thread beneath each plain thread, as it is in each worker process. With
``OMP_NUM_THREADS=1`` in the environment it is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Self

from ferroflow_dask.bench.observe import NOTHING_SEEN, Measurement, longest_chain
from ferroflow_dask.bench.schema import Shape
from ferroflow_dask.bench.verdict import failure, hung, verdict
from ferroflow_dask.bench.workloads.base import Instance
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph import Graph, Op
from ferroflow_dask.kernels import compile_op

#: By name, with what they are.
REFERENCES = {
    # Of ours and of Dask's dependencies, none can limit BLAS in a process that runs.
    "threads": "as many plain threads as the cluster has, beneath which BLAS has as many as "
    "`OMP_NUM_THREADS` says, or else all cores; in a worker process, of Dask's or of Ray's, it has one",
    "ray": "Ray, a process for each thread",
}

Values = dict[str, Any]


def run_op(op: Op, opsets: Mapping[str, int], *operands: Any) -> tuple[tuple[Any, ...], float]:
    """Return an op's results and the time inside its kernel [s]."""
    kernel = compile_op(op, opsets)
    start = time.perf_counter()
    results = kernel(*operands)
    return tuple(results), time.perf_counter() - start


def run_one(op: Op, opsets: Mapping[str, int], *operands: Any) -> tuple[Any, float]:
    """Return the one result of an op and the time inside its kernel [s]."""
    (result,), seconds = run_op(op, opsets, *operands)
    return result, seconds


def _nap(seconds: float) -> None:
    time.sleep(seconds)


class _Reference:
    """What computes graphs without Dask.

    Parameters
    ----------
    shape : Shape
    timeout_s : float, optional
        After which a run counts as hung [s]; never if left out.
    """

    def __init__(self, shape: Shape, timeout_s: float | None = None) -> None:
        self._n_threads = shape.n_threads
        self._timeout_s = timeout_s
        #: What has run since it was started.
        self.warm: set[tuple[Any, ...]] = set()


class Threads(_Reference):
    """A pool of plain threads that run ops as soon as their operands are there."""

    def __init__(self, shape: Shape, timeout_s: float | None = None) -> None:
        super().__init__(shape, timeout_s)
        self._pool = ThreadPoolExecutor(self._n_threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def renew(self) -> None:
        """Leave the threads to what they may still be at, and start others."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = ThreadPoolExecutor(self._n_threads)
        self.warm.clear()

    def scatter(self, graph: Graph) -> Values:
        """Return the constants of a graph as they are, since all threads have them."""
        return dict(graph.constants)

    def compute(self, graph: Graph, scattered: Values) -> tuple[Values, dict[int, float]]:
        """Return the outputs of a graph, and the time that each op took by its id [s]."""
        values, seconds = _ThreadRun(self._pool, graph, scattered).compute(self._timeout_s)
        return {name: values[name] for name in graph.outputs}, seconds


class _ThreadRun:
    """One computation of a graph: what ends an op hands those that are ready now to the pool."""

    def __init__(self, pool: ThreadPoolExecutor, graph: Graph, scattered: Values) -> None:
        self._pool, self._graph = pool, graph
        self._values = dict(scattered)
        self._seconds: dict[int, float] = {}
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        #: Ops that the pool has and has not ended, and whoever hands it some. At none, nothing more can come.
        self._n_open = 0
        self._done = threading.Event()
        self._readers: dict[str, list[Op]] = {}
        self._n_missing: dict[int, int] = {}
        for op in graph.live_ops:
            needed = {value for value in op.operands if value in graph.producers}
            self._n_missing[op.id] = len(needed)
            for value in needed:
                self._readers.setdefault(value, []).append(op)

    def compute(self, timeout_s: float | None) -> tuple[Values, dict[int, float]]:
        """Return all values, and the time of each op [s], or raise what an op raised once no other runs."""
        self._n_open = 1
        self._hand_over([op for op in self._graph.live_ops if not self._n_missing[op.id]])
        self._end_one()
        if not self._done.wait(timeout_s):
            self._fail(hung(timeout_s))
        if self._error is not None:
            raise self._error
        return self._values, self._seconds

    def _hand_over(self, ops: Sequence[Op]) -> None:
        for op in ops:
            with self._lock:  # an op must not end before it is counted
                self._pool.submit(self._run, op)
                self._n_open += 1

    def _end_one(self) -> None:
        with self._lock:
            self._n_open -= 1
            if not self._n_open:
                self._done.set()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error

    def _run(self, op: Op) -> None:
        try:
            if self._error is None:  # else it would only disturb the run that comes next
                self._hand_over(self._compute(op))
        except BaseException as error:  # noqa: BLE001 -- raised where the run is waited for
            self._fail(error)
        finally:
            self._end_one()

    def _compute(self, op: Op) -> Sequence[Op]:
        """Compute an op, and return those that it was the last to be waited for by."""
        operands = (self._values[name] if name else None for name in op.inputs + op.captured)
        results, seconds = run_op(op, self._graph.opsets, *operands)
        ready = []
        with self._lock:
            self._seconds[op.id] = seconds
            for name, result in zip(op.outputs, results, strict=True):
                self._values[name] = result
                for reader in self._readers.get(name, ()):
                    self._n_missing[reader.id] -= 1
                    if not self._n_missing[reader.id]:
                        ready.append(reader)
        return ready


class Ray(_Reference):
    """Ray on this machine, one CPU of it for each thread of the cluster."""

    def __init__(self, shape: Shape, timeout_s: float | None = None) -> None:
        if find_spec("ray") is None:
            raise UsageError("policy 'ray' needs Ray; run in the clone: pip install '.[bench]'")
        super().__init__(shape, timeout_s)

    def __enter__(self) -> Self:
        import ray

        ray.init(
            num_cpus=self._n_threads,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        self._run_one: Any = ray.remote(num_cpus=1, num_returns=2)(run_one)
        nap: Any = ray.remote(num_cpus=1)(_nap)
        ray.get([nap.remote(0.1) for _ in range(2 * self._n_threads)])  # all processes start
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        ray.shutdown()

    def renew(self) -> None:
        """End all processes, whatever they are at, and start others."""
        self.__exit__()
        self.warm.clear()
        self.__enter__()

    def scatter(self, graph: Graph) -> Values:
        """Return references to the constants of a graph, which all processes can read."""
        import ray

        return {name: ray.put(value) for name, value in graph.constants.items()}

    def compute(self, graph: Graph, scattered: Values) -> tuple[Values, dict[int, float]]:
        """Return the outputs of a graph whose ops have one result each, and the time of each op [s]."""
        import ray

        # A result is its value alone, so that another op gets it as such; its time travels beside it.
        references = dict(scattered)
        seconds: dict[int, Any] = {}
        for op in graph.live_ops:
            operands = [references[name] if name else None for name in op.inputs + op.captured]
            value, spent = self._run_one.remote(op, dict(graph.opsets), *operands)
            references[op.outputs[0]], seconds[op.id] = value, spent
        wanted = [*(references[name] for name in graph.outputs), *seconds.values()]
        try:
            found = ray.get(wanted, timeout=self._timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise hung(self._timeout_s) from None
        n = len(graph.outputs)
        return dict(zip(graph.outputs, found[:n], strict=True)), dict(zip(seconds, found[n:], strict=True))


def make_reference(name: str, shape: Shape, timeout_s: float | None = None) -> Threads | Ray:
    """Return what computes graphs under a name of `REFERENCES`; a context manager."""
    return Threads(shape, timeout_s) if name == "threads" else Ray(shape, timeout_s)


def measure(reference: Threads | Ray, instance: Instance) -> Measurement:
    """Compute an instance's graph once, its constants scattered before as on Dask's workers, and check it."""
    graph = instance.graph
    assert graph is not None
    makespan_s = 0.0
    seconds: dict[int, float] = {}
    try:
        scattered = reference.scatter(graph)
        start = time.perf_counter()
        try:
            outputs, seconds = reference.compute(graph, scattered)
        finally:
            makespan_s = time.perf_counter() - start
        status = verdict(instance, list(outputs.values()), len(seconds))
    except Exception as error:  # noqa: BLE001 -- any failure of a run is a line of the report
        status = failure(error)
    dependencies = {
        op.id: tuple(graph.producers[value].id for value in op.operands if value in graph.producers)
        for op in graph.live_ops
    }
    seen = replace(
        NOTHING_SEEN,
        tasks=len(graph.live_ops),
        executed=len(seconds),
        t1_s=sum(seconds.values()),
        t_inf_s=longest_chain(dependencies, seconds),
    )
    return Measurement(makespan_s, seen, len(seconds), status)
