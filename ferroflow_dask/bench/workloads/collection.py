"""A Dask collection and its known answer, as a workload.

Owns what the array, frame and RSDS workloads share: when the answer is computed, how tasks are counted, what
comes on the clock, how a result is compared, and sources of random arrays. A collection's data depend on its
sizes and the seed, so that one answer serves all of its instances; its keys depend on the salt too, so that
Dask never takes one instance's task for another's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.base import collections_to_expr, tokenize

from ferroflow_dask.bench.workloads.base import Instance, Request, Workload
from ferroflow_dask.bench.workloads.sizes import check_sizes
from ferroflow_dask.exceptions import ResultError

if TYPE_CHECKING:
    from distributed import Client, Future

#: Sums of doubles in another order differ by less than this, relative to the value itself, and, where terms
#: cancel, by less than `CANCELLATION` relative to the largest value.
TOLERANCE, CANCELLATION = 1e-9, 1e-12

#: Answers and counts that are kept; a comparison has fewer pairs of workload and seed at a time.
N_KEPT = 256


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a collection is made and what it must compute to.

    Parameters
    ----------
    collect : callable
        Takes the seed, the salt and the sizes by name; returns a lazy collection.
    answer : callable
        Takes the seed and the sizes by name; returns the answer, computed without Dask. Arrays and floats are
        compared within `TOLERANCE`, integers and lists exactly.
    view : callable, optional
        Takes the result and returns what is comparable to the answer.
    count : callable, optional
        Takes the sizes by name and returns the number of ops, where that of tasks varies.
    """

    collect: Callable[..., Any]
    answer: Callable[..., Any]
    view: Callable[[Any], Any] | None = None
    count: Callable[..., int] | None = None


def of_collection(
    name: str,
    summary: str,
    recipe: Recipe,
    *,
    defaults: Mapping[str, Any],
    small: Mapping[str, Any],
    family: str,
    needs: tuple[str, ...] = (),
) -> Workload:
    """Return the workload whose instances compute a collection; the parameters are `Workload`'s."""

    def build(request: Request) -> Instance:
        return instance(name, recipe, request)

    return Workload(name, summary, build, defaults, small, family=family, needs=needs)


def instance(name: str, recipe: Recipe, request: Request) -> Instance:
    """Build a collection and what its result is compared with; neither is on the clock.

    Raises
    ------
    UsageError
        A count is less than 1, or a duration negative.
    """
    numbers = {name: size for name, size in request.arguments.items() if not isinstance(size, str)}
    ranges = {name: (1 if isinstance(size, int) else 0, math.inf) for name, size in numbers.items()}
    check_sizes(name, request.arguments, ranges)
    sizes = tuple(sorted(request.arguments.items()))
    expected = _answer(recipe.answer, request.seed, sizes)
    collection = recipe.collect(request.seed, request.salt, **request.arguments)

    def submit(client: Client) -> Sequence[Future[Any]]:
        return [client.compute(_optimized(collection))]

    def check(results: Sequence[Any]) -> None:
        found = results[0] if len(results) == 1 else results
        try:
            problem = difference(recipe.view(found) if recipe.view else found, expected)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            why = str(error).partition("\n")[0]
            raise ResultError(f"{name}: the result is a {type(found).__name__} ({why})") from error
        if problem:
            raise ResultError(f"{name}: {problem}")

    n_ops = recipe.count(**request.arguments) if recipe.count else _n_tasks(recipe.collect, sizes)
    return Instance(submit, check, n_ops)


@lru_cache(N_KEPT)
def _answer(answer: Callable[..., Any], seed: int, sizes: tuple[tuple[str, Any], ...]) -> Any:
    return answer(seed, **dict(sizes))


@lru_cache(N_KEPT)
def _n_tasks(collect: Callable[..., Any], sizes: tuple[tuple[str, Any], ...]) -> int:
    """Count the tasks of the optimised graph.

    The collection is one of its own: what Dask remembers of a frame's optimisation must not make that of an
    instance faster.
    """
    # Not a public name, but what `Client.compute` hands over.
    from dask._expr import FinalizeCompute

    collection = _optimized(collect(0, "to be counted", **dict(sizes)))
    return len(FinalizeCompute(collections_to_expr([collection])).optimize().__dask_graph__())


def _optimized(collection: Any) -> Any:
    """Fuse a frame's tasks, as its `compute` does and `Client.compute` does not; leave others as they are."""
    # Delayed values have any attribute that is asked for.
    return collection.optimize() if hasattr(type(collection), "optimize") else collection


def difference(found: Any, expected: Any) -> str:
    """Say in one line how a result differs from what is expected; "" if it does not."""
    if isinstance(expected, list):
        if not isinstance(found, list):
            return f"the result is a {type(found).__name__}, expected a list"
        if len(found) != len(expected):
            return f"{len(found)} values, expected {len(expected)}"
        wrong = [i for i, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
        return f"value {wrong[0]} is {found[wrong[0]]!r}, expected {expected[wrong[0]]!r}" if wrong else ""
    if isinstance(expected, int):
        return "" if found == expected else f"the value is {found!r}, expected {expected!r}"
    values, wanted = np.asarray(found, dtype=float), np.asarray(expected, dtype=float)
    if values.shape != wanted.shape:
        return f"shape {values.shape}, expected {wanted.shape}"
    sizes = np.abs(wanted)
    # Written so that NaN counts as wrong.
    is_wrong = ~(np.abs(values - wanted) <= TOLERANCE * sizes + CANCELLATION * np.max(sizes, initial=0))
    if not is_wrong.any():
        return ""
    first = tuple(int(i) for i in np.argwhere(is_wrong)[0])
    where = f"value {first}" if first else "the value"
    return (
        f"{where} is {values[first]!s}, expected {wanted[first]!s} "
        f"({np.count_nonzero(is_wrong)} of {wanted.size} wrong)"
    )


def token(salt: str, *parts: Any) -> str:
    """Return 32 hexadecimal digits, which Dask leaves out of the names of task prefixes."""
    return str(tokenize(salt, *parts))


# Parts


def share(n: int, parts: int, part: int) -> int:
    """Return how many of `n` items are in a part, so that the parts differ by at most one."""
    return n * (part + 1) // parts - n * part // parts


def block(n: int, parts: int) -> int:
    """Return the length of the blocks in which an axis of length `n` has at most that many parts."""
    return -(-n // parts)


# Random arrays


def random_array(
    seed: int, salt: str, shape: tuple[int, ...], chunks: tuple[int, ...], *, index: int = 0
) -> Any:
    """Return a Dask array of uniform random numbers, one task a block; -1 is the whole of an axis.

    Parameters
    ----------
    index : int, optional
        Tells apart the arrays of one instance.
    """
    import dask.array as da

    return da.map_blocks(
        _block,
        seed,
        index,
        chunks=da.core.normalize_chunks(chunks, shape),
        meta=np.empty((0,) * len(shape)),
        name=f"random-{token(salt, index)}",
    )


def random_values(
    seed: int, shape: tuple[int, ...], chunks: tuple[int, ...], *, index: int = 0
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the values of `random_array` without Dask computing anything."""
    from dask.array.core import normalize_chunks, slices_from_chunks

    blocks = normalize_chunks(chunks, shape)
    values = np.empty(shape)
    locations = np.ndindex(*map(len, blocks))
    for location, part in zip(locations, slices_from_chunks(blocks), strict=True):
        values[part] = _random(seed, index, location, values[part].shape)
    return values


def _block(seed: int, index: int, block_info: Mapping[Any, Any]) -> Any:
    block = block_info[None]
    return _random(seed, index, block["chunk-location"], block["chunk-shape"])


def _random(seed: int, index: int, location: Sequence[int], shape: Sequence[int]) -> Any:
    return np.random.default_rng([seed, index, *location]).random(tuple(shape))
