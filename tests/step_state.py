"""Programs whose tasks change what they were given; a script, so that their functions are pickled by value.

It prints as JSON, for each program, its value without the plugin, its value with it, and how many tasks were
in bundles.
"""

from __future__ import annotations

import contextvars
import decimal
import functools
import json
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import numpy as np
from assume_short import assume_short
from distributed import Client, LocalCluster

from ferroflow_dask import install
from ferroflow_dask.scheduler import extension_on

#: Tasks of a program that call its function.
N_TASKS = 20

SEEN: list[int] = []
CACHE: dict[int, int] = {}
NUMBER = 0


class Counter:
    """An object with state."""

    def __init__(self) -> None:
        self.n = 0

    def add(self, x: int) -> int:
        self.n += 1
        return self.n

    def __call__(self, x: int) -> int:
        return self.add(x)


# What tasks call


def pop(x: int, params: Any) -> Any:
    return params.pop("lr", None)


def append(x: int, values: Any) -> int:
    values.append(x)
    return len(values)


def append_inside(x: int, nested: Any) -> int:
    return append(x, nested["a"][0][1])


def append_and_return(x: int, values: Any) -> Any:
    values.append(x)
    return values


def add_to_set(x: int, values: Any) -> int:
    values.add(x)
    return len(values)


def add_in_place(x: int, array: Any) -> Any:
    array += 1
    return array.tolist()


def draw(x: int, generator: Any) -> float:
    return float(generator.random())


def count_in(x: int, counter: Counter) -> int:
    return counter.add(x)


def with_default(x: int, values: Any = []) -> int:  # noqa: B006 -- that is tested
    return append(x, values)


def with_named_default(x: int, *, values: Any = {}) -> int:  # noqa: B006 -- that is tested
    values[x] = x
    return len(values)


def use_global_list(x: int) -> int:
    return append(x, SEEN)


def use_cache(x: int) -> int:
    CACHE.setdefault(x % 2, x)
    return CACHE[x % 2]


def assign_global(x: int) -> int:
    global NUMBER  # noqa: PLW0603 -- that is tested
    NUMBER += 1
    return NUMBER


def call_helper(x: int) -> int:
    return use_global_list(x) + assign_global(x)


def with_attribute(x: int) -> int:
    with_attribute.n = getattr(with_attribute, "n", 0) + 1  # type: ignore[attr-defined]
    return int(with_attribute.n)  # type: ignore[attr-defined]


def closure(values: Any) -> Callable[[int], int]:
    def inner(x: int) -> int:
        return append(x, values)

    return inner


def assigning_closure() -> Callable[[int], int]:
    n = 0

    def inner(x: int) -> int:
        nonlocal n
        n += 1
        return n

    return inner


def in_blocks(block: Any, values: Any = (), function: Callable[..., int] = append) -> Any:
    return np.full(block.shape, function(1, values))


def global_in_blocks(block: Any) -> Any:
    return np.full(block.shape, use_global_list(1))


def add_to_blocks(block: Any, array: Any) -> Any:
    array += 1
    return block + array[0]


# Contexts


def set_precision(x: int) -> str:
    text = str(decimal.Decimal(1) / 3)
    decimal.setcontext(decimal.Context(prec=3))
    return text


def set_errors(x: int) -> str:
    before = np.geterr()["divide"]
    np.seterr(divide="raise")
    return before


def set_variable(x: int) -> int:
    # A variable of `__main__` cannot be pickled.
    variable = vars(contextvars).setdefault(
        "for_this_test", contextvars.ContextVar("for_this_test", default=0)
    )
    before = variable.get()
    variable.set(x + 1)
    return int(before)


# How tasks are made

Way = Callable[..., Any]


def mapped(client: Client, function: Callable[..., Any], *shared: Any) -> Any:
    rest = [[value] * N_TASKS for value in shared]
    return client.gather(client.map(function, range(N_TASKS), *rest, pure=False))


def mapped_by_name(client: Client, function: Callable[..., Any], **shared: Any) -> Any:
    return client.gather(client.map(function, range(N_TASKS), pure=False, **shared))


def delayed(client: Client, function: Callable[..., Any], *shared: Any) -> Any:
    call = dask.delayed(function, pure=False, traverse=False)
    return list(dask.compute(*(call(i, *shared) for i in range(N_TASKS))))


def bag(client: Client, function: Callable[..., Any], **shared: Any) -> Any:
    return db.from_sequence(range(2 * N_TASKS), npartitions=N_TASKS).map(function, **shared).compute()


def blocks(client: Client, function: Callable[..., Any], **shared: Any) -> Any:
    array = da.ones((2 * N_TASKS,), chunks=2)
    return array.map_blocks(function, dtype=float, meta=np.empty(0), **shared).compute().tolist()


def alternating(client: Client, *functions: Callable[..., Any]) -> Any:
    calls = [dask.delayed(functions[i % len(functions)], pure=False)(i) for i in range(N_TASKS)]
    return list(dask.compute(*calls))


def chained(client: Client, function: Callable[..., Any], *shared: Any) -> Any:
    call = dask.delayed(function, pure=False, traverse=False)
    found = [call(0, *shared)]
    for _ in range(N_TASKS - 1):
        found.append(call(found[-1], *shared))
    return list(dask.compute(*found))


#: Programs whose tasks change the context in which they run.
CONTEXTS: dict[str, Callable[[Client], Any]] = {
    "precision of decimals by map": lambda c: mapped(c, set_precision),
    "errors of NumPy by delayed": lambda c: delayed(c, set_errors),
    "context variable by bag": lambda c: bag(c, set_variable),
    "context variable by map": lambda c: mapped(c, set_variable),
}
#: Functions that make the calls of each program, since they need fresh objects.
PROGRAMS: dict[str, Callable[[Client], Any]] = {
    "argument of map by name": lambda c: mapped_by_name(c, pop, params={"lr": 0.1}),
    "argument of map": lambda c: mapped(c, append, []),
    "argument of delayed": lambda c: delayed(c, pop, {"lr": 0.1}),
    "argument of bag": lambda c: bag(c, append, values=[]),
    "argument of map_blocks": lambda c: blocks(c, in_blocks, values=[]),
    "array in place by map": lambda c: mapped(c, add_in_place, np.zeros(3)),
    "array in place by delayed": lambda c: delayed(c, add_in_place, np.zeros(3)),
    "object in a container by map": lambda c: mapped(c, append_inside, {"a": [("b", [])]}),
    "object in a container by bag": lambda c: bag(c, append_inside, nested={"a": [("b", [])]}),
    "set by delayed": lambda c: delayed(c, add_to_set, {-1}),
    "deque by map": lambda c: mapped(c, append, deque([1])),
    "random numbers by map": lambda c: mapped(c, draw, random.Random(1)),
    "NumPy's random numbers by delayed": lambda c: delayed(c, draw, np.random.default_rng(1)),
    "object of __main__ by map": lambda c: mapped(c, count_in, Counter()),
    "method of an object by delayed": lambda c: delayed(c, Counter().add),
    "callable object by map": lambda c: mapped(c, Counter()),
    "returned argument by map": lambda c: mapped(c, append_and_return, []),
    "returned argument by delayed": lambda c: delayed(c, append_and_return, []),
    "default by map": lambda c: mapped(c, with_default),
    "default by bag": lambda c: bag(c, with_named_default),
    "default of a lambda by delayed": lambda c: delayed(c, lambda x, values=[]: append(x, values)),
    "closure by map": lambda c: mapped(c, closure([])),
    "closure that assigns by bag": lambda c: bag(c, assigning_closure()),
    "global list by map": lambda c: mapped(c, use_global_list),
    "global list by map_blocks": lambda c: blocks(c, global_in_blocks),
    "global cache by bag": lambda c: bag(c, use_cache),
    "global name by delayed": lambda c: delayed(c, assign_global),
    "global state of a helper by map": lambda c: mapped(c, call_helper),
    "two functions with one global by delayed": lambda c: alternating(c, use_global_list, call_helper),
    "attribute by map": lambda c: mapped(c, with_attribute),
    "partial by map": lambda c: mapped(c, functools.partial(append, values=[])),
    "partial by bag": lambda c: bag(c, functools.partial(append_inside, nested={"a": [("b", [])]})),
    "argument of a chain": lambda c: chained(c, append, []),
    "array in place by map_blocks": lambda c: blocks(c, functools.partial(add_to_blocks, array=np.zeros(1))),
    **CONTEXTS,
}


def main() -> None:
    """Run all programs on one cluster, without the plugin and with it."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        stock = {name: program(client) for name, program in PROGRAMS.items()}
        assume_short()
        install(client)
        found: dict[str, dict[str, Any]] = {}
        for name, program in PROGRAMS.items():
            before = _bundled(cluster)
            value = program(client)
            found[name] = {"stock": stock[name], "plugin": value, "bundled": _bundled(cluster) - before}
    print(json.dumps(found))


def _bundled(cluster: LocalCluster) -> int:
    extension = extension_on(cluster.scheduler)
    return 0 if extension is None else int(extension.graphs.bundles.counts["tasks"])


if __name__ == "__main__":
    main()
