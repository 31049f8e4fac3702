"""From a graph to Dask tasks: one for each op or bundle of ops, outputs by name."""

from ferroflow_dask.lowering.batches import map_batches
from ferroflow_dask.lowering.bundles import AUTO, PLACEMENTS, check_placement, predictions_of
from ferroflow_dask.lowering.collection import BoundGraph, bind
from ferroflow_dask.lowering.execution import (
    KIND_ANNOTATION,
    ExecutionReport,
    Results,
    device_here,
    executed,
    executed_here,
)
from ferroflow_dask.lowering.placement import is_placed_key, place
from ferroflow_dask.lowering.predict import Prediction
from ferroflow_dask.lowering.sealed import token_of
from ferroflow_dask.lowering.sequence import bundle_in
from ferroflow_dask.lowering.tasks import COST_ANNOTATION, CPU, GPU, RANK_ANNOTATION

__all__ = [
    "AUTO",
    "COST_ANNOTATION",
    "CPU",
    "GPU",
    "KIND_ANNOTATION",
    "PLACEMENTS",
    "RANK_ANNOTATION",
    "BoundGraph",
    "ExecutionReport",
    "Prediction",
    "Results",
    "bind",
    "bundle_in",
    "check_placement",
    "device_here",
    "executed",
    "executed_here",
    "is_placed_key",
    "map_batches",
    "place",
    "predictions_of",
    "token_of",
]
