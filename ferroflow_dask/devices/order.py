"""In which order the steps of a plan are enqueued, and which go out together.

Steps keep the order of the plan, except that those that are ready and may be computed in one call are: a
step takes along what is like it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import islice

from ferroflow_dask.kernels import Plan


class Order:
    """The steps of a plan that have not been enqueued, and the values that are still read.

    Parameters
    ----------
    plan : Plan
    may_batch : sequence of bool
        For each kernel of the plan whether steps of it may go out together.
    """

    def __init__(self, plan: Plan, may_batch: Sequence[bool]) -> None:
        self._plan = plan
        self._may_batch = may_batch
        self._is_done = [False] * len(plan.steps)
        self._next = 0
        maker = {value: at for at, step in enumerate(plan.steps) for value in step[2] if value >= 0}
        #: How often each value is still read; exports are read once more, at the end.
        self.n_reads = [0] * plan.n_values
        for value in plan.exports:
            self.n_reads[value] += 1
        self._followers: list[list[int]] = [[] for _ in plan.steps]
        self._n_missing: list[int] = []
        # Steps that may be batched and have become ready since they were last sorted.
        self._new: list[int] = []
        # By kernel and by what they have in common: such steps in the order in which they became ready.
        self._ready: dict[tuple[int, Hashable], dict[int, None]] = {}
        self._common: dict[int, Hashable] = {}
        for at, (kernel, inputs, _, _) in enumerate(plan.steps):
            before = {maker[value] for value in inputs if value in maker}
            for earlier in before:
                self._followers[earlier].append(at)
            for value in inputs:
                if value >= 0:
                    self.n_reads[value] += 1
            self._n_missing.append(len(before))
            if not before and may_batch[kernel]:
                self._new.append(at)

    def next_group(self, alike: Callable[[int], Hashable], most: Callable[[int], int]) -> list[int] | None:
        """Return the steps to enqueue next; None if all are done.

        Parameters
        ----------
        alike : callable
            What steps of a kernel that may go out together have in common; None for a step that goes alone.
        most : callable
            How many steps like a given one may go out together.
        """
        while self._next < len(self._is_done) and self._is_done[self._next]:
            self._next += 1
        if self._next == len(self._is_done):
            return None
        first = self._next
        kernel = self._plan.steps[first][0]
        group = [first]
        if self._may_batch[kernel]:
            self._sort(alike)
            common = self._common[first]
            if common is not None:
                others = (at for at in self._ready[kernel, common] if at != first)
                group += islice(others, most(first) - 1)
        for at in group:
            self._finish(at)
        return group

    def _sort(self, alike: Callable[[int], Hashable]) -> None:
        for at in self._new:
            common = self._common[at] = alike(at)
            self._ready.setdefault((self._plan.steps[at][0], common), {})[at] = None
        self._new.clear()

    def _finish(self, at: int) -> None:
        self._is_done[at] = True
        kernel = self._plan.steps[at][0]
        if self._may_batch[kernel]:
            del self._ready[kernel, self._common.pop(at)][at]
        for follower in self._followers[at]:
            self._n_missing[follower] -= 1
            of = self._plan.steps[follower][0]
            if not self._n_missing[follower] and self._may_batch[of]:
                self._new.append(follower)
