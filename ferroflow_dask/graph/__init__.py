"""Graphs: what they are, how they are built, and what their shape says of them."""

from ferroflow_dask.graph.analysis import Bounds, bounds, critical_path, levels, upward_ranks
from ferroflow_dask.graph.builder import Builder
from ferroflow_dask.graph.from_onnx import graph_from_onnx
from ferroflow_dask.graph.generate import TOPOLOGIES, generate_graph
from ferroflow_dask.graph.inputs import check_inputs, random_inputs
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import FERROFLOW_DOMAIN, Op, Source, TensorSpec

__all__ = [
    "FERROFLOW_DOMAIN",
    "TOPOLOGIES",
    "Bounds",
    "Builder",
    "Graph",
    "Op",
    "Source",
    "TensorSpec",
    "bounds",
    "check_inputs",
    "critical_path",
    "generate_graph",
    "graph_from_onnx",
    "levels",
    "random_inputs",
    "upward_ranks",
]
