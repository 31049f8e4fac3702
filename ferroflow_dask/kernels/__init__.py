"""Kernels: what computes an op, and who provides it."""

from ferroflow_dask.kernels.choice import (
    DEVICE_PROVIDER,
    PROVIDERS,
    SESSIONS,
    check_supported,
    find_provider,
    one_line,
    provider_counts,
)
from ferroflow_dask.kernels.evaluate import evaluate
from ferroflow_dask.kernels.op_model import has_subgraph
from ferroflow_dask.kernels.plan import Plan, make_plan, single
from ferroflow_dask.kernels.provider import DeclinedError, ExecutionProvider, Kernel, Provider
from ferroflow_dask.kernels.registry import compile_op, failure, host_operands, shared_kernel
from ferroflow_dask.kernels.session import in_session

__all__ = [
    "DEVICE_PROVIDER",
    "PROVIDERS",
    "SESSIONS",
    "DeclinedError",
    "ExecutionProvider",
    "Kernel",
    "Plan",
    "Provider",
    "check_supported",
    "compile_op",
    "evaluate",
    "failure",
    "find_provider",
    "has_subgraph",
    "host_operands",
    "in_session",
    "make_plan",
    "one_line",
    "provider_counts",
    "shared_kernel",
    "single",
]
