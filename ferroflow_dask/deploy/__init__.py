"""Start clusters, connect to running ones, and measure what they are like."""

from ferroflow_dask.deploy.calibration import calibrate, load_profile, profile_of, profiles_file, save_profile
from ferroflow_dask.deploy.local import connect, local_client
from ferroflow_dask.deploy.optimize import optimize

__all__ = [
    "calibrate",
    "connect",
    "load_profile",
    "local_client",
    "optimize",
    "profile_of",
    "profiles_file",
    "save_profile",
]
