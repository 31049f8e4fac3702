"""Policy look-up: policies by name, our own and those of other packages."""

from __future__ import annotations

import inspect
from importlib.metadata import entry_points
from typing import Any

from ferroflow_dask.exceptions import UnknownNameError, UsageError
from ferroflow_dask.policy.base import Policy
from ferroflow_dask.policy.baselines import RandomPolicy, RingPolicy, StaticPolicy
from ferroflow_dask.policy.stealing import StealingPolicy

#: Entry points through which other packages offer policies.
ENTRY_POINT_GROUP = "ferroflow_dask.policies"

_BUILT_IN: dict[str, type[Policy]] = {
    "ferroflow": StealingPolicy,
    "random": RandomPolicy,
    "ring": RingPolicy,
    "static": StaticPolicy,
}


def policy_names() -> list[str]:
    """Return the names that `make_policy` accepts."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def make_policy(name: str, **options: Any) -> Policy:
    """Make a policy by name.

    Parameters
    ----------
    name : str
        One of `policy_names()`.
    **options
        Keyword arguments of the policy's class.

    Raises
    ------
    UnknownNameError
        No policy has this name.
    UsageError
        The policy does not accept an option, or the package that offers it cannot be imported or offers
        something that is no subclass of `Policy`.
    """
    cls: Any = _BUILT_IN.get(name) or _from_other_packages(name)
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise UsageError(f"policy {name!r} must be a subclass of ferroflow_dask.policy.Policy, got {cls!r}")
    parameters = inspect.signature(cls).parameters
    for option in options:
        if option not in parameters:
            accepted = ", ".join(parameters) or "none"
            raise UsageError(f"options of policy {name!r} must be among: {accepted}; got {option!r}")
    policy: Policy = cls(**options)
    return policy


def policy_name(policy: Policy) -> str:
    """Return the name of a built-in policy, the name of the class of any other."""
    kind = type(policy)
    return next((name for name, built_in in _BUILT_IN.items() if built_in is kind), kind.__name__)


def _from_other_packages(name: str) -> Any:
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            return point.load()
        except (ImportError, AttributeError) as error:
            raise UsageError(f"policy {name!r} cannot be imported from {point.value}: {error}") from error
    raise UnknownNameError.of("policy", name, policy_names())
