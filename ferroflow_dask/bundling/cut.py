"""Cut work into bundles, so that the predicted makespan is least.

Of a few ways to cut, each piece by itself among them, the one is taken that `predict` finds fastest on the
cluster at hand, with a handicap for each task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from statistics import fmean

from ferroflow_dask.bundling.coarse import CoarseGraph, factored, longest_first, tapered
from ferroflow_dask.bundling.predict import Cut, Prediction, Work, predict
from ferroflow_dask.cluster_profile import ClusterProfile

#: A piece of whose cost nothing is known is taken to last as long as a task costs, times this.
GUESS = 4.0
#: Part of a worker's memory that a bundle may need.
MEMORY_SHARE = 0.25
#: Pieces that last as long as the scheduler takes to feed all threads, times this, travel alone: they can be
#: stolen then, and a cost that is wrong does less harm.
_ALONE = 5.0
#: Among numbers of bundles that are as good as this, the largest is taken: it forgives errors in costs.
_SLACK = 1.05
#: Part of what the scheduler takes for a task that counts even where it should take it beside the work: that
#: may turn out shorter, and scheduler and workers may share cores.
_HANDICAP = 0.5
#: A thread's share is halved, in case costs are wrong, as long as bundles last as long as the scheduler takes
#: to feed all threads, times this. It has no time for that where there are very many threads.
_TAPER = 2.0
#: What bundles of short pieces last at most, where threads are given several then [s]: one can be stolen, and
#: computed again, while others run, and clusters that grow with the work see how much there is.
_LONGEST_S = 1.0
#: A cut that comes as near to what no cut can beat is taken without a look at others.
_GOOD = 1.05


def best_cut(
    work: Work, cluster: ClusterProfile, is_guess: bool, fits: Callable[[Cut], bool]
) -> tuple[Cut, Prediction]:
    """Return the best of the cuts that fit; O(pieces · log pieces).

    Parameters
    ----------
    work : Work
    cluster : ClusterProfile
    is_guess : bool
        Whether some costs are guesses: then so many bundles of decreasing sizes are made that stealing can
        correct what the guesses get wrong.
    fits : callable
        Returns whether a cut is admissible; each piece by itself is, always.
    """
    best: tuple[Cut, Prediction] | None = None
    best_s = inf
    good_s = _GOOD * _bound_s(work.costs_s, cluster)
    for cut in _cuts(work, cluster, is_guess):
        handicap_s = _HANDICAP * len(cut) * cluster.task_s
        # Not all are predicted: most are out of the question.
        if _least_s(cut, cluster) + handicap_s >= best_s:
            continue
        if len(cut) < len(work.costs_s) and not fits(cut):
            continue
        prediction = predict(work, cut, cluster)
        if prediction.makespan_s + handicap_s < best_s:
            best, best_s = (cut, prediction), prediction.makespan_s + handicap_s
        if best is not None and best[1].makespan_s <= good_s:
            break
    assert best is not None  # each piece by itself always fits
    return best


def _cuts(work: Work, cluster: ClusterProfile, is_guess: bool) -> Iterator[Cut]:
    n_pieces = len(work.costs_s)
    coarse = CoarseGraph(work)
    coarse.reduce(partial(_pack, cluster=cluster, is_guess=is_guess))
    order = coarse.sorted_nodes()
    yield [coarse.members[node] for node in order]
    if n_pieces and not work.alone and len(work.last) < 2 and sum(work.costs_s) <= _LONGEST_S:
        yield [list(range(n_pieces))]
    yield _by_level(coarse, order, cluster, is_guess)
    yield [[i] for i in range(n_pieces)]


def _bound_s(costs_s: Sequence[float], cluster: ClusterProfile) -> float:
    """Return what no cut of work of these costs is below [s]."""
    least_s = max(sum(costs_s) / cluster.n_threads, max(costs_s, default=0.0))
    return cluster.submit_s + cluster.task_s + least_s


def _least_s(cut: Cut, cluster: ClusterProfile) -> float:
    """Return what no prediction of a cut is below [s]."""
    return cluster.submit_s + len(cut) * cluster.task_s


def _pack(
    costs_s: Sequence[float], is_joined: bool, *, cluster: ClusterProfile, is_guess: bool
) -> list[list[int]]:
    """Share out siblings; `is_joined` says whether something comes before or after them."""
    alone_s = _ALONE * cluster.task_s * cluster.n_threads
    short = [i for i, cost_s in enumerate(costs_s) if cost_s < alone_s]
    alone = [[i] for i, cost_s in enumerate(costs_s) if cost_s >= alone_s]
    if not short:
        return alone
    short_s = [costs_s[i] for i in short]
    n_bundles = _n_bundles(short_s, is_joined and not alone, cluster)
    if is_guess and n_bundles > 1:
        mean_s = fmean(short_s)
        most = max(1, int(_LONGEST_S / mean_s)) if mean_s else len(short)
        shares = factored(len(short), cluster.n_threads, most)
        return alone + [[short[i] for i in share] for share in shares]
    most_s = _LONGEST_S
    if n_bundles == cluster.n_threads:  # what is alone is part of a thread's share
        shares = longest_first(costs_s, n_bundles)
        shares = [[i for i in share if costs_s[i] < alone_s] for share in shares]
        if alone and n_bundles > 1:
            # Few threads may share all the others: should these be long, they are for all threads.
            most_s = min(most_s, _SLACK * sum(short_s) / n_bundles)
    else:
        shares = [[short[i] for i in share] for share in longest_first(short_s, n_bundles)]
    least_s = _TAPER * cluster.n_threads * cluster.task_s if n_bundles > 1 else inf
    return alone + tapered(costs_s, shares, least_s, most_s)


def _n_bundles(costs_s: Sequence[float], is_joined: bool, cluster: ClusterProfile) -> int:
    """Return how many bundles are best: more share the work among threads, and each costs a task."""
    work_s, longest_s = sum(costs_s), max(costs_s)
    numbers = range(1, min(len(costs_s), cluster.n_threads) + 1)

    def makespan_s(n: int) -> float:
        # One bundle can be fused with its surroundings; several have to be waited for.
        apart_s = cluster.round_trip_s if n > 1 and is_joined else 0.0
        return max(longest_s, work_s / n) + n * cluster.task_s + apart_s

    times_s = [makespan_s(n) for n in numbers]
    good_s = _SLACK * min(times_s)
    return next(n for n in reversed(numbers) if times_s[n - 1] <= good_s)


def _by_level(coarse: CoarseGraph, order: Sequence[int], cluster: ClusterProfile, is_guess: bool) -> Cut:
    """Pack the nodes of each level, whatever they wait for: right where everything waits for everything."""
    level: dict[int, int] = {}
    levels: list[list[int]] = []
    for node in order:
        level[node] = 1 + max((level[earlier] for earlier in coarse.before[node]), default=-1)
        if level[node] == len(levels):
            levels.append([])
        levels[level[node]].append(node)
    cut: list[list[int]] = []
    for every in levels:
        nodes = [node for node in every if coarse.may_be_packed(node)]
        cut += [coarse.members[node] for node in every if not coarse.may_be_packed(node)]
        if not nodes:
            continue
        costs_s = [coarse.cost_s[node] for node in nodes]
        groups = [[i] for i in range(len(nodes))]
        if not coarse.are_packed(nodes):
            groups = _pack(costs_s, len(levels) > 1, cluster=cluster, is_guess=is_guess)
        cut += [sorted(p for i in items for p in coarse.members[nodes[i]]) for items in groups]
    return cut
