"""Training as a problem: backward passes and the synchronisation of weights, as in FlexFlow's paper.

Each operator computes its backward pass where it computes its forward pass, in twice the time. Gradients go
the opposite way of values. Then the workers that hold the same part of a weight sum up its gradient: on one
of them, which sends the new weight back as a parameter server does, or in a ring (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from ferroflow_dask.cost import CostModel
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import Op
from ferroflow_dask.search.candidates import spread
from ferroflow_dask.search.problem import COPY_BANDWIDTH, Choice, Degrees, Problem, Table
from ferroflow_dask.search.timeline import Simulation
from ferroflow_dask.simulation import Machine
from ferroflow_dask.strategy.spaces import Axis, Region, region_of, shape_of, whole_region

#: A backward pass computes the gradients of the inputs and of the weights.
_BACKWARD = 2.0
#: How the holders of a weight sum up its gradient.
SYNCHRONIZATIONS = ("server", "ring")


class TrainingProblem(Problem):
    """One iteration of the training of a graph on a machine.

    Operators that read the same weights have the same choice.

    Parameters
    ----------
    graph : Graph
        With known shapes.
    machine : Machine
    cost : CostModel
    times : mapping of str to float, optional
        By operator, how many times its duration and its weights count: for one that stands for several.
    without : mapping of str to collection of str, optional
        By operator, axes along which it must not be split.
    copy_bandwidth : float, optional
        As for `Problem` [B/s].
    synchronization : str, optional
        `server`: for each part of a weight, one of its holders gets all gradients and sends the new values.
        `ring`: the sum goes around.
    """

    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        cost: CostModel,
        *,
        times: Mapping[str, float] | None = None,
        without: Mapping[str, Collection[str]] | None = None,
        copy_bandwidth: float = COPY_BANDWIDTH,
        synchronization: str = "server",
    ) -> None:
        if synchronization not in SYNCHRONIZATIONS:
            known = " or ".join(SYNCHRONIZATIONS)
            raise UsageError(f"synchronization must be {known}, got {synchronization!r}")
        super().__init__(graph, machine, cost, copy_bandwidth)
        self._times = times or {}
        for name, axes in (without or {}).items():
            space = self.spaces[name]
            if not isinstance(space, str):
                kept = tuple(axis for axis in space.axes if axis.name not in axes)
                self.spaces[name] = replace(space, axes=kept)
        # The loss is computed where the results are: nothing is put together.
        self._n_forward = self.first + len(self.ops)
        self.values = self.values[: self._n_forward]
        self.consumers = [[i for i in found if i < self._n_forward] for found in self.consumers]
        self.consumers = self.consumers[: self._n_forward]
        #: By the first operator of each group, the operators that read the same weights.
        self.groups = _groups(self)
        self._group_of = {node: first for first, nodes in self.groups.items() for node in nodes}
        self._backward = {node: self._n_forward + i for i, node in enumerate(self.changeable)}
        n_before = self._n_forward + len(self.ops)
        weighted = [first for first in self.groups if self.weights_of(first)]
        self._sync = {first: n_before + i for i, first in enumerate(weighted)}
        self._forward = {there: node for node, there in self._backward.items()}
        self.n_nodes = n_before + len(weighted)
        #: Where servers send the new weights.
        self._spread: dict[int, int] = {}
        if synchronization == "server":
            self._spread = {first: self.n_nodes + i for i, first in enumerate(weighted)}
            self.n_nodes += len(weighted)
        self._first_of = {there: first for of in (self._sync, self._spread) for first, there in of.items()}
        self._connect_backward()

    def _connect_backward(self) -> None:
        more = self.n_nodes - self._n_forward
        self.values += [{} for _ in range(more)]
        self.consumers += [[] for _ in range(more)]
        for node, there in self._backward.items():
            readers = list(self.consumers[node])
            for producer in [self._backward[reader] for reader in readers] or [node]:
                self.values[there][producer] = []
        for first, there in self._sync.items():
            for node in self.groups[first]:
                self.values[there][self._backward[node]] = []
        for first, there in self._spread.items():
            self.values[there][self._sync[first]] = []
        for node in range(self._n_forward, self.n_nodes):
            for producer in self.values[node]:
                self.consumers[producer].append(node)

    def weights_of(self, node: int) -> list[str]:
        """Return the names of the weights that the operator of a node reads."""
        op = self.op(node)
        names = () if op is None else op.inputs
        constants = self.graph.constants
        return [name for name in names if name in constants and constants[name].dtype.kind == "f"]

    def following(self, node: int, choice: Choice) -> dict[int, Choice]:
        """Return the choices that follow: of the group, their backward passes and their weights."""
        first = self._group_of[node]
        found: dict[int, Choice] = {}
        for member in self.groups[first]:
            found |= {member: choice, self._backward[member]: choice}
        for later in (self._sync, self._spread):
            if first in later:
                found[later[first]] = choice
        del found[node]
        return found

    def base_s(self, node: int, degrees: Degrees) -> list[float]:
        """Return the duration of each part of a node on a worker of speed 1 [s]."""
        if node in self._forward:
            return [_BACKWARD * seconds for seconds in self.base_s(self._forward[node], degrees)]
        if node in self._first_of:
            return [0.0] * len(self.parts(self._first_of[node], degrees))
        op = self.op(node)
        times = 1.0 if op is None else self._times.get(op.name, 1.0)
        return [times * seconds for seconds in super().base_s(node, degrees)]

    def _new_table(self, producer: int, made: Degrees, reader: int, read: Degrees) -> Table:
        if reader < self._n_forward:
            return super()._new_table(producer, made, reader, read)
        if reader in self._first_of:
            return self._summed(producer, reader, read)
        if producer < self._n_forward:  # the loss: the gradient of a result is where the result is
            n = len(self.parts(producer, made))
            return Table([[] for _ in range(n)], [[i] for i in range(n)], [0.0] * n)
        return self._gradients(self._forward[reader], read, self._forward[producer], made)

    def _gradients(self, node: int, degrees: Degrees, reader: int, read: Degrees) -> Table:
        """Return what the backward pass of a node gets of that of one of its readers."""
        forward = self.table(node, degrees, reader, read)
        reads: list[list[tuple[int, int, int]]] = [[] for _ in forward.copy_s]
        for part, found in enumerate(forward.reads):
            for taker, _, nbytes in found:
                # Gradients of different readers are different values.
                reads[taker].append((part, self._number(node, reader, part), nbytes))
        readers = [sorted({part for part, _, _ in found}) for found in reads]
        return Table(reads, readers, [0.0] * len(forward.reads))

    def _summed(self, producer: int, sync: int, degrees: Degrees) -> Table:
        """Return what the holders of weights get: gradients of backward passes, or new weights of servers."""
        node = self._first_of[sync]
        n = len(self.parts(node, degrees))
        reads: list[list[tuple[int, int, int]]] = [[] for _ in range(n)]
        readers = [[part] for part in range(n)]
        # All members of a group sum up their gradients where they are. The last backward pass sends them.
        if producer in (self._backward[node], self._sync[node]):
            for shard, (holders, nbytes) in enumerate(self.shards(node, degrees)):
                for part, to, size in self._sent(sync, shard, holders, nbytes):
                    # A gradient is each holder's own, a new weight the same for all.
                    reads[part].append((to, self._number(sync, shard), round(size)))
                    readers[part].append(to)
        return Table(reads, [sorted(set(found)) for found in readers], [0.0] * n)

    def _sent(
        self, sync: int, shard: int, holders: list[int], nbytes: float
    ) -> Iterator[tuple[int, int, float]]:
        """Yield which holder sends how much to which other one [B]."""
        n = len(holders)
        first = self._first_of[sync]
        # Servers are spread over the holders.
        server = holders[(first + shard) % n]
        if not self._spread:
            for at, part in enumerate(holders if n > 1 else ()):
                yield part, holders[(at + 1) % n], 2 * nbytes * (n - 1) / n
        elif sync == self._spread[first]:
            yield from ((server, part, nbytes) for part in holders if part != server)
        else:
            yield from ((part, server, nbytes) for part in holders if part != server)

    def _number(self, *value: int) -> int:
        return self._regions.setdefault(value, len(self._regions))

    def shards(self, node: int, degrees: Degrees) -> list[tuple[list[int], float]]:
        """Return which parts hold the same part of a weight, and the size of its gradient [B]."""
        op = self.op(node)
        assert op is not None
        held: dict[tuple[str, Region], list[int]] = {}
        for i, part in enumerate(self.parts(node, degrees)):
            for name in self.weights_of(node):
                held.setdefault((name, self._weight_region(op, name, part)), []).append(i)
        return [(holders, self._gradient_nbytes(op, *shard)) for shard, holders in held.items()]

    def _weight_region(self, op: Op, name: str, part: Mapping[str, tuple[int, int]]) -> Region:
        shape = tuple(self.graph.constants[name].shape)
        space = self.spaces[op.name]
        dims = None if isinstance(space, str) else space.inputs[op.inputs.index(name)]
        return whole_region(shape) if dims is None else region_of(dims, part, shape)

    def _gradient_nbytes(self, op: Op, name: str, region: Region) -> float:
        weight = self.graph.constants[name]
        share = math.prod(shape_of(region)) / weight.size
        nbytes: float = weight.nbytes * share * self._times.get(op.name, 1.0)
        if op.op_type != "Gather":
            return nbytes
        # The gradient of a table has only the rows that were looked up. They are gathered, not summed up.
        looked_up = self.graph.spec(op.outputs[0]).nbytes or 0
        rows: float = min(nbytes, looked_up * share / 2)
        return rows


def least_traffic(problem: TrainingProblem) -> list[Choice]:
    """Return all operators on all workers, each split so that the busiest link is busy for the least time.

    Samples, a part of the weights, or both are split. That generalises A. Krizhevsky, "One weird trick for
    parallelizing convolutional neural networks", 2014.
    """
    n = len(problem.machine.threads)
    choices = [Choice((), (0,))] * problem.n_nodes
    for first, nodes in problem.groups.items():
        options = [spread(problem, degrees) for degrees in _both_ways(problem, first, n) or [()]]
        costs = [_busiest_s(problem, nodes, choice, choices) for choice in options]
        best = options[costs.index(min(costs))]
        for node in nodes:
            choices[node] = best
    return choices


def _both_ways(problem: TrainingProblem, node: int, n: int) -> list[Degrees]:
    """Return the degrees that split samples and one dimension of weights into as many parts as workers."""
    op = problem.op(node)
    space = "" if op is None else problem.spaces[op.name]
    axes = [] if isinstance(space, str) else list(space.axes)
    samples = next((axis.size for axis in axes if axis.name == "sample"), 1)
    others: list[Axis | None] = [axis for axis in axes if axis.name.startswith("parameter")]
    options = []
    for other in others or [None]:
        inside = 1
        while inside <= n:
            if not n % inside and n // inside <= samples and inside <= (1 if other is None else other.size):
                found = {"sample": n // inside, **({} if other is None else {other.name: inside})}
                options.append(tuple(sorted((axis, degree) for axis, degree in found.items() if degree > 1)))
            inside *= 2
    return options


def _busiest_s(problem: TrainingProblem, nodes: list[int], choice: Choice, before: list[Choice]) -> float:
    """Return how long a choice keeps the busiest link busy: values, gradients and weights [s]."""
    machine = problem.machine
    busy_s: dict[int, float] = {}

    def send(source: int, destination: int, nbytes: float) -> None:
        if source != destination:
            for link in machine.route(source, destination).links:
                busy_s[link] = busy_s.get(link, 0.0) + nbytes / machine.bandwidths[link]

    for node in nodes:
        for producer in problem.values[node]:
            made = before[producer]
            table = problem.table(producer, made.degrees, node, choice.degrees)
            for home, reads in zip(made.workers, table.reads, strict=True):
                for part, _, nbytes in reads:
                    send(home, choice.workers[part], nbytes)
                    send(choice.workers[part], home, nbytes)
    for holders, size in problem.shards(nodes[0], choice.degrees):
        for holder in holders[1:]:
            send(choice.workers[holder], choice.workers[holders[0]], size)
            send(choice.workers[holders[0]], choice.workers[holder], size)
    return max(busy_s.values(), default=0.0)


def _groups(problem: TrainingProblem) -> dict[int, list[int]]:
    by_weights: dict[object, int] = {}
    found: dict[int, list[int]] = {}
    for node in problem.changeable:
        weights = tuple(problem.weights_of(node))
        first = by_weights.setdefault(weights or node, node)
        found.setdefault(first, []).append(node)
    return found


def compute_s(problem: Problem, found: Simulation) -> float:
    """Return the time that all parts take together, without transfers [s]."""
    speeds = problem.machine.speeds
    return sum(
        seconds / speeds[worker]
        for choice, durations in zip(found.choices, found.durations_s, strict=True)
        for worker, seconds in zip(choice.workers, durations, strict=True)
    )


def nbytes_between(problem: Problem, found: Simulation, places: Sequence[int]) -> int:
    """Return the size of all transfers between different places, such as hosts [B].

    Parameters
    ----------
    problem : Problem
    found : Simulation
    places : sequence of int
        Of each worker.
    """
    total = 0
    for node, choice in enumerate(found.choices):
        for part, home in enumerate(choice.workers):
            sent = {
                (found.choices[reader].workers[taker], region): nbytes
                for reader in problem.consumers[node]
                for taker, region, nbytes in found.tables[reader][node].reads[part]
            }
            total += sum(nbytes for (to, _), nbytes in sent.items() if places[to] != places[home])
    return total
