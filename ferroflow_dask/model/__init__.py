"""Models: graphs that users load, build or generate, and compute with Dask."""

from ferroflow_dask.model.made import GraphBuilder, generate, load_onnx
from ferroflow_dask.model.model import Model

__all__ = ["GraphBuilder", "Model", "generate", "load_onnx"]
