"""What a kernel is, and what a library must offer to provide some.

Providers know operators and arrays, never graphs, tasks or clusters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ferroflow_dask.graph.builder import DEFAULT_OPSET
from ferroflow_dask.graph.nodes import Op

#: Computes one op. Called with one value per entry of `op.inputs` (None for the empty string), then one
#: per entry of `op.captured`; returns one per entry of `op.outputs` (None for the empty string).
Kernel = Callable[..., tuple[Any, ...]]

#: Computes a graph: takes its inputs by name, constants among them, and returns its outputs by name.
Runner = Callable[[Mapping[str, Any]], dict[str, Any]]

#: One of onnxruntime's execution providers, which are where it computes, and its options.
ExecutionProvider = tuple[str, Mapping[str, str]]


class DeclinedError(Exception):
    """A kernel cannot take these values, though another provider's may; never seen by users.

    Parameters
    ----------
    reason : str
    failed : bool, optional
        Whether it had to try to find out: then the values, not the kernel, may be what is wrong.
    """

    def __init__(self, reason: str, failed: bool = False) -> None:
        super().__init__(reason)
        self.failed = failed


class WrongOperandsError(Exception):
    """ONNX does not know an op on such operands, whatever a library computes; never seen by users."""


class Provider(Protocol):
    """A source of kernels.

    It may also have a method `yields_to(op)`, which returns the name of a provider that is to be asked
    before it where both are among those to ask, or None.
    """

    @property
    def name(self) -> str:
        """The name in the setting `kernels.providers`."""

    def supports(self, op: Op, opsets: Mapping[str, int]) -> bool:
        """Return whether there is a kernel for this op, whatever the values will be."""

    def compile(self, op: Op, opsets: Mapping[str, int]) -> Kernel:
        """Return the kernel of a supported op.

        It is called from several threads at a time, and raises `DeclinedError` for values that only
        another provider can take. The op's own name, and those of values that no sub-graph reads, are
        placeholders: one kernel serves all ops that differ in nothing else.
        """


@dataclass(frozen=True, slots=True)
class Part:
    """Ops of a graph that one provider computes.

    Parameters
    ----------
    provider : str
        `onnxruntime` for a session, otherwise the provider that is tried first.
    ops : tuple of str
        Names, in order.
    reason : str
        Why they are not part of a session; empty for those that are.
    """

    provider: str
    ops: tuple[str, ...]
    reason: str = ""

    def __str__(self) -> str:
        if len(self.ops) == 1 and self.reason:
            return f"{self.provider}: {self.ops[0]} ({self.reason})"
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.provider}: {len(self.ops)} ops{why}"


def opset_version(op: Op, opsets: Mapping[str, int]) -> int:
    """Return the version of the op's domain that its graph is written in."""
    return opsets.get(op.domain, 1 if op.domain else DEFAULT_OPSET)
