"""From a graph to Dask tasks: one for each op or bundle of ops, outputs by name."""

from ferroflow_dask.lowering.batches import map_batches
from ferroflow_dask.lowering.bundles import AUTO, PLACEMENTS, check_placement, predictions_of
from ferroflow_dask.lowering.collection import bind_graph
from ferroflow_dask.lowering.execution import ExecutionReport, device_here, executed, executed_here
from ferroflow_dask.lowering.placement import place
from ferroflow_dask.lowering.sealed import token_of

__all__ = [
    "AUTO",
    "PLACEMENTS",
    "ExecutionReport",
    "bind_graph",
    "check_placement",
    "device_here",
    "executed",
    "executed_here",
    "map_batches",
    "place",
    "predictions_of",
    "token_of",
]
