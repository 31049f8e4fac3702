"""A workload of a few sums, plans that run it, and what breaks a run on purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import add
from typing import Any

from distributed import Client

from ferroflow_dask.bench.plan import Plan, make_cases
from ferroflow_dask.bench.schema import Shape
from ferroflow_dask.bench.workloads import Instance, Request, Workload
from ferroflow_dask.exceptions import ResultError

SHAPE = Shape(workers=2, threads=1, processes=False)


def check(expected: list[Any], results: Sequence[Any]) -> None:
    if list(results) != expected:
        raise ResultError(f"{list(results)} is not {expected}")


def sums(request: Request, submit_more: Callable[[Client], object] | None = None) -> Instance:
    """`n` sums of the seed and a number, that depend on one root."""
    n = request.arguments["n"]

    def submit(client: Client) -> list[Any]:
        if submit_more is not None:
            submit_more(client)
        root = client.submit(int, request.seed, key=f"root-{request.salt}")
        return client.map(add, [root] * n, range(n), key=[f"sum-{request.salt}-{i}" for i in range(n)])

    return Instance(submit, partial(check, [request.seed + i for i in range(n)]), n_ops=n)


SUMS = Workload("sums", "a few sums", sums, defaults={"n": 6}, lowerings=("plain", "other"))


def plan(
    *policies: str,
    workload: Workload = SUMS,
    repetitions: int = 2,
    costs: str = "learned",
    shape: Shape = SHAPE,
    is_fresh: bool = False,
) -> Plan:
    cases = make_cases([(workload, workload.arguments({}))], policies, [costs])
    return Plan(cases, shape, repetitions, is_fresh=is_fresh)


def fail(*_: object) -> Any:
    raise ArithmeticError("broken on purpose")
