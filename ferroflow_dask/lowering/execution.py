"""What runs on a worker: an op or a bundle of them per call, each execution counted where it happens.

The counts are kept in the process that executed the ops and are asked for afterwards, so that they
tell what was run and not what was meant to be.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distributed import get_worker

from ferroflow_dask.annotations import KIND_ANNOTATION
from ferroflow_dask.bundling.results import Results
from ferroflow_dask.clients import ask_workers, check_synchronous
from ferroflow_dask.devices import DeviceRunner, attached, drain, host_value, is_on_device, register_spilled
from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels import Plan, compile_op, single

if TYPE_CHECKING:
    from distributed import Client

#: Runs whose executions a process remembers; older ones are forgotten.
_REMEMBERED_RUNS = 16


@dataclass(frozen=True, slots=True)
class ExecutionReport:
    """Executions of one run's ops.

    Parameters
    ----------
    executed_ops : int
        Number of kernel calls that returned; a retried op counts again.
    seconds : mapping of int to float
        Time inside the kernel by op id [s], summed over executions: of ops that ran on CPUs.
    device_seconds : mapping of int to float
        Likewise, of those that ran on devices.
    """

    executed_ops: int = 0
    seconds: Mapping[int, float] = field(default_factory=dict)
    device_seconds: Mapping[int, float] = field(default_factory=dict)

    @property
    def busy_s(self) -> float:
        """Time that threads and devices spent inside kernels [s]."""
        return sum(self.seconds.values()) + sum(self.device_seconds.values())

    def merge(self, other: ExecutionReport) -> ExecutionReport:
        """Return the sum of two processes' reports."""
        return ExecutionReport(
            self.executed_ops + other.executed_ops,
            _summed((*self.seconds.items(), *other.seconds.items())),
            _summed((*self.device_seconds.items(), *other.device_seconds.items())),
        )


def _summed(executions: Iterable[tuple[int, float]]) -> dict[int, float]:
    seconds: dict[int, float] = {}
    for op_id, spent in executions:
        seconds[op_id] = seconds.get(op_id, 0.0) + spent
    return seconds


class _Executions:
    """Executions of ops, each with its time [s]; ops of one session have equal times."""

    def __init__(self) -> None:
        self.single: list[tuple[int, float]] = []
        # A pair for each op would have the garbage collector look through all that there is.
        self.alike: list[tuple[Sequence[int], float]] = []

    def __len__(self) -> int:
        return len(self.single) + sum(len(ids) for ids, _ in self.alike)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        yield from self.single
        for ids, seconds in self.alike:
            yield from ((op_id, seconds) for op_id in ids)


class _ExecutionLog:
    """The executions of this process, by run."""

    def __init__(self) -> None:
        self.process = uuid.uuid4().hex
        self._lock = threading.Lock()
        # On CPUs, and on devices.
        self._runs: OrderedDict[str, tuple[_Executions, _Executions]] = OrderedDict()

    def record(self, run: str, executions: Iterable[tuple[int, float]], on_device: bool = False) -> None:
        with self._lock:
            self._of(run)[on_device].single.extend(executions)

    def record_alike(self, run: str, ids: Sequence[int], seconds: float, on_device: bool = False) -> None:
        with self._lock:
            self._of(run)[on_device].alike.append((ids, seconds))

    def _of(self, run: str) -> tuple[_Executions, _Executions]:
        if run not in self._runs:
            self._runs[run] = (_Executions(), _Executions())
            if len(self._runs) > _REMEMBERED_RUNS:
                self._runs.popitem(last=False)
        return self._runs[run]

    def report(self, run: str) -> ExecutionReport:
        with self._lock:
            on_cpu, on_device = (list(found) for found in self._runs.get(run, ((), ())))
        return ExecutionReport(len(on_cpu) + len(on_device), _summed(on_cpu), _summed(on_device))


_LOG = _ExecutionLog()
#: Note executions of ops of a run, and the time that each took [s].
record = _LOG.record
#: Note executions of ops that took the same time, each with this part of it [s].
record_alike = _LOG.record_alike


def device_here() -> DeviceRunner | None:
    """Return the device of the worker whose task calls this; None if it has none."""
    if attached() is None:
        return None
    try:
        return attached(get_worker().id)
    except ValueError:  # called by no task
        return None


def run_there(
    runner: DeviceRunner, plan: Plan, arguments: Sequence[Any], providers: Sequence[str], run: str
) -> list[Any]:
    """Run a plan on a device, as `DeviceRunner.run`, and count its executions when they have ended."""

    def note(ids: tuple[int, ...], seconds: float, is_on_device: bool) -> None:
        if run:
            record_alike(run, ids, seconds, on_device=is_on_device)

    return runner.run(plan, arguments, providers, note, _kind_of_this_task())


def run_session_there(
    runner: DeviceRunner,
    session: Callable[[Mapping[str, Any]], dict[str, Any]],
    values: Mapping[str, Any],
    ids: Sequence[int],
    run: str,
) -> dict[str, Any]:
    """Run a whole graph in a session on a device, and count its ops, each with the same part of the time."""
    found, seconds = runner.run_session(session, values, len(ids), _kind_of_this_task())
    if run:
        record_alike(run, ids, seconds / len(ids), on_device=True)
    return found


def _kind_of_this_task() -> str:
    worker = get_worker()
    ts = worker.state.tasks.get(worker.get_current_task())
    return str(((ts is not None and ts.annotations) or {}).get(KIND_ANNOTATION, ""))


@dataclass(frozen=True, slots=True, eq=False)
class ExecuteOp:
    """The function of a Dask task: run one op on the values of its operands.

    Parameters
    ----------
    run : str
        Name of the run under which the execution is counted.
    op : Op
    opsets : mapping
        Operator set versions that `op` needs.
    providers : tuple of str
        Kernel providers in the order in which they are asked.
    items : tuple of (int or None)
        For each operand, which item of the producing task's result it is; None for all of it.
    """

    run: str
    op: Op
    opsets: Mapping[str, int]
    providers: tuple[str, ...]
    items: tuple[int | None, ...]

    def __call__(self, *results: Any) -> Any:
        """Return the op's output, or a tuple of them, from one result for each operand."""
        operands = [
            result if item is None else result[item] for result, item in zip(results, self.items, strict=True)
        ]
        runner = device_here()
        if runner is not None:
            found = run_there(runner, single(self.op, self.opsets), operands, self.providers, self.run)
            return found[0] if len(found) == 1 else tuple(found)
        arguments = map(host_value, operands)
        values = [next(arguments) if name else None for name in self.op.inputs]
        values.extend(arguments)  # what sub-graphs captured
        kernel = compile_op(self.op, self.opsets, self.providers)
        start = time.perf_counter()
        outputs = kernel(*values)
        record(self.run, [(self.op.id, time.perf_counter() - start)])
        return outputs[0] if len(outputs) == 1 else outputs

    def __dask_tokenize__(self) -> tuple[str, str, int]:
        return (type(self).__qualname__, self.run, self.op.id)


def _is_spilled(results: Results) -> bool:
    return any(map(is_on_device, results.values))


register_spilled(Results, _is_spilled)


@dataclass(frozen=True, slots=True, eq=False)
class ExecuteBundle:
    """The function of a Dask task: run some ops one after another, on the values that they read of others.

    Parameters
    ----------
    run : str
        Name of the run under which the executions are counted.
    plan : Plan
    providers : tuple of str
        Kernel providers in the order in which they are asked.
    items : tuple of (int, int or None)
        For each argument of the plan the number of the result that it is in, and which item of it, None
        for all of it.
    """

    run: str
    plan: Plan
    providers: tuple[str, ...]
    items: tuple[tuple[int, int | None], ...]

    def __call__(self, *results: Any) -> Any:
        """Return the value that is wanted of the bundle, or `Results` of several."""
        arguments = [results[i] if item is None else results[i][item] for i, item in self.items]
        runner = device_here()
        if runner is not None:
            outputs = run_there(runner, self.plan, arguments, self.providers, self.run)
            return outputs[0] if len(outputs) == 1 else Results(tuple(outputs))
        spent_s: list[float] = []
        try:
            here = list(map(host_value, arguments))
            outputs = self.plan.run(here, self.providers, time.perf_counter, spent_s)
        finally:  # what ran before an op failed, ran
            record(self.run, zip(self.plan.ids, spent_s, strict=False))
        return outputs[0] if len(outputs) == 1 else Results(tuple(outputs))

    def __dask_tokenize__(self) -> tuple[str, str, tuple[int, ...]]:
        return (type(self).__qualname__, self.run, self.plan.ids)


def executed_here(run: str) -> ExecutionReport:
    """Return what this process has executed of a run."""
    return _LOG.report(run)


def _report_with_process(run: str) -> tuple[str, ExecutionReport]:
    drain()  # what was enqueued on a device counts when it has ended
    return _LOG.process, _LOG.report(run)


def executed(client: Client, run: str) -> ExecutionReport:
    """Return what the workers of a cluster have executed of a run.

    Workers that share a process are counted once. What a lost worker had executed is not known. The client is
    synchronous; `UsageError` is raised for another.
    """
    check_synchronous(client, "executed")
    by_process = dict(ask_workers(client, _report_with_process, run).values())
    total = ExecutionReport()
    for report in by_process.values():
        total = total.merge(report)
    return total
