"""Task Bench: layered graphs whose tasks check that their inputs are what the pattern says.

Slaughter, Wu, Fu, Brandenburg, Garcia, Kautz, Marx, Morris, Cao, Bosilca, Mirchandaney, Lee, Treichler,
McCormick and Aiken, "Task Bench: A Parameterized Benchmark for Evaluating Parallel Runtime Performance",
SC'20. Points (t, i), `width` of them at each of `steps` time steps; a point at t > 0 depends on points at
t − 1.

Deviations: tasks sleep, `dom` keeps its full width (there it is a diamond), equal dependences are one
(`spread` has some at large radix), and `random_nearest` hashes with BLAKE2b. The results are all points that
no other depends on, or Dask would not run them; the last step is among them.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dask._task_spec import Task, TaskRef
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.typing import Key

from ferroflow_dask.annotations import COST_ANNOTATION
from ferroflow_dask.bench.workloads.base import Instance, Request, Workload
from ferroflow_dask.bench.workloads.collection import check_equal
from ferroflow_dask.exceptions import ResultError

if TYPE_CHECKING:
    from distributed import Client, Future

_MILLISECOND = 1e-3
#: After so many steps `spread` and `random_nearest` repeat; Task Bench's default.
_PERIOD = 3


# Patterns


@dataclass(frozen=True, slots=True)
class Pattern:
    """Who depends on whom.

    Parameters
    ----------
    name : str
        One of `PATTERNS`.
    width : int
        Points of a step.
    radix : int, optional
        Dependences of a point, for `nearest`, `spread` and `random_nearest`.
    fraction : float, optional
        Part of the window that `random_nearest` keeps.

    Examples
    --------
    >>> Pattern("stencil_1d", width=4).dependences(1, 0)
    (0, 1)
    >>> [Pattern("tree", width=6).width_at(t) for t in range(5)]
    [1, 2, 4, 6, 6]
    """

    name: str
    width: int
    radix: int = 0
    fraction: float = 0.0

    def width_at(self, t: int) -> int:
        """Return the number of points of step `t`."""
        return min(self.width, 2**t) if self.name == "tree" else self.width

    def dependences(self, t: int, i: int) -> tuple[int, ...]:
        """Return the points of step t − 1 that (t, i) depends on, each once."""
        if t == 0:
            return ()
        before = range(self.width_at(t - 1))
        return tuple(dict.fromkeys(j for j in PATTERNS[self.name](self, t, i) if j in before))


def _nearest(pattern: Pattern, _t: int, i: int) -> Sequence[int]:
    return range(i - pattern.radix // 2, i + (pattern.radix - 1) // 2 + 1)


def _fft(pattern: Pattern, t: int, i: int) -> Sequence[int]:
    period = max(1, math.ceil(math.log2(pattern.width)))
    stride = 2 ** ((t - 1) % period)
    return (i - stride, i, i + stride)


def _spread(pattern: Pattern, t: int, i: int) -> Sequence[int]:
    shift, width, radix = t % _PERIOD, pattern.width, pattern.radix
    return [(i + k * width // radix + (shift if k else 0)) % width for k in range(radix)]


def _random_nearest(pattern: Pattern, t: int, i: int) -> Sequence[int]:
    window = _nearest(pattern, t, i)
    return [j for j in window if j == i or _uniform(t % _PERIOD, i, j) < pattern.fraction]


def _uniform(*numbers: object) -> float:
    """Return a number in [0, 1) that depends on nothing but `numbers`."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2.0**64


#: Dependences of (t, i) on step t − 1 by pattern; those outside of that step do not count.
PATTERNS: Mapping[str, Callable[[Pattern, int, int], Sequence[int]]] = {
    "trivial": lambda _pattern, _t, _i: (),
    "no_comm": lambda _pattern, _t, i: (i,),
    "stencil_1d": lambda _pattern, _t, i: (i - 1, i, i + 1),
    "dom": lambda _pattern, _t, i: (i - 1, i),
    "tree": lambda _pattern, _t, i: (i // 2,),
    "fft": _fft,
    "all_to_all": lambda pattern, _t, _i: range(pattern.width),
    "nearest": _nearest,
    "spread": _spread,
    "random_nearest": _random_nearest,
}


# What a task does


#: Points that ran in this process, by the salt of their instance.
_ran: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)


def _take_ran(salt: str) -> int:
    return len(_ran.pop(salt, ()))


@dataclass(frozen=True, slots=True)
class PointTask:
    """The function of all tasks of an instance: it sleeps for `seconds` and returns its point."""

    seconds: float
    salt: str

    def __call__(self, t: int, i: int, dependences: tuple[int, ...], *inputs: Any) -> tuple[int, int]:
        """Check the inputs of point (t, i), sleep and return the point.

        Raises
        ------
        ResultError
            An input is not the point that is depended on.
        """
        found, expected = list(inputs), [(t - 1, j) for j in dependences]
        if found != expected:
            raise ResultError(f"point {(t, i)} depends on {expected} and was given {found}")
        time.sleep(self.seconds)
        _ran[self.salt].append((t, i))
        return (t, i)


# Workloads


def _build(name: str, request: Request) -> Instance:
    sizes = request.arguments
    steps = sizes["steps"]
    pattern = Pattern(name, sizes["width"], sizes.get("radix", 0), sizes.get("fraction", 0.0))
    seconds = sizes["task_ms"] * _MILLISECOND
    task = PointTask(seconds, request.salt)
    # A token, since a salt of letters only would become part of the prefix by which Dask learns.
    group = f"{name}-{tokenize(request.salt)}"
    points = [(t, i) for t in range(steps) for i in range(pattern.width_at(t))]
    dependences = {(t, i): pattern.dependences(t, i) for t, i in points}
    before = {(t, i): tuple((t - 1, j) for j in needed) for (t, i), needed in dependences.items()}
    tasks: dict[Key, Task] = {
        (group, t, i): Task((group, t, i), task, t, i, needed, *(TaskRef((group, t - 1, j)) for j in needed))
        for (t, i), needed in dependences.items()
    }
    annotations = {COST_ANNOTATION: seconds} if request.costs == "known" else None
    dsk = HighLevelGraph({group: MaterializedLayer(tasks, annotations=annotations)}, {group: set()})
    read = {point for needed in before.values() for point in needed}
    results = [point for point in points if point not in read]
    keys: list[Key] = [(group, t, i) for t, i in results]

    def submit(client: Client) -> Sequence[Future[Any]]:
        futures: Sequence[Future[Any]] = client.get(dsk, keys, sync=False)
        return futures

    def count_executed(client: Client) -> int:
        return sum(client.run(_take_ran, task.salt).values())

    return Instance(
        submit=submit,
        check=partial(check_equal, results),
        n_ops=len(points),
        t1_s=len(points) * seconds,
        t_inf_s=seconds * _longest_chain(before),
        count_executed=count_executed,
    )


def _longest_chain(before: Mapping[tuple[int, int], Sequence[tuple[int, int]]]) -> int:
    """Return the points of the longest chain; points come after those that they depend on."""
    lengths: dict[tuple[int, int], int] = {}
    for point, needed in before.items():
        lengths[point] = 1 + max((lengths[one] for one in needed), default=0)
    return max(lengths.values())


def _workload_name(pattern: str) -> str:
    # `tree` alone is a reduction of the RSDS suite's.
    return "task_bench_tree" if pattern == "tree" else pattern


_SIZES: Mapping[str, Any] = {"width": 16, "steps": 20, "task_ms": 20.0}
_SMALL: Mapping[str, Any] = {"width": 4, "steps": 4, "task_ms": 1.0}
#: Five dependences as in Task Bench's own studies, and its default fraction.
_OF_PATTERN: Mapping[str, Mapping[str, Any]] = {
    "nearest": {"radix": 5},
    "spread": {"radix": 5},
    "random_nearest": {"radix": 5, "fraction": 0.25},
}
_SMALL_RADIX = 3
_SUMMARIES: Mapping[str, str] = {
    "trivial": "independent tasks",
    "no_comm": "independent chains",
    "stencil_1d": "each point on itself and its two neighbours a step before",
    "dom": "each point on itself and its left neighbour a step before",
    "tree": "each point on its parent, twice as many each step up to `width`",
    "fft": "each point on itself and those 2^d away, d by step",
    "all_to_all": "each point on all of the step before",
    "nearest": "each point on the `radix` nearest a step before",
    "spread": "each point on `radix` evenly spread ones, shifted by step",
    "random_nearest": "each point on itself and a `fraction` of the `radix` nearest",
}


def _workload(pattern: str) -> Workload:
    own = _OF_PATTERN.get(pattern, {})
    return Workload(
        name=_workload_name(pattern),
        summary=f"Task Bench, {pattern}: {_SUMMARIES[pattern]}",
        build=partial(_build, pattern),
        defaults={**_SIZES, **own},
        small={**_SMALL, **({"radix": _SMALL_RADIX} if "radix" in own else {})},
        suite="task-bench",
    )


TASK_BENCH: tuple[Workload, ...] = tuple(_workload(pattern) for pattern in PATTERNS)
