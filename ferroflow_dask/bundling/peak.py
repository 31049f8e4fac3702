"""Peak memory of bundles: what one holds at most, and what all of a graph hold together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from dask.typing import Key

from ferroflow_dask.bundling.predict import Cut

#: The number of an earlier bundle of the graph, or the key of a result from outside.
_Input = int | tuple[Key]


@dataclass(slots=True, eq=False)
class BundleNeed:
    """The bytes that a bundle holds while its tasks run one after the other.

    Its inputs are held until it has ended; the result of another bundle is one input. A value is dropped
    after the last task that reads it, unless another bundle reads it, too, or a client wants it.

    Attributes
    ----------
    inputs : dict of int or (Key,) to float
        Sizes of the results of earlier bundles, by number, and of results from outside [B].
    result_nbytes : float
        Values that are left at the end [B].
    wanted_nbytes : float
        Those of them that clients want [B].
    values_nbytes : float
        The most bytes of its own values at once [B].
    shared_nbytes : float
        Values that other graphs make while this one runs, or may read meanwhile [B].
    """

    inputs: dict[_Input, float] = field(default_factory=dict)
    result_nbytes: float = 0.0
    wanted_nbytes: float = 0.0
    values_nbytes: float = 0.0
    shared_nbytes: float = 0.0

    @property
    def peak_nbytes(self) -> float:
        """The most bytes of inputs and values at once [B]."""
        return sum(self.inputs.values()) + self.values_nbytes


@dataclass(frozen=True, slots=True)
class GraphMemory:
    """Sizes of the values of a graph, from which follows what bundles need.

    Parameters
    ----------
    edges : sequence of sequence of int
        For each task the earlier tasks whose values it reads, each once.
    nbytes : sequence of float
        Size of the value of each task [B].
    wanted : collection of int
        Tasks whose values clients want.
    outside : sequence of collection of Key
        For each task the results that it reads and that no task of the graph makes.
    outside_nbytes : mapping of Key to float
        Their sizes as far as they are known [B].
    awaited : collection of Key
        Those of them that do not exist yet.
    """

    edges: Sequence[Sequence[int]]
    nbytes: Sequence[float]
    wanted: Collection[int]
    outside: Sequence[Collection[Key]]
    outside_nbytes: Mapping[Key, float]
    awaited: Collection[Key] = frozenset()

    def total_nbytes(self) -> float:
        """Return the size of all values together [B]."""
        return sum(self.nbytes) + sum(self.outside_nbytes.values())

    def needs(self, cut: Cut, apart: Collection[int] = frozenset()) -> list[BundleNeed]:
        """Return what each bundle of a cut holds while it runs; O(edges).

        The results of the tasks in `apart` move by themselves, others with all that their bundle returns.
        """
        unread = [0] * len(self.nbytes)
        for read in self.edges:
            for j in read:
                unread[j] += 1
        for i in self.wanted:
            unread[i] += 1
        needs: list[BundleNeed] = []
        bundle_of = [-1] * len(self.nbytes)
        for n, tasks in enumerate(cut):
            need = BundleNeed()
            seen = set[int]()
            for i in tasks:
                bundle_of[i] = n
                need.inputs |= {(key,): self.outside_nbytes.get(key, 0.0) for key in self.outside[i]}
                need.result_nbytes += self.nbytes[i]
                need.values_nbytes = max(need.values_nbytes, need.result_nbytes)
                if i in self.wanted:
                    need.wanted_nbytes += self.nbytes[i]
                for j in self.edges[i]:
                    source = bundle_of[j]
                    if source == n:
                        unread[j] -= 1
                        if not unread[j]:
                            need.result_nbytes -= self.nbytes[j]
                    elif j not in apart:
                        need.inputs[source] = needs[source].result_nbytes
                    elif j not in seen:
                        seen.add(j)
                        need.inputs[source] = need.inputs.get(source, 0.0) + self.nbytes[j]
                if not unread[i]:
                    need.result_nbytes -= self.nbytes[i]
            awaited = [
                size for key, size in need.inputs.items() if isinstance(key, tuple) and key[0] in self.awaited
            ]
            need.shared_nbytes = need.wanted_nbytes + sum(awaited)
            needs.append(need)
        return needs


def held_nbytes(needs: Sequence[BundleNeed], n_threads: int) -> float:
    """Return the most bytes that bundles hold together if they run in the given order [B].

    These are the results that later bundles read, and what the bundles hold that run at the same time. A
    result may be where it was made and where it is read.
    """
    n_readers = [0] * len(needs)
    for need in needs:
        for source in need.inputs:
            if isinstance(source, int):
                n_readers[source] += 1
    held = results = 0.0
    running = _sums([need.peak_nbytes for need in needs], n_threads)
    for n, need in enumerate(needs):
        held = max(held, results + running[n])
        if n_readers[n]:
            results += need.result_nbytes - need.wanted_nbytes
        for source in need.inputs:
            if isinstance(source, int):
                n_readers[source] -= 1
                if not n_readers[source]:
                    results -= needs[source].result_nbytes - needs[source].wanted_nbytes
    return held


def shared_nbytes(needs: Sequence[BundleNeed], n_threads: int) -> float:
    """Return the most bytes of values that bundles of several graphs share, while they run [B].

    Calls of `client.map` that read each other are such graphs. The values of single tasks are read and
    dropped one by one, those of a bundle together: for each thread, those of the bundle that runs, and of one
    more that has ended or is about to start.
    """
    return max(_sums([need.shared_nbytes for need in needs], 2 * n_threads), default=0.0)


def _sums(sizes: Sequence[float], n: int) -> list[float]:
    """Return the sum of each size and the `n - 1` after it."""
    before = [0.0, *accumulate(sizes)]
    return [before[min(i + n, len(sizes))] - before[i] for i in range(len(sizes))]
