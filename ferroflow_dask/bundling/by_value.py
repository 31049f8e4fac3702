"""Functions and classes that are pickled by value: which they are, and what state they have.

Pickle finds most functions and classes by their names; then all tasks of a process share them. cloudpickle
pickles those of `__main__` and local ones with their code and all that they refer to.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class is not a static one of an extension module
#: Functions with which code changes global names.
_CHANGE_NAMES = frozenset({"globals", "exec", "eval"})
#: Functions and attributes with which code changes attributes.
_CHANGE_ATTRIBUTES = frozenset(
    {"setattr", "delattr", "vars", "__dict__", "__globals__", "__defaults__", "__kwdefaults__", "__setattr__"}
)


@dataclass(frozen=True, slots=True)
class Pickling:
    """How a function or class is pickled.

    Parameters
    ----------
    is_by_value : bool
        Whether it is pickled by value.
    parts : list
        The objects that are pickled with it.
    has_state : bool
        Whether it changes names or attributes that are its own if it is pickled.
    """

    is_by_value: bool
    parts: list[Any]
    has_state: bool


_BY_NAME = Pickling(False, [], False)


def is_by_name(value: Any) -> bool:
    """Return whether pickle finds a function or class by its name."""
    name = getattr(value, "__module__", None)
    found = sys.modules.get(name) if isinstance(name, str) and name != "__main__" else None
    for part in value.__qualname__.split(".") if found is not None else ():
        found = getattr(found, part, None)
    return found is value


def of_class(cls: type) -> Pickling:
    """Return how a class is pickled."""
    if not cls.__flags__ & _HEAP_TYPE or is_by_name(cls):
        return _BY_NAME
    functions: list[Any] = []
    data: list[Any] = []
    for name, value in vars(cls).items():
        if hasattr(type(value), "__get__"):
            functions += _functions_in(value)
        elif not name.startswith("__") and name != "_abc_impl":
            data.append(value)
    # An attribute that was set on the class is set back when another task unpickles the class.
    return Pickling(True, [*functions, *data, *cls.__bases__], bool(data))


def _functions_in(value: Any) -> Iterator[Any]:
    """Yield the functions of a method or property of a class."""
    parts = (value, *(getattr(value, name, None) for name in ("__func__", "fget", "fset", "fdel", "func")))
    return (part for part in parts if isinstance(part, FunctionType))


def of_function(function: FunctionType) -> Pickling:
    """Return how a function is pickled."""
    if is_by_name(function):
        return _BY_NAME
    uses = _Uses()
    uses.add(function.__code__, frozenset(function.__code__.co_freevars))
    names = function.__globals__
    parts = [names[name] for name in uses.globals if name in names]
    parts += function.__defaults__ or ()
    parts += (function.__kwdefaults__ or {}).values()
    parts += vars(function).values()
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # it is empty
            continue
    # A function can be found by its own name, and by that of another one.
    owners = (part for part in parts if isinstance(part, FunctionType | type) and not is_by_name(part))
    has_attributes = bool(vars(function).keys() - {"__wrapped__"})
    changes = uses.assigns or has_attributes or (uses.sets_attributes and any(owners))
    return Pickling(True, parts, changes)


@dataclass(slots=True)
class _Uses:
    """Global names that code refers to, and whether it assigns to names or attributes outside of it."""

    globals: set[str] = field(default_factory=set)
    assigns: bool = False
    sets_attributes: bool = False

    def add(self, code: CodeType, free: frozenset[str]) -> None:
        """Add the code of a function with some free names, and that of the functions inside."""
        for instruction in dis.get_instructions(code):
            operation, name = instruction.opname, instruction.argval
            if operation.startswith("LOAD_") and isinstance(name, str):
                if "GLOBAL" in operation or operation == "LOAD_NAME":
                    self.globals.add(name)
                    self.assigns |= name in _CHANGE_NAMES
                self.sets_attributes |= name in _CHANGE_ATTRIBUTES
            elif operation in {"STORE_GLOBAL", "DELETE_GLOBAL"}:
                self.globals.add(name)
                self.assigns = True
            elif operation in {"STORE_DEREF", "DELETE_DEREF"}:
                self.assigns |= name in free
            elif operation in {"STORE_ATTR", "DELETE_ATTR"}:
                self.sets_attributes = True
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                self.add(inner, free)
