"""Search of strategies by simulation."""

from ferroflow_dask.search.problem import Choice, Problem
from ferroflow_dask.search.search import Found, search, search_exactly
from ferroflow_dask.search.timeline import Simulation, simulate, simulate_change

__all__ = [
    "Choice",
    "Found",
    "Problem",
    "Simulation",
    "search",
    "search_exactly",
    "simulate",
    "simulate_change",
]
