"""Library functions: those that do not change their arguments."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import dask.array.core
import dask.utils
import numpy as np
import pandas as pd
import pytest
import toolz
from dask._task_spec import _execute_subgraph

from ferroflow_dask.bundling.library import is_library


def own(values: Any) -> Any:
    return values


@functools.wraps(np.sum)
def like_numpy(values: Any) -> Any:
    return values


LIBRARY: dict[str, Callable[..., Any]] = {
    "an operator": operator.add,
    "an operator whose name begins with i": operator.index,
    "an item of an object": operator.itemgetter(1),
    "a function of NumPy": np.concatenate,
    "a ufunc": np.add,
    "a reduction by a ufunc": np.add.reduce,
    "a function of pandas": pd.concat,
    "a class of pandas": pd.DataFrame,
    "a method of pandas that returns a new object": pd.DataFrame.sum,
    "a function of toolz": toolz.pluck,
    "functions composed by toolz": toolz.compose(len, str),
    "a function of Dask": dask.utils.apply,
    "the function of fused tasks": _execute_subgraph,
    "a builtin function": sum,
    "a builtin class": list,
    "a method of an immutable class": str.upper,
    "a method of an immutable object": ", ".join,
    "a class method": dict.fromkeys,
}
OTHERS: dict[str, Callable[..., Any]] = {
    "an operator in place": operator.iadd,
    "a special method of an operator in place": operator.__iadd__,
    "an assignment to an item": operator.setitem,
    "a deletion of an item": operator.delitem,
    "a method by its name": operator.methodcaller("append", 1),
    "a method by its name, by Dask": dask.utils.M.append,
    "a copy into an array": np.copyto,
    "values put into an array": np.put,
    "values placed in an array": np.place,
    "values put into an array by a mask": np.putmask,
    "a diagonal filled": np.fill_diagonal,
    "a ufunc in place": np.add.at,
    "an array shuffled": np.random.shuffle,
    "a method of a mutable class": list.append,
    "a method of a mutable object": [].append,
    "a method that sorts an array": np.ndarray.sort,
    "a method of pandas that inserts a column": pd.DataFrame.insert,
    "an iterator advanced": next,
    "an attribute assigned": setattr,
    "a chunk stored": dask.array.core.load_store_chunk,
    "a function of another package": pytest.approx,
    "a function of this module": own,
    "a function that calls itself one of NumPy": like_numpy,
    "a lambda": lambda values: values,
}


@pytest.mark.parametrize("name", LIBRARY)
def test_a_library_function_is(name: str) -> None:
    assert is_library(LIBRARY[name])


@pytest.mark.parametrize("name", OTHERS)
def test_no_library_function_is(name: str) -> None:
    assert not is_library(OTHERS[name])
