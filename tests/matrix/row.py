"""Rows of the matrix: a program, the features that it covers, and how its observations are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matrix.trial import Trial

#: Letters of a row: tasks run in bundles; they stay separate; a bundle is divided; a plugin follows tasks.
BUNDLED, SEPARATE, DIVIDED, OBSERVER = "B", "S", "T", "O"


def difference(stock: Any, other: Any, place: str = "") -> str | None:
    """Return how observations differ from those of stock Dask; None if they are equal."""
    if stock == other:
        return None
    parts: list[Any] = []
    if isinstance(stock, dict) and isinstance(other, dict) and stock.keys() == other.keys():
        parts = list(stock)
    elif isinstance(stock, (list, tuple)) and type(stock) is type(other) and len(stock) == len(other):
        parts = list(range(len(stock)))
    for part in parts:
        found = difference(stock[part], other[part], f"{place}[{part!r}]")
        if found is not None:
            return found
    return f"{place} {_short(stock)} in stock, {_short(other)} here".strip()


def no_more(*names: str, slack: int = 0) -> Callable[[Any, Any], str | None]:
    """Return a comparison of dicts; some numbers may be smaller than in stock, or larger by a slack."""

    def compare(stock: Any, other: Any) -> str | None:
        if not (
            isinstance(stock, dict) and isinstance(other, dict) and {*names} <= stock.keys() & other.keys()
        ):
            return difference(stock, other)
        for name in names:
            if other[name] > stock[name] + slack:
                return f"{name}: {stock[name]} in stock, {other[name]} here"
        return difference(*({k: v for k, v in one.items() if k not in names} for one in (stock, other)))

    return compare


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 400 else f"{text[:300]} … {text[-80:]}"


@dataclass(frozen=True)
class Row:
    """A row of the matrix.

    Parameters
    ----------
    name : str
        The feature.
    letters : str
        See the constants above.
    run : callable
        Runs the program, and returns plain data that can be compared.
    text : str
        What the program does.
    covers : tuple of str
        Public names, such as `Client.map`, and annotations, such as `annotation priority`.
    separate : callable, optional
        Returns whether the task of a key stays separate, if only some of a row marked `S` do.
    compare : callable
        As `difference`, if not all observations must be equal.
    cluster : mapping, optional
        Options of `LocalCluster` if the row needs a cluster of its own.
    settings : mapping, optional
        Settings of Dask for such a cluster and its client.
    is_timed : bool
        Whether the observations depend on how fast the machine is: a trial that differs is repeated once.
    needs_processes : bool
        Whether the program ends workers or their memory, so that it cannot run in the process of the tests.
    """

    name: str
    letters: str
    run: Callable[[Trial], Any]
    text: str
    covers: tuple[str, ...] = ()
    separate: Callable[[str], bool] | None = None
    compare: Callable[[Any, Any], str | None] = difference
    cluster: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_timed: bool = False
    needs_processes: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether the row needs a cluster of its own."""
        return self.cluster is not None or bool(self.settings) or self.needs_processes


@dataclass
class Rows:
    """The rows in the order of their definition."""

    by_name: dict[str, Row] = field(default_factory=dict)

    def __call__(
        self, name: str, letters: str = "", text: str = "", **options: Any
    ) -> Callable[[Callable[[Trial], Any]], Callable[[Trial], Any]]:
        """Return a decorator that adds the program of a row."""

        def add(run: Callable[[Trial], Any]) -> Callable[[Trial], Any]:
            assert name not in self.by_name, name
            self.by_name[name] = Row(name, letters, run, text or name, **options)
            return run

        return add


#: Decorator of the functions that run a row.
row = Rows()
