"""Policies: pure decisions about where tasks run, shared by the scheduler plugin and by simulators."""

from ferroflow_dask.policy.base import Policy
from ferroflow_dask.policy.registry import make_policy, policy_name, policy_names
from ferroflow_dask.policy.state import TaskView, WorkerView
from ferroflow_dask.policy.stealing import StealingPolicy
from ferroflow_dask.policy.view import ClusterView

__all__ = [
    "ClusterView",
    "Policy",
    "StealingPolicy",
    "TaskView",
    "WorkerView",
    "make_policy",
    "policy_name",
    "policy_names",
]
