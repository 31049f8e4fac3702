"""Policy interface: the abstract base class of all policies, and look-up by name."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any, ClassVar

from ferroflow_dask.exceptions import UnknownNameError, UsageError
from ferroflow_dask.policy.events import Event
from ferroflow_dask.policy.instructions import Instruction
from ferroflow_dask.policy.view import ClusterView

#: Entry points through which other packages offer policies.
ENTRY_POINT_GROUP = "ferroflow_dask.policies"


class Policy(ABC):
    """Decides where tasks run: a pure function of the event, the view and the time.

    A policy reads no clock and no global random generator, and changes nothing but itself. The same events
    in the same order give the same instructions. Only `handle` must be written.
    """

    #: Whether the policy also places root tasks that Dask would keep in the scheduler's queue.
    places_queued: ClassVar[bool] = False
    #: Whether a task may be prefetched to the worker that holds or makes all of its inputs.
    keeps_successors: ClassVar[bool] = False

    @abstractmethod
    def handle(self, event: Event, view: ClusterView, now: float) -> Iterator[Instruction]:
        """Yield instructions in answer to an event.

        Parameters
        ----------
        event : Event
        view : ClusterView
            Up to date with the event, and with each instruction once it was yielded.
        now : float
            Time of the event [s], on any clock that never goes back.
        """

    def gauges(self) -> dict[str, tuple[str, float]]:
        """Return numbers to show in the metrics: by name, a help text and the value; none by default."""
        return {}


def policy_names() -> list[str]:
    """Return the names that `make_policy` accepts."""
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
        No policy has this name.
    UsageError
        The policy does not accept an option, or the package that offers it cannot be imported or offers
        something that is no subclass of `Policy`.
    """
    cls: Any = _builtin().get(name) or _from_other_packages(name)
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise UsageError(f"policy {name!r} must be a subclass of ferroflow_dask.policy.Policy, got {cls!r}")
    parameters = inspect.signature(cls).parameters
    for option in options:
        if option not in parameters:
            accepted = ", ".join(parameters) or "none"
            raise UsageError(f"options of policy {name!r} must be among: {accepted}; got {option!r}")
    policy: Policy = cls(**options)
    return policy


def _from_other_packages(name: str) -> Any:
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            return point.load()
        except (ImportError, AttributeError) as error:
            raise UsageError(f"policy {name!r} cannot be imported from {point.value}: {error}") from error
    raise UnknownNameError.of("policy", name, policy_names())


def _builtin() -> dict[str, type[Policy]]:
    from ferroflow_dask.policy.baselines import RandomPolicy, RingPolicy, StaticPolicy
    from ferroflow_dask.policy.stealing import StealingPolicy

    return {
        "ferroflow": StealingPolicy,
        "random": RandomPolicy,
        "ring": RingPolicy,
        "static": StaticPolicy,
    }
