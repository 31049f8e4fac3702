"""Start clusters, or connect to running ones."""

from ferroflow_dask.deploy.local import connect, local_client

__all__ = ["connect", "local_client"]
