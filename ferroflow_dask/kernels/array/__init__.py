"""ONNX's operators written once for every library with NumPy's interface: NumPy, CuPy and their like."""

from ferroflow_dask.kernels.array.products import gemm
from ferroflow_dask.kernels.array.provider import ArrayProvider

__all__ = ["ArrayProvider", "gemm"]
