"""A Dask collection as a workload: its answer is what the same program gives in this process.

Owns what the array, frame and RSDS workloads share: when the answer is computed, how tasks are counted, what
comes on the clock, how a result is compared, and sources of random arrays. A collection's data depend on its
sizes and the seed, so that one answer serves all of its instances; its keys depend on the salt too, so that
Dask never takes one instance's task for another's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from dask import config
from dask.base import collections_to_expr, compute, tokenize

from ferroflow_dask.bench.public.answers import difference
from ferroflow_dask.bench.workloads.base import Instance, Request, Workload
from ferroflow_dask.exceptions import ResultError

if TYPE_CHECKING:
    from distributed import Client, Future

#: Answers and counts that are kept; a comparison has fewer pairs of workload and seed at a time.
N_KEPT = 256


@dataclass(frozen=True)
class Recipe:
    """How a collection is made.

    Parameters
    ----------
    collect : callable
        Takes the seed, the salt and the sizes by name; returns a lazy collection.
    local : mapping
        Sizes and other arguments that differ where the answer is computed: no sleeps, and no P2P shuffle.
    count : callable, optional
        Takes the sizes by name and returns the number of ops, where that of tasks varies.
    """

    collect: Callable[..., Any]
    local: Mapping[str, Any] = field(default_factory=dict)
    count: Callable[..., int] | None = None

    @property
    def name(self) -> str:
        """Name of the workload."""
        return self.collect.__name__.lstrip("_")


def of_collection(
    suite: str,
    summary: str,
    defaults: Mapping[str, Any],
    small: Mapping[str, Any],
    *,
    needs: tuple[str, ...] = (),
    local: Mapping[str, Any] | None = None,
    count: Callable[..., int] | None = None,
) -> Callable[[Callable[..., Any]], Workload]:
    """Make a function that returns a collection a workload of its name; see `Workload` and `Recipe`."""

    def workload(collect: Callable[..., Any]) -> Workload:
        recipe = Recipe(collect, local or {}, count)
        build = partial(instance, recipe)
        return Workload(recipe.name, summary, build, defaults, small, suite=suite, needs=needs)

    return workload


def instance(recipe: Recipe, request: Request, **options: Any) -> Instance:
    """Build a collection and what its result is compared with; neither is on the clock.

    Parameters
    ----------
    recipe : Recipe
    request : Request
    **options
        Further arguments of `collect`, which do not change the answer.
    """
    name, arguments = recipe.name, request.arguments
    collection = recipe.collect(request.seed, request.salt, **arguments, **options)
    expected = _answer(recipe.collect, request.seed, tuple(sorted({**arguments, **recipe.local}.items())))

    def submit(client: Client) -> Sequence[Future[Any]]:
        return [client.compute(_optimized(collection))]

    def check(results: Sequence[Any]) -> None:
        found = results[0] if len(results) == 1 else results
        try:
            problem = difference(found, expected)
        except (TypeError, ValueError) as error:
            why = str(error).partition("\n")[0]
            raise ResultError(f"{name}: the result is a {type(found).__name__} ({why})") from error
        if problem:
            raise ResultError(f"{name}: {problem}")

    sizes = tuple(sorted(arguments.items()))
    n_ops = recipe.count(**arguments) if recipe.count else _n_tasks(recipe.collect, sizes)
    return Instance(submit, check, n_ops)


@lru_cache(N_KEPT)
def _answer(collect: Callable[..., Any], seed: int, arguments: tuple[tuple[str, Any], ...]) -> Any:
    """Compute a collection in this thread, by tasks of its own, without a cluster."""
    # With a client, Dask would choose P2P shuffles, which work on a cluster only.
    with config.set({"dataframe.shuffle.method": "tasks"}):
        (found,) = compute(collect(seed, "the answer", **dict(arguments)), scheduler="synchronous")
    return found


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


def check_equal(expected: Sequence[Any], found: Sequence[Any]) -> None:
    """Raise `ResultError` unless all results are the expected ones."""
    if problem := difference(list(found), expected):
        raise ResultError(problem)


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


def _block(seed: int, index: int, block_info: Mapping[Any, Any]) -> Any:
    block = block_info[None]
    return np.random.default_rng([seed, index, *block["chunk-location"]]).random(block["chunk-shape"])
