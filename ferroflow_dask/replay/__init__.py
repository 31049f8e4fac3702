"""Simulations of whole programs: jobs from graphs, collections and recorded runs, on any topology."""

from ferroflow_dask.replay.files import load_record
from ferroflow_dask.replay.job import Job, JobGraph
from ferroflow_dask.replay.outcome import ENGINES, Execution, Outcome, simulate_job, stock_s
from ferroflow_dask.replay.record import record
from ferroflow_dask.replay.simulate import simulate
from ferroflow_dask.replay.sources import job_of_collection, job_of_graph
from ferroflow_dask.replay.wfformat import save_wfformat

__all__ = [
    "ENGINES",
    "Execution",
    "Job",
    "JobGraph",
    "Outcome",
    "job_of_collection",
    "job_of_graph",
    "load_record",
    "record",
    "save_wfformat",
    "simulate",
    "simulate_job",
    "stock_s",
]
