"""Values of a test of coiled/benchmarks, which returns none: those that it waits for or reads.

They are kept while the test runs, and become the answer of a program once the clock has stopped. Large values
become figures where they are, on the workers. Values that a test discards cannot be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import distributed
import numpy as np
from dask.core import flatten
from dask.sizeof import sizeof
from distributed import Client, Future

if TYPE_CHECKING:
    import pytest

#: Larger values become figures [B].
_WHOLE_NBYTES = 2**16
#: Of more futures, evenly spaced ones are read: reading 100,000 takes longer than the tests.
_READ = 10_000
#: Futures that are canceled at once: a scheduler takes time in proportion to the square of their number.
_CANCELED = 500


class Values:
    """Values of one run of a test."""

    def __init__(self) -> None:
        self._waited: list[tuple[Client, Any]] = []
        self._read: list[Any] = []
        self._discarded: list[Any] = []
        self._completed: Counter[str] = Counter()
        self._iterators: list[Any] = []
        self._wait: Callable[..., Any] = distributed.wait
        self._iterator: Any = distributed.as_completed

    def replace(self, patch: pytest.MonkeyPatch, utils_test: Any) -> None:
        """Replace functions by which tests wait and read, before the files with the tests are imported."""
        import dask.distributed

        for module in (distributed, dask.distributed):
            patch.setattr(module, "wait", self._wait_for_futures)
            patch.setattr(module, "as_completed", self._counting())
        for owner, name in ((Client, "gather"), (Future, "result")):
            patch.setattr(owner, name, self._keeping(getattr(owner, name)))
        patch.setattr(utils_test, "wait", self._wait_for)
        # Not all checkouts and not all tests discard values.
        if hasattr(utils_test, "arr_to_devnull"):
            patch.setattr(utils_test, "arr_to_devnull", self._discarding(utils_test.arr_to_devnull))

    def forget(self) -> None:
        """Forget what was read so far, by fixtures."""
        self._read.clear()

    def answer(self) -> dict[str, Any]:
        """Return what the test has waited for and read, large values as figures, and release it."""
        read, discarded, self._read = self._read, self._discarded, []  # what follows reads, too
        waited = [_values(client, thing) for client, thing in self._waited]
        # Blocks of a discarded array have keys of the test's tasks, which must not be there any more.
        self.release()
        answer = {
            "waited": waited,
            "read": _compact([figures(value) for value in _flat(read)]),
            "corners": [figures(block.compute()) for array in discarded for block in _corners(array)],
            "completed": dict(self._completed),
        }
        return {name: value for name, value in answer.items() if len(value)}

    def release(self) -> None:
        """Cancel collections that the test has waited for, as the checkout does, and tasks that still run.

        Otherwise futures from which a test has read only the first ones would run after it.
        """
        for client, thing in self._waited:
            if client.status == "running" and not isinstance(thing, list):
                client.cancel(thing)
        for iterator in self._iterators:
            futures = list(iterator.futures)
            for start in range(0, len(futures), _CANCELED):
                futures[0].client.cancel(futures[start : start + _CANCELED])
        self._waited, self._read, self._discarded, self._iterators = [], [], [], []

    def _wait_for(self, thing: Any, client: Client, timeout: float) -> None:
        persisted = thing.persist() if hasattr(thing, "persist") else thing
        self._waited.append((client, persisted))
        self._wait(persisted, timeout=timeout)
        for future in client.futures_of(persisted):
            if future.status in ("error", "cancelled"):
                raise future.exception()

    def _wait_for_futures(self, futures: Any, *arguments: Any, **options: Any) -> Any:
        done = self._wait(futures, *arguments, **options)
        listed = [futures] if isinstance(futures, Future) else list(futures)
        if listed and all(isinstance(future, Future) for future in listed):
            self._waited.append((listed[0].client, listed))
            self._completed.update(str(future.status) for future in listed)
        return done

    def _counting(self) -> type:
        values = self
        iterator: Any = self._iterator

        class _Counting(iterator):  # type: ignore[misc]
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                values._iterators.append(self)

            def __next__(self) -> Any:
                item = super().__next__()
                values._completed[str((item if isinstance(item, Future) else item[0]).status)] += 1
                return item

        return _Counting

    def _keeping(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def keep(*arguments: Any, **options: Any) -> Any:
            value = read(*arguments, **options)
            self._read.append(value)
            return value

        return keep

    def _discarding(self, discard: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def remember(array: Any) -> Any:
            self._discarded.append(array)
            return discard(array)

        return remember


def figures(value: Any) -> Any:
    """Return a value of at most 64 KiB as it is, and figures that depend on every number of a larger one.

    The order of the rows of a frame does not count.
    """
    if sizeof(value) <= _WHOLE_NBYTES:
        return value
    if isinstance(value, np.ndarray):
        return {"shape": list(value.shape), "dtype": str(value.dtype)} | _of_numbers(value, is_ordered=True)
    if hasattr(value, "to_frame"):  # a pandas.Series or an index
        value = value.to_frame()
    if hasattr(value, "iloc"):
        columns = {str(name): _of_column(value[name]) for name in value.columns}
        return {"rows": len(value), "index": _of_column(value.index.to_series()), **columns}
    return {"type": type(value).__name__, "nbytes": sizeof(value)}


def _of_numbers(array: Any, *, is_ordered: bool) -> dict[str, Any]:
    numbers = np.asarray(array, dtype=float).ravel()
    is_nan = np.isnan(numbers)
    numbers = np.where(is_nan, 0, numbers)
    found = {"nan": int(is_nan.sum()), "sum": float(numbers.sum()), "squares": float(numbers @ numbers)}
    if is_ordered:
        found["positions"] = float(numbers @ np.linspace(0, 1, len(numbers)))
    return found


def _of_column(column: Any) -> Any:
    from pandas.util import hash_pandas_object

    if column.dtype.kind == "f":
        return _of_numbers(column, is_ordered=False)
    return int(hash_pandas_object(column, index=False).sum())  # of unsigned integers, which wrap


def _values(client: Client, thing: Any) -> Any:
    """Return the values of a collection or of futures, block by block in a fixed order."""
    if not hasattr(thing, "__dask_keys__"):
        return _compact([figures(value) for value in client.gather(thing[:: -(-len(thing) // _READ)])])
    # Keys of persisted frames are other ones than those of their futures.
    positions = {key: n for n, key in enumerate(flatten(thing.__dask_keys__()))}
    blocks = sorted(client.futures_of(thing), key=lambda future: _place(future.key, positions))
    return _compact(client.gather(client.map(figures, blocks, pure=False)))


def _place(key: Any, positions: dict[Any, int]) -> tuple[Any, ...]:
    return positions.get(key, 0), key[1:] if isinstance(key, tuple) else ()


def _corners(array: Any) -> list[Any]:
    """Return the first and the last block."""
    return [array.blocks[(n,) * array.ndim] for n in (0, -1)]


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _compact(values: Sequence[Any]) -> Any:
    """Return an array instead of a list of numbers."""
    is_numeric = values and all(isinstance(value, int | float | np.number) for value in values)
    return np.asarray(values) if is_numeric else list(values)
