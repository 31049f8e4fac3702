"""Samples on the scheduler: a few tasks of an arriving graph run first, so that the others can be bundled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dask._task_spec import GraphNode
from dask.typing import Key

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

#: Longest wait for the first task of a sample, as new workers import libraries, and again for the others [s].
_FIRST_S = 2.0
#: Wait for the others: at least so long [s], and this part of the expected duration of the graph.
_LEAST_S, _MOST_PART = 0.05, 0.05
#: States of tasks that have not ended.
_UNENDED = frozenset({"waiting", "no-worker", "queued", "processing"})


class Sample:
    """Some tasks of a graph; stands for an expression of them.

    Parameters
    ----------
    tasks : dict of Key to GraphNode
        Complete, but for dependencies that exist already.
    kept : collection of Key
        Those whose results the client or tasks outside the sample read.
    annotations : mapping of str to mapping of Key to object
        Annotations of the whole graph by type and key.
    """

    def __init__(
        self,
        tasks: dict[Key, GraphNode],
        kept: Collection[Key],
        annotations: Mapping[str, Mapping[Key, Any]],
    ) -> None:
        self.tasks = tasks
        self.kept = frozenset(kept)
        self._annotations = annotations

    def __dask_graph__(self) -> dict[Key, GraphNode]:
        """Return the tasks; called by Dask in its offload thread."""
        return dict(self.tasks)

    def __dask_annotations__(self) -> dict[str, dict[Key, Any]]:
        """Return the annotations by type and key; called by Dask after `__dask_graph__`."""
        return {name: dict(by_key) for name, by_key in self._annotations.items()}


class Samples:
    """Lets samples run and waits for them.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        #: Samples whose tasks have not all ended; several clients may have the same task in theirs.
        self.running: list[_Running] = []
        self._is_open = True

    def changed(self, key: Key) -> None:
        """Note that the state of a task has changed."""
        for running in self.running:
            if key in running.keys and self._has_ended(key):
                running.keys.discard(key)
                running.event.set()

    def close(self) -> None:
        """Wait for no sample any more: `changed` may not be called again."""
        self._is_open = False
        for running in self.running:
            running.keys.clear()
            running.event.set()

    def _has_ended(self, key: Key) -> bool:
        ts = self._scheduler.tasks.get(key)
        return ts is None or ts.state not in _UNENDED

    async def run(
        self, sample: Sample, submit: Callable[[], Awaitable[None]], expected_s: Callable[[], float]
    ) -> None:
        """Submit a sample and wait until it has ended, or until waiting longer might cost more than it gains.

        Parameters
        ----------
        sample : Sample
        submit : callable
            Lets Dask create the tasks.
        expected_s : callable
            Returns the expected duration of the whole graph [s] by what is known now.
        """
        await submit()
        if not self._is_open:
            return
        running = _Running({key for key in sample.tasks if not self._has_ended(key)})
        self.running.append(running)
        clock = asyncio.get_running_loop().time
        deadline = clock() + _FIRST_S
        has_first = False
        try:
            while running.keys:
                async with asyncio.timeout_at(deadline):
                    await running.event.wait()
                running.event.clear()
                if not has_first:
                    has_first = True
                    deadline = clock() + min(max(_LEAST_S, _MOST_PART * expected_s()), _FIRST_S)
        except TimeoutError:
            pass
        finally:
            self.running.remove(running)


@dataclass(eq=False, slots=True)
class _Running:
    """Tasks of a sample that have not ended; the event is set whenever one ends."""

    keys: set[Key]
    event: asyncio.Event = field(default_factory=asyncio.Event)
