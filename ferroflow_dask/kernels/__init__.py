"""Kernels: what computes an op, and who provides it."""

from ferroflow_dask.kernels.evaluate import evaluate
from ferroflow_dask.kernels.model import has_subgraph
from ferroflow_dask.kernels.plan import Plan, make_plan
from ferroflow_dask.kernels.provider import Kernel, Provider
from ferroflow_dask.kernels.registry import (
    PROVIDERS,
    check_supported,
    compile_op,
    find_provider,
    provider_counts,
)
from ferroflow_dask.kernels.session import SESSIONS, in_session

__all__ = [
    "PROVIDERS",
    "SESSIONS",
    "Kernel",
    "Plan",
    "Provider",
    "check_supported",
    "compile_op",
    "evaluate",
    "find_provider",
    "has_subgraph",
    "in_session",
    "make_plan",
    "provider_counts",
]
