"""The steps of a plan, enqueued on a device one after another, and the values that they hand on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ferroflow_dask.devices.products import (
    Told,
    as_matrices,
    common,
    has_function,
    is_product,
    nbytes_of,
    product,
)
from ferroflow_dask.devices.resident import Resident
from ferroflow_dask.devices.window import Work
from ferroflow_dask.exceptions import FerroflowError, KernelError
from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels import DEVICE_PROVIDER, DeclinedError, Plan, failure, one_line, shared_kernel

if TYPE_CHECKING:
    from ferroflow_dask.devices.runner import DeviceRunner

#: Part of the memory that the operands and results of one batch may take.
_BATCH_SHARE = 1 / 8
#: Elements of what may be a shape, or axes.
_MOST_STEERING = 64


@dataclass(frozen=True, slots=True)
class Part:
    """One of the results of a batch: an item of a stack of them."""

    stack: Any
    item: int

    @property
    def array(self) -> Any:
        """The item, a view of the stack."""
        return self.stack[self.item]


@dataclass(frozen=True, slots=True)
class DeviceKernel:
    """How an op is computed: on the device, unless `on_device` is None."""

    op: Op
    on_device: Callable[..., tuple[Any, ...]] | None
    host_operands: frozenset[int]

    @property
    def is_product(self) -> bool:
        """Whether it is a product of matrices, or of stacks of them."""
        return self.on_device is not None and is_product(self.op)


class PlanRun:
    """The values of a plan while it is enqueued."""

    def __init__(
        self, runner: DeviceRunner, plan: Plan, kernels: Sequence[DeviceKernel], values: list[Any]
    ) -> None:
        self._runner = runner
        self._plan = plan
        self._kernels = kernels
        self._values = values
        #: What has been read by work that belongs to no step.
        self.read: list[Any] = []

    def shape_of_product(self, at: int) -> Hashable:
        """Return what products that go out together have in common; None for one that must go alone."""
        return common(_told_of(self._operands(at)))

    def most_in_batch(self, at: int) -> int:
        """Return how many products like one fit a batch."""
        nbytes = max(1, nbytes_of(self._op(at), _told_of(self._operands(at))))
        return max(1, int(_BATCH_SHARE * self._runner.device.total_nbytes() / nbytes))

    def _operands(self, at: int) -> list[Any]:
        return [self._values[value] if value >= 0 else None for value in self._plan.steps[at][1]]

    def _op(self, at: int) -> Op:
        return self._kernels[self._plan.steps[at][0]].op

    def enqueue(self, group: Sequence[int], work: Work, providers: Sequence[str]) -> None:
        """Enqueue a step, or several as one."""
        if len(group) == 1:
            self._enqueue_one(group[0], work, providers)
        else:
            self._enqueue_batch(group, work)

    def _enqueue_one(self, at: int, work: Work, providers: Sequence[str]) -> None:
        kernel, _, outputs, _ = self._plan.steps[at]
        used = self._kernels[kernel]
        op = replace(used.op, name=self._plan.names[at])
        operands = self._operands(at)
        results = None
        if used.on_device is not None and not all(map(_is_steering, operands)):
            results = self._on_device(used, op, operands, self._plan.ids[at], work)
        if results is None:
            results = self._on_host(op, operands, self._plan.ids[at], work, providers)
        self._keep(outputs, results)

    def _on_device(
        self, used: DeviceKernel, op: Op, operands: Sequence[Any], op_id: int, work: Work
    ) -> tuple[Any, ...] | None:
        """Return the results of an op on the device, None where its kernel declines."""
        runner, kernel = self._runner, used.on_device
        assert kernel is not None
        if not all(map(_is_for_devices, operands)):
            return None
        what = f"op {op.name!r} ({op.kind})"
        with self._naming(what):
            placed = [
                None if value is None else self._placed(value, i in used.host_operands, what)
                for i, value in enumerate(operands)
            ]
        nbytes = sum(int(getattr(value, "nbytes", 0)) for value in placed)
        try:
            call: Callable[[], tuple[Any, ...]] = lambda: kernel(*placed)  # noqa: E731
            if used.is_product and has_function(op, _told_of(placed)):
                call = lambda: (product(runner.device, op, placed),)  # noqa: E731
            results, events = runner.step(call, what, nbytes)
        except DeclinedError:
            self.read += placed  # some of its work may be under way
            return None
        except FerroflowError:
            raise
        except Exception as error:
            raise failure(op, self._plan.opsets, (DEVICE_PROVIDER,), placed, error) from error
        runner.note_step(what, (op_id,), events, work, [placed, results])
        return tuple(results)

    def _placed(self, value: Any, is_for_host: bool, what: str) -> Any:
        return self._runner.on_host(value) if is_for_host else self._runner.on_device(value, what)

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
        columns = list(zip(*map(self._operands, group), strict=True))
        op, names = self._op(group[0]), [self._plan.names[at] for at in group]
        what = f"ops {names[0]!r} to {names[-1]!r} ({op.op_type}, {len(names)} in a batch)"
        operands = {id(value): value for column in columns for value in column}
        nbytes = sum(map(_nbytes, operands.values()))

        def call() -> tuple[Any, list[Any]]:
            read: list[Any] = []
            stacks = [self._stacked(column, not i, what, read) for i, column in enumerate(columns)]
            return product(runner.device, op, stacks), [stacks, read]

        with self._naming(what):
            (stack, read), events = runner.step(call, what, nbytes)
        runner.note_step(what, tuple(self._plan.ids[at] for at in group), events, work, [read, stack])
        for item, at in enumerate(group):
            self._keep(self._plan.steps[at][2], (Part(stack, item),))

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Let errors of the device tell what failed there."""
        try:
            yield
        except FerroflowError:
            raise
        except Exception as error:
            raise KernelError(f"{what} failed on {self._runner.device.name}: {one_line(error)}") from error

    def _stacked(self, column: Sequence[Any], is_left: bool, what: str, read: list[Any]) -> Any:
        """Return one operand of several products as a stack; as it is, if all have the same on the right.

        What is copied for it is added to `read`.
        """
        first = column[0]
        if not is_left and all(value is first for value in column):
            return None if first is None else self._runner.on_device(first, what)
        if isinstance(first, Part) and first.stack.shape[0] == len(column):
            parts = [value for value in column if isinstance(value, Part) and value.stack is first.stack]
            if [part.item for part in parts] == list(range(len(column))):
                return first.stack
        arrays = [self._runner.on_device(value, what) for value in column]
        read += arrays
        return as_matrices(np.stack(arrays))

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

    def export(self, value: int, last: str) -> tuple[Any, bool]:
        """Return a value that is wanted, and whether it is not on the device; `last` names the last op."""
        found = self._values[value]
        if found is None or isinstance(found, Resident | np.ndarray | np.generic | list):
            return found, True
        array = found.array if isinstance(found, Part) else found
        if _is_part_of_more(array) or not array.flags.c_contiguous:
            # What it is a view of would stay with it; and to be sent it must be contiguous, which takes
            # memory of the device that may be lacking then.
            what = f"a copy of the results up to op {last!r}"
            self.read.append(array)
            return self._runner.with_memory(array.copy, what, array.nbytes), False
        return array, False


def _is_steering(value: Any) -> bool:
    """Return whether a value is a few integers on the host, like a shape: what comes of it stays there."""
    is_small = isinstance(value, np.ndarray | np.generic) and value.size <= _MOST_STEERING
    return value is None or (is_small and value.dtype.kind in "iub")


def _is_part_of_more(array: Any) -> bool:
    base = getattr(array, "base", None)
    return base is not None and base.nbytes > array.nbytes


def _is_for_devices(value: Any) -> bool:
    """Return whether a device takes values of this type: numbers that NumPy itself knows."""
    dtype = getattr(value, "dtype", None)
    return dtype is None or (dtype.kind in "biufc" and issubclass(dtype.type, np.number | np.bool))


def told(value: Any) -> tuple[tuple[int, ...], str]:
    """Return shape and dtype of a value, as far as it has them."""
    if isinstance(value, Part):
        return tuple(value.stack.shape[1:]), str(value.stack.dtype)
    return tuple(getattr(value, "shape", ())), str(getattr(value, "dtype", ""))


def _told_of(values: Sequence[Any]) -> list[Told]:
    return [None if value is None else told(value) for value in values]


def _nbytes(value: Any) -> int:
    shape, dtype = told(value)
    return int(np.prod(shape)) * np.dtype(dtype).itemsize
