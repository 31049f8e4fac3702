"""Installation without a line of code: a preload module for Dask's schedulers and clients.

Either where the scheduler starts, `dask scheduler --preload ferroflow_dask.preload`, or in Dask's
configuration of either side::

    distributed:
      scheduler:
        preload: [ferroflow_dask.preload]     # every scheduler started here
      client:
        preload: [ferroflow_dask.preload]     # every cluster that a client here connects to
"""

from __future__ import annotations

import warnings

from distributed import Client, Scheduler

from ferroflow_dask.exceptions import FerroflowError
from ferroflow_dask.scheduler import install, installed
from ferroflow_dask.scheduler.installation import follow


async def dask_setup(target: Scheduler | Client) -> None:
    """Install the policy of the setting `ferroflow.policy`; called by distributed.

    A cluster on which some policy is installed keeps it. One that cannot run ours is left to Dask, with a
    warning: configuration alone must not break a program.
    """
    try:
        if isinstance(target, Client) and (plugin := await installed(target)) is not None:
            await follow(target, plugin)
        else:
            await install(target)
    except FerroflowError as error:
        warnings.warn(f"ferroflow is not installed: {error}", stacklevel=2)
