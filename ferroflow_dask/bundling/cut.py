"""Cut work into bundles, so that the predicted makespan is least.

`best_cut` compares a few ways to cut, one of them without bundles. It returns the one for which `predict`
finds the least makespan on the given cluster, with a handicap for each task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from math import inf
from statistics import fmean

from ferroflow_dask.bundling.coarse import CoarseGraph, factored, longest_first, runs, tapered
from ferroflow_dask.bundling.convex import convex_clusters, regions
from ferroflow_dask.bundling.predict import Cut, Prediction, Work, predict, shortest_s
from ferroflow_dask.bundling.repeats import Measured, fastest, tries
from ferroflow_dask.cluster_profile import ClusterProfile

#: Assumed cost of a piece with unknown cost, in units of a task's overhead.
GUESS = 4.0
#: Fraction of a worker's memory that a bundle may need.
MEMORY_SHARE = 0.25
#: Fraction of all memory that bundles may need for values that graphs share: those of single tasks are read
#: and dropped one by one.
SHARED = 0.01
#: Pieces of at least this duration are not bundled, in units of the time in which the scheduler feeds all
#: threads: they can be stolen one by one, and a wrong cost does less harm.
_ALONE = 5.0
#: Fraction of the scheduler's time for a task that counts even if it overlaps with the work: the work may be
#: shorter than predicted, and scheduler and workers may share cores.
_HANDICAP = 0.5
#: Bundles of fewer pieces gain little, if their number is limited by memory.
_WORTHWHILE = 8
#: The last bundle of a thread's share is halved, in case costs are wrong, while the halves last at least this
#: long, in units of the time in which the scheduler feeds all threads.
_TAPER = 2.0
#: Upper bound of the duration of a bundle of short pieces [s]: some bundles can be stolen or computed again
#: while others run, and adaptive clusters see how much work is left.
_LONGEST_S = 1.0
#: Part of the longest bundle's duration by which it may last longer than predicted: costs are averages, and
#: workers differ.
_DOUBT = 0.2
#: Neighbours may be in different bundles if moving all results that clients want, and those that the work
#: reads, takes at most this part of the work. Regions stay together if moving all results takes more.
_CHEAP = 0.1
#: Numbers of clusters for each thread that are compared.
_CLUSTERS = (1, 4)
#: A cut within this factor of the lower bound is returned without comparing others, or if they could gain
#: less than they take to make, for each piece [s].
_GOOD, _MAKING_S = 1.05, 2e-5
#: A cut that was never measured is tried if it is predicted to take at most so many times the best one.
_TRIED = 1.5


def best_cut(
    work: Work,
    cluster: ClusterProfile,
    is_guess: bool,
    fits: Callable[[Cut], bool],
    measured: Measured | None = None,
    *,
    may_try: bool = False,
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
    measured : mapping of str to Mean, optional
        Durations of the same work by the name of its cut. After a few runs they count instead of predictions.
    may_try : bool, optional
        Whether now and then a cut may be tried that was never measured.
    """
    if _moves_cheaply(work, cluster):
        work = replace(work, held=())
    known, tried = fastest(measured or {}), ""
    if known is not None and measured and may_try and tries(measured):
        tried = _untried(work, cluster, is_guess, fits, measured)
    for name, make in _cuts(work, cluster, is_guess) if known is not None else ():
        if name == (tried or known):
            cut = make()
            if len(cut) == len(work.costs_s) or fits(cut):
                return cut, replace(predict(work, cut, cluster), cut=name)
    best: tuple[Cut, Prediction] | None = None
    best_s = inf
    bound_s = _bound_s(work, cluster)
    good_s = max(_GOOD * bound_s, bound_s + _MAKING_S * len(work.costs_s))
    for cut, prediction, cost_s in _predicted(work, cluster, is_guess, fits):
        if cost_s < best_s:
            best, best_s = (cut, prediction), cost_s
        if best_s <= good_s:
            break
    assert best is not None  # each piece by itself always fits
    return best


def _untried(
    work: Work, cluster: ClusterProfile, is_guess: bool, fits: Callable[[Cut], bool], measured: Measured
) -> str:
    """Return the most promising cut that was never measured; empty if none is promising."""
    found = list(_predicted(work, cluster, is_guess, fits, _TRIED))
    most_s = _TRIED * min(cost_s for *_, cost_s in found)
    known = [one for _, one, _ in found if one.cut in measured]

    def is_alike(one: Prediction) -> bool:
        return any(one.n_tasks < 2 * other.n_tasks < 4 * one.n_tasks for other in known)

    # Two cuts of one prediction are usually the same. Those of about as many tasks take about as long.
    same = {replace(one, cut="") for one in known}
    promising = {
        one.cut: (is_alike(one), cost_s)
        for _, one, cost_s in found
        if cost_s <= most_s and replace(one, cut="") not in same
    }
    return min(promising, key=promising.__getitem__, default="")


def _predicted(
    work: Work, cluster: ClusterProfile, is_guess: bool, fits: Callable[[Cut], bool], slack: float = 1.0
) -> Iterator[tuple[Cut, Prediction, float]]:
    """Yield cuts that fit, with their predictions and costs [s].

    Those are left out that must take more than `slack` times an earlier one.
    """
    best_s = inf
    for name, make in _cuts(work, cluster, is_guess):
        cut = make()
        handicap_s = _handicap_s(work, cut, cluster)
        # Not all are predicted: most are out of the question.
        if shortest_s(work, len(cut), cluster) + handicap_s >= slack * best_s:
            continue
        if len(cut) < len(work.costs_s) and not fits(cut):
            continue
        prediction = replace(predict(work, cut, cluster), cut=name)
        # Transfers overlap with the work, but they share cores with it and links with each other.
        moved_s = prediction.nbytes_moved / (cluster.bandwidth * len(cluster.threads))
        cost_s = prediction.makespan_s + handicap_s + moved_s
        best_s = min(best_s, cost_s)
        yield cut, prediction, cost_s


def _cuts(work: Work, cluster: ClusterProfile, is_guess: bool) -> Iterator[tuple[str, Callable[[], Cut]]]:
    """Yield names of cuts, and functions that make them; the last one is each piece by itself."""
    n_pieces = len(work.costs_s)
    in_order = not _moves_cheaply(work, cluster)
    pack = partial(_pack, cluster=cluster, is_guess=is_guess, longest_s=_longest_s(work, cluster))

    @cache
    def coarse() -> tuple[CoarseGraph, list[int]]:
        found = CoarseGraph(work)
        found.reduce(partial(pack, in_order=in_order))
        return found, found.sorted_nodes()

    yield "siblings", lambda: [coarse()[0].members[node] for node in coarse()[1]]
    if n_pieces and not work.alone and sum(work.costs_s) <= _LONGEST_S:
        yield "one bundle", lambda: [list(range(n_pieces))]
    # Otherwise clusters have the short ones of each region, and their data move for next to nothing.
    if max(work.costs_s, default=0.0) >= separate_s(cluster) or _is_heavy(work, cluster):
        yield "regions", partial(_regions, work, cluster, partial(pack, in_order=in_order))
    yield "levels", lambda: _by_level(*coarse(), partial(pack, is_last=False))
    for n in () if is_guess else _CLUSTERS:
        yield f"clusters, {n} a thread", partial(_clustered, work, cluster, n, in_order)
    yield "single tasks", lambda: [[i] for i in range(n_pieces)]


def _regions(work: Work, cluster: ClusterProfile, pack: Callable[..., list[list[int]]]) -> Cut:
    """Pack regions: all that is done with one partition up to a shuffle, however long, is one bundle."""
    found = regions(work, cluster.added_s, cluster.added_s * cluster.bandwidth)
    coarse = CoarseGraph(_grouped(work, found))
    coarse.reduce(pack)
    return [sorted([i for at in coarse.members[node] for i in found[at]]) for node in coarse.sorted_nodes()]


def _longest_s(work: Work, cluster: ClusterProfile) -> float:
    """Return the longest duration of a bundle of siblings [s]; short if other graphs read or make much."""
    nbytes = sum(work.nbytes(i) for i in work.last) + work.outside_nbytes
    most_nbytes = SHARED * cluster.all_memory_nbytes / (2 * cluster.n_threads)
    n_bundles = nbytes / most_nbytes if most_nbytes else 0.0
    if n_bundles < 1 or n_bundles * _WORTHWHILE > len(work.costs_s):
        return _LONGEST_S
    return min(_LONGEST_S, sum(work.costs_s) / n_bundles)


def _moves_cheaply(work: Work, cluster: ClusterProfile) -> bool:
    """Return whether the values shared with other graphs are moved in far less time than the work takes."""
    nbytes = sum(work.nbytes(i) for i in work.last) + work.outside_nbytes
    moved_s = len(work.last) * cluster.round_trip_s + nbytes / cluster.bandwidth
    return moved_s <= _CHEAP * sum(work.costs_s)


def _is_heavy(work: Work, cluster: ClusterProfile) -> bool:
    """Return whether to move all results would take more than a small part of the work."""
    nbytes = sum(map(work.nbytes, range(len(work.costs_s))))
    return nbytes / cluster.bandwidth > _CHEAP * sum(work.costs_s)


def _clustered(work: Work, cluster: ClusterProfile, n: int, in_order: bool) -> Cut:
    """Return convex clusters of short siblings, about `n` for each thread; chains of clusters are fused."""
    alone_s = separate_s(cluster)
    long = frozenset([i for i, cost_s in enumerate(work.costs_s) if cost_s >= alone_s])
    short = replace(work, alone=long.union(work.alone))
    short_s = sum([cost_s for i, cost_s in enumerate(work.costs_s) if i not in short.alone])
    # Should costs be wrong, the short pieces are for all threads, however long the others are.
    size_s = min(_LONGEST_S, short_s / (n * cluster.n_threads)) or inf

    def pack(costs_s: Sequence[float], _: bool, is_last: bool, __: bool) -> list[list[int]]:
        share_out = runs if is_last and in_order else longest_first
        return share_out(costs_s, max(1, math.ceil(sum(costs_s) / size_s)))

    coarse = CoarseGraph(short)
    coarse.reduce(pack)
    siblings = [coarse.members[node] for node in coarse.sorted_nodes()]
    groups = convex_clusters(_grouped(short, siblings), size_s, _LONGEST_S)
    cut = [sorted([i for at in group for i in siblings[at]]) for group in groups]
    fused = CoarseGraph(_grouped(work, cut))
    return [sorted([i for at in fused.members[node] for i in cut[at]]) for node in fused.sorted_nodes()]


def separate_s(cluster: ClusterProfile) -> float:
    """Return the duration from which on pieces are not bundled [s]."""
    return _ALONE * cluster.added_s * cluster.n_threads


def _grouped(work: Work, groups: Cut) -> Work:
    """Return the work whose pieces are groups of pieces."""
    group_of = {i: at for at, pieces in enumerate(groups) for i in pieces}
    edges = [{group_of[j] for i in pieces for j in work.edges[i]} - {at} for at, pieces in enumerate(groups)]
    return Work(
        [sorted(needed) for needed in edges],
        [sum([work.costs_s[i] for i in pieces]) for pieces in groups],
        lambda at: sum([work.nbytes(i) for i in groups[at]]),
        alone=frozenset(group_of[i] for i in work.alone),
        last=frozenset(group_of[i] for i in work.last),
        held=[work.held_for(pieces) for pieces in groups] if work.held else (),
    )


def _bound_s(work: Work, cluster: ClusterProfile) -> float:
    """Return a lower bound of the makespan of all cuts of the work [s]."""
    on_threads_s = max(sum(work.costs_s) / cluster.n_threads, max(work.costs_s, default=0.0))
    return max(cluster.submit_s + cluster.task_s + on_threads_s, shortest_s(work, 1, cluster))


def _handicap_s(work: Work, cut: Cut, cluster: ClusterProfile) -> float:
    """Return how much longer than predicted a cut may take [s]."""
    longest_s = max((sum([work.costs_s[i] for i in pieces]) for pieces in cut), default=0.0)
    doubt_s = longest_s - max(work.costs_s, default=0.0)
    return _HANDICAP * len(cut) * cluster.added_s + _DOUBT * max(doubt_s, 0.0)


def _pack(
    costs_s: Sequence[float],
    is_joined: bool,
    is_last: bool,
    is_held: bool = False,
    *,
    cluster: ClusterProfile,
    is_guess: bool,
    longest_s: float = _LONGEST_S,
    in_order: bool = False,
) -> list[list[int]]:
    """Share out siblings; `is_joined` says whether something comes before or after them.

    Neighbours stay together (`in_order`) if clients want the results (`is_last`): later graphs may read them
    together. Otherwise they are separated: often neighbours are alike, and a bundle of long ones ends late.
    """
    in_order = in_order and is_last
    alone_s = separate_s(cluster)
    short = [i for i, cost_s in enumerate(costs_s) if cost_s < alone_s]
    alone = [[i] for i, cost_s in enumerate(costs_s) if cost_s >= alone_s]
    if not short:
        return alone
    short_s = [costs_s[i] for i in short]
    # Those whose data one worker holds run there.
    n_threads = max(cluster.threads) if is_held else cluster.n_threads
    n_bundles = _n_bundles(short_s, is_joined and not alone, cluster, n_threads)
    if is_guess and n_bundles > 1:
        mean_s = fmean(short_s)
        most = max(1, int(longest_s / mean_s)) if mean_s else len(short)
        shares = factored(len(short), cluster.n_threads, most)
        return alone + [[short[i] for i in share] for share in shares]
    most_s = longest_s
    share_out = runs if in_order else longest_first
    if n_bundles == cluster.n_threads:  # what is alone is part of a thread's share
        shares = share_out(costs_s, n_bundles)
        shares = [[i for i in share if costs_s[i] < alone_s] for share in shares]
        if alone and n_bundles > 1:
            # Few threads may share all the others: should these be long, they are for all threads.
            most_s = min(most_s, sum(short_s) / n_bundles)
    else:
        shares = [[short[i] for i in share] for share in share_out(short_s, n_bundles)]
    least_s = _TAPER * cluster.n_threads * cluster.added_s if n_bundles > 1 else inf
    return alone + tapered(costs_s, shares, least_s, most_s, is_in_order=in_order)


def _n_bundles(costs_s: Sequence[float], is_joined: bool, cluster: ClusterProfile, n_threads: int) -> int:
    """Return how many bundles are best: more share the work among threads, and each costs a task."""
    work_s, longest_s = sum(costs_s), max(costs_s)
    numbers = range(1, min(len(costs_s), n_threads) + 1)

    def makespan_s(n: int) -> float:
        # One bundle can be fused with its surroundings; several have to be waited for.
        apart_s = cluster.round_trip_s if n > 1 and is_joined else 0.0
        return max(longest_s, work_s / n) + n * cluster.task_s + apart_s

    times_s = [makespan_s(n) for n in numbers]
    # Of equally good numbers the largest: it tolerates wrong costs.
    return max(numbers, key=lambda n: (-times_s[n - 1], n))


def _by_level(coarse: CoarseGraph, order: Sequence[int], pack: Callable[..., list[list[int]]]) -> Cut:
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
        nodes = [node for node in every if not coarse.ends_chain(node)]
        cut += [coarse.members[node] for node in every if coarse.ends_chain(node)]
        if not nodes:
            continue
        costs_s = [coarse.cost_s[node] for node in nodes]
        groups = [[i] for i in range(len(nodes))]
        if not coarse.are_packed(nodes):
            groups = pack(costs_s, len(levels) > 1)
        cut += [sorted(p for i in items for p in coarse.members[nodes[i]]) for items in groups]
    return cut
