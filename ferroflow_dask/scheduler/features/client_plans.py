"""Client plans: a client that computes a data frame again does not optimize its expression again.

Optimizing an expression takes the client 50 to 300 ms of a query that ends in less than a second. The result
depends on the expression, of which Dask's name is a hash of all that it reads and does, on Dask's settings,
and on the way in which the client shuffles. So plans are kept by these three. The keys of a kept plan are
those that Dask would make again.

A plan is kept when its expression is computed the second time, so a program that repeats nothing holds
nothing. Expressions with futures, with graphs or with large data are not kept: they would keep results on
the cluster, or data in the client. Nor are those with functions of modules that a user may edit and reload:
Dask names such a function by its module only.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Collection
from functools import cache, partial
from threading import Lock
from types import FunctionType
from typing import Any
from weakref import WeakSet

import dask
from cloudpickle import Pickler
from dask._expr import Expr, FinalizeCompute, HLGExpr, LLGExpr
from dask.utils import get_default_shuffle_method
from distributed import Client, Future

from ferroflow_dask import config
from ferroflow_dask.scheduler.changes import FAILURES
from ferroflow_dask.scheduler.features.base import Feature

#: Expressions of which we know that they were computed, for each plan that may be kept.
_SEEN = 4
#: Where packages are installed.
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))
#: A plan with more data than this is not kept [B].
_MOST_NBYTES = 1_000_000


class ClientPlans(Feature):
    """Switches the plans of clients; they are kept in the process of each client."""

    name = "client_plans"
    summary = "A data frame that a client computes again is not optimized again"
    reason = "the third run of a data frame takes 12 to 260 ms less: `tests/scheduler/test_client_plans.py`"


def prepared(without: Collection[str]) -> Callable[[Client], None]:
    """Return a function that keeps plans in this process while a client is open, or until `forget`.

    Parameters
    ----------
    without : collection of str
        Names of features that are off, besides those that the settings switch off.

    Raises
    ------
    UsageError
        `ferroflow.client-plans` is not a number of plans.
    """
    n_plans = config.get_count("client-plans")
    is_on = ClientPlans.name not in without and config.is_on(ClientPlans.name)
    return partial(_plans.start, n_plans=n_plans) if is_on else _plans.stop


def forget(client: Client) -> None:
    """Forget the plans, unless another client of this process keeps them."""
    _plans.stop(client)


class _Plans:
    """Kept plans of this process, and the method of Dask that uses them."""

    def __init__(self) -> None:
        self._clients: WeakSet[Client] = WeakSet()
        self._n_plans = 0
        #: Optimized expressions, or None for those that were computed once; the one used last is the last.
        self._kept: OrderedDict[object, Expr | None] = OrderedDict()
        self._lock = Lock()
        #: The method in the place of Dask's, and that of another package which was there before.
        self._ours: Callable[..., Expr] | None = None
        self._before: Callable[..., Expr] | None = None

    def start(self, client: Client, n_plans: int) -> None:
        """Keep plans while a client is open, so many at most."""
        with self._lock:
            self._clients.add(client)
            self._n_plans = n_plans
            if self._ours is None:
                self._before = vars(FinalizeCompute).get("optimize")
                self._ours = self._with_plans(FinalizeCompute.optimize)
                FinalizeCompute.optimize = self._ours  # type: ignore[method-assign]

    def stop(self, client: Client) -> None:
        """Keep plans for other clients only."""
        with self._lock:
            self._clients.discard(client)
        self._is_used()

    def _is_used(self) -> bool:
        """Return whether a client is open; undo the change if none is."""
        with self._lock:
            is_used = any(one.status == "running" for one in self._clients)
            if is_used or self._ours is None:
                return is_used
            self._kept.clear()
            if vars(FinalizeCompute).get("optimize") is self._ours:  # else another package has changed it
                if self._before is None:
                    del FinalizeCompute.optimize
                else:
                    FinalizeCompute.optimize = self._before  # type: ignore[method-assign]
            self._ours = None
            return False

    def _with_plans(self, optimize: Callable[[Expr, bool], Expr]) -> Callable[..., Expr]:
        def optimized(expr: Expr, fuse: bool = False) -> Expr:
            if not self._is_used():
                return optimize(expr, fuse)
            key = (expr._name, fuse, get_default_shuffle_method(), repr(dask.config.config))
            is_known, kept = self._found(key)
            if kept is not None:
                return kept
            found = optimize(expr, fuse)
            if is_known and _may_be_kept(found):
                self._keep(key, found)
            return found

        return optimized

    def _found(self, key: object) -> tuple[bool, Expr | None]:
        """Return whether an expression was computed before, and its plan if that is kept."""
        with self._lock:
            is_known, kept = key in self._kept, self._kept.get(key)
            self._put(key, kept)
            return is_known, kept

    def _keep(self, key: object, plan: Expr) -> None:
        with self._lock:
            self._put(key, plan)
            plans = [each for each, kept in self._kept.items() if kept is not None]
            for each in plans[: -self._n_plans]:
                del self._kept[each]

    def _put(self, key: object, plan: Expr | None) -> None:
        self._kept[key] = plan
        self._kept.move_to_end(key)
        if len(self._kept) > _SEEN * self._n_plans:
            self._kept.popitem(last=False)


_plans = _Plans()


# What may be kept


class _UnsuitableError(Exception):
    """An expression holds something that must not be kept."""


class _Counted:
    """A file that counts what is written, up to a limit."""

    def __init__(self) -> None:
        self._nbytes = 0

    def write(self, data: Any) -> int:
        nbytes = memoryview(data).nbytes
        self._nbytes += nbytes
        if self._nbytes > _MOST_NBYTES:
            raise _UnsuitableError
        return nbytes


@cache
def _is_installed(package: str) -> bool:
    """Return whether functions of a package stay as they are, or Dask names them by what they do."""
    if package in sys.stdlib_module_names or package == "__main__":
        return True
    file = getattr(sys.modules.get(package), "__file__", None)
    return file is not None and file.startswith(_INSTALLED)


class _Inspector(Pickler):  # type: ignore[misc]
    """Pickles an expression to see all that it holds."""

    def persistent_id(self, obj: object) -> None:
        if isinstance(obj, Future | HLGExpr | LLGExpr):
            raise _UnsuitableError
        if isinstance(obj, FunctionType | type) and not _is_installed(obj.__module__.partition(".")[0]):
            raise _UnsuitableError


def _may_be_kept(expr: Expr) -> bool:
    try:
        _Inspector(_Counted(), protocol=5).dump(expr)
    except FAILURES:  # what cannot be pickled is Dask's to report
        return False
    return True
