"""Find a kernel for an op: providers are asked in order, and what they compile is kept.

Ops do not keep their identity on the way to a worker, so kernels are kept by what decides their code:
operator, opset version, attributes, and which optional inputs and outputs there are.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from zict import LRU

from ferroflow_dask import config
from ferroflow_dask.exceptions import KernelError, KernelNotFoundError, UnknownNameError, UsageError
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels.op_model import has_subgraph
from ferroflow_dask.kernels.operands import mixed_types
from ferroflow_dask.kernels.provider import DeclinedError, Kernel, Provider, opset_version

#: Kernels kept per process; an onnxruntime session takes about 0.1 MB, so this is at most some 50 MB.
_KEPT = 512


def _synthetic() -> Provider:
    from ferroflow_dask.kernels.synthetic import SyntheticProvider

    return SyntheticProvider()


def _array() -> Provider:
    from ferroflow_dask.kernels.array import ArrayProvider

    return ArrayProvider()


def _onnxruntime() -> Provider:
    from ferroflow_dask.kernels.ort_provider import OnnxRuntimeProvider

    return OnnxRuntimeProvider()


def _reference() -> Provider:
    from ferroflow_dask.kernels.reference import ReferenceProvider

    return ReferenceProvider()


#: Imported on first use: onnxruntime and onnx.reference take a good part of a second.
PROVIDERS: Mapping[str, Callable[[], Provider]] = {
    "synthetic": _synthetic,
    "array": _array,
    "onnxruntime": _onnxruntime,
    "reference": _reference,
}


#: Less than the distance of two places.
_RIGHT_AFTER = 0.5

#: The provider whose kernels also take the arrays of devices.
DEVICE_PROVIDER = "array"


@cache
def _provider(name: str) -> Provider | None:
    """Return the provider, or None where its library is not installed."""
    try:
        return PROVIDERS[name]()
    except ImportError:
        return None


def provider_names(providers: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the providers to ask, those of the configuration if none are given.

    Raises
    ------
    UnknownNameError
        There is no provider of that name.
    UsageError
        It is a name, and no list of them.
    """
    if isinstance(providers, str):
        raise UsageError(f"providers is {providers!r}; it must be a list of names: [{providers!r}]")
    names = tuple(config.get_names("kernels.providers") if providers is None else providers)
    for name in names:
        if name not in PROVIDERS:
            raise UnknownNameError.of("kernel provider", name, PROVIDERS)
    return names


def _installed(names: Sequence[str], op: Op) -> list[Provider]:
    """Return the providers to ask for an op, in this order.

    One that yields to a provider behind it is asked right after that one.
    """
    providers = [provider for provider in map(_provider, names) if provider is not None]
    places = {provider.name: float(place) for place, provider in enumerate(providers)}

    def place(provider: Provider) -> float:
        yields_to = getattr(provider, "yields_to", None)
        other = None if yields_to is None else yields_to(op)
        own = places[provider.name]
        return own if other is None else max(own, places.get(other, own) + _RIGHT_AFTER)

    return sorted(providers, key=place)


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
        raises KernelError, which names the op, when the op fails.

    Raises
    ------
    KernelNotFoundError
        No provider has the operator.
    UnknownNameError
        There is no provider of that name.
    KernelError
        The op's attributes make no sense to the provider.
    """
    names = provider_names(providers)
    return _NamedKernel(op, shared_kernel(op, opsets, names), names)


def shared_kernel(op: Op, opsets: Mapping[str, int], providers: Sequence[str] | None = None) -> _Dispatcher:
    """Return what ops that differ by name only share: a kernel whose errors are as they come.

    `failure` turns them into those of `compile_op`, which takes and raises the same.
    """
    names = provider_names(providers)
    dispatcher = _dispatcher(op, opsets, names)
    try:
        found = dispatcher.kernel(0)
    except Exception as error:
        raise KernelError(f"op {op.name!r} ({op.kind}) cannot be compiled: {one_line(error)}") from error
    if found is None:
        raise _not_found(op, opsets, names)
    return dispatcher


def host_operands(op: Op) -> frozenset[int]:
    """Return which operands of an op a kernel of `DEVICE_PROVIDER` reads as the host's, by position."""
    from ferroflow_dask.kernels.array import ArrayProvider

    provider = _provider(DEVICE_PROVIDER)
    return provider.host_operands(op) if isinstance(provider, ArrayProvider) else frozenset()


def failure(
    op: Op, opsets: Mapping[str, int], providers: Sequence[str], operands: Sequence[Any], error: Exception
) -> KernelError | KernelNotFoundError:
    """Return the error to raise where a shared kernel has raised one: it names the op."""
    reason: object = error
    if isinstance(error, DeclinedError):
        reason = mixed_types(op, opsets, operands) or error
        if reason is error and not error.failed:
            return _not_found(op, opsets, providers, error)
    told = ", ".join(map(_describe, operands))
    return KernelError(f"op {op.name!r} ({op.kind}) failed on ({told}): {one_line(reason)}")


def find_provider(op: Op, opsets: Mapping[str, int], providers: Sequence[str] | None = None) -> str:
    """Return the name of the provider that would be asked first to compute an op.

    Raises
    ------
    KernelNotFoundError
        No provider has the operator.
    """
    names = provider_names(providers)
    for provider in _installed(names, op):
        if provider.supports(op, opsets):
            return provider.name
    raise _not_found(op, opsets, names)


def provider_counts(
    graph: Graph, providers: Sequence[str] | None = None
) -> tuple[Counter[str], Counter[str]]:
    """Return how many ops each provider would be asked first for, and, by kind, those that none has."""
    found: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    for op in graph.live_ops:
        try:
            found[find_provider(op, graph.opsets, providers)] += 1
        except KernelNotFoundError:
            missing[op.kind] += 1
    return found, missing


def check_supported(graph: Graph, providers: Sequence[str] | None = None) -> None:
    """Raise for the first op that a run would execute and no provider has; nothing is compiled.

    Parameters
    ----------
    graph : Graph
    providers : sequence of str, optional
        As in `compile_op`.

    Raises
    ------
    KernelNotFoundError
        The message names the op, its operator and the providers.
    """
    known: set[Hashable] = set()
    for op in graph.live_ops:
        told = signature(op)
        if told not in known:
            find_provider(op, graph.opsets, providers)
            known.add(told)


def signature(op: Op) -> Hashable:
    """Return something that tells ops apart that have no kernel in common, in one graph.

    It is quickly made; it may tell apart what has one in common, which costs only time.
    """
    if op.captured:
        return op.id
    # Lengths tell what is there where nothing is left out.
    inputs: Hashable = tuple(map(bool, op.inputs)) if "" in op.inputs else len(op.inputs)
    outputs: Hashable = tuple(map(bool, op.outputs)) if "" in op.outputs else len(op.outputs)
    told: list[Any] = [op.domain, op.op_type, inputs, outputs]
    for name, value in op.attributes.items():
        if type(value) is float and not value:
            return op.id  # 0.0 and -0.0 are equal, but not the same
        told += (name, type(value), value)
    key = tuple(told)
    try:
        hash(key)
    except TypeError:  # lists, arrays, messages of ONNX
        return op.id
    return key


def _not_found(
    op: Op, opsets: Mapping[str, int], names: Sequence[str], reason: object = ""
) -> KernelNotFoundError:
    version = opset_version(op, opsets)
    why = f" ({one_line(reason)})" if reason else ""
    return KernelNotFoundError(
        f"no kernel for op {op.name!r} ({op.kind}, opset {version}){why}; "
        f"asked: {', '.join(names) or 'nobody'}"
    )


def one_line(reason: object) -> str:
    """Return what an error says in one line."""
    return " ".join(str(reason).split()) or type(reason).__name__


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
    """The kernels of one signature: of those that providers have, the first that does not decline is used."""

    def __init__(self, op: Op, opsets: Mapping[str, int], providers: Sequence[Provider]) -> None:
        self.opsets = dict(opsets)
        self._op = op
        self._unasked = iter(providers)
        self._kernels: list[Kernel] = []
        self._names: list[str] = []
        self._lock = threading.Lock()
        #: The provider that has computed the op the last time.
        self.computed_by = ""

    def kernel(self, index: int) -> Kernel | None:
        """Return the kernel of the provider that is `index` places behind the first supporting one."""
        with self._lock:
            while len(self._kernels) <= index:
                provider = next((p for p in self._unasked if p.supports(self._op, self.opsets)), None)
                if provider is None:
                    return None
                self._kernels.append(provider.compile(self._op, self.opsets))
                self._names.append(provider.name)
            return self._kernels[index]

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        declined = DeclinedError("nobody was asked")
        for index in itertools.count():
            kernel = self.kernel(index)
            if kernel is None:
                break
            try:
                results = kernel(*values)
            except DeclinedError as error:
                declined = error
            else:
                self.computed_by = self._names[index]
                return results
        raise declined


#: By what decides an op's kernel.
_dispatchers: LRU[Hashable, _Dispatcher] = LRU(_KEPT, {})


def _dispatcher(op: Op, opsets: Mapping[str, int], names: tuple[str, ...]) -> _Dispatcher:
    key = _key(op, opsets, names)
    with _dispatchers.lock:  # threads that ask at once get the same
        found = _dispatchers.get(key)
        if found is None:
            found = _dispatchers[key] = _Dispatcher(anonymous(op), opsets, _installed(names, op))
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
