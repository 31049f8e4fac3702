"""Ends of features on virtual workers; steps of bundles are run by the code of real workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from dask._task_spec import DataNode, TaskRef
from dask.sizeof import sizeof
from dask.typing import Key
from distributed import Reschedule
from distributed.worker_state_machine import StateMachineEvent, WorkerState

from ferroflow_dask.bundling.deliveries import EARLY_S, Deliveries
from ferroflow_dask.bundling.results import Results
from ferroflow_dask.bundling.run import Run
from ferroflow_dask.bundling.sequence import ExecuteTasks
from ferroflow_dask.scheduler.features.inlined_results_worker import ReportedResults
from ferroflow_dask.scheduler.features.working_sets_worker import TOPIC as WORKING_SETS
from ferroflow_dask.scheduler.features.working_sets_worker import WorkingSetsEnd
from ferroflow_dask.scheduler.graphs.worker_runs import Runs
from ferroflow_dask.virtual.memory import Memory


class Result:
    """Stands for a task's result; it has a size and nothing else."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __sizeof__(self) -> int:
        return self.nbytes


@sizeof.register(Result)  # type: ignore[untyped-decorator]
def _nbytes(result: Result) -> int:
    return result.nbytes


@dataclass
class Host:
    """The part of a worker that ends of features use, under the names of `distributed.Worker`.

    Parameters
    ----------
    state : distributed.worker_state_machine.WorkerState
    handle_stimulus : callable
        Hands an event to the state machine and carries out its instructions.
    batched_send : callable
        Sends a message to the scheduler.
    stream_handlers : mapping of str to callable
    soon : callable
        Calls a function with arguments after the present call.
    """

    state: WorkerState
    handle_stimulus: Callable[[StateMachineEvent], None]
    batched_send: Callable[[dict[str, Any]], object]
    stream_handlers: dict[str, Callable[..., None]]
    soon: Callable[..., None]
    extensions: dict[str, Any] = field(default_factory=dict)
    handlers: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loop = SimpleNamespace(add_callback=self.soon, asyncio_loop=SimpleNamespace(call_soon=self.soon))


class VirtualReportedResults(ReportedResults):
    """The small results of a virtual worker, which have a size and no data."""

    def may_send(self, value: object, limit: int) -> bool:  # noqa: ARG002 -- overrides
        """Return whether a value is small enough: its size was checked before."""
        return True


class VirtualRuns(Runs):
    """The running bundles of a virtual worker, whose threads have no pool."""

    def _leave_pool(self, key: Key, run: Any) -> bool:  # noqa: ARG002 -- overrides
        return True

    def _on_cores(self) -> tuple[float, float]:
        return 0.0, 0.0


class VirtualWorkingSets(WorkingSetsEnd):
    """The working sets of a virtual worker.

    Parameters
    ----------
    host : Host
    memory : Memory
    """

    def __init__(self, host: Any, memory: Memory) -> None:
        super().__init__(host)
        self._memory = memory

    def sampler(self) -> _Growth:
        """Start to measure the memory of the process."""
        return _Growth(self._memory)

    def report(self, event: dict[str, Any]) -> None:
        """Report to the scheduler."""
        self.worker.batched_send({"op": "log-event", "topic": WORKING_SETS, "msg": event})


class _Growth:
    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._before = memory.largest = memory.nbytes

    def stop(self) -> int:
        return self._memory.largest - self._before


#: Runs a step that takes time: its key, whether it computes, and the function to call with its result.
Compute = Callable[[Key, bool, Callable[[Result], None]], None]


class VirtualRun(Run):
    """One execution of a bundle in virtual time.

    Parameters
    ----------
    key : Key
    bundle : ExecuteTasks
    results : sequence
        The results of other tasks that the bundle reads.
    runs : Runs
    compute : callable
        Lets time pass for a step.
    clock : callable
        Returns the time [s].
    on_values : callable, optional
        Takes the size of the values that the run holds, whenever it changes [B].
    """

    def __init__(
        self,
        key: Key,
        bundle: ExecuteTasks,
        results: Sequence[Any],
        runs: Runs,
        *,
        compute: Compute,
        clock: Callable[[], float],
        on_values: Callable[[int], object] | None = None,
    ) -> None:
        self.clock = clock
        self._on_values = on_values
        super().__init__(bundle, results)
        self.key = key
        self._compute = compute
        self._extension = runs
        first_s = EARLY_S if bundle.is_early else None
        self._deliveries = Deliveries(runs, key, self._delivered, first_s=first_s, clock=clock)

    def begin(self, ended: Callable[[Any], None]) -> None:
        """Start; call `ended` with the result, or with `Reschedule` if the scheduler runs the rest again."""
        self._ended = ended
        self._extension.started(self)  # type: ignore[union-attr]
        self._go_on(0)

    def _go_on(self, step: int) -> None:
        """Start the next step that is not taken, as the loop of `Run` does."""
        for i in range(step, len(self.bundle.steps)):
            self._current = i
            if self.claim(i):
                done = partial(self._step_ended, i)
                self._compute(self.bundle.keys[i], self.bundle.computes(i), done)
                return
        self._deliveries.flush()
        result: Any
        try:
            outputs = self._outputs()
        except Reschedule as error:
            result = error
        else:
            result = outputs[0] if self.bundle.is_single else Results(outputs, self.delivers_all())
        self._extension.ended(self)  # type: ignore[union-attr]
        self._ended(result)

    def _step_ended(self, step: int, result: Result) -> None:
        self._values[self._n_arguments + step] = result
        if self._delivered:
            self._deliveries.add(step, result)
        self._note_values()
        _, _, _, gone = self.bundle.steps[step]
        for number in gone:
            if number not in self._new_exports:
                self._values[number] = None
        self._note_values()
        self._go_on(step + 1)

    def _note_values(self) -> None:
        if self._on_values is None:
            return
        # The worker has those that are delivered under their own keys.
        own = enumerate(self._values[self._n_arguments :])
        live = [one for i, one in own if isinstance(one, Result) and i not in self._delivered]
        self._on_values(sum(one.nbytes for one in live))


def inputs_of(spec: Any, data: Mapping[Key, Any]) -> list[Any]:
    """Return the results that the arguments of a Dask task stand for."""
    found = []
    for argument in spec.args:
        if isinstance(argument, TaskRef):
            found.append(data[argument.key])
        else:
            found.append(argument.value if isinstance(argument, DataNode) else argument)
    return found
