"""Which providers may compute an op, and in which order they are tried.

A rule may prefer another provider to onnxruntime where onnxruntime does not compute what ONNX describes. No
rule leaves an op without onnxruntime: behind all others it is tried once more, without the rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from ferroflow_dask import config
from ferroflow_dask.exceptions import KernelNotFoundError, UnknownNameError, UsageError
from ferroflow_dask.graph import custom_ops
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.kernels.provider import Provider, opset_version
from ferroflow_dask.printable import printable


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

#: The provider that is tried again without the rules.
SESSIONS = "onnxruntime"

#: The provider whose kernels also take the arrays of devices.
DEVICE_PROVIDER = "array"

#: Less than the distance of two places.
_RIGHT_AFTER = 0.5


@cache
def provider_of(name: str) -> Provider | None:
    """Return the provider, or None where its library is not installed."""
    try:
        return PROVIDERS[name]()
    except ImportError:
        return None


@cache
def _without_rules() -> Provider | None:
    try:
        from ferroflow_dask.kernels.ort_provider import OnnxRuntimeProvider
    except ImportError:
        return None
    return OnnxRuntimeProvider(has_rules=False)


@cache
def _nested(names: tuple[str, ...]) -> Provider:
    from ferroflow_dask.kernels.nested import NestedProvider

    return NestedProvider(names)


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


def candidates(names: Sequence[str], op: Op, opsets: Mapping[str, int]) -> Iterator[Provider]:
    """Yield the providers that may compute an op, in the order in which they are tried.

    One that yields to a provider behind it comes right after that one.
    """
    providers = [provider for provider in map(provider_of, names) if provider is not None]
    places = {provider.name: float(place) for place, provider in enumerate(providers)}

    def place(provider: Provider) -> float:
        yields_to = getattr(provider, "yields_to", None)
        other = None if yields_to is None else yields_to(op)
        own = places[provider.name]
        return own if other is None else max(own, places.get(other, own) + _RIGHT_AFTER)

    nested = _nested(tuple(names))
    for provider in sorted(providers, key=place):
        if provider.name == "reference" and nested.supports(op, opsets):
            yield nested
        if provider.supports(op, opsets):
            yield provider
    if "reference" not in places and nested.supports(op, opsets):
        yield nested
    last = _without_rules() if SESSIONS in names else None
    if last is not None and last.supports(op, opsets):
        yield last


def find_provider(op: Op, opsets: Mapping[str, int], providers: Sequence[str] | None = None) -> str:
    """Return the name of the provider that would be asked first to compute an op.

    Raises
    ------
    KernelNotFoundError
        No provider has the operator.
    """
    names = provider_names(providers)
    for provider in candidates(names, op, opsets):
        return provider.name
    raise not_found(op, opsets, names)


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


#: Of each graph, with which providers and libraries all of its ops are known to be supported.
_supported: WeakKeyDictionary[Graph, set[Hashable]] = WeakKeyDictionary()


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
    question = (provider_names(providers), custom_ops.libraries())
    answered = _supported.setdefault(graph, set())
    if question in answered:
        return
    known: set[Hashable] = set()
    for op in graph.live_ops:
        told = signature(op)
        if told not in known:
            find_provider(op, graph.opsets, providers)
            known.add(told)
    answered.add(question)


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


def not_found(
    op: Op, opsets: Mapping[str, int], names: Sequence[str], reason: object = ""
) -> KernelNotFoundError:
    """Return the error to raise for an op that no provider computes."""
    version = opset_version(op, opsets)
    why = f" ({one_line(reason)})" if reason else ""
    return KernelNotFoundError(
        f"no kernel for op {op.name!r} ({op.kind}, opset {version}){why}; "
        f"asked: {', '.join(names) or 'nobody'}"
    )


def one_line(reason: object) -> str:
    """Return what an error says in one line."""
    return printable(" ".join(str(reason).split())) or type(reason).__name__
