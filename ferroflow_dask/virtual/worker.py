"""A worker: distributed's state machine, threads that only take time, and a store without bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from dask.sizeof import sizeof
from dask.typing import Key
from distributed import Reschedule
from distributed.core import Status
from distributed.worker_state_machine import (
    Execute,
    ExecuteFailureEvent,
    ExecuteSuccessEvent,
    FindMissingEvent,
    GatherDep,
    Instruction,
    PauseEvent,
    RescheduleEvent,
    RetryBusyWorkerEvent,
    RetryBusyWorkerLater,
    SendMessageToScheduler,
    StateMachineEvent,
    UnpauseEvent,
    WorkerState,
)

from ferroflow_dask.bundling.results import value_of
from ferroflow_dask.bundling.sequence import bundle_in
from ferroflow_dask.exceptions import SimulationError
from ferroflow_dask.scheduler.features.inlined_results_worker import TASK
from ferroflow_dask.scheduler.features.prefetch_worker import SEND, PrefetchedTasks
from ferroflow_dask.scheduler.remote_worker import WorkerEnd
from ferroflow_dask.virtual.clock import VirtualTime
from ferroflow_dask.virtual.fabric import Fabric
from ferroflow_dask.virtual.fetches import Fetches
from ferroflow_dask.virtual.hosts import Process
from ferroflow_dask.virtual.memory import Memory, MemorySpec
from ferroflow_dask.virtual.network import Stream
from ferroflow_dask.virtual.record import Execution, Outcome, Record
from ferroflow_dask.virtual.runs import (
    Host,
    Result,
    VirtualReportedResults,
    VirtualRun,
    VirtualRuns,
    VirtualWorkingSets,
    inputs_of,
)
from ferroflow_dask.virtual.task import VirtualTask
from ferroflow_dask.virtual.upstream_worker import event_of, unpacked

#: How soon a worker asks again for inputs that nobody has, and of a peer that was busy [s]
#: (`Worker.find_missing`, `Worker.retry_busy_worker_later`).
_FIND_MISSING_S = 1.0
_RETRY_S = 0.15
#: Messages after which a worker starts a task.
_STARTING = frozenset({"compute-task", TASK, SEND})


@dataclass(frozen=True)
class Surroundings:
    """What all workers of a cluster share.

    Parameters
    ----------
    time : VirtualTime
    fabric : Fabric
    tasks : mapping of key to VirtualTask
    record : Record
    peers : mapping of address to VirtualWorker
    """

    time: VirtualTime
    fabric: Fabric
    tasks: Mapping[Key, VirtualTask]
    record: Record
    peers: Mapping[str, VirtualWorker]


class VirtualWorker:
    """Carries out what a worker's state machine asks for.

    Parameters
    ----------
    name : int
    state : distributed.worker_state_machine.WorkerState
    speed : float
        How many times faster than declared its threads are.
    around : Surroundings
    to_scheduler : Stream
    """

    def __init__(
        self, name: int, state: WorkerState, speed: float, around: Surroundings, to_scheduler: Stream
    ) -> None:
        self.name = name
        self.state = state
        self.speed = speed
        self.is_alive = True
        self.to_scheduler = to_scheduler
        self._around = around
        self._time = around.time
        self._executing: dict[Key, float] = {}
        self._cores = around.fabric.cores_of(name)
        #: Its event loop, in which it takes messages and reports tasks.
        self.process = Process(around.time, self._cores)
        self.fetches = Fetches(self, around, self._handle)
        #: None without a limit.
        self.memory: Memory | None = None
        self._is_search_due = False
        self._handlers: dict[str, Callable[..., None]] = {}
        soon = partial(self._later, 0.0)
        host: Any
        self._host = host = Host(state, self._handle, to_scheduler.send, self._handlers, soon)
        self._held = PrefetchedTasks(host)
        self._inline = VirtualReportedResults(host)
        self._runs = VirtualRuns(host, around.time)
        #: Its ends of features, and their numbers.
        self.ends: dict[WorkerEnd, int] = {end: end.open() for end in (self._held, self._inline, self._runs)}
        plugins: dict[str, Any] = state.plugins
        plugins |= {end.name: end for end in (self._held, self._inline)}

    def limit(
        self, spec: MemorySpec, tell: Callable[[dict[str, Any]], None], died: Callable[[], None]
    ) -> None:
        """Limit its memory, before it has any results; see `Memory`."""
        record = self._around.record.memory
        self.memory = Memory(spec, self, self._time, record, tell=tell, died=died)
        self.state.data = self.memory.store
        end = VirtualWorkingSets(self._host, self.memory)
        self.ends[end] = end.open()
        plugins: dict[str, Any] = self.state.plugins
        plugins[end.name] = end

    @property
    def n_held(self) -> int:
        """Tasks that came before their inputs."""
        return len(self._held)

    @property
    def n_asked(self) -> int:
        """Tasks whose results are to be told."""
        return len(self._inline)

    # What happens to it

    def receive(self, message: Mapping[str, Any]) -> None:
        """Take a message from the scheduler."""
        costs = message["op"] in _STARTING
        self.process.run(
            self._around.fabric.runtime.worker_task_s / 2 if costs else 0.0, self._receive, message
        )

    def _receive(self, message: Mapping[str, Any]) -> None:
        if not self.is_alive:
            return
        handler = self._handlers.get(message["op"])
        if handler is None:
            self._handle(event_of(message))
        else:
            fields = unpacked(message)
            del fields["op"]
            handler(**fields)

    def set_running(self, is_running: bool) -> None:
        """Pause or go on, as `Worker.status` does: tell the scheduler first."""
        stimulus_id = f"worker-status-change-{self._time.now}"
        status = Status.running if is_running else Status.paused
        self.to_scheduler.send(
            {"op": "worker-status-change", "status": status.name, "stimulus_id": stimulus_id}
        )
        self._handle((UnpauseEvent if is_running else PauseEvent)(stimulus_id=stimulus_id))

    def die(self) -> None:
        """Lose all tasks and all data; peers that are being sent data learn of it first."""
        self.is_alive = False
        if self.memory is not None:
            self.memory.die()
        for key, start in self._executing.items():
            self._note(key, start, Outcome.LOST)
        self.fetches.worker_died()

    def block(self, seconds: float) -> None:
        """Occupy the event loop for some time [s]."""
        self.process.run(seconds, lambda: None)

    # What its state machine asks for

    def _handle(self, event: StateMachineEvent) -> None:
        instructions = self.state.handle_stimulus(event)
        if self.memory is None:
            self._carry_out(instructions)
            return
        self.memory.changed()  # the event loop writes to disk first
        self.process.run(0.0, self.if_alive, self._carry_out, instructions)

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case SendMessageToScheduler():
                    self.to_scheduler.send(instruction.to_dict())
                case Execute(key=key):
                    self._execute(key)
                case GatherDep():
                    self.fetches.begin(instruction)
                case RetryBusyWorkerLater(worker=address):
                    retry = RetryBusyWorkerEvent(worker=address, stimulus_id="retry-busy-worker")
                    self._later(_RETRY_S, self._handle, retry)
                case _:
                    raise SimulationError(f"worker {self.name} cannot carry out {instruction!r}")
        if self.state.missing_dep_flight and not self._is_search_due:
            self._is_search_due = True
            self._later(_FIND_MISSING_S, self._search)

    def _later(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        self._time.after(delay, self.if_alive, call, *args)

    def if_alive(self, call: Callable[..., None], *args: Any) -> None:
        """Call a function unless the worker has died."""
        if self.is_alive:
            call(*args)

    def _search(self) -> None:
        self._is_search_due = False
        self._handle(FindMissingEvent(stimulus_id=f"find-missing-{self._time.now}"))

    def _execute(self, key: Key) -> None:
        if self.memory is None:
            self._start(key)
            return
        # Inputs that are spilled are read first, by the event loop.
        self.memory.load(key, [ts.key for ts in self.state.tasks[key].dependencies])
        self.process.run(0.0, self.if_alive, self._start, key)

    def _start(self, key: Key) -> None:
        self._executing[key] = self._time.now
        record, ts, memory = self._around.record, self.state.tasks[key], self.memory
        spec: Any = ts.run_spec
        bundle = bundle_in(spec)
        ended = partial(self.if_alive, self._executed, key, ts.run_id)
        if bundle is not None:
            record.n_started[key] += 1
            try:
                results = inputs_of(spec, self.state.data)
                holds = None if memory is None else partial(memory.works, key)
                run = VirtualRun(
                    key,
                    bundle,
                    results,
                    self._runs,
                    compute=self._run_step,
                    clock=self._time,
                    on_values=holds,
                )
            except Reschedule as error:
                self._time.after(0.0, ended, error)
            else:
                run.begin(ended)
            return
        if getattr(spec, "func", None) is value_of:
            try:
                value = value_of(*inputs_of(spec, self.state.data))
            except Reschedule as error:
                value = error
            self._time.after(0.0, ended, value)
            return
        self._compute(key, ended)

    def _run_step(self, key: Key, computes: bool, done: Callable[[Any], None]) -> None:
        """Run a step of a bundle."""
        start = self._time.now

        def ended(result: Any) -> None:
            if self.is_alive:
                self._around.record.ran_step(Execution(key, self.name, start, self._time.now))
                done(result)

        if computes:
            self._compute(key, ended)
        else:
            self._time.after(0.0, ended, Result(0))

    def _compute(self, key: Key, ended: Callable[[Any], None]) -> None:
        """Take the time of a task, and call `ended` with its result, or with the exception that it raises."""
        record, task = self._around.record, self._around.tasks[key]
        if self.memory is not None and task.working_nbytes:
            ended = self.memory.during(key, task.working_nbytes, ended)
        result: Any = Result(task.nbytes)
        if record.n_started[key] < task.failures:
            result = RuntimeError(f"{key!r} is one of the executions that fail")
        record.n_started[key] += 1
        work_s = task.duration_s / self.speed
        computes_s = work_s * task.core_share
        done = partial(ended, result)
        if task.awaits:
            done = partial(record.await_all, task.awaits, done)
        if computes_s:
            rest_s = work_s - computes_s
            self._cores.run(computes_s, partial(self._time.after, rest_s, done) if rest_s else done)
        else:
            self._time.after(work_s, done)

    def _executed(self, key: Key, run_id: int, result: Any) -> None:
        start, stop = self._executing.pop(key), self._time.now
        if self.memory is not None:
            self.memory.ended(key)
        self._note(key, start, Outcome.FAILED if isinstance(result, Exception) else Outcome.FINISHED)
        report_s = self._around.fabric.runtime.worker_task_s / 2
        self.process.run(report_s, self.if_alive, self._report, key, run_id, result, start, stop)

    def _report(self, key: Key, run_id: int, result: Any, start: float, stop: float) -> None:
        common: dict[str, Any] = {"key": key, "run_id": run_id, "start": start, "stop": stop}
        if isinstance(result, Reschedule):
            self._handle(RescheduleEvent(key=key, stimulus_id=f"reschedule-{stop}"))
        elif isinstance(result, Exception):
            stimulus_id = f"task-erred-{stop}"
            self._handle(ExecuteFailureEvent.from_exception(result, **common, stimulus_id=stimulus_id))
        else:
            values: dict[str, Any] = {"value": result, "nbytes": sizeof(result), "type": type(result)}
            self._handle(ExecuteSuccessEvent(**common, **values, stimulus_id=f"task-finished-{stop}"))

    def _note(self, key: Key, start: float, outcome: Outcome) -> None:
        execution = Execution(key, self.name, start, self._time.now, outcome)
        self._around.record.executed(execution)
