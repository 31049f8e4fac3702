"""Worker's end of observers: reports the plugins that follow the tasks of a worker.

The scheduler asks when a plugin is registered or unregistered through it. Each heartbeat finds the changes
that it cannot see, as after `client.run`. This module is sent to workers by value and must not import this
package.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from distributed.metrics import monotonic

if TYPE_CHECKING:
    from distributed import Worker

#: Operation by which the scheduler asks a worker for a report, and name of the metric.
OPERATION = "ferroflow-observers"
#: Packages whose plugins know bundles, except for the plugins of Dask's own tests.
_PACKAGES = frozenset({"distributed", "ferroflow_dask"})
_TESTS = frozenset({"tests", "utils_test"})


def observers(plugins: Iterable[Any], hooks: Iterable[str]) -> list[str]:
    """Return the classes of foreign plugins that follow tasks by one of these hooks.

    A plugin whose attribute `ferroflow_bundles` is true is none of them.
    """
    return sorted(
        {
            f"{type(plugin).__module__}.{type(plugin).__qualname__}"
            for plugin in plugins
            if not getattr(plugin, "ferroflow_bundles", False)
            and any(_is_foreign(getattr(plugin, hook, None)) for hook in hooks)
        }
    )


def _is_foreign(hook: Any) -> bool:
    """Return whether a hook is code of other packages; one that is inherited from Dask is Dask's code."""
    package, *modules = str(getattr(hook, "__module__", None)).split(".")
    return hook is not None and (package not in _PACKAGES or not _TESTS.isdisjoint(modules))


class WorkerObservers:
    """Reports the plugins that follow the tasks of a worker.

    Parameters
    ----------
    worker : distributed.Worker
    topic : str
        Topic of the reports.
    announcement : dict
        Added to the first report.
    """

    def __init__(self, worker: Worker, topic: str, announcement: dict[str, Any]) -> None:
        self._worker = worker
        self._topic = topic
        self._announced: list[str] | None = None
        # A heartbeat may come before the callback below.
        self._announcement = announcement
        worker.handlers[OPERATION] = self.report
        worker.metrics[OPERATION] = self.announce
        # A worker that starts adds all its plugins in this turn of its event loop.
        worker.loop.add_callback(self.announce, worker)

    def report(self) -> dict[str, Any]:
        """Return the plugins and the time [s]; called when the scheduler asks."""
        return {"observers": observers(self._worker.plugins.values(), ["transition"]), "at": monotonic()}

    def announce(self, _: Worker) -> int:
        """Send a report if it has changed; return the number of plugins; called with each heartbeat."""
        report = self.report()
        if report["observers"] != self._announced:
            self._announced = report["observers"]
            self._worker.log_event(self._topic, report | self._announcement)  # distributed adds the worker
            self._announcement = {}
        return len(report["observers"])

    def close(self) -> None:
        """Report no more, unless a newer plugin does."""
        for registry in (self._worker.handlers, self._worker.metrics):
            # Methods of one object may differ: workers of one process share this class, which each unpickles.
            if getattr(registry.get(OPERATION), "__self__", None) is self:
                del registry[OPERATION]
