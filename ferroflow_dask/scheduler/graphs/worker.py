"""Worker's end of bundling: announces this package, and notes the tasks that talk to Dask.

Tasks that ask for their worker or for a client must not share a bundle: they may wait for each other. This
module is sent to workers by value and must not import this package, except `worker_observers`.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import distributed.utils
import distributed.worker
from dask.system import CPU_COUNT
from dask.utils import key_split
from distributed import WorkerPlugin

from ferroflow_dask.scheduler.graphs.worker_observers import WorkerObservers

if TYPE_CHECKING:
    from distributed import Worker

#: Topic under which workers announce their version of this package, the cores of their host, and the prefixes
#: of tasks that talk to Dask.
TOPIC = "ferroflow-bundles"
_DISTRIBUTION = "ferroflow-dask"
#: The variable of `distributed.worker` from which `get_worker`, and so `get_client`, reads the worker.
_VARIABLE = "_worker_cvar"


class NotingVariable:
    """Context variable of the current worker that notes which tasks read it.

    Parameters
    ----------
    variable : contextvars.ContextVar
        The variable that it stands for.
    """

    def __init__(self, variable: Any) -> None:
        self.variable = variable
        self.set = variable.set
        self.reset = variable.reset
        #: Plugins that use it: the workers of one process share it.
        self.ferroflow_users = 0
        self._noted: set[str] = set()

    def get(self, *default: Any) -> Any:
        """Return the current worker."""
        worker = self.variable.get(*default)
        state = distributed.utils.thread_state  # type: ignore[attr-defined]
        # Only in the thread of a task. A bundle sets the key of the task inside.
        key = getattr(state, "ferroflow_key", None) or getattr(state, "key", None)
        if key is not None and (prefix := key_split(key)) not in self._noted:
            self._noted.add(prefix)
            worker.log_event(TOPIC, {"prefix": prefix})
        return worker


class WorkerBundles(WorkerPlugin):
    """Announces what a worker can run, and notes the tasks that talk to Dask."""

    def setup(self, worker: Worker) -> None:
        """Note tasks from now on; called by distributed on each worker."""
        present = getattr(distributed.worker, _VARIABLE)
        if not hasattr(present, "ferroflow_users"):
            present = NotingVariable(present)
            setattr(distributed.worker, _VARIABLE, present)
        present.ferroflow_users += 1
        try:
            found = version(_DISTRIBUTION)
        except PackageNotFoundError:
            found = None
        self._observers: WorkerObservers = WorkerObservers(
            worker, TOPIC, {"version": found, "cores": CPU_COUNT}
        )

    def teardown(self, worker: Worker) -> None:
        """Restore the variable; called by distributed when the plugin is removed."""
        self._observers.close()
        present = getattr(distributed.worker, _VARIABLE)
        if hasattr(present, "ferroflow_users"):
            present.ferroflow_users -= 1
            if not present.ferroflow_users:
                setattr(distributed.worker, _VARIABLE, present.variable)
