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
    "map(priority=)": Known("fault 10: bundles of a lower priority fill the threads and the queue at once"),
    "map, a large keyword argument": Known(
        "an exception of Dask's `_task_to_msg` ends the plugin", policies=("plain", "bundled")
    ),
}
