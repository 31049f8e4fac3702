"""A graph that is made coarser, step by step: chains become one node, siblings are packed together.

Two steps never make a cycle and never delay a piece of work that could run earlier, apart from those that
share its thread. A chain: a node and its only follower, which waits for nothing else. Siblings: nodes that
wait for the same nodes and are waited for by the same ones, as in the reduction of series-parallel graphs
(Valdes, Tarjan and Lawler, "The recognition of series parallel digraphs", 1982).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from ferroflow_dask.bundling.predict import Work

#: Decides how siblings, given by their costs [s], are shared out: a list of their positions for each bundle.
#: Further arguments: whether other pieces come before or after them, whether clients want their results, and
#: whether one worker holds most of their inputs.
Packing = Callable[[Sequence[float], bool, bool, bool], list[list[int]]]


class CoarseGraph:
    """Nodes that each stand for some pieces of work.

    Parameters
    ----------
    work : Work

    Attributes
    ----------
    members : dict of int to list of int
        For each node, its pieces, ascending.
    cost_s : dict of int to float
        [s]
    before, after : dict of int to set of int
        Nodes that a node waits for, and that wait for it.
    """

    def __init__(self, work: Work) -> None:
        before, after = work.edges, _followers(work.edges)
        chain = _chains(work, after)
        self.members: dict[int, list[int]] = {}
        self.cost_s: dict[int, float] = {}
        self.before: dict[int, set[int]] = {}
        self.after: dict[int, set[int]] = {}
        for i, cost_s in enumerate(work.costs_s):
            node = chain[i]
            if node == i:
                self.members[i] = [i]
                self.cost_s[i] = cost_s
                self.before[i] = {chain[earlier] for earlier in before[i]} if before[i] else set()
            else:
                self.members[node].append(i)
                self.cost_s[node] += cost_s
            self.after[node] = {chain[later] for later in after[i]} if after[i] else set()
        # Worker that holds most of a node's inputs.
        self._home: dict[int, str] = {}
        for i, home in work.homes().items():
            self._home.setdefault(chain[i], home)
        # Nodes that were packed beside others: what was shared out once stays so.
        self._packed: set[int] = set()
        self._alone = set(work.alone)
        # Nodes that end with a result that clients want. They may be packed with others of them.
        self._last = {chain[i] for i in work.last if i not in self._alone}
        # Nodes that nothing may follow in a chain.
        self._closed = self._last | self._alone

    def reduce(self, pack: Packing) -> None:
        """Fuse chains and pack siblings until neither is left."""
        while self._pack_siblings(pack):
            self._fuse_chains()
        for positions in self.members.values():
            positions.sort()

    def are_packed(self, nodes: Iterable[int]) -> bool:
        """Return whether all of some nodes are what siblings were shared out to."""
        return self._packed.issuperset(nodes)

    def ends_chain(self, node: int) -> bool:
        """Return whether a node is alone or clients want its result."""
        return node in self._closed

    def sorted_nodes(self) -> list[int]:
        """Return the nodes so that each comes after those that it waits for, smallest first."""
        missing = {node: len(before) for node, before in self.before.items()}
        ready = [node for node, n in missing.items() if not n]
        heapq.heapify(ready)
        order = []
        while ready:
            node = heapq.heappop(ready)
            order.append(node)
            for follower in self.after[node]:
                missing[follower] -= 1
                if not missing[follower]:
                    heapq.heappush(ready, follower)
        return order

    def _fuse_chains(self) -> None:
        for node in list(self.members):
            if node not in self.members:
                continue
            while len(self.after[node]) == 1 and node not in self._closed:
                (follower,) = self.after[node]
                if len(self.before[follower]) > 1 or follower in self._alone:
                    break
                self._absorb(node, follower)

    def _absorb(self, node: int, follower: int) -> None:
        self.members[node] += self.members.pop(follower)
        self.cost_s[node] += self.cost_s.pop(follower)
        del self.before[follower]
        self.after[node] = self.after.pop(follower)
        if follower in self._last:
            self._last.add(node)
            self._closed.add(node)
        for later in self.after[node]:
            self.before[later].remove(follower)
            self.before[later].add(node)

    def _pack_siblings(self, pack: Packing) -> bool:
        groups: dict[tuple[object, ...], list[int]] = {}
        for node in self.members:
            if node in self._alone:
                continue
            before, after = frozenset(self.before[node]), frozenset(self.after[node])
            signature = (before, after, node in self._last, self._home.get(node))
            groups.setdefault(signature, []).append(node)
        is_changed = False
        for siblings in groups.values():
            if len(siblings) == 1 or self.are_packed(siblings):
                continue
            node = siblings[0]
            is_joined = bool(self.before[node] or self.after[node])
            costs_s = [self.cost_s[one] for one in siblings]
            bundles = pack(costs_s, is_joined, node in self._last, node in self._home)
            is_changed |= len(bundles) < len(siblings)
            for bundle in bundles:
                self._unite([siblings[i] for i in bundle])
            if len(bundles) > 1:
                self._packed.update(min(siblings[i] for i in bundle) for bundle in bundles)
        return is_changed

    def _unite(self, siblings: list[int]) -> None:
        first, *others = sorted(siblings)
        for other in others:
            self.members[first] += self.members.pop(other)
            self.cost_s[first] += self.cost_s.pop(other)
        for earlier in self.before[first]:
            self.after[earlier].difference_update(others)
        for later in self.after[first]:
            self.before[later].difference_update(others)
        for other in others:
            del self.before[other], self.after[other]


def _followers(before: Sequence[Sequence[int]]) -> list[list[int]]:
    after: list[list[int]] = [[] for _ in before]
    for i, earlier in enumerate(before):
        for j in earlier:
            after[j].append(i)
    return after


def _chains(work: Work, after: Sequence[Sequence[int]]) -> list[int]:
    """Return for each piece the first one of the chain that it is in."""
    chain = list(range(len(work.edges)))
    ends = {*work.last, *work.alone}
    for i, earlier in enumerate(work.edges):
        is_chain = len(earlier) == 1 and len(after[earlier[0]]) == 1
        if is_chain and earlier[0] not in ends and i not in work.alone:
            chain[i] = chain[earlier[0]]
    return chain


def longest_first(costs_s: Sequence[float], n_bundles: int) -> list[list[int]]:
    """Share items out among bundles, each to the one that is least full, the costliest first.

    R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969: at most 4/3 of the best there is.
    """
    bundles: list[list[int]] = [[] for _ in range(n_bundles)]
    heap = [(0.0, i) for i in range(n_bundles)]
    for item in sorted(range(len(costs_s)), key=lambda item: -costs_s[item]):
        filled_s, i = heap[0]
        bundles[i].append(item)
        heapq.heapreplace(heap, (filled_s + costs_s[item], i))
    return [bundle for bundle in bundles if bundle]


def runs(costs_s: Sequence[float], n_bundles: int) -> list[list[int]]:
    """Share items out among bundles of neighbours that cost about the same."""
    bundles: list[list[int]] = [[] for _ in range(n_bundles)]
    total_s, before_s = sum(costs_s), 0.0
    for item, cost_s in enumerate(costs_s):
        middle = (before_s + cost_s / 2) / total_s if total_s else item / len(costs_s)
        bundles[min(int(middle * n_bundles), n_bundles - 1)].append(item)
        before_s += cost_s
    return [bundle for bundle in bundles if bundle]


def tapered(
    costs_s: Sequence[float],
    shares: Iterable[Sequence[int]],
    least_s: float,
    most_s: float,
    *,
    is_in_order: bool = False,
) -> list[list[int]]:
    """Cut each thread's share of the work into bundles, of which the last ones are small.

    As costs are known, a thread can compute its own share, and none is late; as they can be wrong, what has
    not begun can run elsewhere. Each bundle is half of what is left, as in `factored`, and has some of the
    costly items and some of the cheap ones: none is all of what was said to be short.

    Parameters
    ----------
    costs_s : sequence of float
        [s]
    shares : iterable of sequence of int
        Items, in each share the costliest first.
    least_s, most_s : float
        What a bundle should last: a share is cut into as many as `most_s` asks for, and the last of them is
        halved as long as the halves last `least_s` on average [s].
    is_in_order : bool, optional
        Whether neighbours stay together.
    """

    def sum_s(items: Sequence[int]) -> float:
        return sum([costs_s[item] for item in items])

    rounds: list[list[list[int]]] = []
    for share in filter(None, shares):
        n_full = min(len(share), max(1, math.ceil(sum_s(share) / most_s)))
        bundles = _parts(share, n_full, is_in_order)
        while len(bundles[-1]) > 1 and sum_s(bundles[-1]) >= 2 * least_s:
            bundles += _parts(bundles.pop(), 2, is_in_order)
        rounds += [[] for _ in range(len(bundles) - len(rounds))]
        for i, bundle in enumerate(bundles):
            rounds[i].append(bundle)
    return [bundle for bundles in rounds for bundle in bundles]


def _parts(items: Sequence[int], n: int, is_in_order: bool) -> list[list[int]]:
    if not is_in_order:
        return [list(items[i::n]) for i in range(n)]
    bounds = [len(items) * i // n for i in range(n + 1)]
    return [list(items[start:stop]) for start, stop in pairwise(bounds)]


def factored(n_items: int, n_threads: int, most: int) -> list[list[int]]:
    """Share items of unknown cost out in rounds of a bundle for each thread, each round half of the rest.

    No bundle has more than `most` items.

    S. F. Hummel, E. Schonberg and L. E. Flynn, "Factoring: a method for scheduling parallel loops", 1992.
    Within a round the items are dealt out one by one, as neighbours are often alike.
    """
    bundles = []
    start = 0
    while start < n_items:
        size = min(most, math.ceil((n_items - start) / (2 * n_threads)))
        stop = min(n_items, start + size * n_threads)
        bundles += [list(range(start + i, stop, n_threads)) for i in range(min(n_threads, stop - start))]
        start = stop
    return bundles
