"""Suite of small tasks: programs that any library can run that submits functions.

Each program is written once, for an `Api`. Dask and the plugin run it here, other libraries in `peers`.
A program runs as usual and, where the documentation of a library advises another way, that way as well.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ferroflow_dask.bench.public.base import Clock, Options, Other, Program, Suite

if TYPE_CHECKING:
    from distributed import Client

#: Sleep of all tasks together [s].
TOTAL_S = 10.0
#: Calls in a task, and tasks in a message of `Client.map`, in programs that run as advised.
BATCH = 100
_MEBIBYTE = 2**20


class Api:
    """Functions of a library that runs calls on workers, with what a library without them gets instead."""

    #: Programs, by the first part of their name, for which the library's documentation advises another way.
    advised: Collection[str] = ()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function on a worker and return a future; arguments may be futures."""
        raise NotImplementedError

    def map(self, function: Callable[..., Any], *values: Collection[Any], batch: int | None = None) -> Any:
        """Call a function for each value and return the futures; `batch` tasks are sent at a time."""
        del batch
        return [self.submit(function, *arguments) for arguments in zip(*values, strict=True)]

    def put(self, value: Any) -> Any:
        """Send a value to the workers and return what stands for it in arguments."""
        return value

    def results(self, futures: Any) -> Any:
        """Wait for futures and return their results."""
        return [future.result() for future in futures]


class DaskApi(Api):
    """Futures of Dask.

    Its documentation advises larger tasks (Best practices of delayed: too many tasks), `scatter` for large
    arguments, and `batch_size` for calls that should start early.
    """

    advised = ("empty", "first", "readers")

    def __init__(self, client: Client) -> None:
        self._client = client

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call `Client.submit`."""
        return self._client.submit(function, *arguments)

    def map(self, function: Callable[..., Any], *values: Collection[Any], batch: int | None = None) -> Any:
        """Call `Client.map`."""
        return self._client.map(function, *values, batch_size=batch)

    def put(self, value: Any) -> Any:
        """Call `Client.scatter`."""
        return self._client.scatter(value)

    def results(self, futures: Any) -> Any:
        """Call `Client.gather`."""
        return self._client.gather(futures)


# Functions of tasks


def same(i: int) -> int:
    """Return the argument: an empty task whose result can be checked."""
    return i


def same_of_each(values: Iterable[int]) -> list[int]:
    """Return the results of as many empty calls."""
    return [same(i) for i in values]


def nap(i: int, seconds: float) -> int:
    """Sleep [s] and return the number of the task."""
    time.sleep(seconds)
    return i


def add(one: int, other: int) -> int:
    """Return a sum."""
    return one + other


def checksum(value: Any, i: int) -> int:
    """Return the checksum of an array, changed by the number of the task."""
    return zlib.crc32(value) ^ i


# Programs: each returns its answer and the futures, which are released when the clock has stopped

Ran = tuple[Any, Sequence[Any]]


def _empty(api: Api, n: int) -> Ran:
    futures = api.map(same, range(n))
    return api.results(futures), futures


def _empty_in_batches(api: Api, n: int) -> Ran:
    futures = api.map(same_of_each, [range(i, min(i + BATCH, n)) for i in range(0, n, BATCH)])
    return list(chain.from_iterable(api.results(futures))), futures


def _sleep(api: Api, n: int) -> Ran:
    futures = api.map(nap, range(n), [TOTAL_S / n] * n)
    return api.results(futures), futures


def _one_by_one(api: Api, n: int) -> Ran:
    total = 0
    for i in range(n):
        (total,) = api.results([api.submit(add, total, i)])
    return total, ()


def _first(api: Api, n: int, batch: int | None = None) -> Ran:
    futures = api.map(same, range(n), batch=batch)
    return api.results(futures[:1])[0], futures


def _tree(api: Api, n: int) -> Ran:
    values: list[Any] = list(range(n + 1))
    futures = []
    while len(values) > 1:
        values = [api.submit(add, *pair) for pair in zip(values[::2], values[1::2], strict=True)]
        futures += values
    return api.results(values)[0], futures


def _value() -> Any:
    return np.random.default_rng(0).integers(0, 256, _MEBIBYTE, np.uint8)


def _readers(api: Api, n: int, *, is_put: bool = False) -> Ran:
    value = api.put(_value()) if is_put else _value()
    futures = [api.submit(checksum, value, i) for i in range(n)]
    return api.results(futures), futures


def _numbers(n: int) -> list[int]:
    return list(range(n))


@dataclass(frozen=True, slots=True)
class SmallTasks:
    """A program of `n` tasks.

    Parameters
    ----------
    run, advised : callable
        Take an `Api` and `n`; return the answer and the futures. As usual, and as documentations advise.
    expected : callable
        Takes `n` and returns the answer.
    """

    kind: str
    n: int
    run: Callable[[Api, int], Ran]
    expected: Callable[[int], Any]
    advised: Callable[[Api, int], Ran] | None = None

    @property
    def name(self) -> str:
        """Name as usual; "-advised" follows it in the other way."""
        return f"{self.kind}-{self.n}"

    def way(self, is_advised: bool) -> Callable[[Api, int], Ran]:
        """Return the program in one of its ways; an API's own settings may be all that is advised."""
        return self.advised if is_advised and self.advised else self.run


def small_tasks(is_full: bool) -> Sequence[SmallTasks]:
    """Return the programs; without `is_full`, those that take long are smaller or left out."""
    return (
        SmallTasks("one-by-one", 100, _one_by_one, lambda n: n * (n - 1) // 2),
        SmallTasks("tree", 1_023, _tree, lambda n: n * (n + 1) // 2),
        *(SmallTasks("sleep", n, _sleep, _numbers) for n in ((100, 1_000, 10_000) if is_full else (1_000,))),
        SmallTasks("empty", 10_000 if is_full else 1_000, _empty, _numbers, _empty_in_batches),
        SmallTasks(
            "readers",
            1_000 if is_full else 100,
            _readers,
            lambda n: [checksum(_value(), i) for i in range(n)],
            partial(_readers, is_put=True),
        ),
        SmallTasks(
            "first", 100_000 if is_full else 10_000, _first, lambda _n: 0, partial(_first, batch=10 * BATCH)
        ),
    )


# The suite


def _run(run: Callable[[Api, int], Ran], n: int, client: Client, clock: Clock) -> Any:
    with clock:
        answer, _futures = run(DaskApi(client), n)
    return answer


def programs(options: Options) -> Sequence[Program]:
    """Return the programs as usual, each followed by the way that Dask's documentation advises."""
    return [
        Program(
            suite="tasks",
            name=f"{program.name}-advised" if is_advised else program.name,
            source="ferroflow-dask, MIT",
            run=partial(_run, program.way(is_advised), program.n),
            sizes={"tasks": program.n},
            expected=partial(program.expected, program.n),
        )
        for program in small_tasks(options.is_full)
        for is_advised in (False, True)
        if not is_advised or program.kind in DaskApi.advised
    ]


def _by_peers(options: Options) -> Iterator[Other]:
    from ferroflow_dask.bench.public.peers import peer_rows  # which needs this module

    return peer_rows(options)


SUITE = Suite(
    "tasks",
    "Six programs of small tasks, written here (MIT). Empty tasks and sleeps follow the comparison with Dask "
    "by the authors of HyperQueue. The suffix *advised* marks the way that Dask's documentation advises.",
    programs,
    others=_by_peers,
)
