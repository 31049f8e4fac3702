"""Fault injection: one function of the plugin raises at one of its calls.

`code_of_functions` lists the functions. `Injector` counts the calls of one function and raises at the n-th,
at the start of the function's body. `inventory` describes everything on a scheduler that the plugin may
change: equal inventories mean that nothing of the plugin is left. `virtual_faults` and `real_faults` run
clusters.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import importlib
import inspect
import pkgutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

from distributed.stealing import WorkStealing

from ferroflow_dask.scheduler.features import metrics

#: Exceptions that an injected fault may be.
ERRORS: tuple[type[BaseException], ...] = (RuntimeError, MemoryError, asyncio.CancelledError)
#: A function raises at one of its first calls.
MOST_CALLS = 5

# Functions

#: Packages and modules whose functions are injected.
PACKAGES = (
    "ferroflow_dask.scheduler",
    "ferroflow_dask.policy",
    "ferroflow_dask.bundling.rewrite",
    "ferroflow_dask.bundling.plan",
    "ferroflow_dask.bundling.sharing",
    "ferroflow_dask.bundling.small_shuffles",
    "ferroflow_dask.bundling.snapshot",
)
#: Modules whose functions run on workers, in a process of their own.
ON_WORKERS = (
    "ferroflow_dask.scheduler.graphs.worker",
    "ferroflow_dask.scheduler.graphs.worker_runs",
    "ferroflow_dask.scheduler.graphs.worker_observers",
    "ferroflow_dask.scheduler.features.inlined_results_worker",
    "ferroflow_dask.scheduler.features.prefetch_worker",
    "ferroflow_dask.scheduler.remote_worker",
)

_HOOK = "distributed calls it; it hands over to guarded functions, which are injected"
_GUARD = "it is the guard itself"
_HANDLER = "distributed calls it as a stream handler; it hands over to functions that are injected"
_STOCK = "it only calls the method of Dask that it stands for"
_INSTEAD = "it stands for a part of Dask's state machine, which no error leaves whole"
_LOOP = "the event loop calls it and logs its error; it hands over to functions that are injected"
_EXPRESSION = "Dask calls it as a method of a client's expression, and gives its error to the client"
_PAGE = "the HTTP server calls it; the page is not available once"
#: Functions that cannot be protected from a fault at their very start, with the reason.
BOUNDARY = {
    "scheduler.extension:FerroflowStealing.add_worker": _HOOK,
    "scheduler.extension:FerroflowStealing.remove_worker": _HOOK,
    "scheduler.extension:FerroflowStealing.add_client": _HOOK,
    "scheduler.extension:FerroflowStealing.remove_client": _HOOK,
    "scheduler.extension:FerroflowStealing.update_graph": _HOOK,
    "scheduler.extension:FerroflowStealing.log_event": _HOOK,
    "scheduler.extension:FerroflowStealing.restart": _HOOK,
    "scheduler.extension:FerroflowStealing.balance": _HOOK,
    "scheduler.extension:FerroflowStealing.remove_key_from_stealable": _HOOK,
    "scheduler.extension:FerroflowStealing.put_key_in_stealable": _HOOK,
    "scheduler.extension:FerroflowStealing.move_task_confirm": _HANDLER,
    "scheduler.task_events:TaskEvents.transition": _HOOK,
    "scheduler.placing:Placing.decide_worker": _HOOK,
    "scheduler.placing:Placing.passes_queue": _HOOK,
    "scheduler._distributed:placement_changes.<locals>.is_rootish": _HOOK,
    "scheduler._distributed:_task_to_msg.<locals>.task_to_msg": _HOOK,
    "scheduler._distributed:message_changes.<locals>.request_remove_replicas": _HOOK,
    "scheduler._distributed:_gather_change.<locals>.gather": _HOOK,
    "scheduler._distributed:stock_decision": _STOCK,
    "scheduler._distributed_transitions:_transition_on.<locals>.transition": _INSTEAD,
    "scheduler._distributed_transitions:_through_released": _INSTEAD,
    "scheduler._distributed_transitions:_joined": _INSTEAD,
    "scheduler._distributed_transitions:_forget": _INSTEAD,
    "scheduler._distributed_transitions:_check_on.<locals>.check": _INSTEAD,
    "scheduler._distributed_transitions:_choice_on.<locals>.choose": _INSTEAD,
    "scheduler._distributed_transitions:_choice_on.<locals>.search": _INSTEAD,
    "scheduler._distributed_transitions:_check_on.<locals>.occupancy_of": _INSTEAD,
    "scheduler._distributed_transitions:queue_changes.<locals>.decide": _INSTEAD,
    "scheduler._distributed_transitions:queue_changes.<locals>.open_slots": _INSTEAD,
    "scheduler.features.siblings:Siblings._choose": _INSTEAD,
    "scheduler._distributed_graphs:comparison_change.<locals>.find_lost_dependencies": _HOOK,
    "scheduler.graphs.arrival:Arrival.__dask_annotations__": _EXPRESSION,
    "scheduler.graphs.arrival:Arrival.__dask_graph__": _EXPRESSION,
    "scheduler.graphs.arrivals:GraphArrivals._arrived": _HANDLER,
    "scheduler.graphs.arrivals:GraphArrivals._create": _HANDLER,
    "scheduler.graphs.splitting:Splitting.changes.<locals>.handle": _HANDLER,
    "scheduler.failed_transfers:FailedTransfers._before.<locals>.handle": _HANDLER,
    "scheduler.refusals:Refusals.change.<locals>.handle": _HANDLER,
    "scheduler.graphs.deliveries:Deliveries.arrived": _HANDLER,
    "scheduler.graphs.divided:Divided.received": _HANDLER,
    "scheduler.graphs.observers:Observers.changes.<locals>.add_plugin": _HOOK,
    "scheduler.graphs.observers:Observers.changes.<locals>.handle": _HANDLER,
    "scheduler.graphs.observers:Observers._ask": _HANDLER,
    "scheduler.graphs.deliveries:Deliveries.ignored": _HANDLER,
    "scheduler.remote:Remote._worker_closed": _HANDLER,
    "scheduler.features.scattered_replicas:KeepPlaced.run": (
        "the active memory manager calls it; one round has no suggestions"
    ),
    "scheduler.features.low_latency_worker:Interval.__radd__": (
        "a stream calls it; all that it calls is guarded"
    ),
    "scheduler.features.metrics:_Collector.collect": _PAGE,
    "scheduler.features.metrics:_Collector.describe": _PAGE,
    "scheduler.features.queue_depth:QueueDepth.restore.<locals>.<lambda>": _LOOP,
    "scheduler.remote:WorkerPluginChange._settle": _LOOP,
    "scheduler.remote:Remote._look": _LOOP,
    "scheduler.changes:_call": _LOOP,
    "scheduler.extension:FerroflowStealing.error": "it only reads an attribute of the guard",
    "scheduler.changes:Guard.__call__.<locals>.guarded": _GUARD,
    "scheduler.changes:Guard.fail": _GUARD,
}
#: Functions in which an error ends nothing, with the reason; the plugin goes on.
HANDLED = {
    "Arrival.__init__": "the graph runs as it came",
    "Bundles.keys": "the graph runs as it came",
    "Divided._received": "the message is handled again",
    "GraphArrivals._created": "the graph runs as it came, and does not wait for others",
    "_outside": "the graph runs as it came, and does not wait for others",
    "outside": "the graph runs as it came",
    "CapableWorkers.announced": "the graph runs as it came",
    "GraphArrivals._prepare": "the graph runs as it came",
    "GraphArrivals._expression": "the graph runs as it came, and Dask reports what cannot be deserialized",
    "GraphArrivals._planned": "the graph runs as it came, and the client releases its sample",
    "GraphArrivals._plan": "the graph runs as it came",
    "sent_graph": "the graph runs as it came, and Dask reports what cannot be materialized",
    "_in_this_process": "the graph runs as it came",
    "Observers.are_present": "the graph runs as it came",
    "active_update": "the graph runs as it came",
    "in_this_process": "the graph runs as it came",
    "Interval.__radd__": "messages are batched as by Dask for once",
    "_Collector._families": "metrics are not available, which is logged",
    "LowLatencyMessages.followed_by": "the client that called has the error",
    "QueueDepth.restore.<locals>.<lambda>": "the next event sends the tasks in the queue",
}


def code_of_functions() -> dict[str, CodeType]:
    """Return the code of all functions and methods of the plugin, nested functions included, by name."""
    found: dict[str, CodeType] = {}
    for package in PACKAGES:
        for module in modules_of(package):
            for qualname, code in _codes_in(module) if module.__name__ not in ON_WORKERS else ():
                unique = f"{module.__name__.removeprefix('ferroflow_dask.')}:{qualname}"
                while unique in found and found[unique] is not code:
                    unique += "'"
                found[unique] = code
    return found


def modules_of(package: str) -> list[ModuleType]:
    """Return a package, or a module, and all modules in it."""
    top = importlib.import_module(package)
    inner = pkgutil.walk_packages(getattr(top, "__path__", []), f"{package}.")
    return [top, *(importlib.import_module(one.name) for one in inner)]


def _codes_in(module: ModuleType) -> Iterator[tuple[str, CodeType]]:
    for qualname, function in functions_of(module):
        code, name = function.__code__, qualname.rpartition(".")[2]
        if name == "__hash__":
            continue  # weak dictionaries call it where Python ignores exceptions
        # All dataclasses share `__getstate__` and `__setstate__`, also those that workers unpickle.
        # All named tuples share `_make` and `_replace`, those of the standard library, too.
        is_own = code.co_filename not in ("<string>", dataclasses.__file__, collections.__file__)
        if is_own or name in _WRITTEN_BY_DATACLASS:
            yield from _with_nested(qualname, code)


def functions_of(module: ModuleType) -> Iterator[tuple[str, FunctionType]]:
    """Yield the functions and methods of a module with their names."""
    for value in vars(module).values():
        if getattr(value, "__module__", None) == module.__name__:
            members = vars(value).items() if inspect.isclass(value) else [("", value)]
            for name, member in members:
                for function in _functions_behind(member):
                    yield f"{value.__qualname__}.{name}".strip("."), function


def _functions_behind(member: Any) -> Iterator[FunctionType]:
    if isinstance(member, property):
        candidates = [member.fget, member.fset]
    elif isinstance(member, functools.cached_property):
        candidates = [member.func]
    elif isinstance(member, staticmethod | classmethod):
        candidates = [member.__func__]
    else:
        candidates = [member]
    for candidate in candidates:
        function = inspect.unwrap(candidate) if callable(candidate) else None
        if isinstance(function, FunctionType) and not inspect.isclass(candidate):
            yield function


def _with_nested(name: str, code: CodeType) -> Iterator[tuple[str, CodeType]]:
    yield name, code
    for nested in code.co_consts:
        if isinstance(nested, CodeType) and nested.co_name not in _COMPREHENSIONS:
            yield from _with_nested(f"{name}.<locals>.{nested.co_name}", nested)


_WRITTEN_BY_DATACLASS = ("__init__", "__eq__", "__hash__")
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})


# Faults


class Injection(NamedTuple):
    """A function raises an error at its n-th call."""

    function: str
    error: type[BaseException]
    n: int

    def __str__(self) -> str:
        return f"{self.function} raises {self.error.__name__} at call {self.n}"


_INJECTED: dict[type[BaseException], type[BaseException]] = {
    error: type(f"Injected{error.__name__}", (error,), {}) for error in ERRORS
}


class Injector:
    """Trace function that raises at the n-th start of a piece of code."""

    def __init__(self, injection: Injection | None, codes: dict[str, CodeType]) -> None:
        self.injection = injection
        self.has_fired = False
        #: Names of the functions in which the fault has struck.
        self.stack: list[str] = []
        #: Calls by function, without an injection; up to `MOST_CALLS`.
        self.calls: Counter[str] = Counter()
        self._code = codes[injection.function] if injection is not None else None
        self._names = {id(code): name for name, code in codes.items()}
        # A generator or coroutine is entered again whenever it is resumed.
        self._starts: dict[int, int] = {}
        self._n = 0

        self.trace = self._counting if injection is None else self._failing

    @contextmanager
    def active(self) -> Iterator[None]:
        """Count the calls within a context."""
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(before)

    @property
    def is_handled(self) -> bool:
        """Whether the fault has struck where an error ends nothing."""
        return not HANDLED.keys().isdisjoint(self.stack)

    def _is_start(self, frame: FrameType) -> bool:
        return frame.f_lasti == self._starts.setdefault(id(frame.f_code), frame.f_lasti)

    def _counting(self, frame: FrameType, event: str, arg: object) -> None:
        name = self._names.get(id(frame.f_code))
        if name is not None and self._is_start(frame):
            self.calls[name] += 1

    def _failing(self, frame: FrameType, event: str, arg: object) -> None:
        if frame.f_code is self._code and self._is_start(frame):
            self._n += 1
            assert self.injection is not None
            if self._n == self.injection.n:
                self.has_fired = True
                sys.settrace(None)
                caller: FrameType | None = frame
                while caller is not None:
                    self.stack.append(caller.f_code.co_qualname)
                    caller = caller.f_back
                raise _INJECTED[self.injection.error](str(self.injection))


def story(error: BaseException) -> str:
    """Return an error and where it was raised."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_qualname)
        trace = trace.tb_next
    return f"{type(error).__name__}({str(error)[:100]}) in {' > '.join(frames[-4:])}"


# Inventory


def inventory(scheduler: Any) -> dict[str, object]:
    """Return everything that the plugin may change on a scheduler, in a form that can be compared."""
    manager = scheduler.extensions.get("amm")
    broker = scheduler._broker
    application = getattr(scheduler, "http_application", None)
    return {
        "attributes": {
            name: _described(value) if callable(value) else None
            for name, value in vars(scheduler).items()
            if name not in _OF_THE_HARNESS
        },
        "handlers": {op: _described(handler) for op, handler in scheduler.handlers.items()},
        "stream handlers": {op: _described(handler) for op, handler in scheduler.stream_handlers.items()},
        "plugins": sorted(type(plugin).__name__ for plugin in scheduler.plugins.values()),
        "extensions": {name: type(one).__name__ for name, one in scheduler.extensions.items()},
        "periodic callbacks": {
            name: callback.callback_time for name, callback in scheduler.periodic_callbacks.items()
        },
        "subscriptions": {(name, who) for name, topic in broker._topics.items() for who in topic.subscribers},
        "worker plugins": sorted(scheduler.worker_plugins),
        "saturation": scheduler.WORKER_SATURATION,
        "intervals of workers' streams": {_interval(stream) for stream in scheduler.stream_comms.values()},
        "intervals of clients' streams": {_interval(stream) for stream in scheduler.client_comms.values()},
        "memory manager": sorted(type(one).__name__ for one in manager.policies) if manager else None,
        "pages": sorted(str(rule.matcher) for rule in _rules(application)),
        "metrics": sum(one.scheduler is scheduler for one in metrics._COLLECTOR.cores),
    }


#: Attributes that tests set on a scheduler while the plugin is installed.
_OF_THE_HARNESS = frozenset({"_no_workers_since"})


def _rules(application: Any) -> list[Any]:
    return (
        [] if application is None else [r for g in application.default_router.rules for r in g.target.rules]
    )


def _interval(stream: Any) -> object:
    return stream.interval if isinstance(stream.interval, float) else type(stream.interval).__name__


def _described(function: Any) -> object:
    # Each access makes a new bound method, and each stealing extension is another instance.
    owner = getattr(function, "__self__", None)
    if isinstance(owner, WorkStealing):
        return type(owner).__name__, function.__name__
    return (id(owner), function.__name__) if inspect.ismethod(function) else id(function)


def differences(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """Return what differs between two inventories, in words."""
    found = []
    for name, old in before.items():
        new = after[name]
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            keys = {key for key in {*old, *new} if old.get(key, "absent") != new.get(key, "absent")}
            found.append(f"{name} {sorted(keys)}")
        else:
            found.append(f"{name}: {new!r} instead of {old!r}")
    return found


def injections(calls: Counter[str]) -> list[Injection]:
    """Return all injections into the first calls of functions, given how often each is called."""
    return [
        Injection(name, error, n)
        for name, n_calls in sorted(calls.items())
        if name not in BOUNDARY
        for error in ERRORS
        for n in range(1, min(n_calls, MOST_CALLS) + 1)
    ]
