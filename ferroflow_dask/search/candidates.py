"""Candidates of a search: choices of one operator, and strategies to start from or to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

from ferroflow_dask.search.problem import Choice, Degrees, Problem

#: Combinations of degrees of one operator.
_MOST_DEGREES = 128


def degrees_of(problem: Problem, node: int) -> list[Degrees]:
    """Return the degrees that a search tries for an operator: powers of two, and the number of workers."""
    if node not in problem.degrees:
        problem.degrees[node] = _degrees(problem, node)
    return problem.degrees[node]


def _degrees(problem: Problem, node: int) -> list[Degrees]:
    op = problem.op(node)
    space = "" if op is None else problem.spaces[op.name]
    if isinstance(space, str):
        return [()]
    n = len(problem.machine.threads)
    allowed = sorted({1, n, *(2**i for i in range(n.bit_length()) if 2**i <= n)})
    each = [[(axis.name, d) for d in allowed if d <= axis.size] for axis in space.axes]
    found: list[Degrees] = []
    for one in product(*each):
        if np.prod([d for _, d in one], initial=1) in allowed:
            found.append(tuple(sorted((axis, d) for axis, d in one if d > 1)))
            if len(found) == _MOST_DEGREES:
                break
    return found


def spread(problem: Problem, degrees: Degrees) -> Choice:
    """Return degrees with the parts in order on the workers."""
    n_parts = int(np.prod([d for _, d in degrees], initial=1))
    n = len(problem.machine.threads)
    return Choice(degrees, tuple(i * n // n_parts for i in range(n_parts)))


def neighbours(problem: Problem, node: int) -> Iterator[Choice]:
    """Yield the choices that a descent tries: parts in order, and whole on each worker."""
    for degrees in degrees_of(problem, node):
        if degrees:
            yield spread(problem, degrees)
    for worker in range(len(problem.machine.threads)):
        yield Choice((), (worker,))


def random_choice(problem: Problem, node: int, rng: np.random.Generator) -> Choice:
    """Return random degrees of an operator; in half of the cases each part has a random worker, too."""
    known = degrees_of(problem, node)
    found = spread(problem, known[int(rng.integers(len(known)))])
    if len(found.workers) > 1 and rng.random() < 0.5:
        return found
    n = len(problem.machine.threads)
    return Choice(found.degrees, tuple(int(worker) for worker in rng.integers(n, size=len(found.workers))))


def seeds(problem: Problem) -> dict[str, list[Choice]]:
    """Return the strategies to start from, by name."""
    n = len(problem.machine.threads)
    names: dict[str, Callable[[Problem, int, list[Choice]], Degrees]] = {
        "one device": lambda _problem, _node, _before: (),
        "data-parallel": _along("sample"),
        "sequence-parallel": _along("attribute1", "sample"),
        "output dimensions": _output_dimensions,
        "Megatron-like": _megatron,
    }
    found = {}
    for name, rule in names.items():
        choices = [Choice((), (0,))] * problem.n_nodes
        for node in problem.changeable if n > 1 else ():
            choices[node] = spread(problem, rule(problem, node, choices))
        found[name] = choices
    return found


def _options(problem: Problem, node: int) -> list[Degrees]:
    """Return the degrees that split one axis over all workers."""
    op = problem.op(node)
    space = "" if op is None else problem.spaces[op.name]
    n = len(problem.machine.threads)
    return [] if isinstance(space, str) else [((axis.name, n),) for axis in space.axes if axis.size >= n]


def _along(*axes: str) -> Callable[[Problem, int, list[Choice]], Degrees]:
    def rule(problem: Problem, node: int, _before: list[Choice]) -> Degrees:
        options = _options(problem, node)
        return next((one for axis in axes for one in options if one[0][0] == axis), ())

    return rule


def _output_dimensions(problem: Problem, node: int, before: list[Choice]) -> Degrees:
    """Split a dimension of the result that moves the fewest bytes, as Mesh-TensorFlow could."""
    options = [one for one in _options(problem, node) if one[0][0] != "contracted"]
    return min(options, key=lambda one: _moved(problem, node, one, before), default=())


def _megatron(problem: Problem, node: int, before: list[Choice]) -> Degrees:
    """Split weights by columns, then by rows; operators without weights follow, as in Megatron-LM."""
    options = _options(problem, node)
    weighted = [one for one in options if one[0][0].startswith("parameter")]
    summed = [one for one in options if one[0][0] == "contracted"]
    if weighted and summed:
        return weighted[0] if _moved(problem, node, summed[0], before) else summed[0]
    options = [one for one in options if one[0][0] != "contracted"]
    return min(options, key=lambda one: _moved(problem, node, one, before), default=())


def _moved(problem: Problem, node: int, degrees: Degrees, before: list[Choice]) -> int:
    """Return how many bytes an operator reads of other workers [B]."""
    workers = spread(problem, degrees).workers
    total = 0
    for producer in problem.values[node]:
        table = problem.table(producer, before[producer].degrees, node, degrees)
        for home, reads in zip(before[producer].workers, table.reads, strict=True):
            sent = {(workers[part], region): size for part, region, size in reads if workers[part] != home}
            total += sum(sent.values())
    return total
