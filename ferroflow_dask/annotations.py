"""Task annotations and key prefixes: what tasks, the scheduler plugin and workers agree on.

This module is pure Python and imports nothing, so that a scheduler can use it without Dask's graph classes.
"""

from __future__ import annotations

#: Expected duration of a task on one thread [s]. Any Dask code may set it with `dask.annotate`. Where some
#: workers have GPUs, it may be a dict of durations by worker kind (`CPU`, `GPU`), None for an unknown one.
#: A worker kind that is left out gets none of the tasks as long as there is a worker of the other kind.
COST_ANNOTATION = "ferroflow_cost"
#: Upward rank of a task [s]: its duration plus the longest chain of tasks that depends on it.
RANK_ANNOTATION = "ferroflow_rank"
#: Operator kind of a task. Tasks of one kind take equally long, and their durations are learned together.
KIND_ANNOTATION = "ferroflow_kind"

#: False for tasks that must not be bundled with others.
BUNDLE_ANNOTATION = "ferroflow_bundle"

#: The annotations that a user may set.
ANNOTATIONS = (COST_ANNOTATION, RANK_ANNOTATION, KIND_ANNOTATION, BUNDLE_ANNOTATION)

#: Worker kinds.
CPU, GPU = "cpu", "gpu"

#: Key prefix of tasks that run several tasks or ops.
BUNDLE_PREFIX = "bundle"

#: Key prefix of values that `scatter` has copied to all workers; a unique part follows.
SCATTERED_PREFIX = "ferroflow-scattered-"


def is_bundling_off(value: object) -> bool:
    """Return whether a value of `BUNDLE_ANNOTATION` keeps a task separate."""
    return value is False


def is_scattered_key(key: object) -> bool:
    """Return whether a key belongs to a value that `scatter` has copied to all workers."""
    return isinstance(key, str) and key.startswith(SCATTERED_PREFIX)
