"""Batch jobs over files: partitions are read and written by workers, and finished ones are not done again."""

from ferroflow_dask.jobs.job import Job, job_of, run_job
from ferroflow_dask.jobs.outputs import is_job_output
from ferroflow_dask.jobs.sources import is_job_input

__all__ = ["Job", "is_job_input", "is_job_output", "job_of", "run_job"]
