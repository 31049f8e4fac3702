"""Ways to hand work over: many calls at once, one call after the other, and two graphs with common tasks.

Tasks sleep, so that the processors of the machine are little part of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dask._task_spec import List, Task, TaskRef
from dask.base import tokenize
from dask.typing import Key

from ferroflow_dask.bench.workloads.base import Instance, Request, Workload
from ferroflow_dask.bench.workloads.scenarios import (
    MILLISECOND,
    Calls,
    check_numbers,
    declared,
    nap,
    number_of,
)
from ferroflow_dask.lowering.tasks import PerKey

if TYPE_CHECKING:
    from distributed import Client, Future


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
    check = partial(check_numbers, start, chains)
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
    check = partial(check_numbers, total, 2, step=0)
    return Instance(submit, check, n + 2, t1_s=n * seconds, t_inf_s=seconds)


_workload = partial(Workload, suite="stealing")

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
