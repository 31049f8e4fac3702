"""Runs the steps of a plan on a device: places operands, batches products, bounds what is under way.

What a device has no kernel for runs beside it, on the host.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ferroflow_dask.devices.device import Counters, Device, DeviceUsage, Event, HostArray
from ferroflow_dask.devices.order import Order
from ferroflow_dask.devices.resident import Resident, host_value
from ferroflow_dask.devices.window import Note, Window, Work
from ferroflow_dask.exceptions import FerroflowError, KernelError, KernelNotFoundError
from ferroflow_dask.graph.ir import Op
from ferroflow_dask.kernels import DEVICE_PROVIDER, DeclinedError, Plan, failure, host_operands, shared_kernel

#: Part of the memory that the operands and results of one batch may take.
_BATCH_SHARE = 1 / 8


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the results of a batch: an item of a stack of them."""

    stack: Any
    item: int

    @property
    def array(self) -> Any:
        return self.stack[self.item]


@dataclass(frozen=True, slots=True)
class _DeviceKernel:
    """How an op is computed: on the device, unless `on_device` is None."""

    op: Op
    on_device: Callable[..., tuple[Any, ...]] | None
    host_operands: frozenset[int]
    is_product: bool


class DeviceRunner:
    """A device, and the work of one worker on it.

    Parameters
    ----------
    device : Device
    spill : callable, optional
        Frees memory of the device that results take which nobody needs there at once; returns False when
        there is nothing left to free.
    on_duration : callable, optional
        Told a task's label and how long it took on the device [s], some time after it ended there.
    """

    def __init__(
        self,
        device: Device,
        spill: Callable[[], bool] | None = None,
        on_duration: Callable[[str, float], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device = device
        self.clock = clock
        self._spill = spill or (lambda: False)
        self._on_duration = on_duration or (lambda _label, _seconds: None)
        self._window = Window(device)
        self._counters = Counters()
        # What the host has and the device was given, as long as the host has it.
        self._placed: dict[int, tuple[weakref.ref[HostArray], Any, Event]] = {}

    # Crossings

    def to_device(self, array: HostArray) -> Any:
        """Enqueue a copy from the host, in `device.use()`; counted."""
        self._counters.add(to_device=1, nbytes_to_device=array.nbytes)
        return self._with_memory(lambda: self.device.to_device(array), "a copy from the host", array.nbytes)

    def to_host(self, array: Any, event: Event) -> HostArray:
        """Return a copy on the host of what is there once an event has come; counted.

        Raises
        ------
        KernelError
            What computes it has failed.
        """
        self._window.until(event)
        with self.device.use():
            self.device.wait(event)
            found = self.device.to_host(array)
        self._counters.add(to_host=1, nbytes_to_host=found.nbytes)
        return found

    # Work

    def run(
        self,
        plan: Plan,
        arguments: Sequence[Any],
        providers: Sequence[str],
        note: Note,
        label: str = "",
    ) -> list[Any]:
        """Enqueue the ops of a plan; return the values of its exports, which may still be computed.

        Parameters
        ----------
        plan : Plan
        arguments : sequence of array
        providers : sequence of str
            Asked for what the device has no kernel for.
        note : callable
            Told the ids of ops, how long each took [s], and whether on the device, once they have ended.
        label : str, optional
            What `on_duration` is told.

        Raises
        ------
        KernelNotFoundError
            No provider has one of the operators.
        KernelError
            An op failed, or one that was enqueued earlier; the message names it.
        """
        kernels = [self._kernel(op, plan, providers) for op in plan.ops]
        work = Work(note, lambda seconds: self._on_duration(label, seconds))
        run = _Run(self, plan, kernels, [*arguments, *[None] * (plan.n_values - len(arguments))])
        with self.device.use(), np.errstate(all="ignore"):
            order = Order(plan, [kernel.is_product for kernel in kernels])
            while (group := order.next_group(run.shape_of_product, run.most_in_batch)) is not None:
                run.enqueue(group, work, providers)
                run.drop_read(group, order.n_reads)
            start = self.device.record()
            exports = [run.export(value) for value in plan.exports]
            end = self.device.record()
            self._window.add("the end of a task", (), (start, end), work, exports)
        self._window.complete(work)
        return [value if is_host else Resident(on_device=(self, value, end)) for value, is_host in exports]

    def _kernel(self, op: Op, plan: Plan, providers: Sequence[str]) -> _DeviceKernel:
        try:
            kernel = shared_kernel(op, plan.opsets, (DEVICE_PROVIDER,))
        except KernelNotFoundError:
            shared_kernel(op, plan.opsets, providers)  # raises where nobody has it
            return _DeviceKernel(op, None, frozenset(), False)
        is_product = self.device.batches_products and op.op_type == "MatMul" and not op.domain
        return _DeviceKernel(op, kernel, host_operands(op), is_product)

    # Bookkeeping

    def drain(self) -> None:
        """Wait for all that was enqueued.

        Raises
        ------
        KernelError
            Some of it has failed.
        """
        self._window.until()

    def close(self) -> None:
        """Forget what was placed and what is under way."""
        self._window.forget()
        self._placed.clear()

    def usage(self) -> DeviceUsage:
        """Return what was done on the device."""
        return self._counters.usage(self.device.used_nbytes())

    def on_device(self, value: Any) -> Any:
        """Return a value as the device has it, on the calling thread's stream; what it lacks is placed."""
        if isinstance(value, Resident):
            return value.on(self)
        if isinstance(value, _Part):
            return value.array
        if not isinstance(value, np.ndarray | np.generic):
            return value  # the device's own
        array = np.asarray(value)
        known = self._placed.get(id(array))
        if known is not None and known[0]() is array:
            self.device.wait(known[2])
            return known[1]
        placed = self.to_device(array)
        if array is value:
            key = id(array)
            reference = weakref.ref(array, lambda _: self._placed.pop(key, None))
            self._placed[key] = (reference, placed, self.device.record())
        return placed

    def on_host(self, value: Any) -> Any:
        """Return a value as the host has it."""
        if isinstance(value, _Part):
            value = value.array
        if value is None or isinstance(value, Resident | np.ndarray | np.generic):
            return host_value(value)
        if not hasattr(value, "dtype"):
            return value
        self._window.until()  # tells which op has failed, if one has
        return self.to_host(value, self.device.record())

    def step(self, call: Callable[[], Any], what: str, nbytes: int) -> tuple[Any, tuple[Event, Event]]:
        """Enqueue a step; return what it yields, and the events around it."""
        start = self.device.record()
        result = self._with_memory(call, what, nbytes)
        return result, (start, self.device.record())

    def note_step(
        self, what: str, ids: tuple[int, ...], events: tuple[Event, Event], work: Work, keeps: list[Any]
    ) -> None:
        """Account for a step that was enqueued."""
        batched = {"batches": 1, "batched_ops": len(ids)} if len(ids) > 1 else {}
        self._counters.add(ops=len(ids), **batched)
        self._window.add(what, ids, events, work, keeps)

    def note_host_op(self) -> None:
        """Account for an op that ran on the host."""
        self._counters.add(host_ops=1)

    def _with_memory(self, call: Callable[[], Any], what: str, nbytes: int) -> Any:
        """Call; where the device has no memory left, make room and call again."""
        with suppress(MemoryError):
            return call()
        self._window.until()
        self._placed.clear()
        while True:
            self.device.release_free()
            # Errors are not kept: their tracebacks hold operands.
            with suppress(MemoryError):
                return call()
            if not self._spill():
                break
        used, total = self.device.used_nbytes(), self.device.total_nbytes()
        raise KernelError(
            f"{what}, of {nbytes:,} B of operands, ran out of memory on {self.device.name}: {used:,} of "
            f"{total:,} B are in use, and nothing is left to spill to the host"
        )


class _Run:
    """The values of a plan while it is enqueued."""

    def __init__(
        self, runner: DeviceRunner, plan: Plan, kernels: Sequence[_DeviceKernel], values: list[Any]
    ) -> None:
        self._runner = runner
        self._plan = plan
        self._kernels = kernels
        self._values = values

    def shape_of_product(self, at: int) -> Hashable:
        """Return what products that go out together have in common; None for one that must go alone."""
        operands = [self._values[value] for value in self._plan.steps[at][1]]
        shapes = tuple(_told(value) for value in operands)
        if any(len(shape) != 2 or dtype not in ("float32", "float64") for shape, dtype in shapes):
            return None
        return shapes

    def most_in_batch(self, at: int) -> int:
        """Return how many products like one fit a batch."""
        (rows, _), (_, columns) = (_told(self._values[value])[0] for value in self._plan.steps[at][1])
        shapes = [_told(self._values[value]) for value in self._plan.steps[at][1]]
        each = sum(shape[0] * shape[1] for shape, _ in shapes) + rows * columns
        nbytes = max(1, each * np.dtype(shapes[0][1]).itemsize)
        return max(1, int(_BATCH_SHARE * self._runner.device.total_nbytes() / nbytes))

    def enqueue(self, group: Sequence[int], work: Work, providers: Sequence[str]) -> None:
        """Enqueue a step, or several as one."""
        if len(group) == 1:
            self._enqueue_one(group[0], work, providers)
        else:
            self._enqueue_batch(group, work)

    def _enqueue_one(self, at: int, work: Work, providers: Sequence[str]) -> None:
        kernel, inputs, outputs, _ = self._plan.steps[at]
        used = self._kernels[kernel]
        op = replace(used.op, name=self._plan.names[at])
        operands = [self._values[value] if value >= 0 else None for value in inputs]
        results = None
        if used.on_device is not None:
            results = self._on_device(used, op, operands, self._plan.ids[at], work)
        if results is None:
            results = self._on_host(op, operands, self._plan.ids[at], work, providers)
        self._keep(outputs, results)

    def _on_device(
        self, used: _DeviceKernel, op: Op, operands: Sequence[Any], op_id: int, work: Work
    ) -> tuple[Any, ...] | None:
        """Return the results of an op on the device, None where its kernel declines."""
        runner, kernel = self._runner, used.on_device
        assert kernel is not None
        placed = [
            value
            if value is None
            else (runner.on_host if i in used.host_operands else runner.on_device)(value)
            for i, value in enumerate(operands)
        ]
        what = f"op {op.name!r} ({op.kind})"
        nbytes = sum(int(getattr(value, "nbytes", 0)) for value in placed)
        is_product = op.op_type == "MatMul" and not op.domain
        try:
            call = (lambda: (runner.device.product(*placed),)) if is_product else (lambda: kernel(*placed))
            results, events = runner.step(call, what, nbytes)
        except DeclinedError:
            return None
        except FerroflowError:
            raise
        except Exception as error:
            raise failure(op, self._plan.opsets, (DEVICE_PROVIDER,), placed, error) from error
        runner.note_step(what, (op_id,), events, work, [placed, results])
        return tuple(results)

    def _on_host(
        self, op: Op, operands: Sequence[Any], op_id: int, work: Work, providers: Sequence[str]
    ) -> tuple[Any, ...]:
        values = [self._runner.on_host(value) for value in operands]
        start = self._runner.clock()
        try:
            results = shared_kernel(op, self._plan.opsets, providers)(*values)
        except Exception as error:
            raise failure(op, self._plan.opsets, providers, values, error) from error
        self._runner.note_host_op()
        work.ran(op_id, self._runner.clock() - start)
        return tuple(results)

    def _enqueue_batch(self, group: Sequence[int], work: Work) -> None:
        runner = self._runner
        steps = [self._plan.steps[at] for at in group]
        columns = [[self._values[step[1][i]] for step in steps] for i in (0, 1)]
        names = [self._plan.names[at] for at in group]
        what = f"ops {names[0]!r} to {names[-1]!r} (MatMul, {len(names)} in a batch)"
        nbytes = 3 * sum(_nbytes(value) for value in columns[0])

        def call() -> tuple[Any, ...]:
            a, b = self._stacked(columns[0], True), self._stacked(columns[1], False)
            return a, b, _batched_product(runner.device, a, b)

        (a, b, stack), events = runner.step(call, what, nbytes)
        runner.note_step(what, tuple(self._plan.ids[at] for at in group), events, work, [a, b, stack])
        for item, step in enumerate(steps):
            self._keep(step[2], (_Part(stack, item),))

    def _stacked(self, column: Sequence[Any], is_left: bool) -> Any:
        """Return one operand of several products as a stack; on the right as it is, if all have the same."""
        first = column[0]
        if not is_left and all(value is first for value in column):
            return self._runner.on_device(first)
        if isinstance(first, _Part) and first.stack.shape[0] == len(column):
            parts = [value for value in column if isinstance(value, _Part) and value.stack is first.stack]
            if [part.item for part in parts] == list(range(len(column))):
                return first.stack
        return np.stack([self._runner.on_device(value) for value in column])

    def _keep(self, outputs: Sequence[int], results: Sequence[Any]) -> None:
        for value, result in zip(outputs, results, strict=True):
            if value >= 0:
                self._values[value] = result

    def drop_read(self, group: Sequence[int], n_reads: list[int]) -> None:
        """Let go of values that nobody reads any more."""
        for at in group:
            _, inputs, outputs, _ = self._plan.steps[at]
            for value in inputs:
                if value >= 0:
                    n_reads[value] -= 1
            for value in (*inputs, *outputs):
                if value >= 0 and not n_reads[value]:
                    self._values[value] = None

    def export(self, value: int) -> tuple[Any, bool]:
        """Return a value that is wanted, and whether it is not on the device."""
        found = self._values[value]
        if isinstance(found, _Part):  # on its own, the others would stay with it
            return found.array.copy(), False
        return found, found is None or isinstance(found, Resident | np.ndarray | np.generic | list)


def _batched_product(device: Device, a: Any, b: Any) -> Any:
    if b.ndim == 2:  # one for all: rows of the left ones after each other make one product
        n, rows, inner = a.shape
        return device.product(a.reshape(n * rows, inner), b).reshape(n, rows, b.shape[-1])
    return device.product(a, b)


def _told(value: Any) -> tuple[tuple[int, ...], str]:
    if isinstance(value, _Part):
        return tuple(value.stack.shape[1:]), str(value.stack.dtype)
    return tuple(getattr(value, "shape", ())), str(getattr(value, "dtype", ""))


def _nbytes(value: Any) -> int:
    shape, dtype = _told(value)
    return int(np.prod(shape)) * np.dtype(dtype).itemsize
