"""Known differences: rows that do not pass yet, each with the reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """A known difference.

    Parameters
    ----------
    reason : str
        What the plugin does wrong.
    policies : tuple of str, optional
        Policies under which the row differs.
    is_run : bool, optional
        False for rows that hang or leave threads behind: the test does not run them.
    """

    reason: str
    policies: tuple[str, ...] = ("bundled",)
    is_run: bool = True


#: By the name of the row; without an entry, the test asserts that the row passes.
KNOWN: dict[str, Known] = {
    **dict.fromkeys(
        ("mutable argument", "mutable default, closure, attribute, global", "mutable partial; map_blocks"),
        Known("fault 1: the steps of a bundle share literals and functions"),
    ),
    **dict.fromkeys(
        ("context variable, decimal, np.errstate, dask.annotate in a task", "np.seterr in a task"),
        Known("fault 2: the steps of a bundle share a context"),
    ),
    **dict.fromkeys(
        (
            *('gather(errors="skip")', "Future.retry, Client.retry", "two steps fail"),
            *("exceptions: custom, unpicklable, with cause, group, notes", "error in one of two outputs"),
            *("10 of 70 tasks fail on their first run", "error in a shared input"),
        ),
        Known("fault 5: the tasks of a bundle run again after an error"),
    ),
    **dict.fromkeys(
        ("Future.cancel(reason, msg)", "cancel of every second future", "Future.release, del of half"),
        Known("fault 10: steps start although their futures are cancelled or released"),
    ),
    **dict.fromkeys(
        (
            *("file as partner", "Event with a timeout", "Queue with a timeout", "Variable with a timeout"),
            "socket as partner",
        ),
        Known("fault 3: a task waits for siblings that are behind it in its bundle", is_run=False),
    ),
    "paused worker": Known("fault 10: steps of a running bundle start on a paused worker"),
    "secede, rejoin": Known("fault 10: the rest of the bundle waits for the task that secedes", is_run=False),
    **dict.fromkeys(
        (
            "get_worker, also by importlib, for one input only",
            "get_current_task",
            "call_stack(), call_stack(futures)",
        ),
        Known("a task in a bundle runs under the key of its bundle"),
    ),
    **dict.fromkeys(
        (
            *("SchedulerPlugin.transition, update_graph", "WorkerPlugin: setup, transition, teardown"),
            "plugin added by run",
        ),
        Known("fault 8: plugins that follow tasks see bundles"),
    ),
    "Compute Failed in the log": Known("fault 5: the log names the bundle, and the task once more"),
    "recreate_error_locally, recreate_task_locally": Known(
        "`recreate_task_locally` raises an `AttributeError` for a task that ran in a bundle"
    ),
    "get_client, worker_client(separate_thread=…)": Known(
        "fault 4: short children stay behind the parent that waits for them",
        ("plain", "bundled"),
        is_run=False,
    ),
    **{
        f"worker killed: {how}, allowed-failures {allowed}": Known(
            "fault 6: Dask blames bundles for the death of a worker"
        )
        for how in ("exit", "SIGKILL", "SIGSEGV")
        for allowed in (0, 1, 3)
    },
    "60 tasks in pairs": Known(
        "faults 3 and 4: a task waits for one that is behind it in its bundle or on its worker",
        ("plain", "bundled"),
        is_run=False,
    ),
    "Reschedule while on one of four workers": Known(
        "fault 15: a worker that a task refused looks best again", ("plain", "bundled"), is_run=False
    ),
    "map(priority=)": Known("fault 10: bundles of a lower priority fill the threads and the queue at once"),
    "map, a large keyword argument": Known(
        "an exception of Dask's `_task_to_msg` ends the plugin", policies=("plain", "bundled")
    ),
}
