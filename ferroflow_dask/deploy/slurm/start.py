"""Clusters of SLURM jobs, from the sections of `jobqueue.yaml` that describe the jobs.

dask-jobqueue starts the jobs. The functions import it, because its import writes a file into the home folder
and replaces the handler of SIGINT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import Security

from ferroflow_dask.deploy.interrupts import handlers_restored
from ferroflow_dask.deploy.slurm.sections import default_section, described, job_kind
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.scheduler import FerroflowPlugin

if TYPE_CHECKING:
    from ferroflow_dask.deploy.slurm.cluster import SlurmCluster


def slurm_cluster(
    section: str | None = None,
    gpu_section: str | None = None,
    *,
    config_file: str | Path | None = None,
    policy: str | None = None,
    security: Security | bool | None = None,
    scheduler_options: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
    **job_arguments: Any,
) -> SlurmCluster:
    """Start a scheduler with ferroflow's policy for workers in SLURM jobs; no job is submitted yet.

    The scheduler runs in this process, on a login node or another host where `sbatch` works. The first
    section gives its interface, protocol and options.

    Parameters
    ----------
    section : str, optional
        The section of `jobqueue.yaml` that describes its jobs. The default is `cpu`, or dask-jobqueue's
        own section, `slurm`, if there is no other.
    gpu_section : str, optional
        The section that describes jobs with GPUs. They are scaled independently of the others.
    config_file : path, optional
        The only file that is read for sections. By default sections are read from Dask's configuration
        (`~/.config/dask` and `$DASK_CONFIG`). Unless `DASK_CONFIG` is set, sections of `jobqueue.yaml` in
        the working folder take precedence.
    policy : str, optional
        As in `install`; `dask` installs no plugin.
    security : Security or bool, optional
        True for TLS with temporary certificates.
    scheduler_options : mapping, optional
        Options of `distributed.Scheduler`: `host`, `dashboard_address`, …. They override the section's.
    asynchronous : bool, optional
    **job_arguments
        Settings of jobs without GPUs that override the section's: `job_name`, `queue`, `account`, `cores`,
        `memory`, `processes`, `walltime`, … of `dask_jobqueue.SLURMCluster`.

    Returns
    -------
    SlurmCluster
        A `dask_jobqueue.SLURMCluster` with `scale(jobs=…, gpu_jobs=…)`, `adapt(…)` and `wait_for_jobs()`.

    Raises
    ------
    UsageError
        The configuration cannot be read or has no such section, a setting or an argument is not allowed,
        or certificates cannot be made.

    Examples
    --------
    >>> with slurm_cluster("cpu", "gpu") as cluster:  # doctest: +SKIP
    ...     cluster.scale(jobs=4, gpu_jobs=1)
    ...     cluster.wait_for_jobs()
    ...     client = cluster.get_client()
    """
    name = default_section(config_file) if section is None else section
    kind, of_cluster = described(name, config_file, job_arguments)
    gpu_kind = None if gpu_section is None else job_kind(gpu_section, config_file)
    # Made before the cluster, so that a wrong policy raises before anything starts.
    plugins = [] if policy == "dask" else [FerroflowPlugin(policy)]
    options = {**of_cluster.pop("scheduler_options", {}), **(scheduler_options or {})}
    options["plugins"] = [*options.get("plugins", ()), *plugins]
    with handlers_restored():
        from ferroflow_dask.deploy.slurm.cluster import SlurmCluster

    return SlurmCluster(
        kind,
        gpu_kind,
        security=_certificates(security),
        scheduler_options=options,
        asynchronous=asynchronous,
        **of_cluster,
    )


def _certificates(security: Security | bool | None) -> Security | None:
    if security is not True:
        return security or None
    try:
        made: Security = Security.temporary()
    except ImportError as error:
        raise UsageError(
            "security=True (--tls) needs the package cryptography: pip install cryptography"
        ) from error
    return made


def job_scripts(
    sections: Sequence[str],
    config_file: str | Path | None = None,
    *,
    security: Security | bool | None = None,
) -> list[str]:
    """Return the batch scripts of a cluster's jobs, one for each section, without submitting them.

    Placeholders in angle brackets stand for values that are known once the cluster has started. The first
    section is the cluster's own, as in `slurm_cluster`.
    """
    found = [described(section, config_file, {}) for section in sections]
    _, of_cluster = found[0]
    with handlers_restored():
        from ferroflow_dask.deploy.slurm.job import scripts_of

    return scripts_of([kind for kind, _ in found], _certificates(security), **of_cluster)
