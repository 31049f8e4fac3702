"""ferroflow's scheduling for Dask, and tensor DAGs and ONNX models on it.

What is raised on purpose is a `FerroflowError`; its kinds are in `ferroflow_dask.exceptions`.
"""

from ferroflow_dask import config as _config
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.deploy import calibrate, optimizations, optimize, optimize_graph, slurm_cluster
from ferroflow_dask.devices.workers import use_gpus
from ferroflow_dask.exceptions import FerroflowError
from ferroflow_dask.graph import Graph, GraphBuilder, generate, load_onnx
from ferroflow_dask.kernels import evaluate
from ferroflow_dask.lowering import BoundGraph, bind, executed, place
from ferroflow_dask.scheduler import (
    FerroflowPlugin,
    FerroflowStealing,
    explain,
    install,
    installed,
    uninstall,
)

_config.load_defaults()

__version__ = "0.1.0"

__all__ = [
    "BoundGraph",
    "ClusterProfile",
    "FerroflowError",
    "FerroflowPlugin",
    "FerroflowStealing",
    "Graph",
    "GraphBuilder",
    "bind",
    "calibrate",
    "evaluate",
    "executed",
    "explain",
    "generate",
    "install",
    "installed",
    "load_onnx",
    "optimizations",
    "optimize",
    "optimize_graph",
    "place",
    "slurm_cluster",
    "uninstall",
    "use_gpus",
]
