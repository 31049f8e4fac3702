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
    GatherDepNetworkFailureEvent,
    GatherDepSuccessEvent,
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
from ferroflow_dask.virtual.hosts import Process
from ferroflow_dask.virtual.memory import Memory, MemorySpec
from ferroflow_dask.virtual.network import Stream
from ferroflow_dask.virtual.record import Execution, Outcome, Record, Transfer
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
#: Smaller transfers do not tell of the bandwidth [B] (`Worker._update_metrics_received_data`).
_LEAST_MEASURED_NBYTES = 1_000_000


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
        #: As in `Worker.bandwidth_workers`; no heartbeat takes them away.
        self.bandwidths: dict[str, tuple[float, int]] = {}
        self._around = around
        self._time = around.time
        self._executing: dict[Key, float] = {}
        self._sending: dict[_Fetch, None] = {}
        self._network = around.fabric.network
        self._cores = around.fabric.cores_of(name)
        #: Its event loop, in which it takes messages and reports tasks.
        self.process = Process(around.time, self._cores)
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
        for fetch in self._sending:
            fetch.is_broken = True
            latency_s = self._network.latency_s(self.name, fetch.by.name)
            self._time.after(latency_s, fetch.by._fetch_failed, fetch.instruction)

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
        self.process.run(0.0, self._if_alive, self._carry_out, instructions)

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case SendMessageToScheduler():
                    self.to_scheduler.send(instruction.to_dict())
                case Execute(key=key):
                    self._execute(key)
                case GatherDep():
                    self._fetch(instruction)
                case RetryBusyWorkerLater(worker=address):
                    retry = RetryBusyWorkerEvent(worker=address, stimulus_id="retry-busy-worker")
                    self._later(_RETRY_S, self._handle, retry)
                case _:
                    raise SimulationError(f"worker {self.name} cannot carry out {instruction!r}")
        if self.state.missing_dep_flight and not self._is_search_due:
            self._is_search_due = True
            self._later(_FIND_MISSING_S, self._search)

    def _later(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        self._time.after(delay, self._if_alive, call, *args)

    def _if_alive(self, call: Callable[..., None], *args: Any) -> None:
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
        self.process.run(0.0, self._if_alive, self._start, key)

    def _start(self, key: Key) -> None:
        self._executing[key] = self._time.now
        record, ts, memory = self._around.record, self.state.tasks[key], self.memory
        spec: Any = ts.run_spec
        bundle = bundle_in(spec)
        ended = partial(self._if_alive, self._executed, key, ts.run_id)
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
        self.process.run(report_s, self._if_alive, self._report, key, run_id, result, start, stop)

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

    # Inputs from its peers

    def _fetch(self, instruction: GatherDep) -> None:
        fetch_s = self._around.fabric.runtime.fetch_s
        self.process.run(fetch_s, self._if_alive, self._ask, instruction)

    def _ask(self, instruction: GatherDep) -> None:
        peer = self._around.peers[instruction.worker]
        if not peer.is_alive:  # nobody answers
            self._later(self._network.latency_s(self.name, peer.name), self._fetch_failed, instruction)
            return
        keys = sorted(instruction.to_gather, key=repr)  # a set, whose order no run repeats
        # Of an actor the peer sends a handle.
        stores = (peer.state.data, peer.state.actors)
        data = {key: store[key] for key in keys for store in stores if key in store}
        nbytes = sum(peer.state.tasks[key].nbytes or 0 for key in data)
        fetch = _Fetch(self, instruction, data, nbytes, self._time.now)
        peer._sending[fetch] = None
        arrived = partial(self._if_alive, self._fetched, fetch, peer)
        send = partial(self._network.send, peer.name, self.name, nbytes, arrived)
        if peer.memory is None:
            send()
        else:
            peer.memory.changed()  # it may have read some of them
            peer.process.run(0.0, peer._if_alive, send)

    def _fetched(self, fetch: _Fetch, peer: VirtualWorker) -> None:
        if fetch.is_broken:
            return
        del peer._sending[fetch]
        keys = tuple(fetch.data)
        transfer = Transfer(keys, peer.name, self.name, fetch.nbytes, fetch.start, self._time.now)
        self._around.record.transfers.append(transfer)
        instruction = fetch.instruction
        self._measure(transfer, instruction.worker)
        self._handle(
            GatherDepSuccessEvent(
                worker=instruction.worker,
                total_nbytes=instruction.total_nbytes,
                data=fetch.data,
                stimulus_id=f"gather-dep-success-{self._time.now}",
            )
        )

    def _measure(self, transfer: Transfer, source: str) -> None:
        """Note what a transfer tells, as `Worker._update_metrics_received_data` does."""
        span: Any = {"action": "transfer", "start": transfer.start, "stop": transfer.stop, "source": source}
        # It is told with one of the tasks that need what came: the first by name, so that runs repeat.
        needing = {ts.key: ts for key in transfer.keys for ts in self.state.tasks[key].dependents}
        if needing:
            needing[min(needing, key=repr)].startstops.append(span)
        if transfer.nbytes > _LEAST_MEASURED_NBYTES:
            seconds = transfer.stop - transfer.start
            total, n = self.bandwidths.get(source, (0.0, 0))
            self.bandwidths[source] = total + transfer.nbytes / seconds, n + 1

    def _fetch_failed(self, instruction: GatherDep) -> None:
        if self.is_alive:
            failure = GatherDepNetworkFailureEvent(
                worker=instruction.worker,
                total_nbytes=instruction.total_nbytes,
                stimulus_id=f"gather-dep-network-failure-{self._time.now}",
            )
            self._handle(failure)


@dataclass(eq=False)
class _Fetch:
    """A transfer under way, as the one who sends knows it."""

    by: VirtualWorker
    instruction: GatherDep
    data: dict[Key, object]
    nbytes: int
    start: float
    is_broken: bool = False
