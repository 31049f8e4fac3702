"""Faults in features: any function that a feature calls raises, in any thread of a cluster in this process.

A feature is a computation with a known result. `Faults` lets the n-th call of a function raise, in whichever
thread it is: it replaces the code of the function. Afterwards Dask's own scheduling must be back, and work.
"""

from __future__ import annotations

import builtins
import inspect
import json
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import real_faults
from distributed import Client, LocalCluster
from distributed.stealing import WorkStealing
from fault_injection import BOUNDARY, MOST_CALLS, differences, functions_of, inventory, modules_of, story
from waiting import until

from ferroflow_dask import GraphBuilder, Model, install, record, uninstall
from ferroflow_dask.jobs import job_of, run_job
from ferroflow_dask.lowering import scatter
from ferroflow_dask.scheduler.graphs.graphs import Graphs
from ferroflow_dask.strategy import Configuration, Strategy, spaces_of

#: Time of a computation with a fault: that without one, times a factor, and more [s].
FACTOR, MORE_S = 1.5, 5.0
#: Time until messages in flight have arrived [s].
_SETTLED_S = 30.0
_SETTINGS = {
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.scheduler.work-stealing-interval": "50ms",
    "array.rechunk.method": "p2p",
}


class InjectedError(RuntimeError):
    """A fault; its text is in all errors that follow from it."""

    TEXT = "injected fault"


class InjectedMemoryError(MemoryError):
    """A fault of another kind."""


ERRORS: tuple[type[Exception], ...] = (InjectedError, InjectedMemoryError)


# Faults


def _entry(*args: Any, **kwargs: Any) -> Any:
    return ferroflow_faults.enter(0, args, kwargs)  # type: ignore[name-defined]  # noqa: F821 -- among builtins


class Faults:
    """Functions whose calls are counted, and of which one may raise.

    Parameters
    ----------
    functions : mapping of str to function
    """

    def __init__(self, functions: Mapping[str, FunctionType]) -> None:
        self.calls: Counter[str] = Counter()
        self.has_fired = False
        self._names = list(functions)
        self._functions = list(functions.values())
        self._codes: list[CodeType] = [one.__code__ for one in self._functions]
        self._originals = [_copy(one) for one in self._functions]
        self._chosen: tuple[str, type[Exception], int] | None = None
        self._lock = threading.Lock()

    @contextmanager
    def active(self, name: str = "", error: type[Exception] = InjectedError, n: int = 0) -> Iterator[None]:
        """Count calls within a context; the n-th call of a function raises."""
        self.calls.clear()
        self.has_fired = False
        self._chosen = (name, error, n) if name else None
        watched = [self._names.index(name)] if name else range(len(self._names))
        builtins.ferroflow_faults = self  # type: ignore[attr-defined]
        for i in watched:
            consts = tuple(i if const == 0 else const for const in _entry.__code__.co_consts)
            free = self._codes[i].co_freevars
            self._functions[i].__code__ = _entry.__code__.replace(co_consts=consts, co_freevars=free)
        try:
            yield
        finally:
            for i in watched:
                self._functions[i].__code__ = self._codes[i]

    def enter(self, i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, or raise in its place."""
        name = self._names[i]
        with self._lock:
            self.calls[name] += 1
            if self._chosen is not None and self.calls[name] == self._chosen[2]:
                self.has_fired = True
                raise self._chosen[1](f"{InjectedError.TEXT} in {name}")
        return self._originals[i](*args, **kwargs)


def _copy(function: FunctionType) -> FunctionType:
    parts = (function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy = FunctionType(function.__code__, *parts)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@lru_cache
def functions_in(*packages: str) -> Mapping[str, FunctionType]:
    """Return the functions of some packages that can be replaced, by name."""
    found: dict[str, FunctionType] = {}
    for package in packages:
        for module in modules_of(f"ferroflow_dask.{package}"):
            for label, function in functions_of(module):
                _add(found, f"{module.__name__.removeprefix('ferroflow_dask.')}:{label}", function)
    return found


def _add(found: dict[str, FunctionType], name: str, function: FunctionType) -> None:
    code = function.__code__
    # A coroutine function would be one no more, and Dask looks at the names of some parameters.
    is_plain = not code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR)
    is_plain = is_plain and _SEEN_BY_DASK.isdisjoint(code.co_varnames[: code.co_argcount])
    if is_plain and "ferroflow_dask" in code.co_filename and name not in BOUNDARY:
        found[name] = function


_SEEN_BY_DASK = frozenset({"dask_scheduler", "dask_worker"})
#: Code that runs inside tasks: an error there is an error of the task.
_IN_TASKS = ("bundling.bundle:", "bundling.results:", "bundling.sequence:", "bundling.shuffle_tasks:")


# Features


@dataclass(frozen=True)
class Feature:
    """A computation with a known result.

    Parameters
    ----------
    packages : sequence of str
        Functions of these are injected.
    compute : callable
        Takes a client and a folder, and returns a result.
    expected : callable
        Returns the right result.
    is_hidden : bool
        Whether no error may reach the client: the plugin, and not the client's code, has the fault.
    """

    packages: Sequence[str]
    compute: Callable[[Client, Path], Any]
    expected: Callable[[], Any]
    is_hidden: bool = False


_X = np.random.default_rng(0).standard_normal((24, 8), dtype=np.float32)


def _model() -> Model:
    builder = GraphBuilder("mlp")
    rng = np.random.default_rng(1)
    value = builder.input("x", np.float32, ("n", 8))
    for n, m in ((8, 6), (6, 4)):
        value = builder.op(
            "Relu", builder.op("MatMul", value, builder.constant(rng.random((n, m), np.float32)))
        )
    builder.output(y=value)
    return builder.build()


def _rows() -> list[float]:
    rng = np.random.default_rng(1)
    value = _X
    for n, m in ((8, 6), (6, 4)):
        value = np.maximum(value @ rng.random((n, m), np.float32), 0)
    return [round(float(one), 2) for one in value.sum(1)]


def _rounded(value: Any) -> list[float]:
    return [round(float(one), 2) for one in np.asarray(value).sum(1)]


def _graphs(client: Client, _: Path) -> Any:
    first = next(iter(client.scheduler_info(n_workers=-1)["workers"]))
    return client.gather(real_faults.workload(client, first), asynchronous=False)


def _shuffle(client: Client, _: Path) -> Any:
    # Equal keys would meet the errors of earlier faults.
    x = da.from_array(np.arange(64).reshape(8, 8), chunks=(1, 8), name=False).rechunk((8, 2)) + 1
    return int(client.compute(x.sum()).result(timeout=30))


def _record(client: Client, folder: Path) -> Any:
    with record(client, folder / "record.json"):
        found = client.gather(client.map(real_faults.add, range(12), pure=False))
    return [len(json.loads((folder / "record.json").read_text())["tasks"]), *found]


def _strategy(client: Client, _: Path) -> Any:
    model = _model()
    operators = {}
    for name, space in spaces_of(model.graph).items():
        axis = None if isinstance(space, str) else next(iter(space.sizes), None)
        operators[name] = Configuration(("0",)) if axis is None else Configuration(("0", "1"), {axis: 2})
    bound = model.bind(x=_X, strategy=Strategy(("0", "1"), operators))
    return _rounded(client.compute(bound).result(timeout=30)["y"])


def _batches(client: Client, _: Path) -> Any:
    return _rounded(client.compute(_model().map_batches(_X, batch=5)).result(timeout=30))


def _job(client: Client, folder: Path) -> Any:
    np.save(folder / "x.npy", _X)
    graph = _model().graph
    made = job_of(graph, str(folder / "x.npy"), str(folder / "y.npy"), batch=5)
    run_job(made, scatter(graph, client), client, lambda *_: None)
    return _rounded(np.load(folder / "y.npy"))


FEATURES: Mapping[str, Feature] = {
    "bundles, samples, prefetch and inlined results": Feature(
        ("scheduler", "bundling", "policy"), _graphs, real_faults.expected, is_hidden=True
    ),
    "small shuffles": Feature(
        ("bundling", "scheduler.graphs"), _shuffle, lambda: sum(range(64)) + 64, is_hidden=True
    ),
    "records": Feature(("replay",), _record, lambda: [12, *range(12)]),
    "strategies": Feature(("strategy", "lowering"), _strategy, _rows),
    "map_batches": Feature(("lowering", "kernels.session", "model"), _batches, _rows),
    "batch jobs": Feature(("jobs", "lowering"), _job, _rows),
}


# Runs


class Bench:
    """A cluster in this process, on which features run with faults.

    Parameters
    ----------
    checks_time : bool, optional
        Whether a computation that takes much longer than without a fault is wrong.
    """

    def __init__(self, checks_time: bool = True) -> None:
        self._checks_time = checks_time
        self._possible: dict[str, dict[str, int]] = {}
        self._usual_s: dict[str, float] = {}
        self._cluster: Any = None

    @contextmanager
    def open(self) -> Iterator[Bench]:
        """Patch what makes all tasks short, and close the cluster at the end."""
        with (
            dask.config.set(_SETTINGS),
            warnings.catch_warnings(),
            pytest.MonkeyPatch.context() as patch,
            tempfile.TemporaryDirectory() as folder,
        ):
            warnings.simplefilter("ignore")
            patch.setattr(Graphs, "learned", lambda _: real_faults._Known())
            self._folder = Path(folder)
            try:
                yield self
            finally:
                self._close()

    def _start(self) -> Client:
        if self._cluster is None:
            self._cluster = LocalCluster(
                n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0", silence_logs=50
            )
            self._client = Client(self._cluster)
            until(lambda: "warn" in self._cluster.scheduler._broker._topics)
        return self._client

    def _close(self) -> None:
        if self._cluster is not None:
            self._client.close()
            self._cluster.close()
            self._cluster = None

    def possible(self, feature: str) -> dict[str, int]:
        """Return how often each function is called by a feature."""
        if feature not in self._possible:
            faults = Faults(functions_in(*FEATURES[feature].packages))
            for turn in range(2):  # some functions are called once in a process
                problems = self._run(feature, faults)
                assert not problems, (feature, problems)
                self._usual_s[feature] = self._took_s
                if turn:
                    self._possible[feature] = dict(faults.calls)
        return self._possible[feature]

    def inject(self, feature: str, function: str, error: type[Exception], n: int) -> list[str]:
        """Run a feature with a fault; return what is wrong."""
        self.possible(feature)
        faults = Faults(functions_in(*FEATURES[feature].packages))
        problems = self._run(feature, faults, function, error, n)
        took_s = self._took_s
        if self._checks_time and took_s > FACTOR * self._usual_s[feature] + MORE_S:
            problems.append(f"took {took_s:.3g} s, without a fault {self._usual_s[feature]:.3g} s")
        if problems:
            self._close()  # the next fault meets a new cluster
        return problems

    def _run(self, feature: str, faults: Faults, *fault: Any) -> list[str]:
        client = self._start()
        scheduler = self._client.cluster.scheduler
        before = inventory(scheduler)
        install(client)
        problems = []
        one = FEATURES[feature]
        began = time.monotonic()
        with faults.active(*fault):
            try:
                found = one.compute(client, Path(tempfile.mkdtemp(dir=self._folder)))
                if found != one.expected():
                    problems.append(f"wrong result: {str(found)[:200]}")
            except Exception as error:  # noqa: BLE001 -- any is judged
                is_hidden = one.is_hidden and not fault[0].startswith(_IN_TASKS)
                if is_hidden or not faults.has_fired or not _is_injected(error):
                    problems.append(f"an error reached the client: {story(error)}")
        self._took_s = time.monotonic() - began
        uninstall(client)
        return problems + list(self._left(scheduler, before))

    def _left(self, scheduler: Any, before: dict[str, object]) -> Iterator[str]:
        deadline = time.monotonic() + _SETTLED_S
        while (found := differences(before, inventory(scheduler))) and time.monotonic() < deadline:
            time.sleep(0.01)
        yield from (f"not restored: {one}" for one in found)
        if type(scheduler.extensions["stealing"]) is not WorkStealing:
            yield "Dask's stealing is not back"
        client = self._client
        if client.gather(client.map(real_faults.add, range(6), pure=False)) != list(range(6)):
            yield "wrong results with Dask's scheduling"


def _is_injected(error: BaseException | None) -> bool:
    """Return whether an error follows from the fault: its text, its cause or its context says so."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if InjectedError.TEXT in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def choose(bench: Bench, feature: str, rng: Any) -> tuple[str, type[Exception], int]:
    """Return a function of a feature, an error and a number of the call."""
    calls = bench.possible(feature)
    function = rng.choice(sorted(calls))
    return function, rng.choice(ERRORS), rng.randint(1, min(calls[function], MOST_CALLS))
