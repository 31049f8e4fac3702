"""Reach: the objects that are pickled with an object, and which of them can change."""

from __future__ import annotations

import copyreg
import datetime
import functools
import operator
import pickle
import re
import sys
import types
from collections import deque
from collections.abc import Iterable
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any
from uuid import UUID

import numpy as np
from dask._task_spec import Alias, DataNode, GraphNode, Task, TaskRef
from dask.utils import methodcaller

from ferroflow_dask.bundling import by_value

_SCALARS = (str, int, float, bytes, complex)
#: Types whose objects never change, with their subclasses.
_LEAVES = (
    *(*_SCALARS, types.NoneType, slice, range, types.EllipsisType, types.NotImplementedType),
    *(np.generic, np.dtype, np.ufunc, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, Decimal, Fraction, UUID, PurePath),
    *(re.Pattern, Enum, methodcaller, operator.itemgetter, operator.attrgetter, TaskRef, Alias),
)
#: Modules whose types are like those.
_LEAF_MODULES = ("pandas._libs.tslibs", "pandas._libs.missing", "pandas.core.dtypes")
#: Types of objects that change only if what they refer to does.
_TRANSPARENT = (tuple, frozenset, functools.partial, types.MethodType, types.FunctionType, type, GraphNode)


class _LeafTypes(dict[type, bool]):
    """Whether objects of a type never change and refer to none that do."""

    def __missing__(self, cls: type) -> bool:
        has_attributes = issubclass(cls, _SCALARS) and cls.__dictoffset__ and not issubclass(cls, Enum)
        is_leaf = issubclass(cls, _LEAVES) and not has_attributes
        self[cls] = is_leaf or cls.__module__.startswith(_LEAF_MODULES)
        return self[cls]


class Reach:
    """Finds what objects refer to; remembers it by their identity, so they must be kept."""

    def __init__(self) -> None:
        #: For each type, whether its objects never change and refer to none that do.
        self.is_leaf = _LeafTypes()
        self._frozen: dict[int, bool] = {}
        self._by_value: dict[int, by_value.Pickling] = {}
        # What other objects are pickled as, which exists only for that.
        self._pickled: dict[int, Iterable[Any]] = {}

    def is_frozen(self, value: Any) -> bool:
        """Return whether neither an object nor any that it refers to can change."""
        if self.is_leaf[type(value)]:
            return True
        known = self._frozen.get(id(value))
        if known is None:
            known = self._frozen[id(value)] = self._is_frozen(value)
        return known

    def _is_frozen(self, value: Any) -> bool:
        seen: set[int] = set()
        stack = [value]
        while stack:
            part = stack.pop()
            name = id(part)
            if self.is_leaf[type(part)] or name in seen or self._frozen.get(name):
                continue
            if not _is_transparent(part) or self.has_state(part):
                return False
            seen.add(name)
            stack += self.parts(part)
        self._frozen.update(dict.fromkeys(seen, True))
        return True

    def has_state(self, value: Any) -> bool:
        """Return whether an object is a function or class that changes names or attributes of its own."""
        return isinstance(value, types.FunctionType | type) and self._of(value).has_state

    def is_by_value(self, value: Any) -> bool:
        """Return whether an object is a function or class that is pickled by value."""
        return isinstance(value, types.FunctionType | type) and self._of(value).is_by_value

    def _of(self, value: Any) -> by_value.Pickling:
        found = self._by_value.get(id(value))
        if found is None:
            find = by_value.of_class if isinstance(value, type) else by_value.of_function
            found = self._by_value[id(value)] = find(value)
        return found

    def parts(self, value: Any) -> Iterable[Any]:
        """Return the objects that an object refers to, as far as they are pickled with it."""
        cls = type(value)
        if cls in {list, tuple, set, frozenset, deque}:
            found: Iterable[Any] = value
            return found
        if cls is dict:
            return [*value.keys(), *value.values()]
        if cls is np.ndarray:
            return value.ravel().tolist() if value.dtype.hasobject else ()
        if isinstance(value, types.FunctionType | type):
            return self._of(value).parts
        if isinstance(value, GraphNode):
            return _parts_of_task(value)
        if isinstance(value, functools.partial):
            return value.func, *value.args, *value.keywords.values(), *vars(value).values()
        if isinstance(value, types.MethodType):
            return value.__self__, value.__func__
        if cls is types.BuiltinMethodType:
            return () if isinstance(value.__self__, types.ModuleType) else (value.__self__,)
        if isinstance(value, types.ModuleType):
            return () if _is_transparent(value) else list(vars(value).values())
        if id(value) not in self._pickled:
            self._pickled[id(value)] = _pickled_parts(value)
        return self._pickled[id(value)]


def _pickled_parts(value: Any) -> Iterable[Any]:
    """Return the objects by which pickle makes an object again."""
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        reduced: Any = reduce(value) if reduce is not None else value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 -- it cannot be pickled, or only in another way
        return ()
    if isinstance(reduced, str):  # it is found by this name
        return ()
    items, pairs = (*reduced[3:], None, None)[:2]
    return [*reduced[1], *reduced[2:3], *(items or ()), *(part for pair in pairs or () for part in pair)]


def _is_transparent(value: Any) -> bool:
    if isinstance(value, _TRANSPARENT) or type(value) is types.BuiltinMethodType:
        return True
    if isinstance(value, types.ModuleType):
        return sys.modules.get(value.__name__) is value
    return hasattr(value, "__qualname__") and by_value.is_by_name(value)


def _parts_of_task(task: GraphNode) -> Iterable[Any]:
    if isinstance(task, DataNode):
        return (task.value,)
    if isinstance(task, Task):
        if task.has_subgraph():  # the function copies the dictionary of its tasks
            return *task.args[0].values(), *task.args[3:]
        return task.func, *task.args, *task.kwargs.values()
    return ()
