"""Isolation: the steps of a bundle share no objects that one of them may change.

Dask pickles each task by itself, so each has its own copies of its arguments, and of its function if that
is pickled by value. A bundle is one pickle. A step that may change objects which other steps reach holds its
call as bytes instead, and unpickles its own copies when it starts.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
from dask._task_spec import DataNode, GraphNode, Task, _execute_subgraph
from dask.typing import Key

from ferroflow_dask.bundling.library import IN_PLACE_ARGUMENTS, is_library
from ferroflow_dask.bundling.reach import Reach


class NotIsolatedError(Exception):
    """Some tasks must not share a bundle, since their objects cannot be copied.

    Parameters
    ----------
    keys : collection of Key
    """

    def __init__(self, keys: Collection[Key]) -> None:
        super().__init__(keys)
        self.keys = frozenset(keys)


class OwnCopies:
    """Function of a step: calls another function with copies that only this step has.

    Parameters
    ----------
    call : bytes
        Pickle of the function, its arguments, and the places of those that are values of other tasks. It
        refers to shared objects by their number.
    shared : bytes
        Pickle of the shared objects. Steps that share the same objects hold the same bytes.
    """

    __slots__ = ("call", "shared")

    def __init__(self, call: bytes, shared: bytes) -> None:
        self.call = call
        self.shared = shared

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnCopies, (self.call, self.shared)

    def __call__(self, *operands: Any) -> Any:
        """Unpickle the function and its arguments, and call it with the values of other tasks."""
        unpickler = _Unpickler(io.BytesIO(self.call))
        unpickler.copies = pickle.loads(self.shared) if self.shared else ()
        function, arguments, places = unpickler.load()
        for place in places:
            arguments[place] = operands[place]
        del operands, unpickler
        return function(*arguments)


class _Unpickler(pickle.Unpickler):
    copies: Sequence[Any]

    def persistent_load(self, number: int) -> Any:
        return self.copies[number]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a call, and numbers the shared objects that it refers to."""

    def __init__(self, file: io.BytesIO, shared: Mapping[int, Any]) -> None:
        super().__init__(file)
        self._shared = shared
        self.numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if id(value) not in self._shared:
            return None
        return self.numbers.setdefault(id(value), len(self.numbers))


class Isolation:
    """Makes the copies that steps of bundles need; remembers what it finds about the objects of one graph.

    A step needs copies if one of its functions may change an object that another step of the bundle reaches.
    """

    def __init__(self) -> None:
        self._reach = Reach()
        # Whether all callables in an object are library functions, by its identity.
        self._harmless: dict[int, bool] = {}
        # Pickles of shared objects, by the identities of these.
        self._pickles: dict[tuple[int, ...], bytes] = {}

    def to_copy(self, tasks: Sequence[GraphNode]) -> ToCopy:
        """Return the steps of a bundle that need copies; linear in the objects that the steps reach."""
        owned = ToCopy(self._reach)
        changing: list[tuple[int, Iterable[Any]]] = []
        literals: list[tuple[int, Iterable[Any]]] = []
        for step, task in enumerate(tasks):
            self._sort(step, task, changing, literals)
        # The tasks that change their arguments may read the literals.
        for step, values in (*changing, *literals) if changing else ():
            owned.add(step, values, may_change=True)
        for step, task in () if owned.is_empty else enumerate(tasks):
            for values in self._in_library(task):
                owned.add(step, values, may_change=False)
        return owned

    def _sort(self, step: int, task: GraphNode, changing: list[Any], literals: list[Any]) -> None:
        """Add the calls of a task that may change objects, and its literals."""
        if isinstance(task, DataNode):
            literals.append((step, (task.value,)))
        elif not isinstance(task, Task):
            return
        elif task.func is _execute_subgraph:  # Dask has fused several tasks
            for inner in task.args[0].values():
                self._sort(step, inner, changing, literals)
            literals.append((step, task.args[3:]))
        elif not self._changes_nothing(task):
            changing.append((step, self._reach.parts(task)))

    def calls_library_only(self, task: GraphNode) -> bool:
        """Return whether all callables in a task, arguments included, are library functions."""
        if not isinstance(task, Task):
            return True
        if task.func is _execute_subgraph:
            return all(map(self.calls_library_only, task.args[0].values()))
        return self._changes_nothing(task)

    def _in_library(self, task: GraphNode) -> Iterator[Iterable[Any]]:
        """Yield the operands of the calls of a task that change nothing."""
        if not isinstance(task, Task):
            return
        if task.func is _execute_subgraph:
            for inner in task.args[0].values():
                yield from self._in_library(inner)
        elif self._changes_nothing(task):
            yield self._reach.parts(task)

    def _changes_nothing(self, task: Task) -> bool:
        """Return whether a call changes no object, since all callables in it are library functions."""
        function, harmless = task.func, self._harmless
        if not harmless.get(id(function)) and not self._is_harmless(function):
            return False
        if isinstance(function, np.ufunc) and len(task.args) > function.nin:  # the next operand is `out`
            return False
        is_leaf = self._reach.is_leaf
        for value in task.args:
            cls = type(value)
            if is_leaf[cls] or (cls is tuple and all(map(is_leaf.__getitem__, map(type, value)))):
                continue
            if not harmless.get(id(value)) and not self._is_harmless(value):
                return False
        return not task.kwargs or self._is_harmless(task.kwargs)

    def _is_harmless(self, value: Any) -> bool:
        known = self._harmless.get(id(value))
        if known is None:
            known = self._harmless[id(value)] = self._has_only_library(value)
        return known

    def _has_only_library(self, value: Any) -> bool:
        is_leaf, harmless, seen = self._reach.is_leaf, self._harmless, set[int]()
        stack = [value]
        while stack:
            inside = self._inside(stack.pop())
            if inside is None:
                return False
            for part in inside:
                if not is_leaf[type(part)] and id(part) not in seen and not harmless.get(id(part)):
                    seen.add(id(part))
                    stack.append(part)
        harmless.update(dict.fromkeys(seen, True))
        return True

    def _inside(self, value: Any) -> Iterable[Any] | None:
        """Return what callables may be found in; None if the object is one that may change its arguments."""
        cls = type(value)
        if cls in _SEQUENCES:
            return value  # type: ignore[no-any-return]
        if cls is dict:
            return value.values() if IN_PLACE_ARGUMENTS.isdisjoint(_given(value)) else None
        if isinstance(value, Task):
            is_in_place = not IN_PLACE_ARGUMENTS.isdisjoint(_given(value.kwargs))
            return None if is_in_place else (value.func, *value.args, *value.kwargs.values())
        if isinstance(value, partial):
            is_in_place = not IN_PLACE_ARGUMENTS.isdisjoint(_given(value.keywords))
            return None if is_in_place else (value.func, *value.args, *value.keywords.values())
        if isinstance(value, GraphNode):
            return self._reach.parts(value)
        if callable(value):
            return self._reach.parts(value) if is_library(value) else None
        return () if is_library(cls) else None

    def own_copies(
        self, function: Any, arguments: Sequence[Any], places: Sequence[int], shared: Mapping[int, Any]
    ) -> OwnCopies:
        """Return a function that calls another one with its own copies.

        Parameters
        ----------
        function : callable
        arguments : sequence
        places : sequence of int
            Of the arguments that are values of other tasks.
        shared : mapping of int to object
            As in `ToCopy`.

        Raises
        ------
        Exception
            An object cannot be pickled; the type depends on the object.
        """
        file = io.BytesIO()
        pickler = _Pickler(file, shared)
        pickler.dump((function, list(arguments), tuple(places)))
        ids = tuple(pickler.numbers)
        if ids and ids not in self._pickles:
            self._pickles[ids] = cloudpickle.dumps(tuple(shared[one] for one in ids))
        return OwnCopies(file.getvalue(), self._pickles[ids] if ids else b"")


_SEQUENCES = frozenset({list, tuple, set, frozenset, deque})


@dataclass(slots=True)
class ToCopy:
    """The steps of a bundle that need their own copies.

    Parameters
    ----------
    reach : Reach
    steps : set of int
    shared : dict of int to object
        Objects that several steps reach, by their identity. They are pickled once.
    """

    reach: Reach
    steps: set[int] = field(default_factory=set)
    shared: dict[int, Any] = field(default_factory=dict)
    # The first step that reaches an object, by its identity; its complement if the step does not change it.
    _owners: dict[int, int] = field(default_factory=dict)
    # The first step that reaches a function that cannot change, by its identity.
    _functions: dict[int, int] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether no step reaches an object that may be changed."""
        return not self._owners

    def add(self, step: int, values: Iterable[Any], *, may_change: bool) -> None:
        """Add objects that a step reaches; first those which steps may change."""
        owners, is_frozen = self._owners, self.reach.is_frozen
        stack = list(values)
        while stack:
            part = stack.pop()
            if is_frozen(part):
                # The code of a function that several steps call is pickled once.
                if self.reach.is_by_value(part) and self._functions.setdefault(id(part), step) != step:
                    self.shared[id(part)] = part
                continue
            owner = owners.get(id(part))
            if owner is None:
                owners[id(part)] = step if may_change else ~step
                if may_change and self.reach.has_state(part):
                    self.steps.add(step)
                stack += self.reach.parts(part)
            elif owner not in {step, ~step}:
                self.shared[id(part)] = part
                self.steps.update(one for one in (owner, step if may_change else -1) if one >= 0)


def _given(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of arguments that are given."""
    return [name for name, value in arguments.items() if value is not None and value is not False]
