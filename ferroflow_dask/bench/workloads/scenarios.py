"""Situations in which stealing must act, or must not, and ways to hand work over.

After `test_work_stealing.py` of github.com/coiled/benchmarks: one root with many trivial tasks, more
workers while an array is computed, durations from a lognormal distribution. A worker that straggles has
there an event loop that is held up; here its tasks take longer. Seconds are shrunk fiftyfold. Tasks sleep,
so that the processors of the machine are little part of the result.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from dask._task_spec import List, Task, TaskRef
from dask.base import annotate, tokenize
from dask.typing import Key
from distributed import get_worker

from ferroflow_dask.annotations import COST_ANNOTATION
from ferroflow_dask.bench.workloads.base import Cluster, Instance, Request, Workload
from ferroflow_dask.bench.workloads.collection import Recipe, block, check_equal, instance, random_array
from ferroflow_dask.clients import workers_of
from ferroflow_dask.lowering.tasks import PerKey

if TYPE_CHECKING:
    from distributed import Client, Future

MILLISECOND = 1e-3
_MEBIBYTE = 2**20


# What tasks do


def nap(i: int, seconds: float, start: int) -> int:
    """Sleep [s] and return `start` + `i`."""
    time.sleep(seconds)
    return start + i


def nap_at_own_speed(i: int, seconds: float, start: int, slow: Sequence[str], slowdown: float) -> int:
    """Do as `nap` does, `slowdown` times as long on the workers whose addresses are in `slow`."""
    return nap(i, seconds * slowdown if get_worker().address in slow else seconds, start)


def _make_root(start: int) -> bytes:
    return (start % 256).to_bytes() * _MEBIBYTE


def _trivial(root: bytes, i: int, start: int) -> int:
    return start + i + root[0]


# What is submitted, and what must come out


class Calls:
    """Calls of one function as for `client.map`: the i-th one takes `seconds[i]` and returns `start` + i."""

    def __init__(self, request: Request, seconds: Sequence[float], name: str) -> None:
        token = tokenize(request.salt)
        # As `client.map` makes them itself, but from the salt.
        self.keys = [f"{name}-{token}-{i}" for i in range(len(seconds))]
        self.seconds = seconds
        self.start = number_of(request)
        self._declared = partial(declared, request)

    def submit(
        self, client: Client, function: Callable[..., int] = nap, **options: Any
    ) -> Sequence[Future[Any]]:
        """Hand all calls over at once."""
        costs = PerKey(dict(zip(self.keys, self.seconds, strict=True)))
        places, options = range(len(self.keys)), {"start": self.start, **options}
        with self._declared(costs):
            futures: list[Future[Any]] = client.map(function, places, self.seconds, key=self.keys, **options)
        return futures

    def instance(self) -> Instance:
        """Return the instance that computes this and nothing else, on workers of equal speed."""
        n = len(self.keys)
        check = partial(check_equal, list(range(self.start, self.start + n)))
        return Instance(self.submit, check, n, t1_s=sum(self.seconds), t_inf_s=max(self.seconds))


def declared(request: Request, costs: object) -> AbstractContextManager[object]:
    """Declare the durations of tasks that are submitted meanwhile [s], if the request has known costs."""
    return annotate(**{COST_ANNOTATION: costs}) if request.costs == "known" else nullcontext()


def number_of(request: Request) -> int:
    """Return the number by which results of an instance differ from those of others."""
    # 48 bits: results of different instances do not meet, and sums of a few are exact as floats.
    return int(tokenize(request.salt)[:12], 16)


# Scenarios


def _trivial_fanout(request: Request) -> Instance:
    n, start, token = request.arguments["n"], number_of(request), tokenize(request.salt)
    root = f"root-{token}"
    tasks: dict[Key, Task] = {
        (f"trivial-{token}", i): Task((f"trivial-{token}", i), _trivial, TaskRef(root), i, start)
        for i in range(n)
    }
    keys = list(tasks)
    dsk = {**tasks, root: Task(root, _make_root, start)}

    def submit(client: Client) -> Sequence[Future[Any]]:
        futures: Sequence[Future[Any]] = client.get(dsk, keys, sync=False)
        return futures

    return Instance(
        submit=submit, check=partial(check_equal, [start + start % 256 + i for i in range(n)]), n_ops=n + 1
    )


def _slowly(chunk: Any, seconds: float) -> Any:
    time.sleep(seconds if chunk.size else 0.0)  # Dask tries functions on empty arrays
    return chunk


def _same(chunk: Any) -> Any:
    return chunk


def _scale_up(seed: int, salt: str, *, n: int, chunks: int, task_ms: float) -> Any:
    x = random_array(seed, salt, (n, n, n), (block(n, chunks),) * 3)
    options = {"depth": 1, "boundary": "none", "meta": x._meta}
    x = x.map_overlap(_slowly, seconds=task_ms * MILLISECOND, **options)
    return x.map_overlap(_same, **options).sum(axis=0)


def _build_scale_up(request: Request) -> Instance:
    # Processes take seconds to start, and so there must be work left for them. By then all that can run is on
    # the first worker: most of the tasks need results, and Dask queues those that need none only.
    def all_workers(cluster: Cluster) -> None:
        cluster.scale(cluster.n_workers)

    return replace(
        instance(Recipe(_scale_up, local={"task_ms": 0.0}), request),
        prepare=lambda cluster: cluster.scale(1),
        during=all_workers,
        restore=all_workers,
    )


#: Of the normal distribution under the lognormal one, and its largest sleep [s], before it is shrunk.
_LOG_MEAN, _LOG_DEVIATION, _LONGEST_S = 1.0, 1.3, 60.0


def _lognormal(request: Request) -> Instance:
    sizes = request.arguments
    drawn = np.random.default_rng(request.seed).lognormal(_LOG_MEAN, _LOG_DEVIATION, sizes["n"])
    seconds = [float(value) for value in np.minimum(drawn, _LONGEST_S) / sizes["shrink"]]
    return Calls(request, seconds, "lognormal").instance()


def _heavy_tail(request: Request) -> Instance:
    sizes = request.arguments
    n, base_s = sizes["n"], sizes["task_ms"] * MILLISECOND
    n_heavy = round(n * sizes["heavy_fraction"])
    heavy = set(np.random.default_rng(request.seed).permutation(n)[:n_heavy].tolist())
    seconds = [base_s * sizes["heavy_factor"] if i in heavy else base_s for i in range(n)]
    # Each reads a result of its own: what reads nothing waits in Dask's queue, and is on no worker too early.
    start, token = number_of(request), tokenize(request.salt)
    loads, reads = ([(f"{name}-{token}", i) for i in range(n)] for name in ("load", "heavy_tail"))
    tasks: dict[Key, Task] = {key: Task(key, nap, i, base_s, start) for i, key in enumerate(loads)}
    for key, load, seconds_of_it in zip(reads, loads, seconds, strict=True):
        tasks[key] = Task(key, nap, 0, seconds_of_it, TaskRef(load))
    costs = PerKey(dict(zip([*loads, *reads], [*[base_s] * n, *seconds], strict=True)))

    def submit(client: Client) -> Sequence[Future[Any]]:
        with declared(request, costs):
            futures: Sequence[Future[Any]] = client.get(tasks, reads, sync=False)
        return futures

    return Instance(
        submit=submit,
        check=partial(check_equal, list(range(start, start + n))),
        n_ops=2 * n,
        t1_s=n * base_s + sum(seconds),
        t_inf_s=base_s + max(seconds),
    )


def _on_slow_workers(name: str, n_slow_of: Callable[[int], int], request: Request) -> Instance:
    """Build a map of equal calls on workers of which some, the first by name, are slow.

    T1 depends on who runs what. What no schedule can beat is the work over the sum of speeds, a slow
    thread's being 1 / slowdown. It is exact for workers of one thread each, if `n_slow_of` is exact for
    threads too; with more threads, of which more are slow then, it is still a bound.
    """
    sizes = request.arguments
    n, slowdown = sizes["n"], sizes["slowdown"]
    seconds = sizes["task_ms"] * MILLISECOND
    calls = Calls(request, [seconds] * n, name)
    slow: list[str] = []

    def prepare(cluster: Cluster) -> None:
        workers = workers_of(cluster.client)
        # A local cluster's workers are named by number, others by word.
        by_name = sorted(workers, key=lambda address: _natural(workers[address]["name"]))
        slow[:] = by_name[: n_slow_of(len(by_name))]

    def submit(client: Client) -> Sequence[Future[Any]]:
        return calls.submit(client, nap_at_own_speed, slow=list(slow), slowdown=slowdown)

    n_slow = n_slow_of(request.n_threads)
    speed = request.n_threads - n_slow + n_slow / slowdown
    return replace(
        calls.instance(),
        submit=submit,
        t1_s=None,
        t_inf_s=None,
        bound_s=max(n * seconds / speed, seconds),
        prepare=prepare,
    )


def _natural(name: object) -> tuple[bool, float, str]:
    is_number = isinstance(name, int)
    return (not is_number, float(name) if isinstance(name, int) else 0.0, str(name))


# Ways to hand work over: many calls at once, one after the other, and two graphs with common tasks


def _mapped(request: Request) -> Instance:
    n, seconds = request.arguments["n"], request.arguments["task_ms"] * MILLISECOND
    return Calls(request, [seconds] * n, "mapped").instance()


def _one_by_one(request: Request) -> Instance:
    chains, steps = request.arguments["chains"], request.arguments["steps"]
    seconds, start, token = (
        request.arguments["task_ms"] * MILLISECOND,
        number_of(request),
        tokenize(request.salt),
    )

    def submit(client: Client) -> Sequence[Future[Any]]:
        ends: list[Any] = [start] * chains
        with declared(request, seconds):
            for step in range(steps):
                ends = [
                    client.submit(nap, 0 if step else i, seconds, end, key=f"step-{token}-{step}-{i}")
                    for i, end in enumerate(ends)
                ]
        return ends

    n = chains * steps
    check = partial(check_equal, list(range(start, start + chains)))
    return Instance(submit, check, n, t1_s=n * seconds, t_inf_s=steps * seconds)


def _sum(values: Sequence[int]) -> int:
    return sum(values)


def _live_pair(request: Request) -> Instance:
    n, seconds = request.arguments["n"], request.arguments["task_ms"] * MILLISECOND
    start, token = number_of(request), tokenize(request.salt)
    loads: dict[Key, Task] = {
        (key := (f"load-{token}", i)): Task(key, nap, i, seconds, start) for i in range(n)
    }

    def graph(name: str) -> tuple[dict[Key, Task], Key]:
        end = f"{name}-{token}"
        return {**loads, end: Task(end, _sum, List(*map(TaskRef, loads)))}, end

    def submit(client: Client) -> Sequence[Future[Any]]:
        futures = []
        for name in ("first", "second"):
            tasks, end = graph(name)
            with declared(request, PerKey({**dict.fromkeys(loads, seconds), end: 0.0})):
                futures += client.get(tasks, [end], sync=False)
        return futures

    total = n * start + n * (n - 1) // 2
    check = partial(check_equal, [total, total])
    return Instance(submit, check, n + 2, t1_s=n * seconds, t_inf_s=seconds)


# Workloads


_workload = partial(Workload, suite="stealing")

SCENARIOS: tuple[Workload, ...] = (
    _workload(
        "trivial_fanout",
        "`n` trivial tasks on one root of 1 MiB: there is nothing to gain by stealing",
        _trivial_fanout,
        {"n": 10_000},
        {"n": 100},
    ),
    _workload(
        "scale_up",
        "`chunks`³ slow blocks of a cube of `n`³ numbers for one worker, then all the others join",
        _build_scale_up,
        # With more blocks, their overlaps are what two cores are busy with.
        {"n": 30, "chunks": 4, "task_ms": 300.0},
        {"n": 6, "chunks": 2, "task_ms": 5.0},
    ),
    _workload(
        "lognormal",
        "`n` tasks of lognormal durations (1, 1.3) over `shrink`, in the order in which they were drawn",
        _lognormal,
        {"n": 500, "shrink": 50.0},
        {"n": 50, "shrink": 2000.0},
    ),
    _workload(
        "straggler",
        "`n` equal tasks, and one worker that takes `slowdown` times as long",
        partial(_on_slow_workers, "straggler", lambda _total: 1),
        {"n": 1000, "task_ms": 20.0, "slowdown": 10.0},
        {"n": 30, "task_ms": 1.0},
    ),
    _workload(
        "heavy_tail",
        "`n` readers under one name, a `heavy_fraction` of which takes `heavy_factor` times as long",
        _heavy_tail,
        {"n": 400, "task_ms": 1.0, "heavy_fraction": 0.1, "heavy_factor": 200.0},
        {"n": 50, "heavy_factor": 20.0},
    ),
    _workload(
        "two_speeds",
        "`n` equal tasks, and half of the workers take `slowdown` times as long",
        partial(_on_slow_workers, "two_speeds", lambda total: math.ceil(total / 2)),
        {"n": 400, "task_ms": 20.0, "slowdown": 10.0},
        {"n": 30, "task_ms": 1.0},
    ),
)

SUBMISSIONS: tuple[Workload, ...] = (
    _workload(
        "mapped",
        "`n` equal calls by `client.map`",
        _mapped,
        {"n": 2000, "task_ms": 1.0},
        {"n": 50},
    ),
    _workload(
        "one_by_one",
        "`chains` chains of `steps` calls, each of which is submitted alone",
        _one_by_one,
        {"chains": 4, "steps": 100, "task_ms": 5.0},
        {"chains": 2, "steps": 5, "task_ms": 1.0},
    ),
    _workload(
        "live_pair",
        "two sums of the same `n` short tasks, one graph right after the other",
        _live_pair,
        {"n": 1000, "task_ms": 2.0},
        {"n": 20},
    ),
)
