"""Runs the steps of a plan on a device: places operands, batches products, bounds what is under way.

What a device has no kernel for runs beside it, on the host.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from ferroflow_dask.device_reports import DeviceUsage
from ferroflow_dask.devices.device import Counters, Device, Event, HostArray
from ferroflow_dask.devices.enqueue import DeviceKernel, Part, PlanRun, told
from ferroflow_dask.devices.order import Order
from ferroflow_dask.devices.resident import Resident, host_value
from ferroflow_dask.devices.window import Note, Window, Work
from ferroflow_dask.exceptions import KernelError, KernelNotFoundError
from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels import DEVICE_PROVIDER, Plan, host_operands, shared_kernel

_MOST_LABELS = 10_000


class DeviceRunner:
    """A device, and the work of one worker on it.

    Parameters
    ----------
    device : Device
    spill : callable, optional
        Frees memory of the device that results take which nobody needs there at once; returns False when
        there is nothing left to free.
    on_duration : callable, optional
        Told a task's label and how long it took on the device [s], some time after it ended there. Not of
        the first one with a label on arguments of some types and shapes: kernels are compiled in it.
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
        # Labels of tasks that have run, with types and shapes of their arguments.
        self._has_run: set[Hashable] = set()
        # What the host has and the device was given, as long as the host has it.
        self._placed: dict[int, tuple[weakref.ref[HostArray], Any, Event]] = {}

    # Crossings

    def _to_device(self, array: HostArray, what: str) -> Any:
        """Enqueue a copy from the host, in `device.use()`; counted."""
        self._counters.add(to_device=1, nbytes_to_device=array.nbytes)
        return self.with_memory(lambda: self.device.to_device(array), what, array.nbytes)

    def to_host(self, array: Any, event: Event) -> HostArray:
        """Return a copy on the host of what is there once an event has come; counted.

        Raises
        ------
        KernelError
            What computes it has failed.
        """
        self._window.until(event)  # tells which op has failed, if one has
        with self._telling_what_failed(), self.device.use(computes=False):
            self.device.wait(event)
            found = self.device.to_host(array)
        self._counters.add(to_host=1, nbytes_to_host=found.nbytes)
        return found

    def wait_for(self, event: Event) -> None:
        """Wait until an event has come.

        Raises
        ------
        KernelError
            What comes before it has failed.
        """
        self._window.until(event)
        event.synchronize()

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
        work = Work(note, self._telling(label, arguments))
        run = PlanRun(self, plan, kernels, [*arguments, *[None] * (plan.n_values - len(arguments))])
        with self._telling_what_failed(), self.device.use(), np.errstate(all="ignore"):
            order = Order(plan, [kernel.is_product for kernel in kernels])
            while (group := order.next_group(run.shape_of_product, run.most_in_batch)) is not None:
                run.enqueue(group, work, providers)
                run.drop_read(group, order.n_reads)
            start = self.device.record()
            exports = [run.export(value, plan.names[-1]) for value in plan.exports]
            end = self.device.record()
            self._window.add("the end of a task", (), (start, end), work, [exports, run.read])
        self._window.complete(work)
        return [value if is_host else Resident(self, value, end) for value, is_host in exports]

    def run_session(
        self,
        session: Callable[[Mapping[str, Any]], dict[str, Any]],
        values: Mapping[str, Any],
        n_ops: int,
        label: str = "",
    ) -> tuple[dict[str, Any], float]:
        """Compute a whole graph in a session on the device, from the host and back.

        Parameters
        ----------
        session : callable
            Takes the inputs by name and returns the outputs; keeps what it needs on the device, and copies.
        values : mapping of str to array
        n_ops : int
            In the graph.
        label : str, optional
            What `on_duration` is told.

        Returns
        -------
        outputs : dict of str to array
            On the host.
        seconds : float
            What it took, the copies included [s].
        """
        inputs = {name: host_value(value) for name, value in values.items()}
        tell = self._telling(label, list(inputs.values()))
        start = self.clock()
        nbytes = sum(np.asarray(value).nbytes for value in inputs.values())
        found = self.with_memory(lambda: session(inputs), f"a session of {n_ops} ops", nbytes)
        seconds = self.clock() - start
        self._counters.add(
            ops=n_ops,
            to_device=len(inputs),
            to_host=len(found),
            nbytes_to_device=nbytes,
            nbytes_to_host=sum(value.nbytes for value in found.values()),
        )
        tell(seconds)
        return found, seconds

    @contextmanager
    def _telling_what_failed(self) -> Iterator[None]:
        """Where a device has failed, whatever is asked of it fails: tell what did it."""
        try:
            yield
        except Exception as error:
            failure = self._window.failure()
            if failure is None or (isinstance(error, KernelError) and not self._window.has_suspects):
                raise
            raise failure from error

    def _telling(self, label: str, arguments: Sequence[Any]) -> Callable[[float], None]:
        """Return what is told how long a task took [s]."""
        key = (label, tuple(map(told, arguments)))
        if key in self._has_run:
            return lambda seconds: self._on_duration(label, seconds)
        if len(self._has_run) >= _MOST_LABELS:  # bounded; each then stays untold once more
            self._has_run.clear()
        self._has_run.add(key)
        return lambda _seconds: None

    def _kernel(self, op: Op, plan: Plan, providers: Sequence[str]) -> DeviceKernel:
        try:
            kernel = shared_kernel(op, plan.opsets, (DEVICE_PROVIDER,))
        except KernelNotFoundError:
            shared_kernel(op, plan.opsets, providers)  # raises where nobody has it
            return DeviceKernel(op, None, frozenset())
        return DeviceKernel(op, kernel, host_operands(op))

    # Bookkeeping

    def drain(self) -> None:
        """Wait for all that was enqueued.

        Raises
        ------
        KernelError
            Some of it has failed.
        """
        self._window.until()

    def reap(self) -> None:
        """Account for what has ended, without waiting, and let go of what it read."""
        self._window.reap()

    @property
    def is_broken(self) -> bool:
        """Whether work has failed late: a CUDA context is of no use after that."""
        return self._window.has_failed

    def close(self) -> None:
        """Let go of what was placed, and of what is under way once that has ended."""
        with suppress(KernelError):
            self._window.until()
        self._window.forget()
        self._placed.clear()

    def usage(self) -> DeviceUsage:
        """Return what was done on the device."""
        return self._counters.usage(self.device.used_nbytes())

    def on_device(self, value: Any, what: str = "a copy from the host") -> Any:
        """Return a value as the device has it, on the calling thread's stream; what it lacks is placed.

        Where there is no memory for that, the error says for what it is.
        """
        if isinstance(value, Resident):
            return value.on(self)
        if isinstance(value, Part):
            return value.array
        if not isinstance(value, np.ndarray | np.generic):
            return value  # the device's own
        array = np.asarray(value)
        known = self._placed.get(id(array))
        if known is not None and known[0]() is array:
            self.device.wait(known[2])
            return known[1]
        placed = self._to_device(array, what)
        if array is value:
            key = id(array)
            reference = weakref.ref(array, lambda _: self._placed.pop(key, None))
            self._placed[key] = (reference, placed, self.device.record())
        return placed

    def on_host(self, value: Any) -> Any:
        """Return a value as the host has it."""
        if isinstance(value, Part):
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
        result = self.with_memory(call, what, nbytes)
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

    def _tried(self, call: Callable[[], Any]) -> tuple[Any] | None:
        """Return what a call yields; None where there was no memory left."""
        try:
            return (call(),)
        except Exception as error:
            if not self.device.lacks_memory(error):
                raise
        return None  # the error is not kept: its traceback holds operands

    def with_memory(self, call: Callable[[], Any], what: str, nbytes: int) -> Any:
        """Call; where the device has no memory left, make room and call again."""
        if found := self._tried(call):
            return found[0]
        self._window.until()
        self._placed.clear()
        while True:
            self.device.release_free()
            if found := self._tried(call):
                return found[0]
            if not self._spill():
                break
        used, total = self.device.used_nbytes(), self.device.total_nbytes()
        raise KernelError(
            f"{what}, of {nbytes:,} B of operands, ran out of memory on {self.device.name}: {used:,} of "
            f"{total:,} B are in use, and nothing is left to spill to the host"
        )
