"""Division of a bundle: which steps another worker could run, and which a failed step takes with it.

Steps are numbered in the order in which they run. A value has a number, too: those of the bundle's arguments
come first, then those of the steps. `reads` has the numbers of the values that each step reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

Reads = Sequence[Collection[int]]


def free_steps(reads: Reads, n_arguments: int, unstarted: Collection[int], running: int) -> list[int]:
    """Return the unstarted steps that need not wait for the running one, in their order; O(reads).

    A step waits if it reads a value that is not computed yet, and if all such values are those of the running
    step and of steps that wait. As separate tasks, all others would not wait.
    """
    waiting = {running}
    free = []
    for step in sorted(unstarted):
        uncomputed = {
            number - n_arguments
            for number in reads[step]
            if number >= n_arguments  # before the first step, -1 is the running one
            and (number - n_arguments in unstarted or number - n_arguments == running)
        }
        if uncomputed and uncomputed <= waiting:
            waiting.add(step)
        else:
            free.append(step)
    return free


def last_half(reads: Reads, n_arguments: int, unstarted: Collection[int], running: int) -> list[int]:
    """Return about half of the unstarted steps: whole components of free steps, the last ones.

    The first component stays, since the thread comes to it next.
    """
    parts = components(reads, n_arguments, free_steps(reads, n_arguments, unstarted, running))
    if len(parts) < 2 and len(unstarted) == sum(map(len, parts)):
        return []
    most, chosen = len(unstarted) // 2, list[int]()
    for part in reversed(parts):
        if len(chosen) + len(part) > most:
            break
        chosen += part
    return sorted(chosen)


def components(reads: Reads, n_arguments: int, steps: Iterable[int]) -> list[list[int]]:
    """Return the connected components of some steps, ordered by their first step."""
    parent = {step: step for step in steps}

    def root(step: int) -> int:
        while parent[step] != step:
            parent[step] = step = parent[parent[step]]
        return step

    for step in parent:
        for number in reads[step]:
            if (read := number - n_arguments) in parent:
                first, second = sorted((root(read), root(step)))
                parent[second] = first
    parts: dict[int, list[int]] = {}
    for step in sorted(parent):
        parts.setdefault(root(step), []).append(step)
    return list(parts.values())


def depending(reads: Reads, n_arguments: int, step: int) -> list[int]:
    """Return the later steps that depend on a step, directly or not, in their order."""
    found = {step}
    for later in range(step + 1, len(reads)):
        if any(number - n_arguments in found for number in reads[later]):
            found.add(later)
    return sorted(found - {step})


def needed(reads: Reads, n_arguments: int, exports: Iterable[int]) -> set[int]:
    """Return the steps that the values of some numbers depend on."""
    found = {number - n_arguments for number in exports}
    for step in range(len(reads) - 1, -1, -1):
        if step in found:
            found.update(number - n_arguments for number in reads[step])
    return {step for step in found if step >= 0}
