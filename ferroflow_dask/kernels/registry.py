"""Kernels of ops: compiled by the providers that may compute an op, and kept.

Ops do not keep their identity on the way to a worker, so kernels are kept by what decides their code:
operator, opset version, attributes, and which optional inputs and outputs there are.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from zict import LRU

from ferroflow_dask.exceptions import KernelError, KernelNotFoundError
from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels.choice import (
    DEVICE_PROVIDER,
    candidates,
    not_found,
    one_line,
    provider_names,
    provider_of,
)
from ferroflow_dask.kernels.op_model import has_subgraph
from ferroflow_dask.kernels.operands import mixed_types
from ferroflow_dask.kernels.provider import DeclinedError, Kernel, Provider, WrongOperandsError, opset_version
from ferroflow_dask.printable import printable

logger = logging.getLogger("ferroflow_dask")

#: Kernels kept per process; an onnxruntime session takes about 0.1 MB, so this is at most some 50 MB.
_KEPT = 512

#: Errors that are the same whichever provider computes the op.
_FINAL = (WrongOperandsError, MemoryError)

#: The provider that is much slower than all others.
_SLOW = "reference"


def _is_final(error: BaseException | None) -> bool:
    """Return whether an error, or one of an op inside that it comes from, is the same for all providers."""
    while error is not None:
        if isinstance(error, _FINAL):
            return True
        error = error.__cause__
    return False


class RefusedError(Exception):
    """No provider computes an op on these operands; never seen by users.

    Parameters
    ----------
    said : sequence of (str, Exception)
        What each provider answered, by name.
    """

    def __init__(self, said: Sequence[tuple[str, Exception]]) -> None:
        self.said = tuple(said)
        reasons: dict[tuple[str, str], None] = {}  # one may have been asked twice
        reasons.update(((name, one_line(error)), None) for name, error in said)
        one = len(reasons) == 1
        super().__init__("; ".join(reason if one else f"{name}: {reason}" for name, reason in reasons))

    @property
    def failed(self) -> bool:
        """Whether any of them has tried."""
        return any(not isinstance(error, DeclinedError) or error.failed for _, error in self.said)


def compile_op(op: Op, opsets: Mapping[str, int], providers: Sequence[str] | None = None) -> Kernel:
    """Return the kernel of an op; equal ops share what is costly about it.

    Parameters
    ----------
    op : Op
    opsets : mapping of str to int
        Versions of the graph that the op comes from (`Graph.opsets`).
    providers : sequence of str, optional
        Names of the providers to ask, in this order; the setting `kernels.providers` if left out.

    Returns
    -------
    callable
        Takes one value per entry of `op.inputs` (None for the empty string), then one per entry of
        `op.captured`; returns one per entry of `op.outputs`. It may be called from several threads, and
        raises KernelError, which names the op and what each provider answered, when all of them fail.

    Raises
    ------
    KernelNotFoundError
        No provider has the operator.
    UnknownNameError
        There is no provider of that name.
    KernelError
        The op's attributes make no sense to the providers.
    """
    names = provider_names(providers)
    return _NamedKernel(op, shared_kernel(op, opsets, names), names)


def shared_kernel(op: Op, opsets: Mapping[str, int], providers: Sequence[str] | None = None) -> _Dispatcher:
    """Return what ops that differ by name only share: a kernel whose errors are as they come.

    `failure` turns them into those of `compile_op`, which takes and raises the same.
    """
    names = provider_names(providers)
    dispatcher = _dispatcher(op, opsets, names)
    if dispatcher.kernel(0) is None:
        if dispatcher.broken:
            refused = RefusedError(dispatcher.broken)
            raise KernelError(f"op {op.name!r} ({op.kind}) cannot be compiled: {refused}") from refused
        raise not_found(op, opsets, names)
    return dispatcher


def host_operands(op: Op) -> frozenset[int]:
    """Return which operands of an op a kernel of `DEVICE_PROVIDER` reads as the host's, by position."""
    from ferroflow_dask.kernels.array import ArrayProvider

    provider = provider_of(DEVICE_PROVIDER)
    return provider.host_operands(op) if isinstance(provider, ArrayProvider) else frozenset()


def failure(
    op: Op, opsets: Mapping[str, int], providers: Sequence[str], operands: Sequence[Any], error: Exception
) -> KernelError | KernelNotFoundError:
    """Return the error to raise where a shared kernel has raised one: it names the op."""
    reason: object = error
    if isinstance(error, RefusedError | DeclinedError):
        reason = mixed_types(op, opsets, operands) or error
        if reason is error and not error.failed:
            return not_found(op, opsets, providers, error)
    told = ", ".join(map(_describe, operands))
    return KernelError(f"op {op.name!r} ({op.kind}) failed on ({told}): {one_line(reason)}")


@dataclass(frozen=True, slots=True)
class _NamedKernel:
    """A shared kernel under the name of one op, which errors carry."""

    op: Op
    dispatcher: _Dispatcher
    providers: tuple[str, ...]

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        try:
            # Infinities and NaN are results like others; ONNX knows no floating-point warnings.
            with np.errstate(all="ignore"):
                return self.dispatcher(*values)
        except Exception as error:
            opsets = self.dispatcher.opsets
            raise failure(self.op, opsets, self.providers, values, error) from error


def _describe(value: Any) -> str:
    """Return dtype and shape of a value as `TensorSpec` prints them."""
    if not hasattr(value, "dtype"):
        return type(value).__name__
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]"


class _Dispatcher:
    """The kernels of one signature: the first one that computes these operands is used."""

    def __init__(self, op: Op, opsets: Mapping[str, int], providers: Iterable[Provider]) -> None:
        self.opsets = dict(opsets)
        self._op = op
        self._unasked = iter(providers)
        self._kernels: list[tuple[str, Kernel]] = []
        self._lock = threading.Lock()
        self._has_logged = False
        #: The providers that could not compile the op, with their errors.
        self.broken: list[tuple[str, Exception]] = []
        #: The provider that has computed the op the last time.
        self.computed_by = ""

    def kernel(self, index: int) -> tuple[str, Kernel] | None:
        """Return the kernel that is `index` places behind the first one, with its provider's name."""
        with self._lock:
            while len(self._kernels) <= index:
                provider = next(self._unasked, None)
                if provider is None:
                    return None
                try:
                    self._kernels.append((provider.name, provider.compile(self._op, self.opsets)))
                except Exception as error:  # noqa: BLE001 -- another provider may compile it
                    self.broken.append((provider.name, error))
            return self._kernels[index]

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        said: list[tuple[str, Exception]] = []
        for index in itertools.count():
            found = self.kernel(index)
            if found is None:
                break
            name, kernel = found
            try:
                results = kernel(*values)
            except Exception as error:  # another provider may compute it
                if _is_final(error):
                    raise
                said.append((name, error))
            else:
                self.computed_by = name
                if said and name == _SLOW:
                    self._log(name, said)
                return results
        raise RefusedError([*said, *self.broken]) from (said[-1][1] if said else None)

    def _log(self, name: str, said: Sequence[tuple[str, Exception]]) -> None:
        if not self._has_logged:
            self._has_logged = True
            kind = printable(self._op.kind)
            logger.warning("%s is computed by %s, slowly: %s", kind, name, RefusedError(said))


#: By what decides an op's kernel.
_dispatchers: LRU[Hashable, _Dispatcher] = LRU(_KEPT, {})


def _dispatcher(op: Op, opsets: Mapping[str, int], names: tuple[str, ...]) -> _Dispatcher:
    key = _key(op, opsets, names)
    with _dispatchers.lock:  # threads that ask at once get the same
        found = _dispatchers.get(key)
        if found is None:
            found = _dispatchers[key] = _Dispatcher(anonymous(op), opsets, candidates(names, op, opsets))
        return found


def anonymous(op: Op) -> Op:
    """Return the op without the names that do not matter: all but those a sub-graph may read."""
    if has_subgraph(op):
        return op
    inputs = tuple(f"input_{i}" if value else "" for i, value in enumerate(op.inputs))
    outputs = tuple(f"output_{i}" if value else "" for i, value in enumerate(op.outputs))
    return Op(0, "", op.op_type, inputs, outputs, op.domain, op.attributes)


def _key(op: Op, opsets: Mapping[str, int], names: tuple[str, ...]) -> Hashable:
    """Return what decides an op's kernel, in time linear in its attributes."""
    same = anonymous(op)
    versions: Hashable = opset_version(op, opsets)
    if same is op:
        versions = tuple(sorted(opsets.items()))
    attributes = tuple(sorted((name, _frozen(value)) for name, value in op.attributes.items()))
    return (names, op.domain, op.op_type, versions, same.inputs, same.outputs, same.captured, attributes)


def _frozen(value: Any) -> tuple[str, Hashable]:
    """Return an attribute's value as something hashable; 1 and 1.0 and True differ, as in ONNX."""
    kind = type(value).__name__
    if isinstance(value, list | tuple):
        return "list", tuple(map(_frozen, value))
    if isinstance(value, np.ndarray):
        return kind, (value.dtype.str, value.shape, value.tobytes())
    if hasattr(value, "SerializeToString"):
        return kind, value.SerializeToString(deterministic=True)
    if isinstance(value, float | np.floating):
        return kind, float(value).hex()  # 0.0 and -0.0 are equal, but not the same
    return kind, value
