"""Policy interface: the abstract base class of all policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from ferroflow_dask.policy.events import Event
from ferroflow_dask.policy.instructions import Instruction
from ferroflow_dask.policy.view import ClusterView


class Policy(ABC):
    """Decides where tasks run: a pure function of the event, the view and the time.

    A policy reads no clock and no global random generator, and changes nothing but itself. The same events
    in the same order give the same instructions. Only `handle` must be written.
    """

    #: Whether the policy also places root tasks that Dask would keep in the scheduler's queue.
    places_queued: ClassVar[bool] = False
    #: Events to which the policy never answers; it need not get them.
    ignores: ClassVar[frozenset[type[Event]]] = frozenset()
    #: Whether a task may be prefetched to the worker that holds or makes all of its inputs.
    keeps_successors: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        # A subclass with an answer of its own gets all events, whatever the class ignores that it extends.
        if "handle" in vars(cls) and "ignores" not in vars(cls):
            cls.ignores = frozenset()

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
