"""Library functions: callables of which it is known that they do not change their arguments."""

from __future__ import annotations

import types
from typing import Any

import numpy as np

#: Packages whose functions return new objects, except for those below. `_operator` is a part of `operator`.
_PACKAGES = frozenset(
    {"builtins", "dask", "ferroflow_dask", "numpy", "operator", "_operator", "pandas", "toolz"}
)
_OPERATORS = (
    "add",
    "and",
    "concat",
    "floordiv",
    "lshift",
    "matmul",
    "mod",
    "mul",
    "or",
    "pow",
    "rshift",
    "sub",
)
#: Functions that change an argument or call an unknown method of it. Names without their underscores, since
#: `operator.iadd` is `operator.__iadd__`.
_IN_PLACE = frozenset(
    {
        *(f"i{name}" for name in (*_OPERATORS, "truediv", "xor")),
        *("delattr", "delitem", "eval", "exec", "methodcaller", "next", "setattr", "setitem"),
        *("copyto", "fill_diagonal", "place", "put", "put_along_axis", "putmask", "shuffle"),
        "load_store_chunk",  # dask.array.core
    }
)
#: Methods that change their object, `numpy.ufunc.at` among them.
_IN_PLACE_METHODS = frozenset({"at", "insert", "pop", "update"})
#: Classes without methods that change their object.
_IMMUTABLE = (str, bytes, int, float, complex, tuple, frozenset, np.generic)
#: Arguments that name an object which the call changes, or whether it does.
IN_PLACE_ARGUMENTS = frozenset({"out", "inplace"})


def is_library(function: Any) -> bool:
    """Return whether a callable is known not to change its arguments.

    Callables that it contains, as a `functools.partial` does, and callables among the arguments are not
    considered. If an argument of a name in `IN_PLACE_ARGUMENTS` is given, the call changes an object.

    Examples
    --------
    >>> import operator
    >>> [is_library(function) for function in (operator.add, operator.iadd, operator.setitem)]
    [True, False, False]
    >>> [is_library(function) for function in (np.add, np.add.at, list.append, str.upper)]
    [True, False, False, True]
    """
    if isinstance(function, types.MethodType):
        # A method of an object may change the object.
        return isinstance(function.__self__, type) and is_library(function.__func__)
    if isinstance(function, types.MethodDescriptorType | types.WrapperDescriptorType):
        return function.__objclass__ in _IMMUTABLE
    if isinstance(function, types.FunctionType):
        # `functools.wraps` gives a function the module of another one.
        module = str(function.__globals__.get("__name__"))
    else:
        module = str(getattr(function, "__module__", None) or type(function).__module__)
    path = str(getattr(function, "__qualname__", type(function).__qualname__))
    name = path.rpartition(".")[2]
    owner = getattr(function, "__self__", None)
    if isinstance(owner, np.ufunc):
        return name not in _IN_PLACE_METHODS
    if owner is not None and not isinstance(owner, (types.ModuleType, type, *_IMMUTABLE)):
        return False
    if module.partition(".")[0] not in _PACKAGES or name.strip("_") in _IN_PLACE:
        return False
    return "." not in path or name not in _IN_PLACE_METHODS
