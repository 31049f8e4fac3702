"""Memory of this machine: sizes that need more are refused before anything is made of them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ferroflow_dask.exceptions import UsageError

#: Estimate for a task or an op, with its share of Dask's client, scheduler and worker [B]. `ferroflow run
#: --dag wide --no-processes` grows by so much for each op.
TASK_NBYTES = 15_000
#: Limit of this process's control group [B]; the text `max` if there is none.
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_GIB = 2**30


def memory_nbytes() -> int:
    """Return the memory of this machine, or of the control group if that is less [B]."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        found = min(found, int(_CGROUP_LIMIT.read_text()))
    return found


def check_memory(what: str, nbytes: float, hint: str) -> None:
    """Raise `UsageError` if something needs more memory than this machine has.

    Parameters
    ----------
    what : str
    nbytes : float
        Estimate [B].
    hint : str
        End of the message.
    """
    available = memory_nbytes()
    if nbytes > available:
        raise UsageError(
            f"{what} must fit into this machine's memory of {_gib(available)}, got sizes that need "
            f"{_gib(nbytes)}; {hint}"
        )


def _gib(nbytes: float) -> str:
    return f"{nbytes / _GIB:,.1f} GiB" if nbytes < 1e18 else f"{nbytes / _GIB:.1e} GiB"
