"""ferroflow's work-stealing scheduler for Dask, and tensor graphs and ONNX models as Dask tasks.

Public names are loaded on first use, so that ``import ferroflow_dask`` loads neither onnx nor bokeh. Errors
that this package raises on purpose are `FerroflowError`; `ferroflow_dask.exceptions` has the subclasses.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ferroflow_dask import config as _config

if TYPE_CHECKING:
    from ferroflow_dask.cluster_profile import ClusterProfile
    from ferroflow_dask.deploy.calibration import calibrate
    from ferroflow_dask.deploy.slurm.start import slurm_cluster
    from ferroflow_dask.devices.workers import use_gpus
    from ferroflow_dask.exceptions import FerroflowError
    from ferroflow_dask.graph.ir import Graph
    from ferroflow_dask.lowering.execution import executed
    from ferroflow_dask.model import GraphBuilder, Model, generate, load_onnx
    from ferroflow_dask.replay.record import record
    from ferroflow_dask.replay.simulate import simulate
    from ferroflow_dask.scheduler.installation import explain, install, installed, uninstall
    from ferroflow_dask.scheduler.plugin import FerroflowPlugin

_config.load_defaults()

__version__ = "0.1.0"

__all__ = [
    "ClusterProfile",
    "FerroflowError",
    "FerroflowPlugin",
    "Graph",
    "GraphBuilder",
    "Model",
    "calibrate",
    "executed",
    "explain",
    "generate",
    "install",
    "installed",
    "load_onnx",
    "record",
    "simulate",
    "slurm_cluster",
    "uninstall",
    "use_gpus",
]

#: The module of each public name. Tests check it against `__all__`, mypy checks the imports above.
_MODULES = {
    "cluster_profile": ["ClusterProfile"],
    "deploy.calibration": ["calibrate"],
    "deploy.slurm.start": ["slurm_cluster"],
    "exceptions": ["FerroflowError"],
    "graph.ir": ["Graph"],
    "lowering.execution": ["executed"],
    "model": ["GraphBuilder", "Model", "generate", "load_onnx"],
    "devices.workers": ["use_gpus"],
    "replay.record": ["record"],
    "replay.simulate": ["simulate"],
    "scheduler.installation": ["explain", "install", "installed", "uninstall"],
    "scheduler.plugin": ["FerroflowPlugin"],
}
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value  # later look-ups do not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
