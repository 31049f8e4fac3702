"""Every error that this package raises on purpose.

::

    FerroflowError
    ├── UsageError (also ValueError)       a value that the caller gave is not allowed
    │   ├── GraphError                     a graph that is not well formed
    │   ├── BindError                      an input's name, shape or dtype does not fit the graph
    │   ├── StrategyError                  a strategy is damaged, or does not fit the graph or the cluster
    │   ├── TopologyError                  a topology is not well formed
    │   └── UnknownNameError               a DAG, a policy or a provider that does not exist
    ├── ModelError                         a file is no ONNX model, or not a valid one
    ├── KernelNotFoundError                no kernel provider has the operator
    ├── KernelError                        an operator failed while it ran
    ├── ResultError                        a computation's result is not what it must be
    ├── ClusterError                       the cluster cannot be reached, or cannot run our code
    └── SimulationError                    a virtual cluster comes to no end, or to a wrong one

The command line ends with status 2 on `UsageError` and with status 1 on all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from ferroflow_dask.printable import printable

#: Longer messages lose their middle: values from damaged files may have any length [characters].
_LONGEST = 2000


class FerroflowError(Exception):
    """Base of all errors raised on purpose.

    Messages contain names and values from files. They are one line of limited length, and control characters
    in them are escaped.
    """

    def __str__(self) -> str:
        """Return the message."""
        text = printable(super().__str__().replace("\n", " "))
        half = _LONGEST // 2 - 2
        return text if len(text) <= _LONGEST else f"{text[:half]} … {text[-half:]}"


class UsageError(FerroflowError, ValueError):
    """A value that the caller gave is not allowed."""


class GraphError(UsageError):
    """A graph is not well formed; the message names the op."""


class BindError(UsageError):
    """An input's name, shape or dtype does not fit the graph."""


class StrategyError(UsageError):
    """A strategy is damaged, or does not fit the graph or the cluster; the message names the operator."""


class TopologyError(UsageError):
    """A topology is not well formed, or its hosts cannot reach each other."""


class UnknownNameError(UsageError):
    """A name that is looked up does not exist."""

    @classmethod
    def of(cls, what: str, name: object, allowed: Iterable[str]) -> UnknownNameError:
        """Build the error for an unknown `name`, with the nearest of the `allowed` ones and all of them."""
        known = sorted(allowed)
        near = get_close_matches(str(name), known, n=1)
        choose = f"did you mean {near[0]!r}? Choose" if near else "choose"
        return cls(f"unknown {what} {name!r}; {choose} one of: {', '.join(known)}")


class ModelError(FerroflowError):
    """A file is no ONNX model, is damaged, or is not valid."""


class KernelNotFoundError(FerroflowError):
    """No kernel provider has the operator."""


class KernelError(FerroflowError):
    """An operator failed while it ran; the message names the op."""


class ResultError(FerroflowError):
    """A computation's result is not what it must be."""


class ClusterError(FerroflowError):
    """The cluster cannot be reached, or cannot run our code."""


class SimulationError(FerroflowError):
    """A virtual cluster comes to no end, or what must hold at its end does not."""
