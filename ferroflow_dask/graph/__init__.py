"""Graphs: what they are, how they are built, and what their shape says of them."""

from ferroflow_dask.graph.analysis import Bounds, bounds, critical_path, levels, upward_ranks
from ferroflow_dask.graph.builder import GraphBuilder
from ferroflow_dask.graph.from_onnx import load_onnx
from ferroflow_dask.graph.generate import TOPOLOGIES, generate
from ferroflow_dask.graph.inputs import check_inputs, random_inputs
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import FERROFLOW_DOMAIN, Op, Source, TensorSpec

__all__ = [
    "FERROFLOW_DOMAIN",
    "TOPOLOGIES",
    "Bounds",
    "Graph",
    "GraphBuilder",
    "Op",
    "Source",
    "TensorSpec",
    "bounds",
    "check_inputs",
    "critical_path",
    "generate",
    "levels",
    "load_onnx",
    "random_inputs",
    "upward_ranks",
]
