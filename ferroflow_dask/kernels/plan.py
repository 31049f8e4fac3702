"""Some ops of a graph as one piece of work: compiled once, then run with little more than the kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels.choice import signature
from ferroflow_dask.kernels.registry import anonymous, failure, shared_kernel
from ferroflow_dask.kernels.segments import PROVIDER, Repeated, Step, plans

#: What stands for an optional input that is left out.
_ABSENT = -1


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Ops in the order in which they run, their values numbered.

    Small to send: ops that have a kernel in common are described once.

    Parameters
    ----------
    ops : tuple of Op
        One for each kernel.
    steps : tuple of Step
        One for each op.
    names : tuple of str
        Of the op in each step.
    ids : tuple of int
        Likewise.
    opsets : mapping of str to int
        Of the graph.
    n_values : int
        The first ones are the arguments.
    exports : tuple of int
        The values that are returned.
    """

    ops: tuple[Op, ...]
    steps: tuple[Step, ...]
    names: tuple[str, ...]
    ids: tuple[int, ...]
    opsets: Mapping[str, int]
    n_values: int
    exports: tuple[int, ...]

    def run(
        self,
        arguments: Sequence[Any],
        providers: Sequence[str],
        clock: Callable[[], float],
        spent_s: list[float],
    ) -> list[Any]:
        """Run the ops; return the values of `exports`, and add to `spent_s` the time that each op took [s].

        Raises
        ------
        KernelNotFoundError
            No provider has one of the operators.
        KernelError
            An op failed; the message names it.
        """
        kernels = [shared_kernel(op, self.opsets, providers) for op in self.ops]
        values: list[Any] = [*arguments, *[None] * (self.n_values - len(arguments))]
        key = (tuple(kernels), self.steps, self.exports)
        repeated = plans.get(key) if _needs_sessions(kernels) else None
        n_before = len(spent_s)
        computed_by = []
        # Infinities and NaN are results like others; ONNX knows no floating-point warnings.
        with np.errstate(all="ignore"):
            before_s, at = clock(), 0
            while at < len(self.steps):
                shares = None if repeated is None else repeated.run(at, values)
                if shares is None:
                    self._run_step(at, kernels, values, providers)
                    # Of equal ops, some may be another provider's: it depends on their operands.
                    computed_by.append(kernels[self.steps[at][0]].computed_by)
                    shares = (1.0,)
                for *_, last_reads in self.steps[at : at + len(shares)]:
                    for i in last_reads:
                        values[i] = None
                after_s = clock()
                spent_s += [share * (after_s - before_s) for share in shares]
                before_s, at = after_s, at + len(shares)
        if repeated is None and PROVIDER in computed_by:
            here_s = spent_s[n_before:]
            plans.setdefault(key, Repeated(self.ops, computed_by, self.opsets, self.steps, here_s))
        return [values[i] for i in self.exports]

    def _run_step(
        self,
        at: int,
        kernels: Sequence[Callable[..., tuple[Any, ...]]],
        values: list[Any],
        providers: Sequence[str],
    ) -> None:
        kernel, inputs, outputs, _ = self.steps[at]
        operands = [values[i] if i >= 0 else None for i in inputs]
        try:
            results = kernels[kernel](*operands)
        except Exception as error:
            op = replace(self.ops[kernel], name=self.names[at])
            raise failure(op, self.opsets, providers, operands, error) from error
        for i, result in zip(outputs, results, strict=True):
            if i >= 0:
                values[i] = result


def _needs_sessions(kernels: Iterable[Any]) -> bool:
    """Return whether ops of some kernel have been computed by the provider of sessions."""
    return any(kernel.computed_by == PROVIDER for kernel in kernels)


def make_plan(graph: Graph, ops: Sequence[Op], arguments: Sequence[str], exports: Sequence[str]) -> Plan:
    """Make the plan of some ops.

    Parameters
    ----------
    graph : Graph
        That the ops are of.
    ops : sequence of Op
        In an order in which they can run.
    arguments : sequence of str
        The values that they read and do not make.
    exports : sequence of str
        The values that are wanted of them.
    """
    number = {value: i for i, value in enumerate(arguments)}
    for op in ops:
        for value in op.outputs:
            if value:
                number[value] = len(number)
    n_values = len(number)
    number[""] = _ABSENT
    needed = {"", *exports}  # by what comes later, as seen from the end
    last_reads: list[tuple[int, ...]] = []
    for op in reversed(ops):
        gone = [value for value in (*op.operands, *op.outputs) if value not in needed]
        needed.update(gone)
        last_reads.append(tuple([number[value] for value in dict.fromkeys(gone)]))
    last_reads.reverse()
    kernels: dict[Hashable, int] = {}
    distinct: list[Op] = []
    steps = []
    for op, gone_after in zip(ops, last_reads, strict=True):
        told = signature(op)
        if told not in kernels:
            kernels[told] = len(distinct)
            distinct.append(anonymous(op))
        inputs = tuple([number[value] for value in op.inputs + op.captured])
        outputs = tuple([number[value] for value in op.outputs])
        steps.append((kernels[told], inputs, outputs, gone_after))
    return Plan(
        tuple(distinct),
        tuple(steps),
        tuple(op.name for op in ops),
        tuple(op.id for op in ops),
        dict(graph.opsets),
        n_values,
        tuple(number[value] for value in exports),
    )


def single(op: Op, opsets: Mapping[str, int]) -> Plan:
    """Return the plan of one op, whose arguments are its operands and which yields all its outputs."""
    places = [name != "" for name in op.inputs] + [True] * len(op.captured)
    numbers = iter(range(len(places)))
    inputs = tuple(next(numbers) if is_there else _ABSENT for is_there in places)
    n = sum(places)
    outputs = tuple(n + i for i in range(len(op.outputs)))
    step = (0, inputs, outputs, ())
    return Plan((anonymous(op),), (step,), (op.name,), (op.id,), opsets, n + len(outputs), outputs)
