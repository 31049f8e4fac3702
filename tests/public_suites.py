"""A suite of small programs, for tests of public comparisons; the processes of sides import it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import cloudpickle
import dask
from dask import delayed
from distributed import Client

from ferroflow_dask.bench.public.base import Clock, Options, Other, Program, SkippedError, Suite
from ferroflow_dask.bench.public.host import Place, serve
from ferroflow_dask.bench.public.sides import Side


def sums(client: Client, clock: Clock) -> int:
    """Add numbers in a tree of tasks."""
    values = [delayed(abs)(n, dask_key_name=f"one-{n}") for n in range(60)]
    while len(values) > 1:
        values = [delayed(sum)(values[i : i + 4]) for i in range(0, len(values), 4)]
    return int(client.compute(values[0]).result())


def prepared(client: Client, clock: Clock) -> list[int]:
    """Start the clock after a preparation."""
    futures = client.map(abs, range(-8, 0))
    client.gather(futures)
    time.sleep(0.3)
    with clock:
        return list(client.gather(client.map(_next, futures)))


def _next(n: int) -> int:
    return n + 1


def skips_itself(client: Client, clock: Clock) -> None:
    """Find a reason not to run."""
    raise SkippedError("the moon is down")


def never_ends(client: Client, clock: Clock) -> None:
    """Print a line from a task that sleeps for ten minutes."""

    def sleep() -> None:
        print("running", flush=True)
        time.sleep(600)

    client.submit(sleep).result()


def by_threads() -> int:
    """Return the answer of `sums`."""
    return sum(dask.compute(*[delayed(abs)(n) for n in range(60)], scheduler="threads"))


def _small(options: Options) -> Sequence[Program]:
    """Return two programs that take milliseconds, and two that do not run."""
    common: dict[str, Any] = {"suite": "small", "source": "written here"}
    anchors = {"threads": lambda _: by_threads()}
    return [
        Program(name="sums", run=sums, expected=by_threads, anchors=anchors, **common),
        Program(name="prepared", run=prepared, sizes={"n": 8}, **common),
        Program(name="absent", run=prepared, skipped="it needs a moon", **common),
        Program(name="night", run=skips_itself, **common),
    ]


def _by_pool(options: Options) -> Sequence[Other]:
    return [Other(program="sums", by="pool", way="as usual", seconds=0.5, workers=options.workers)]


SUITE = Suite("small", "written here", _small, others=_by_pool)


def chosen_suite(suite: Suite, options: Options, program: str | None = None) -> Suite:
    """Return a suite of one program; the processes of sides need not collect it, which takes seconds.

    Parameters
    ----------
    suite : Suite
    options : Options
    program : str, optional
        Its name; the first one that runs if left out.
    """
    programs = [one for one in suite.programs(options) if not one.skipped]
    chosen = cloudpickle.dumps(next(one for one in programs if program in (None, one.name)))
    return Suite(suite.name, suite.source, partial(_only, chosen))


def _only(program: bytes, options: Options) -> Sequence[Program]:
    return [cloudpickle.loads(program)]


class Pickled:
    """A nested function that processes of sides can call."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = cloudpickle.dumps(function)

    def __call__(self) -> Any:
        """Call it."""
        return cloudpickle.loads(self._function)()


def limited_suite(limit: int) -> Suite:
    """Return a suite of a program of two seconds, which may take a minute.

    It returns the memory limit of its workers, and if nannies enforce it.

    Parameters
    ----------
    limit : int
        The expected limit [B].
    """
    return Suite(
        "limited",
        "written here",
        partial(_limited, limit),
        memory_limit="256MiB",
        settings={"distributed.worker.memory.terminate": False},
    )


def _limited(limit: int, options: Options) -> Sequence[Program]:
    expected = partial(list, [limit, False])
    common: dict[str, Any] = {"suite": "limited", "source": "written here"}
    return [Program(name="limits", run=limits, expected=expected, timeout_s=60, **common)]


def limits(client: Client, clock: Clock) -> list[Any]:
    """Return the memory limit of a worker, and the fraction of it at which its nanny kills it."""

    def fraction(dask_worker: Any) -> Any:
        return dask_worker.memory_manager.memory_terminate_fraction

    time.sleep(2)
    (limit,) = {worker["memory_limit"] for worker in client.scheduler_info()["workers"].values()}
    (found,) = set(client.run(fraction, nanny=True).values())
    return [limit, found]


def _endless(options: Options) -> Sequence[Program]:
    """Return a program that does not end."""
    return [Program(suite="endless", name="sleep", source="written here", run=never_ends)]


ENDLESS = Suite("endless", "written here", _endless)


def hold(moment: str, place: str) -> None:
    """Print the process groups of two sides, go on to a moment of a comparison, and stay there.

    Parameters
    ----------
    moment : {"start", "idle", "run"}
        While sides start, while they are stopped, or while the first one runs a program.
    place : {"local", "separate"}
    """
    sides = [Side(name, partial(_serve_endless, place)) for name in ("first", "second")]
    print(*(side.group for side in sides), flush=True)
    if moment != "start":
        for side in sides:
            side.wait_until_ready()
        print("ready", flush=True)
    if moment == "run":
        sides[0].run(("endless", "sleep", 0), 600)
    time.sleep(600)


def _serve_endless(place: str, connection: Any) -> None:
    serve(connection, [ENDLESS], Options(), Place(workers=2, is_separate=place == "separate"), None)
