"""Hooks: the methods by which installed features hear of events, or answer for the plugin."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from dask.typing import Key

from ferroflow_dask.policy.events import Event

if TYPE_CHECKING:
    from distributed.scheduler import TaskState, WorkerState


_Filter = Callable[["TaskState", "WorkerState", dict[str, Any]], dict[str, Any]]


class Watch(NamedTuple):
    """Tasks of which a feature follows the transitions.

    Parameters
    ----------
    keys : collection of Key
        Kept by the feature. No transition is followed while it is empty.
    by_key : bool
        Whether only transitions of these tasks are followed, not those of all tasks.
    changed : callable
        Called with the key, the state before and the state after.
    """

    keys: Collection[Key]
    by_key: bool
    changed: Callable[[Key, str, str], object]


class Hooks:
    """Methods of the installed features, by name; those that no feature defines itself are not called."""

    def __init__(self) -> None:
        self.connect((), object)

    def connect(self, features: Iterable[Any], base: type) -> None:
        """Collect the methods of features that differ from those of `base`, in their order."""
        features = tuple(features)

        def answers(name: str) -> list[tuple[Any, Callable[..., Any]]]:
            own = [one for one in features if getattr(type(one), name) is not getattr(base, name)]
            return [(one, getattr(one, name)) for one in own]

        def of(name: str) -> tuple[Callable[..., Any], ...]:
            return tuple(call for _, call in answers(name))

        # The scheduler's events
        self.add_worker: tuple[Callable[[str], None], ...] = of("add_worker")
        self.remove_worker: tuple[Callable[[str], None], ...] = of("remove_worker")
        self.add_client: tuple[Callable[[str], None], ...] = of("add_client")
        self.remove_client: tuple[Callable[[str], None], ...] = of("remove_client")
        self.update_graph: tuple[Callable[[], None], ...] = of("update_graph")
        self.worker_dies: tuple[Callable[[str], Collection[Key]], ...] = of("worker_dies")
        self.log_event: tuple[Callable[[str, dict[str, Any]], None], ...] = of("log_event")
        self.restart: tuple[Callable[[], None], ...] = of("restart")
        self.failed: tuple[Callable[[], None], ...] = of("failed")
        # Events of tasks
        self.task_sent: tuple[Callable[[TaskState], None], ...] = of("task_sent")
        self.task_waits: tuple[Callable[[TaskState], None], ...] = of("task_waits")
        self.task_moved: tuple[Callable[[Key], None], ...] = of("task_moved")
        self.task_redefined: tuple[Callable[[Key], None], ...] = of("task_redefined")
        self.task_failed: tuple[Callable[[TaskState], None], ...] = of("task_failed")
        self.task_reported: tuple[Callable[[TaskState, dict[str, Any]], None], ...] = of("task_reported")
        self.watches = tuple(watch for one in features for watch in one.watches())
        # Events of the plugin
        self.wants_pass: tuple[Callable[[], bool], ...] = of("wants_pass")
        self.in_pass: tuple[Callable[[], None], ...] = of("in_pass")
        self.policy_took: tuple[Callable[[Event, float], None], ...] = of("policy_took")
        # Answers, each with the tasks for which it is asked
        self.place = tuple((one.placed, call) for one, call in answers("place"))
        self.instead = tuple((one.placed, call) for one, call in answers("instead"))
        self.result_of: tuple[Callable[[Key], bytes | None], ...] = of("result_of")
        # Filters and facts
        self.message: tuple[tuple[object, _Filter], ...] = tuple(
            (one.filtered, call) for one, call in answers("message")
        )
        self.may_drop: tuple[Callable[[Key, str], bool], ...] = of("may_drop")
        self.arrives_with: tuple[Callable[[TaskState], Collection[Key]], ...] = of("arrives_with")
        self.brings: tuple[Callable[[WorkerState, Key], bool], ...] = of("brings")

    def task_changed(self, key: Key, start: str, finish: str) -> None:
        """Report the transition of a task to the features that watch it.

        `TaskEvents.transition` has the same loop: a call for each transition would be five a task.
        """
        for watched, by_key, changed in self.watches:
            if watched and (not by_key or key in watched):
                changed(key, start, finish)


def take_reported(ts: TaskState, metadata: dict[str, Any], name: str) -> Any:
    """Take an entry out of the metadata in the report of a task, as if it had none; None if there is none.

    `InlinedResults` does the same inline: most tasks report a result.
    """
    value = metadata.pop(name, None)
    if ts.metadata is not None:
        value = ts.metadata.pop(name, value)
        ts.metadata = ts.metadata or None
    return value
