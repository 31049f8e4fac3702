"""Worker's end of deliveries: stores values of a running bundle under their own keys, and reports them.

This module is sent to workers by value and must not import this package, except `worker_handlers`.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from dask.utils import typename
from distributed import WorkerPlugin
from distributed.worker_state_machine import UpdateDataEvent

from ferroflow_dask.scheduler.worker_handlers import StreamHandlers

if TYPE_CHECKING:
    from distributed import Worker

#: As in `ferroflow_dask.bundling.deliveries`.
_EXTENSION = "ferroflow-deliveries"
#: Operation of the messages to the scheduler, of values that are stored.
DELIVERED = "ferroflow-delivered"
#: Operations of the last messages of the scheduler, and of a worker in answer.
CLOSE, CLOSED = "ferroflow-deliveries-close", "ferroflow-deliveries-closed"
#: Topic under which workers announce that they deliver.
TOPIC = "ferroflow-deliveries"


class DeliveredValues(StreamHandlers):
    """Worker extension that takes values from bundles.

    Parameters
    ----------
    worker : distributed.Worker
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__({}, CLOSE, self._last)
        self._worker = worker
        self._n_plugins = 0
        self._is_open = False

    def open(self) -> int:
        """Take values for one more plugin, and return its number."""
        self._n_plugins += 1
        self._is_open = True
        self._worker.extensions[_EXTENSION] = self
        return self.add(self._worker.stream_handlers)

    def close(self) -> None:
        """Let bundles keep their values if no other plugin is left."""
        self._n_plugins -= 1
        if not self._n_plugins:
            self._stop()

    def _stop(self) -> None:
        self._is_open = False
        if self._worker.extensions.get(_EXTENSION) is self:
            del self._worker.extensions[_EXTENSION]

    def _last(self) -> None:
        self._stop()
        self._worker.batched_send({"op": CLOSED})

    def deliver(self, bundle: Key, values: Mapping[Key, tuple[Any, float, float]]) -> None:
        """Take values of a running bundle, with start and stop of their tasks; called in its thread."""
        self._worker.loop.add_callback(self._take, bundle, values)

    def _take(self, bundle: Key, values: Mapping[Key, tuple[Any, float, float]]) -> None:
        state = self._worker.state
        ts = state.tasks.get(bundle)
        if not self._is_open or ts is None or ts.state != "executing":
            return  # the plugin was removed, or the scheduler has cancelled the bundle
        data = {
            key: value
            for key, (value, _, _) in values.items()
            if key not in state.tasks or state.tasks[key].state == "released"
        }
        self._worker.handle_stimulus(UpdateDataEvent(data=data, stimulus_id=DELIVERED))
        # A value that could not be stored stays with the bundle.
        stored = {key: values[key][1:] for key in data if state.tasks[key].state == "memory"}
        types: dict[type, bytes] = {}
        details = {}
        for key, (start_s, stop_s) in stored.items():
            one = state.tasks[key]
            kind: Any = one.type
            if kind not in types:
                types[kind] = _pickled_type(kind)
            details[key] = (one.nbytes, types[kind], typename(kind), start_s, stop_s)
        self._worker.batched_send({"op": DELIVERED, "values": details})


class WorkerDeliveries(WorkerPlugin):
    """Stores and reports the values that bundles deliver."""

    def setup(self, worker: Worker) -> None:
        """Take values from now on; called by distributed on each worker."""
        # An earlier plugin of this kind may still be asked to close.
        earlier = getattr(worker.stream_handlers.get(CLOSE), "__self__", None)
        self._values: DeliveredValues = DeliveredValues(worker) if earlier is None else earlier
        number = self._values.open()
        worker.log_event(TOPIC, {"number": number})  # distributed adds the worker

    def teardown(self, worker: Worker) -> None:
        """Let bundles keep their values; called by distributed when the plugin is removed."""
        self._values.close()


def _pickled_type(kind: type) -> bytes:
    try:
        return pickle.dumps(kind)
    except Exception:  # noqa: BLE001 -- as Dask does: some types cannot be pickled
        return pickle.dumps(typename(kind))
