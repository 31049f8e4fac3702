"""Start clusters, connect to running ones, and measure what they are like."""

from ferroflow_dask.deploy.calibration import calibrate, load_profile, profile_of, profiles_file, save_profile
from ferroflow_dask.deploy.local import connect, local_client

__all__ = [
    "calibrate",
    "connect",
    "load_profile",
    "local_client",
    "profile_of",
    "profiles_file",
    "save_profile",
]
