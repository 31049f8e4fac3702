"""Results of tasks that yield several values, and where in them each value is."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from dask.sizeof import sizeof
from dask.typing import Key
from distributed import Reschedule

#: Key of the task that yields a value, and the item of its result that is the value; None for all of it.
Place = tuple[Key, int | None]

#: First part of the key under which a task reads a value of a bundle, to give it a key of its own.
VALUE = "ferroflow-value"

K = TypeVar("K", bound=Hashable)


class Missing(Enum):
    """Mark in place of a value."""

    LEFT = "left"


#: In place of a value whose step has left the bundle: another task yields it.
LEFT = Missing.LEFT


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """The result of a bundle from which several values are wanted.

    It is no tuple: Dask would take a tuple apart and send each item by itself, equal items several times.

    Parameters
    ----------
    values : tuple
    is_delivered : bool, optional
        Whether the worker holds the values under their own keys, too: then they count there.
    """

    values: tuple[Any, ...]
    is_delivered: bool = False

    def __getitem__(self, item: int) -> Any:
        """Return one of the values.

        Raises
        ------
        distributed.Reschedule
            Its step has left the bundle: the reader was sent before it was redefined.
        """
        value = self.values[item]
        if value is LEFT:
            raise Reschedule
        return value

    def __getattr__(self, name: str) -> Any:
        # By default dask-cuda looks for this attribute to find what to spill from a device.
        if name == "__cuda_array_interface__":
            for value in self.values:
                found = getattr(value, name, None)
                if found is not None:
                    return found
        raise AttributeError(name)


def _nbytes(results: Results) -> int:
    if results.is_delivered:
        return 0
    distinct = {id(value): value for value in results.values}
    return sum(sizeof(value) for value in distinct.values())


sizeof.register(Results, _nbytes)


def value_of(result: Any, item: int | None) -> Any:
    """Return an item of a task's result, or all of it for None; a function of tasks.

    Raises
    ------
    distributed.Reschedule
        See `Results`.
    """
    return result if item is None else result[item]


def by_place(results: Sequence[Any], places: Mapping[K, Place]) -> dict[K, Any]:
    """Return the wanted values, given the results of their tasks, in the order of `places`."""
    by_key = dict(zip(dict.fromkeys(key for key, _ in places.values()), results, strict=True))
    return {name: value_of(by_key[key], item) for name, (key, item) in places.items()}
