"""Light engine: task graph × machine × placement to a timeline, without Dask."""

from ferroflow_dask.simulation.graph import TaskGraph, Timeline, Transfer
from ferroflow_dask.simulation.listed import run_listed
from ferroflow_dask.simulation.machine import Machine
from ferroflow_dask.simulation.placed import run_placed

__all__ = ["Machine", "TaskGraph", "Timeline", "Transfer", "run_listed", "run_placed"]
