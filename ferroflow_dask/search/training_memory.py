"""Memory of a training iteration: weights, their gradients, and results that backward passes need.

Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019,
section 2.3, and T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. For a device d, with w
microbatches in flight:

    nbytes(d) = 2 weights(d) + w (received(d) + kept(d)) + recomputed(d)

`weights` count twice, since their gradients are accumulated. `received` are the samples of one microbatch and
the values that other devices computed. `kept` are the results of its operators here. `recomputed` are results
of operators that compute their forward pass twice. They exist for one microbatch and one segment at a time;
the largest segment counts. A segment is a set of such operators that read each other. If all results are
recomputed and w is the number of microbatches M, this is GPipe's O(N + L/K × N/M). Gradients of results live
for a short time and are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ferroflow_dask.search.problem import Choice

if TYPE_CHECKING:
    from ferroflow_dask.search.training import TrainingProblem


def state_nbytes(problem: TrainingProblem, choices: Sequence[Choice]) -> list[float]:
    """Return the size of the state of each device [B]."""
    held = [0.0] * len(problem.machine.threads)
    for first in problem.groups:
        degrees, workers, _ = choices[first]
        seen: set[object] = set()
        for worker, regions in zip(workers, problem.weight_regions(first, degrees), strict=True):
            for region, nbytes in regions.items():
                if (worker, region) not in seen:
                    seen.add((worker, region))
                    held[worker] += 2 * problem.times_of(first) * nbytes
    segment_of = _segments(problem, choices)
    segments: list[dict[int, float]] = [{} for _ in held]
    for node in problem.first_copy:
        degrees, workers, is_recomputed = choices[node]
        for worker, size in zip(workers, problem.result_nbytes(node, degrees), strict=True):
            if is_recomputed:
                segment = segment_of[node]
                segments[worker][segment] = segments[worker].get(segment, 0.0) + size
            else:
                held[worker] += problem.in_flight * size
    for worker, sizes in enumerate(segments):
        held[worker] += max(sizes.values(), default=0.0)
    for (worker, _), size in _received(problem, choices).items():
        held[worker] += problem.in_flight * size
    return held


def _segments(problem: TrainingProblem, choices: Sequence[Choice]) -> dict[int, int]:
    """Return the segment of each operator that computes its forward pass twice, by its first operator."""
    found: dict[int, int] = {}
    for node in problem.first_copy if problem.may_recompute else ():
        if choices[node].recompute:
            joined = {found[one] for one in problem.values[node] if one in found}
            segment = min(joined, default=node)
            found[node] = segment
            if len(joined) > 1:
                found = {one: segment if of in joined else of for one, of in found.items()}
    return found


def _received(problem: TrainingProblem, choices: Sequence[Choice]) -> dict[tuple[int, int], int]:
    """Return by device and region the size of the values that other devices computed, and of samples [B]."""
    found: dict[tuple[int, int], int] = {}
    for node in problem.first_copy:
        read = choices[node]
        for producer in problem.values[node]:
            made = choices[producer]
            is_input = producer not in problem.changeable
            table = problem.table(producer, made.degrees, node, read.degrees)
            for home, reads in zip(made.workers, table.reads, strict=True):
                for part, region, nbytes in reads:
                    if is_input or read.workers[part] != home:
                        found[read.workers[part], region] = nbytes
    return found
