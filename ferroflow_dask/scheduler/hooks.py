"""Hooks: the methods by which installed features hear of events, or answer for the plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ferroflow_dask.policy.events import Event

if TYPE_CHECKING:
    from distributed.scheduler import TaskState


class Hooks:
    """Methods of the installed features, by name; those that no feature defines itself are not called."""

    def __init__(self) -> None:
        self.connect((), object)

    def connect(self, features: Iterable[object], base: type) -> None:
        """Collect the methods of features that differ from those of `base`, in their order."""

        def of(name: str) -> tuple[Callable[..., Any], ...]:
            own = [one for one in features if getattr(type(one), name) is not getattr(base, name)]
            return tuple(getattr(one, name) for one in own)

        features = tuple(features)
        # The scheduler's events
        self.add_worker: tuple[Callable[[str], None], ...] = of("add_worker")
        self.remove_worker: tuple[Callable[[str], None], ...] = of("remove_worker")
        self.add_client: tuple[Callable[[str], None], ...] = of("add_client")
        self.remove_client: tuple[Callable[[str], None], ...] = of("remove_client")
        self.update_graph: tuple[Callable[[], None], ...] = of("update_graph")
        # The plugin's events
        self.task_ran: tuple[Callable[[TaskState, tuple[str, int], float, float], None], ...] = of("task_ran")
        self.wants_pass: tuple[Callable[[], bool], ...] = of("wants_pass")
        self.in_pass: tuple[Callable[[], None], ...] = of("in_pass")
        self.policy_took: tuple[Callable[[Event, float], None], ...] = of("policy_took")
