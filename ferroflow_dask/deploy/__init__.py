"""Start clusters, connect to running ones, and measure what they are like."""

from ferroflow_dask.deploy.calibration import (
    Calibration,
    calibrate,
    calibration_of,
    count_gpus,
    load_durations,
    load_profile,
    profile_of,
    profiles_file,
    save_durations,
    save_profile,
)
from ferroflow_dask.deploy.cuda import DeviceChoice, device_client
from ferroflow_dask.deploy.local import connect, local_client
from ferroflow_dask.deploy.slurm import (
    DEFAULT_SECTION,
    JobKind,
    default_section,
    job_kind,
    job_scripts,
    slurm_cluster,
    slurm_template,
)

__all__ = [
    "DEFAULT_SECTION",
    "Calibration",
    "DeviceChoice",
    "JobKind",
    "calibrate",
    "calibration_of",
    "connect",
    "count_gpus",
    "default_section",
    "device_client",
    "job_kind",
    "job_scripts",
    "load_durations",
    "load_profile",
    "local_client",
    "profile_of",
    "profiles_file",
    "save_durations",
    "save_profile",
    "slurm_cluster",
    "slurm_template",
]
