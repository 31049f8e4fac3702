"""Strategies: each operator of a graph in parts, and a worker for each part."""

from ferroflow_dask.strategy.files import as_json, from_json, read_strategy, write_strategy
from ferroflow_dask.strategy.partition import partition
from ferroflow_dask.strategy.strategy import (
    Configuration,
    Strategy,
    check_strategy,
    signature_of,
    spaces_of,
    whole_on,
    with_shapes,
)
from ferroflow_dask.strategy.table import space_of, splittable

__all__ = [
    "Configuration",
    "Strategy",
    "as_json",
    "check_strategy",
    "from_json",
    "partition",
    "read_strategy",
    "signature_of",
    "space_of",
    "spaces_of",
    "splittable",
    "whole_on",
    "with_shapes",
    "write_strategy",
]
