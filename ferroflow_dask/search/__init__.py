"""Search of strategies by simulation."""

from ferroflow_dask.search.oracle import least_makespan_s
from ferroflow_dask.search.problem import Choice, Problem
from ferroflow_dask.search.search import ENDLESS, Found, search, time_spent
from ferroflow_dask.search.timeline import Simulation, simulate, simulate_change

__all__ = [
    "ENDLESS",
    "Choice",
    "Found",
    "Problem",
    "Simulation",
    "least_makespan_s",
    "search",
    "simulate",
    "simulate_change",
    "time_spent",
]
