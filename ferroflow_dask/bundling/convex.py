"""Convex clusters: work is grouped by a single walk, so that each group can start once its inputs exist."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from ferroflow_dask.bundling.predict import Work


def convex_clusters(work: Work, size_s: float, most_s: float) -> list[list[int]]:
    """Group pieces into clusters; O(pieces + edges).

    A piece joins the cluster that holds all its inputs. Pieces without inputs, and pieces whose inputs are in
    different clusters, fill new clusters in the given order. Each cluster has a level, and reads only from
    clusters of lower levels. So no cluster waits for itself, and none waits for pieces that only some of its
    pieces need, apart from those of one level. Pieces whose inputs from outside are on different workers fill
    different clusters. On a stencil this gives trapezoids in time, as in M. Frigo and V. Strumpen, "Cache
    oblivious stencil computations", 2005; on a tree it gives subtrees.

    Parameters
    ----------
    work : Work
        Neighbours in its order should be read together, as in Dask's static order.
    size_s : float
        A cluster is full when its pieces last so long [s], apart from those that join it.
    most_s : float
        No piece joins a cluster that lasts longer [s].

    Returns
    -------
    list of list of int
        The pieces of each cluster, ascending. The clusters are in an order in which they can run.
    """
    homes = work.homes()
    clusters: list[_Cluster] = []
    cluster_of: list[_Cluster] = []  # by piece
    is_open: dict[tuple[int, str | None], _Cluster] = {}  # by level and home
    single = {*work.alone, *work.last}
    for i, needed in enumerate(work.edges):
        sources = {cluster_of[j] for j in needed}
        level = 1 + max((source.level for source in sources), default=-1)
        duration_s, home = work.costs_s[i], homes.get(i)
        source = next(iter(sources)) if len(sources) == 1 and not single.intersection(needed) else None
        if i in single:
            # Others read its result: their clusters are of a higher level.
            cluster = _Cluster(level, home)
        elif source is not None and source.cost_s <= most_s and home in (None, source.home):
            cluster = source
        else:
            found = is_open.get((level, home))
            if found is None or found.filled_s + duration_s / 2 > size_s:
                found = is_open[level, home] = _Cluster(level, home)
            cluster = found
            cluster.filled_s += duration_s
        if not cluster.pieces:
            clusters.append(cluster)
        cluster.pieces.append(i)
        cluster.cost_s += duration_s
        cluster_of.append(cluster)
    clusters.sort(key=lambda cluster: (cluster.level, cluster.pieces[0]))
    return [cluster.pieces for cluster in clusters]


@dataclass(slots=True, eq=False)
class _Cluster:
    """A cluster that may still grow; the pieces that have joined it do not fill it."""

    level: int
    home: str | None
    pieces: list[int] = field(default_factory=list)
    filled_s: float = 0.0
    cost_s: float = 0.0


def regions(work: Work, light_s: float, light_nbytes: float) -> list[list[int]]:
    """Put each piece that reads nothing, or several regions, together with all that only it leads to.

    Parameters
    ----------
    work : Work
    light_s, light_nbytes : float
        Duration and size up to which a piece that reads nothing counts as no input [s, B]: for example, the
        value that a column is compared with.

    Returns
    -------
    list of list of int
        The pieces of each region, ascending. The regions are in an order in which they can run.
    """
    light = {
        i
        for i, needed in enumerate(work.edges)
        if not needed and work.costs_s[i] <= light_s and work.nbytes(i) <= light_nbytes
    }
    inner = work
    if light:
        edges = [[j for j in needed if j not in light] for needed in work.edges]
        inner = replace(work, edges=edges, last=light.union(work.last))
    # Light pieces are by themselves and read nothing, so they can run first.
    return sorted(convex_clusters(inner, 0.0, inf), key=lambda pieces: pieces[0] not in light)
