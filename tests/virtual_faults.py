"""Faults in virtual time: one rich scenario, which the plugin's end must not harm."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from inspect import iscoroutine
from types import CodeType
from typing import Any

import dask
import pytest
from distributed.active_memory_manager import ActiveMemoryManagerExtension, ReduceReplicas
from distributed.stealing import WorkStealing
from fault_injection import Injector, differences, inventory, story

from ferroflow_dask.device_reports import DEVICES_TOPIC
from ferroflow_dask.scheduler import FerroflowPlugin, _distributed
from ferroflow_dask.scheduler import plugin as plugin_module
from ferroflow_dask.scheduler.changes import FAILURES
from ferroflow_dask.scheduler.extension import FerroflowStealing
from ferroflow_dask.scheduler.features import metrics
from ferroflow_dask.scheduler.plugin import install_on
from ferroflow_dask.scheduler.remote_worker import TOPIC
from ferroflow_dask.scheduler.steal_exchange import STEALING
from ferroflow_dask.virtual import VirtualCluster, VirtualTask
from ferroflow_dask.virtual.clock import VirtualLoop, VirtualTime
from ferroflow_dask.virtual.upstream import start_stealing


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
        except FAILURES as error:
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
        scheduler.handlers = dict.fromkeys(_distributed.HANDLERS, _gather)
        scheduler.stream_handlers |= {"update-graph": _update_graph, "cancel-keys": _cancel_keys}
        scheduler._active_graph_updates = 0
        scheduler.worker_plugins = {}
        scheduler.broadcast = self._broadcast
        scheduler.extensions["amm"] = ActiveMemoryManagerExtension(
            scheduler, policies={ReduceReplicas()}, register=False, start=False
        )

    @property
    def extension(self) -> Any:
        return self.scheduler.extensions.get(STEALING)

    def _join(self, *args: Any, **kwargs: Any) -> int:
        name = super()._join(*args, **kwargs)
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
        for feature in ("prefetch", "inlined_results"):
            if plugin.startswith(f"ferroflow-{feature}"):
                self.scheduler.log_worker_event(address, TOPIC, {"feature": feature, "number": 1})


def _cancel_keys(**_: Any) -> None:
    """Stand for the handler of a scheduler with comms."""


async def _update_graph(**_: Any) -> None:
    """Stand for Dask's handler; graphs in virtual time do not come from clients."""


async def _gather(keys: Any, serializers: Any = None) -> dict[str, Any]:
    return {"status": "OK", "data": {}}


Graph = dict[Any, VirtualTask]


#: The scenario of the seed varies nothing.
USUAL = 3


def varied(seed: int) -> tuple[Graph, Graph, Graph]:
    """Return the graphs with durations and sizes that a seed varies."""
    rng = random.Random(seed)
    if seed == USUAL:
        return graphs()
    found = []
    for graph in graphs():
        found.append(
            {
                key: replace(
                    task,
                    duration_s=task.duration_s * rng.uniform(0.5, 2.0),
                    nbytes=int(task.nbytes * rng.choice((0.1, 1, 1, 10))),
                )
                for key, task in graph.items()
            }
        )
    return found[0], found[1], found[2]


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
#: When a fault may strike, with the time of `leave` or of the first failure [s]. Chains run early, so that
#: tasks are prefetched; steals are in flight late.
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
        When a fault may strike. `install`: while the plugin is installed. `run`: from then on. `leave`: from
        its uninstallation in the middle of the run. `recover`: from another failure at that time.
    injector : Injector
    validate : bool, optional
    seed : int, optional
        Of durations, sizes and ties.
    """

    def __init__(self, mode: str, injector: Injector, validate: bool = False, seed: int = USUAL) -> None:
        self.mode = mode
        self.injector = injector
        #: What the installation, or `leave`, has raised to its caller.
        self.raised: BaseException | None = None
        self.graphs = chains, first, second = varied(seed)
        self.cluster = cluster = Cluster(
            workers=5,
            workers_per_host=2,
            bandwidth=1e8,
            host_bandwidth=1e9,
            resources={0: {"GPU": 1}, 1: {"GPU": 1}},
            speeds={3: 0.5},
            interval_s=0.02,
            seed=seed,
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
        except FAILURES as error:
            self.raised = error
            return
        self.ours = self.cluster.stealing = self.cluster.extension
        if self.mode == "run":
            sys.settrace(self.injector.trace)

    def _follow(self) -> None:
        if self.cluster.extension is self.ours:
            with suppress(*FAILURES):  # the client that asks for it has the error
                self.ours.features[0].followed_by("a")

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
            self.ours.guard.fail(ZeroDivisionError("the first failure"))
            return
        try:
            self.ours.lifecycle.leave()
        except FAILURES:
            self.ours.lifecycle.leave()  # the caller has the error, and calls again

    def play(self) -> list[str]:
        """Play the scenario; return what is wrong at its end."""
        with _virtual_extension(), dask.config.set({"distributed.scheduler.work-stealing-interval": "20ms"}):
            before = sys.gettrace()
            try:
                self.cluster.run()
            except FAILURES as error:
                return [f"an exception reached Dask: {story(error)}"]
            finally:
                sys.settrace(before)
            try:
                return list(self._problems())
            finally:
                if self.ours is not None:
                    for core in list(metrics._COLLECTOR.cores):
                        if core.scheduler is self.cluster.scheduler:
                            del metrics._COLLECTOR.cores[core]

    def _problems(self) -> Iterator[str]:
        injector, scheduler = self.injector, self.cluster.scheduler
        if injector.injection is not None and not injector.has_fired:
            yield "the fault did not strike"
        # The periodic callback repeats a recovery whose error the event loop has logged.
        if not (injector.is_handled or "Lifecycle.recover" in injector.stack):
            yield from (f"an exception reached the event loop: {story(e)}" for e in self.cluster.loop.errors)
        if self.mode == "install":
            # Dask adds the plugin to its list last; a failure there ends it with a warning.
            if injector.has_fired and self.raised is None and not self._has_warned():
                yield "the installation has hidden the fault"
        elif self.raised is not None:
            yield f"an exception reached the caller: {story(self.raised)}"
        if not self.mode.startswith(("leave", "install")) and injector.has_fired and not injector.is_handled:
            if self.cluster.extension is self.ours:
                yield "the plugin did not end"
            elif not self._has_warned():
                yield "no warning"
        self.cluster.stealing = self.cluster.extension
        yield from self._ends_wrong()
        if self.cluster.extension is self.ours:
            self.ours.lifecycle.leave()
            self.cluster.run(until=self.cluster.time.now + 1)
        yield from (f"not restored: {one}" for one in differences(self.before, inventory(scheduler)))

    def _ends_wrong(self) -> Iterator[str]:
        try:
            self.cluster.check()
        except FAILURES as error:
            yield f"wrong end: {story(error)}"
        for graph in self.graphs:
            for key in self._wanted(graph):
                ts = self.cluster.scheduler.tasks.get(key)
                if ts is None or ts.state != "memory":
                    yield f"a wanted task is {None if ts is None else ts.state}"
                    return

    def _has_warned(self) -> bool:
        messages = [message["message"] for _, message in self.cluster.scheduler.get_events("warn")]
        return any(b"scheduling takes over" in message for message in messages)


@contextmanager
def _virtual_extension() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin_module, "FerroflowStealing", VirtualFerroflow)
        yield


def calls(mode: str, codes: dict[str, CodeType], seed: int = USUAL) -> Counter[str]:
    """Return how often the scenario calls each function in a mode."""
    for _ in range(2):  # some functions are called once in a process
        run = Run(mode, Injector(None, codes), validate=True, seed=seed)
        problems = run.play()
        assert not problems, problems
    return run.injector.calls
