"""What every policy is, and how one is found by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any, ClassVar, Protocol

from ferroflow_dask.exceptions import UnknownNameError, UsageError
from ferroflow_dask.policy.events import Event
from ferroflow_dask.policy.instructions import Instruction
from ferroflow_dask.policy.view import ClusterView

#: Entry points through which other packages offer policies.
ENTRY_POINT_GROUP = "ferroflow_dask.policies"


class Policy(Protocol):
    """Decides where tasks run; a pure function of events, the view and time.

    A policy reads no clock and no global random generator, and mutates nothing but itself. The
    same events in the same order give the same instructions.
    """

    #: Whether the policy also places tasks that Dask would keep in its queue on the scheduler.
    places_queued: ClassVar[bool]

    def handle(self, event: Event, view: ClusterView, now: float) -> Iterator[Instruction]:
        """Yield instructions in answer to an event.

        Parameters
        ----------
        event : Event
        view : ClusterView
            Up to date with the event, and with each instruction once it was yielded.
        now : float
            Time of the event [s] on any clock that only goes forward.
        """
        ...


def policy_names() -> list[str]:
    """Return the names that `make_policy` knows."""
    return sorted({*_builtin(), *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


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
        There is no such policy.
    UsageError
        The policy does not take these options, or the package that offers it cannot be imported.
    """
    cls: Any = _builtin().get(name) or _from_other_packages(name)
    parameters = inspect.signature(cls).parameters
    for option in options:
        if option not in parameters:
            takes = ", ".join(parameters) or "none"
            raise UsageError(f"policy {name!r} does not take the option {option!r}; it takes: {takes}")
    policy: Policy = cls(**options)
    return policy


def _from_other_packages(name: str) -> Any:
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            return point.load()
        except (ImportError, AttributeError) as error:
            raise UsageError(f"policy {name!r} is offered as {point.value}, which fails: {error}") from error
    raise UnknownNameError.of("policy", name, policy_names())


def _builtin() -> dict[str, Any]:
    from ferroflow_dask.policy.random import RandomPolicy
    from ferroflow_dask.policy.ring import RingPolicy
    from ferroflow_dask.policy.static import StaticPolicy
    from ferroflow_dask.policy.stealing import StealingPolicy

    return {
        "ferroflow": StealingPolicy,
        "random": RandomPolicy,
        "ring": RingPolicy,
        "static": StaticPolicy,
    }
