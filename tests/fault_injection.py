"""Fault injection: one function of the plugin raises at one of its calls, in virtual time or on real clusters.

`code_of_functions` lists the functions. `Injector` counts the calls of one function and raises at the n-th, at
the start of the function's body. `inventory` describes everything on a scheduler that the plugin may change:
equal inventories mean that nothing of the plugin is left. `Run` plays one scenario in virtual time.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from inspect import iscoroutine
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import dask
import pytest
from distributed.active_memory_manager import ActiveMemoryManagerExtension, ReduceReplicas
from distributed.stealing import WorkStealing

import ferroflow_dask.policy
import ferroflow_dask.scheduler
from ferroflow_dask.device_reports import DEVICES_TOPIC
from ferroflow_dask.scheduler import FerroflowPlugin, FerroflowStealing, metrics
from ferroflow_dask.scheduler import plugin as plugin_module
from ferroflow_dask.scheduler.inlining.worker import RESULT
from ferroflow_dask.scheduler.inlining.worker import TOPIC as INLINING_TOPIC
from ferroflow_dask.scheduler.plugin import install_on
from ferroflow_dask.scheduler.prefetch.worker import TOPIC as PREFETCH_TOPIC
from ferroflow_dask.scheduler.steal_exchange import STEALING
from ferroflow_dask.virtual import VirtualCluster, VirtualTask
from ferroflow_dask.virtual.clock import VirtualLoop, VirtualTime
from ferroflow_dask.virtual.upstream import start_stealing

#: Exceptions that an injected fault may be.
ERRORS: tuple[type[BaseException], ...] = (RuntimeError, MemoryError, asyncio.CancelledError)
#: A function raises at one of its first calls.
MOST_CALLS = 5

# Functions

#: Modules whose functions run on workers, in a process of their own.
ON_WORKERS = (
    "ferroflow_dask.scheduler.inlining.worker",
    "ferroflow_dask.scheduler.prefetch.worker",
    "ferroflow_dask.scheduler.worker_handlers",
)

_HOOK = "distributed calls it; it hands over to guarded functions, which are injected"
_GUARD = "it is the guard itself"
_HANDLER = "distributed calls it as a stream handler; it hands over to functions that are injected"
_STOCK = "it only calls the method of Dask that it stands for"
_LOOP = "the event loop calls it and logs its error; it hands over to functions that are injected"
_PAGE = "the HTTP server calls it; the page is not available once"
#: Functions that cannot be protected from a fault at their very start, with the reason.
BOUNDARY = {
    "scheduler.extension:FerroflowStealing.add_worker": _HOOK,
    "scheduler.extension:FerroflowStealing.remove_worker": _HOOK,
    "scheduler.extension:FerroflowStealing.transition": _HOOK,
    "scheduler.extension:FerroflowStealing.restart": _HOOK,
    "scheduler.extension:FerroflowStealing.balance": _HOOK,
    "scheduler.extension:FerroflowStealing.put_key_in_stealable": _HOOK,
    "scheduler.extension:FerroflowStealing.move_task_confirm": _HANDLER,
    "scheduler.extension:FerroflowStealing._decide_worker": _HOOK,
    "scheduler.extension:FerroflowStealing._passes_queue": _HOOK,
    "scheduler._distributed:placement_changes.<locals>.<lambda>": _HOOK,
    "scheduler._distributed:message_changes.<locals>.task_to_msg": _HOOK,
    "scheduler._distributed:message_changes.<locals>.request_remove_replicas": _HOOK,
    "scheduler._distributed:gather_change.<locals>.gather": _HOOK,
    "scheduler._distributed:stock_decision": _STOCK,
    "scheduler.inlining.scheduler:ResultHandlers._ignored": _HANDLER,
    "scheduler.inlining.scheduler:ResultHandlers._worker_closed": _HANDLER,
    "scheduler.replicas:KeepPlaced.run": "the active memory manager calls it; one round has no suggestions",
    "scheduler.batching.worker:Interval.__radd__": "a stream calls it; all that it calls is guarded",
    "scheduler.metrics:_Collector.collect": _PAGE,
    "scheduler.metrics:_Collector.describe": _PAGE,
    "scheduler.queue_depth:QueueDepth.restore.<locals>.<lambda>": _LOOP,
    "scheduler.worker_plugins:WorkerPluginChange._settle": _LOOP,
    "scheduler.extension:FerroflowStealing.error": "it only reads an attribute of the guard",
    "scheduler.extension:FerroflowStealing.fail": _GUARD,
    "scheduler.extension:_guarded.<locals>.run": _GUARD,
    "scheduler.changes:Guard.__call__.<locals>.guarded": _GUARD,
    "scheduler.changes:Guard.fail": _GUARD,
}
#: Functions in which an error ends nothing, with the reason; the plugin goes on.
HANDLED = {
    "Interval.__radd__": "messages are batched as by Dask for once",
    "_Collector._families": "metrics are not available, which is logged",
    "Batching.followed_by": "the client that called has the error",
    "QueueDepth.restore.<locals>.<lambda>": "the next event sends the tasks in the queue",
}


def code_of_functions() -> dict[str, CodeType]:
    """Return the code of all functions and methods of the plugin, nested functions included, by name."""
    found: dict[str, CodeType] = {}
    for package in (ferroflow_dask.scheduler, ferroflow_dask.policy):
        names = [package.__name__]
        names += [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
        for name in names:
            for qualname, code in _codes_in(importlib.import_module(name)) if name not in ON_WORKERS else ():
                unique = f"{name.removeprefix('ferroflow_dask.')}:{qualname}"
                while unique in found and found[unique] is not code:
                    unique += "'"
                found[unique] = code
    return found


def _codes_in(module: ModuleType) -> Iterator[tuple[str, CodeType]]:
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members = vars(value).items() if inspect.isclass(value) else [("", value)]
        for name, member in members:
            for function in _functions_of(member):
                qualname = f"{value.__qualname__}.{name}".strip(".")
                code = function.__code__
                if code.co_filename != "<string>" or name in _WRITTEN_BY_DATACLASS:
                    yield from _with_nested(qualname, code)


def _functions_of(member: Any) -> Iterator[FunctionType]:
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


def is_injected(error: BaseException | None) -> bool:
    """Return whether an error is an injected one, or was caused by one."""
    while error is not None:
        if type(error) in _INJECTED.values():
            return True
        error = error.__cause__ or error.__context__
    return False


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
        "metrics": sum(one.scheduler is scheduler for one in metrics._COLLECTOR.extensions),
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


# Virtual time


class VirtualStealing(WorkStealing):
    """Dask's stealing, started on the virtual clock."""

    async def start(self, scheduler: Any = None) -> None:
        if STEALING not in self.scheduler.periodic_callbacks:
            loop: Any = self.scheduler.loop
            start_stealing(self, loop.time_)

    def put_key_in_stealable(self, ts: Any) -> None:
        # Dask leaves the resources of a stolen task with the victim, which would be found here, too.
        if not ts.resource_restrictions:
            super().put_key_in_stealable(ts)


class VirtualFerroflow(FerroflowStealing, VirtualStealing):
    """The plugin's extension on the virtual clock."""

    def __init__(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(scheduler, *args, **kwargs, clock=scheduler.loop.time_)


class LoggingLoop(VirtualLoop):
    """Keeps what callbacks raise, where tornado logs it, and runs coroutines, which must not wait."""

    def __init__(self, time: VirtualTime) -> None:
        super().__init__(time)
        self.time_ = time
        self.errors: list[BaseException] = []

    def _call(self, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        try:
            result = callback(*args)
            if iscoroutine(result):
                result.send(None)
                result.close()
                raise AssertionError("a coroutine waits, for which virtual time has no means")
        except StopIteration:
            pass
        except (Exception, asyncio.CancelledError) as error:
            self.errors.append(error)


class ClientStream:
    """Drops what the scheduler sends a client."""

    def __init__(self) -> None:
        self.interval = 0.002

    def send(self, *messages: Any) -> None:
        pass


class Cluster(VirtualCluster):
    """A virtual cluster with Dask's stealing, on which `install_on` works."""

    def __init__(self, **options: Any) -> None:
        super().__init__(policy=VirtualStealing, **options)
        scheduler: Any = self.scheduler
        self.loop = scheduler.loop = LoggingLoop(self.time)
        scheduler.handlers = {"gather": _gather}
        scheduler.worker_plugins = {}
        scheduler.broadcast = self._broadcast
        scheduler.extensions["amm"] = ActiveMemoryManagerExtension(
            scheduler, policies={ReduceReplicas()}, register=False, start=False
        )
        #: Results that came after the plugin had closed; on a real cluster the owner's in-band close comes first.
        self.n_late = 0

    @property
    def extension(self) -> Any:
        return self.scheduler.extensions.get(STEALING)

    def join(self, *args: Any, **kwargs: Any) -> int:
        name = super().join(*args, **kwargs)
        address = self.workers[name].state.address
        self.scheduler.workers[address].metrics |= {"memory": 0, "spilled_bytes": {"memory": 0, "disk": 0}}
        for plugin in list(getattr(self.scheduler, "worker_plugins", ())):
            self._announce(address, plugin)
        return name

    async def _broadcast(self, *, msg: dict[str, Any], **_: Any) -> dict[str, Any]:
        if msg["op"] == "plugin-add":
            for address in list(self.scheduler.workers):
                self._announce(address, msg["name"])
        return {}

    def _announce(self, address: str, plugin: str) -> None:
        for topic in (PREFETCH_TOPIC, INLINING_TOPIC):
            if plugin.startswith(topic):
                self.scheduler.log_worker_event(address, topic, {})

    def _handle(self, address: str, message: dict[str, Any]) -> None:
        if message["op"] == RESULT and RESULT not in self.scheduler.stream_handlers:
            self.n_late += 1
            return
        super()._handle(address, message)


async def _gather(keys: Any, serializers: Any = None) -> dict[str, Any]:
    return {"status": "OK", "data": {}}


Graph = dict[Any, VirtualTask]


def graphs() -> tuple[Graph, Graph, Graph]:
    """Return chains; joins, skewed durations and a queue; restrictions, resources and declared costs."""
    chains: Graph = {}
    for c in range(4):
        for i in range(7):
            chains[f"chain{c}", i] = VirtualTask(0.002, ((f"chain{c}", i - 1),) if i else (), 200)
    first: Graph = {}
    first["join", 0] = VirtualTask(0.001, tuple((f"chain{c}", 6) for c in range(4)), 100)
    first["root", 0] = VirtualTask(0.001, (), 50_000)
    for i in range(24):
        first["skew", i] = VirtualTask(0.04 if i % 8 == 0 else 0.001, (("root", 0), ("join", 0)), 1000)
    for i in range(4):
        first["pair", i] = VirtualTask(0.003, (("skew", i), ("skew", 23 - i)), 100)
    for i in range(30):
        first["queue", i] = VirtualTask(0.002, (), 10)
    first["sum", 0] = VirtualTask(0.001, tuple(("queue", i) for i in range(30)), 8)
    second: Graph = {}
    for i in range(10):
        notes = {"ferroflow_cost": 0.004 + 0.001 * (i % 3)} | ({"ferroflow_rank": 0.1 * i} if i % 2 else {})
        second["cost", i] = VirtualTask(0.005, (), 100, notes)
    for i in range(6):
        needed = ("cost", i)
        second["gpu", i] = VirtualTask(0.003, (needed,), 100, {"resources": {"GPU": 1}})
        second["here", i] = VirtualTask(0.003, (needed,), 100, {"workers": [0, 1]})
        second["maybe", i] = VirtualTask(
            0.006, (needed,), 100, {"workers": [0], "allow_other_workers": True, "ferroflow_cost": 0.006}
        )
    second["odd", 0] = VirtualTask(0.001, (), 10, {"ferroflow_cost": "soon"})
    second["fails", 0] = VirtualTask(0.001, (("cost", 0),), 10, {"retries": 1}, 1)
    second["late", 0] = VirtualTask(0.03, (("cost", 1),), 10)
    return chains, first, second


#: When things happen in the scenario [s].
_INSTALLED_S = 0.0015
#: When a fault may strike: in which part of the scenario its calls are counted. Chains run early, so that tasks
#: are prefetched; steals are in flight late.
MODES = {
    "install": 0.0,
    "run": 0.0,
    "leave early": 0.009,
    "leave late": 0.036,
    "recover early": 0.009,
    "recover late": 0.036,
}


class Run:
    """One run of the scenario.

    Parameters
    ----------
    mode : str
        When calls are counted. `install`: while the plugin is installed. `run`: from then on. `leave`: from its
        uninstallation in the middle of the run. `recover`: from another failure in the middle of the run.
    injector : Injector
    validate : bool, optional
    """

    def __init__(self, mode: str, injector: Injector, validate: bool = False) -> None:
        self.mode = mode
        self.injector = injector
        #: What the installation, or `leave`, has raised to its caller.
        self.raised: BaseException | None = None
        self.graphs = chains, first, second = graphs()
        self.cluster = cluster = Cluster(
            workers=5,
            workers_per_host=2,
            bandwidth=1e8,
            host_bandwidth=1e9,
            resources={0: {"GPU": 1}, 1: {"GPU": 1}},
            speeds={3: 0.5},
            interval_s=0.02,
            seed=3,
            validate=validate,
        )
        self.plugin = FerroflowPlugin()
        self.ours: Any = None
        scheduler: Any = cluster.scheduler
        for client in ("a", "b"):
            scheduler.client_comms[client] = ClientStream()
        self.before: dict[str, object] = {}
        cluster.at(0.0, cluster.submit, chains, client="a", keep=self._wanted(chains))
        cluster.at(0.0, self._take_inventory)
        cluster.at(_INSTALLED_S, self._install)
        cluster.at(0.004, self._follow)
        cluster.at(0.012, cluster.submit, first, client="a", keep=self._wanted(first))
        cluster.at(0.015, cluster.submit, second, client="b", keep=self._wanted(second), fifo_timeout_s=0.0)
        cluster.at(0.016, self._manage_memory)
        cluster.at(0.017, scheduler.log_event, DEVICES_TOPIC, {"kind": "Conv", "seconds": 0.01})
        cluster.at(0.020, cluster.pause, 3)
        cluster.at(0.022, cluster.join, resources={"GPU": 1})
        cluster.at(0.024, self._secede, ("late", 0))
        cluster.at(0.026, lambda: list(metrics._COLLECTOR.collect()))
        cluster.at(0.028, self._add_client)
        cluster.at(0.030, cluster.leave, 2)
        cluster.at(0.032, self._remove_client)
        if MODES[mode]:
            cluster.at(MODES[mode], self._leave)
        cluster.at(0.046, cluster.resume, 3)
        cluster.at(0.055, cluster.join)

    @staticmethod
    def _wanted(graph: dict[Any, VirtualTask]) -> list[Any]:
        return [key for key in graph if key[0] != "queue" and not (key[0] == "chain0" and key[1] < 6)]

    def _take_inventory(self) -> None:
        self.before = inventory(self.cluster.scheduler)

    def _install(self) -> None:
        scheduler: Any = self.cluster.scheduler
        try:
            if self.mode == "install":
                with self.injector.active():
                    asyncio.run(install_on(scheduler, self.plugin))
            else:
                asyncio.run(install_on(scheduler, self.plugin))
        except (Exception, asyncio.CancelledError) as error:
            self.raised = error
            return
        self.ours = self.cluster.stealing = self.cluster.extension
        if self.mode == "run":
            sys.settrace(self.injector.trace)

    def _follow(self) -> None:
        if self.cluster.extension is self.ours:
            with suppress(Exception, asyncio.CancelledError):  # the client that asks for it has the error
                self.ours.messages.batching.followed_by("a")

    def _manage_memory(self) -> None:
        self.cluster.scheduler.extensions["amm"].run_once()

    def _secede(self, key: Any) -> None:
        scheduler: Any = self.cluster.scheduler
        ts = scheduler.tasks[key]
        if ts.processing_on is not None:
            scheduler.handle_long_running(
                key, ts.processing_on.address, ts.run_id, 0.001, stimulus_id="secede"
            )

    def _add_client(self) -> None:
        scheduler: Any = self.cluster.scheduler
        for plugin in list(scheduler.plugins.values()):
            plugin.add_client(scheduler, client="c")
        scheduler.client_comms["c"] = ClientStream()

    def _remove_client(self) -> None:
        scheduler: Any = self.cluster.scheduler
        del scheduler.client_comms["c"]
        for plugin in list(scheduler.plugins.values()):
            plugin.remove_client(scheduler, client="c")

    def _leave(self) -> None:
        sys.settrace(self.injector.trace)
        if self.mode.startswith("recover"):
            self.ours.fail(ZeroDivisionError("the first failure"))
            return
        try:
            self.ours.leave()
        except (Exception, asyncio.CancelledError):
            self.ours.leave()  # the caller has the error, and calls again

    def play(self) -> list[str]:
        """Play the scenario; return what is wrong at its end."""
        with _virtual_extension(), dask.config.set({"distributed.scheduler.work-stealing-interval": "20ms"}):
            before = sys.gettrace()
            try:
                self.cluster.run()
            except (Exception, asyncio.CancelledError) as error:
                return [f"an exception reached Dask: {_story(error)}"]
            finally:
                sys.settrace(before)
            try:
                return list(self._problems())
            finally:
                if self.ours is not None:
                    metrics._COLLECTOR.extensions.pop(self.ours, None)

    def _problems(self) -> Iterator[str]:
        injector, scheduler = self.injector, self.cluster.scheduler
        if injector.injection is not None and not injector.has_fired:
            yield "the fault did not strike"
        # The periodic callback repeats a recovery whose error the event loop has logged.
        if not (injector.is_handled or "FerroflowStealing._recover" in injector.stack):
            yield from (f"an exception reached the event loop: {_story(e)}" for e in self.cluster.loop.errors)
        if self.mode == "install":
            if injector.has_fired and self.raised is None:
                yield "the installation has hidden the fault"
        elif self.raised is not None:
            yield f"an exception reached the caller: {_story(self.raised)}"
        if not self.mode.startswith(("leave", "install")) and injector.has_fired and not injector.is_handled:
            if self.cluster.extension is self.ours:
                yield "the plugin did not end"
            elif not self._has_warned():
                yield "no warning"
        self.cluster.stealing = self.cluster.extension
        yield from self._ends_wrong()
        if self.cluster.extension is self.ours:
            self.ours.leave()
            self.cluster.run(until=self.cluster.time.now + 1)
        yield from (f"not restored: {one}" for one in differences(self.before, inventory(scheduler)))

    def _ends_wrong(self) -> Iterator[str]:
        try:
            self.cluster.check()
        except (Exception, asyncio.CancelledError) as error:
            yield f"wrong end: {_story(error)}"
        for graph in self.graphs:
            for key in self._wanted(graph):
                ts = self.cluster.scheduler.tasks.get(key)
                if ts is None or ts.state != "memory":
                    yield f"a wanted task is {None if ts is None else ts.state}"
                    return

    def _has_warned(self) -> bool:
        messages = [message["message"] for _, message in self.cluster.scheduler.get_events("warn")]
        return any(b"scheduling takes over" in message for message in messages)


def _story(error: BaseException) -> str:
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_qualname)
        trace = trace.tb_next
    return f"{type(error).__name__}({str(error)[:100]}) in {' > '.join(frames[-4:])}"


@contextmanager
def _virtual_extension() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin_module, "FerroflowStealing", VirtualFerroflow)
        yield


def calls(mode: str, codes: dict[str, CodeType]) -> Counter[str]:
    """Return how often the scenario calls each function in a mode."""
    for _ in range(2):  # some functions are called once in a process
        run = Run(mode, Injector(None, codes), validate=True)
        problems = run.play()
        assert not problems, problems
    return run.injector.calls


def injections(mode: str, codes: dict[str, CodeType]) -> list[Injection]:
    """Return all injections that the scenario reaches."""
    return [
        Injection(name, error, n)
        for name, n_calls in sorted(calls(mode, codes).items())
        if name not in BOUNDARY
        for error in ERRORS
        for n in range(1, min(n_calls, MOST_CALLS) + 1)
    ]
