"""Clusters of SLURM jobs.

Imports point one way: `start → cluster → replacing, waiting → adaptive, job, queue_line → refusals,
sections → kinds, settings`.
"""

from ferroflow_dask.deploy.slurm.kinds import JobKind
from ferroflow_dask.deploy.slurm.sections import DEFAULT_SECTION, default_section, job_kind, slurm_template
from ferroflow_dask.deploy.slurm.start import job_scripts, slurm_cluster

__all__ = [
    "DEFAULT_SECTION",
    "JobKind",
    "default_section",
    "job_kind",
    "job_scripts",
    "slurm_cluster",
    "slurm_template",
]
