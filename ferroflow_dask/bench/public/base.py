"""Interface of a suite: programs with a source, and answers that can be compared.

A suite yields programs. The process of each side (`host`) makes the same programs from the same options, so a
program need not be pickled; its answer must be. The clock runs while `run` does. A program whose preparations
do not count starts the clock again, and stops it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ferroflow_dask.bench.public.answers import difference
from ferroflow_dask.exceptions import FerroflowError

if TYPE_CHECKING:
    from distributed import Client

#: What the status of a program that does not run begins with.
SKIPPED = "skipped: "


class SkippedError(FerroflowError):
    """A program does not run, for a reason that is known only when it starts; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may choose of the suites.

    Parameters
    ----------
    scale : float
        Of TPC-H; its tables have about that many gigabytes.
    checkouts : mapping of str to Path
        Working trees of the sources that no package has, by suite.
    workers : int
        Workers of each cluster.
    is_full : bool
        All sizes, not only the smallest.
    data : Path
        Folder for generated data, which is kept between calls.
    only : tuple of str
        Names of programs; all if empty.
    """

    scale: float = 0.1
    checkouts: Mapping[str, Path] = field(default_factory=dict)
    workers: int = 4
    is_full: bool = False
    data: Path = Path("ferroflow-bench-data")
    only: tuple[str, ...] = ()


class Clock:
    """Measures a run; a program may start it again, around the part that counts, and stop it.

    Parameters
    ----------
    on_start, on_stop : callable, optional
        Called right before the clock starts, and right after it has stopped.
    """

    def __init__(
        self, on_start: Callable[[], object] | None = None, on_stop: Callable[[], object] | None = None
    ) -> None:
        self._on_start, self._on_stop = on_start or (lambda: None), on_stop or (lambda: None)
        #: When it was started, by `time.time` [s]; 0 before.
        self.started = 0.0
        #: Duration of what counts [s]; 0 before the clock has stopped.
        self.seconds = 0.0

    def __enter__(self) -> Self:
        self._on_start()
        self.started, self._start = time.time(), time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.seconds:  # else the program has stopped it
            self.seconds = time.perf_counter() - self._start
            self._on_stop()

    def set(self, seconds: float) -> None:
        """Take the duration that another process has measured [s], once the clock has stopped."""
        self.seconds = seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that is measured.

    Parameters
    ----------
    suite, name : str
    source : str
        Where it comes from, with version and licence; a few words.
    run : callable
        Takes a client and a clock; returns the answer, which must be picklable. It may raise `SkippedError`.
    sizes : mapping
        Of its inputs, as JSON has them.
    expected : callable, optional
        Returns the answer without a cluster, off the clock. If left out, the first answer of stock Dask
        counts.
    differs : callable, optional
        Takes an answer and the expected one; says in one line how they differ, "" if they do not.
    fields : callable, optional
        Takes an answer; returns fields of the row that the program knows, such as `ops` and `bound_s`.
    anchors : mapping of str to callable
        The same computation by other means, without a cluster; each takes a clock and returns the answer.
    timeout_s : float
        After which a run counts as hung, if that is longer than for all programs [s].
    skipped : str
        Why it does not run; "" if it does.
    """

    suite: str
    name: str
    source: str
    run: Callable[[Client, Clock], Any]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    expected: Callable[[], Any] | None = None
    differs: Callable[[Any, Any], str] = difference
    fields: Callable[[Any], Mapping[str, Any]] | None = None
    anchors: Mapping[str, Callable[[Clock], Any]] = field(default_factory=dict)
    timeout_s: float = 0.0
    skipped: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """A run of another scheduler, which the suite has made by itself.

    Parameters
    ----------
    program, by : str
        The program, and the scheduler.
    way : str
        How the program is written for it, such as ``"as usual"``.
    seconds, cpu_s : float
        Duration, and CPU time of all its processes [s].
    workers : int
    cluster : str
        ``"virtual"`` for a makespan in virtual time.
    status : str
        "ok" or the failure.
    """

    program: str
    by: str
    seconds: float
    workers: int
    way: str = ""
    cpu_s: float = 0.0
    cluster: str = "local"
    status: str = "ok"


def _no_others(_: Options) -> Iterable[Other]:
    return ()


@dataclass(frozen=True, slots=True)
class Suite:
    """A set of programs."""

    name: str
    source: str  # who wrote it, with version and licence: one sentence for the page
    #: Returns the programs, smallest first; raises `UsageError` if it cannot run with these options.
    programs: Callable[[Options], Sequence[Program]]
    needs: Sequence[str] = ()  # packages without which it cannot run
    others: Callable[[Options], Iterable[Other]] = _no_others  # runs of other schedulers
    memory_limit: str = ""  # of each worker, unless the user gives one
    settings: Mapping[str, Any] = field(default_factory=dict)  # of Dask for its clusters


def missing(suite: Suite) -> list[str]:
    """Return the packages that a suite needs and that are not installed."""
    return [name for name in suite.needs if find_spec(name) is None]


def programs_of(suite: Suite, options: Options) -> list[Program]:
    """Return the programs of a suite that the options choose."""
    return [one for one in suite.programs(options) if not options.only or one.name in options.only]
