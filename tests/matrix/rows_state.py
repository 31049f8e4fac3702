"""Rows of state: tasks that change their arguments, globals, context or process."""

from __future__ import annotations

import contextvars
import decimal
import os
import random
import threading
from functools import partial
from typing import Any

import dask
import numpy as np

from matrix.row import row
from matrix.tasks import inc
from matrix.trial import Trial

_N = 40


def _pop(x: int, params: dict[str, Any]) -> Any:
    return params.pop("lr", None)


def _append(x: int, seen: list[int]) -> list[int]:
    seen.append(x)
    return list(seen)


def _pop_nested(x: int, nested: dict[str, list[int]]) -> int:
    return nested["a"].pop() if nested["a"] else -1


def _gather_by(client: Any, function: Any, **literals: Any) -> tuple[Any, Any]:
    """Return values by `map` and by `delayed`."""
    mapped = client.gather(client.map(function, range(_N), **literals, pure=False))
    delayed = [dask.delayed(function, pure=False)(i, **literals) for i in range(_N)]
    return mapped, client.gather(client.compute(delayed))


@row("mutable argument", "B", "a dict that tasks pop from, a list that they append to, a nested one")
def mutable_argument(trial: Trial) -> Any:
    client = trial.client
    return (
        _gather_by(client, _pop, params={"lr": 0.1}),
        _gather_by(client, _append, seen=[]),
        _gather_by(client, _pop_nested, nested={"a": [1, 2]}),
    )


_SEEN: list[int] = []


def _by_value() -> list[Any]:
    """Return functions with state that cannot be found by name, so that they are pickled by value."""
    cell: list[int] = []

    def default(x: int, seen: list[int] = []) -> int:  # noqa: B006 -- that is the program
        seen.append(x)
        return len(seen)

    def closure(x: int) -> int:
        cell.append(x)
        return len(cell)

    def attribute(x: int) -> int:
        attribute.seen = getattr(attribute, "seen", 0) + 1  # type: ignore[attr-defined]
        return int(attribute.seen)  # type: ignore[attr-defined]

    count = 0

    def nonlocal_name(x: int) -> int:
        nonlocal count
        count += 1
        return count

    def global_list(x: int) -> int:
        _SEEN.append(x)
        return len(_SEEN)

    return [default, closure, attribute, nonlocal_name, global_list]


@row("mutable default, closure, attribute, global", "B", "functions that are pickled by value")
def mutable_functions(trial: Trial) -> Any:
    return [_gather_by(trial.client, function) for function in _by_value()]


def _bag_step(seen: list[int], x: int) -> int:
    seen.append(x)
    return len(seen)


@row("mutable partial; map_blocks", "B", "`partial` with a list, by map, bag and array")
def mutable_partial(trial: Trial) -> Any:
    import dask.array as da
    import dask.bag as db

    mapped = trial.client.gather(trial.client.map(partial(_bag_step, []), range(_N)))
    bag = db.from_sequence(range(_N), npartitions=_N).map(partial(_bag_step, [])).compute()
    blocks = da.arange(_N, chunks=1).map_blocks(_fill, scratch=np.zeros(1), dtype=float).compute()
    return mapped, bag, blocks.tolist()


def _fill(block: Any, scratch: Any) -> Any:
    scratch += 1
    return block * 0 + scratch


_CACHE: dict[int, int] = {}


def _cached(x: int) -> int:
    _CACHE[x % 5] = _CACHE.get(x % 5, 0)
    return len(_CACHE)


@row("function with a cache in a global dict", "B", "the cache is as large as in stock at the end")
def global_cache(trial: Trial) -> Any:
    _CACHE.clear()
    futures = trial.client.map(_cached, range(_N))
    return max(trial.client.gather(futures)) <= 5


def _same(x: Any) -> Any:
    return x


def _make(x: int) -> list[int]:
    return [x]


def _is_same(a: Any, b: Any) -> bool:
    return a is b


# Without a letter: the cut leaves some of these tasks separate.
@row("returned argument; two results are one object", "", "values of readers of both")
def identities(trial: Trial) -> Any:
    made = [dask.delayed(_make)(i) for i in range(20)]
    returned = [dask.delayed(_same)(one) for one in made]
    readers = [dask.delayed(_is_same)(a, b) for a, b in zip(made, returned, strict=True)]
    values = trial.client.compute([*readers, *returned], sync=True)
    return len(values[:20]), values[20:]


_VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("matrix-variable", default=0)


def _count_context(x: int) -> int:
    _VARIABLE.set(_VARIABLE.get() + 1)
    return _VARIABLE.get()


def _precision(x: int) -> str:
    text = str(decimal.Decimal(1) / decimal.Decimal(3))
    decimal.setcontext(decimal.Context(prec=3))  # Dask's own context may be shared by all tasks
    return text


def _divide(x: int) -> float:
    with np.errstate(divide="raise" if x % 3 == 0 else "ignore"):
        try:
            return float(np.float64(1.0) / np.float64(0.0))
        except FloatingPointError:
            return -1.0


def _seterr(x: int) -> float:
    try:
        return float(np.float64(1.0) / np.float64(0.0))
    except FloatingPointError:
        return -1.0
    finally:
        np.seterr(divide="raise")


def _annotate(x: int) -> Any:
    with dask.annotate(priority=x):
        return dict(dask.get_annotations()) if hasattr(dask, "get_annotations") else x


@row("context variable, decimal, np.errstate, dask.annotate in a task", "B", "each task has its own context")
def contexts(trial: Trial) -> Any:
    functions = (_count_context, _precision, _divide, _annotate)
    return [_gather_by(trial.client, function) for function in functions]


@row("np.seterr in a task", "B", "the next task is not affected")
def numpy_errors(trial: Trial) -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _gather_by(trial.client, _seterr)


def _configure(x: int) -> Any:
    with dask.config.set({f"matrix.{x}": x}):
        os.environ[f"MATRIX_{x}"] = str(x)
        here = os.getcwd()
        os.chdir(here)
        value = dask.config.get(f"matrix.{x}"), os.environ.pop(f"MATRIX_{x}")
    return value, dask.config.get(f"matrix.{x}", None)


@row(
    "dask.config.set, os.environ, os.chdir",
    "B",
    "set and restored: values, the state afterwards; on one thread, since they are of the process",
    covers=("config",),
    cluster={"n_workers": 1},
)
def process_state(trial: Trial) -> Any:
    values = trial.client.gather(trial.client.map(_configure, range(_N)))
    return values, trial.client.run(_matrix_variables) == {address: [] for address in trial.workers}


def _matrix_variables() -> list[str]:
    return [name for name in os.environ if name.startswith("MATRIX_")]


_LOCAL = threading.local()


def _count_local(x: int) -> int:
    _LOCAL.n = getattr(_LOCAL, "n", 0) + 1
    return int(_LOCAL.n)


@row("threading.local", "B", "a counter by thread is not above the number of tasks")
def thread_locals(trial: Trial) -> Any:
    found = trial.client.gather(trial.client.map(_count_local, range(_N)))
    return max(found) <= 10 * _N, min(found) >= 1


def _seeded(x: int) -> Any:
    random.seed(x)
    first = random.random()
    return first, float(np.random.default_rng(x).random())


@row(
    "random, np.random seeded in the task",
    "B",
    "values; one thread, since the generator is global",
    cluster={"n_workers": 1},
)
def seeds(trial: Trial) -> Any:
    return trial.client.gather(trial.client.map(_seeded, range(_N)))


def _recurse(depth: int) -> int:
    return 0 if depth == 0 else 1 + _recurse(depth - 1)


def _recurse_to(x: int, depth: int) -> Any:
    try:
        return _recurse(depth)
    except RecursionError:
        return "RecursionError"


@row("recursion to depth 900, recursion limit", "B", "the value, or `RecursionError`")
def recursion(trial: Trial) -> Any:
    client = trial.client
    return [
        client.gather(client.map(_recurse_to, range(20), depth=depth, pure=False)) for depth in (900, 100_000)
    ]


def _outlive(x: int) -> int:
    from concurrent.futures import ThreadPoolExecutor

    done = threading.Event()
    thread = threading.Thread(target=done.wait, args=(0.2,), name="matrix-outlives", daemon=True)
    thread.start()
    with ThreadPoolExecutor(2) as pool:
        total = sum(pool.map(inc, range(3)))
    done.set()
    return total + x


@row("threads that outlive the task, thread pools", "B", "values")
def threads(trial: Trial) -> Any:
    return trial.client.gather(trial.client.map(_outlive, range(20)))


def _call_process(x: int) -> int:
    import subprocess
    import sys

    if x % 10:
        return x
    return int(
        subprocess.run([sys.executable, "-S", "-c", f"print({x})"], capture_output=True, check=True).stdout
    )


@row("subprocess in a task", "B", "values")
def subprocesses(trial: Trial) -> Any:
    return trial.client.gather(trial.client.map(_call_process, range(20)))


def _fork(x: int) -> int:
    if x % 10:
        return x
    pid = os.fork()
    if pid == 0:
        os._exit(x)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@row("fork in a task", "B", "values, no child is left", needs_processes=True)
def forks(trial: Trial) -> Any:
    return trial.client.gather(trial.client.map(_fork, range(20)))


def _set_signal(x: int) -> str:
    import signal

    try:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    except ValueError as error:
        return str(error)
    return "set"


@row("signal.signal in a task", "B", "`ValueError`")
def signals(trial: Trial) -> Any:
    return trial.client.gather(trial.client.map(_set_signal, range(20)))


def _run_loop(x: int) -> int:
    import asyncio

    async def later() -> int:
        await asyncio.sleep(0)
        return x + 1

    return asyncio.run(later())


async def _coroutine(x: int) -> int:
    return x + 1


@row("asyncio.run in a task", "B", "values")
def loops(trial: Trial) -> Any:
    return trial.client.gather(trial.client.map(_run_loop, range(20)))


@row("coroutine task", "S", "values")
def coroutines(trial: Trial) -> Any:
    return trial.client.gather(trial.client.map(_coroutine, range(20)))


def _grow(x: int) -> int:
    """Hold the interpreter's lock in one call for some time."""
    return (7 ** (60_000 if x == 5 else 10)) % 10


@row("step that holds the GIL", "B", "among steps of 1 ms: values")
def gil(trial: Trial) -> Any:
    return trial.client.gather(trial.client.map(_grow, range(40)))


def _write_temporary(x: int) -> bool:
    from distributed import get_worker

    path = os.path.join(get_worker().local_directory, f"matrix-{x}")
    with open(path, "w") as file:
        file.write(str(x))
    os.unlink(path)
    return not os.path.exists(path)


@row("temporary files in worker.local_directory", "", "files")
def temporary_files(trial: Trial) -> Any:
    return trial.client.gather(trial.client.map(_write_temporary, range(20)))
