"""From a graph to Dask tasks: one for each op or bundle of ops, outputs by name."""

from ferroflow_dask.lowering.batches import map_batches
from ferroflow_dask.lowering.bundles import AUTO, GRANULARITIES, check_granularity, predictions_of
from ferroflow_dask.lowering.collection import bind_graph
from ferroflow_dask.lowering.execution import ExecutionReport, device_here, executed, executed_here
from ferroflow_dask.lowering.scattering import scatter
from ferroflow_dask.lowering.sealed import token_of

__all__ = [
    "AUTO",
    "GRANULARITIES",
    "ExecutionReport",
    "bind_graph",
    "check_granularity",
    "device_here",
    "executed",
    "executed_here",
    "map_batches",
    "predictions_of",
    "scatter",
    "token_of",
]
