"""Models opened on all workers before the first batch."""

from __future__ import annotations

from typing import Any

from distributed import Client, default_client

from ferroflow_dask.clients import check_synchronous, workers_of
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.lowering.batch_model import BatchModel, LoadedModel, RunModel
from ferroflow_dask.lowering.row_steps import BuiltOnce, Steps


def warm_up(model: BatchModel, steps: Steps) -> None:
    """Open the session of a model, and build classes of functions, on each worker of the default client.

    Raises
    ------
    UsageError
        There is no client, or it is asynchronous.
    """
    try:
        client = default_client()
    except ValueError as error:
        raise UsageError("warm_up needs a client: Client(address)") from error
    check_synchronous(client, "warm_up")
    functions = [step for step in (steps.preprocess, steps.postprocess) if isinstance(step, BuiltOnce)]
    if model.is_scattered:
        _on_all(client, model.run, functions, dict(model.weights))
    else:  # sent once, and from worker to worker
        _on_all(client, client.scatter(model.loaded, hash=False), functions)


def _on_all(client: Client, *arguments: Any) -> None:
    workers = workers_of(client)
    client.gather([client.submit(_open, *arguments, workers=[worker], pure=False) for worker in workers])


def _open(model: RunModel | LoadedModel, functions: list[BuiltOnce], weights: Any = None) -> None:
    if isinstance(model, LoadedModel):
        model.run.opened(model.arrays)
    else:
        model.opened(weights)
    for function in functions:
        function.instance()
