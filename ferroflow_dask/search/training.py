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
from ferroflow_dask.search.microbatches import repeated
from ferroflow_dask.search.problem import COPY_BANDWIDTH, Choice, Degrees, Problem, Table
from ferroflow_dask.search.training_memory import state_nbytes
from ferroflow_dask.simulation import Machine
from ferroflow_dask.strategy.spaces import Region, region_of, shape_of, whole_region

#: A backward pass computes the gradients of the inputs and of the weights.
_BACKWARD = 2.0
#: How the holders of a weight sum up its gradient.
SYNCHRONIZATIONS = ("server", "ring")


class TrainingProblem(Problem):
    """One iteration of the training of a graph on a machine.

    Operators that read the same weights have the same choice; so have the microbatches. Gradients are
    accumulated over the microbatches, and synchronised once.

    Parameters
    ----------
    graph : Graph
        Of one microbatch, with known shapes.
    machine : Machine
    cost : CostModel
    times : mapping of str to float, optional
        By operator, how many times its duration, its weights and its results count: for one that stands for
        several.
    without : mapping of str to collection of str, optional
        By operator, axes along which it must not be split.
    copy_bandwidth : float, optional
        As for `Problem` [B/s].
    synchronization : str, optional
        `server`: for each part of a weight, one of its holders gets all gradients and sends the new values.
        `ring`: the sum goes around.
    microbatches : int, optional
        Number of microbatches. They follow each other through the operators, as in a pipeline.
    in_flight : int, optional
        How many microbatches may have run the forward pass of an operator, but not its backward pass; all if
        left out. With 1, gradients are accumulated without a pipeline.
    """

    held = "weights, gradients and results"

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
        microbatches: int = 1,
        in_flight: int | None = None,
    ) -> None:
        if synchronization not in SYNCHRONIZATIONS:
            known = " or ".join(SYNCHRONIZATIONS)
            raise UsageError(f"synchronization must be {known}, got {synchronization!r}")
        self.microbatches = microbatches
        self.in_flight = microbatches if in_flight is None else in_flight
        if not 1 <= self.in_flight <= microbatches:
            raise UsageError(f"in_flight must be from 1 to {microbatches} microbatches, got {self.in_flight}")
        graph, self._origin = repeated(graph, microbatches)
        super().__init__(graph, machine, cost, copy_bandwidth)
        self._times = times or {}
        for op in self.ops:
            space, axes = self.spaces[op.name], (without or {}).get(self._origin[op.name][0], ())
            if axes and not isinstance(space, str):
                kept = tuple(axis for axis in space.axes if axis.name not in axes)
                self.spaces[op.name] = replace(space, axes=kept)
        at = {self._origin[op.name]: node for node, op in zip(self.changeable, self.ops, strict=True)}
        #: By node, the same operator in the first microbatch.
        self.twins = {node: at[name, 0] for (name, _), node in at.items()}
        # By node, the one whose backward pass it waits for.
        self._waits = {node: at.get((name, copy - self.in_flight)) for (name, copy), node in at.items()}
        #: Nodes of the first microbatch.
        self.first_copy = [node for (_, copy), node in at.items() if copy == 0]
        # The loss is computed where the results are: nothing is put together.
        self._n_forward = self.first + len(self.ops)
        self.values = self.values[: self._n_forward]
        self.consumers = [[i for i in found if i < self._n_forward] for found in self.consumers]
        self.consumers = self.consumers[: self._n_forward]
        #: By the first operator of each group, the operators that read the same weights.
        self.groups = _groups(self)
        self.leading = list(self.groups)
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
        self.limits = [int(nbytes) for nbytes in machine.memory_nbytes]
        self.may_recompute = any(self.limits)
        self._results: dict[tuple[int, Degrees], list[float]] = {}

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
        for node, before in self._waits.items():
            if before is not None:
                self.values[node][self._backward[before]] = []
                self.consumers[self._backward[before]].append(node)

    def name_of(self, node: int) -> str:
        """Return the name of an operator in the graph of one microbatch."""
        return self._origin[self.ops[node - self.first].name][0]

    def times_of(self, node: int) -> float:
        """Return how many times an operator counts."""
        return self._times.get(self.name_of(node), 1.0) if node in self.changeable else 1.0

    def named(self, choices: Sequence[Choice]) -> dict[str, Choice]:
        """Return the choices of operators by their names in the graph of one microbatch."""
        return {self.name_of(i): choices[i] for i in self.first_copy}

    def of_names(self, found: Mapping[str, Choice]) -> list[Choice]:
        """Return the choice of each node from those by name, as `named` returns them."""
        choices = [Choice((), (0,))] * self.n_nodes
        for node in self.changeable:
            choices[node] = found[self.name_of(node)]
        return choices

    def result_nbytes(self, node: int, degrees: Degrees) -> list[float]:
        """Return the size of the results of each part of an operator [B]."""
        key = (node, degrees)
        if key not in self._results:
            op = self.op(node)
            assert op is not None
            split = not isinstance(self.spaces[op.name], str)
            self._results[key] = [
                self.times_of(node)
                * sum(
                    (self._of_result(op, i, part) if split else self.graph.spec(name)).nbytes or 0
                    for i, name in enumerate(op.outputs)
                )
                for part in self.parts(node, degrees)
            ]
        return self._results[key]

    def excess_nbytes(self, choices: Sequence[Choice]) -> int:
        """Return how much of the state does not fit the memory of the devices; see `state_nbytes` [B]."""
        if not self.may_recompute:
            return 0
        pairs = zip(state_nbytes(self, choices), self.limits, strict=True)
        return math.ceil(sum(max(0.0, nbytes - limit) for nbytes, limit in pairs if limit))

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
        times = self.times_of(node)
        # Microbatches take equal time: one of them is asked for.
        return [times * seconds for seconds in super().base_s(self.twins.get(node, node), degrees)]

    def durations_s(self, node: int, choice: Choice) -> list[float]:
        """Return the duration of each part of a node with a choice on a worker of speed 1 [s].

        A second forward pass counts together with the backward pass.
        """
        seconds = self.base_s(node, choice.degrees)
        if not choice.recompute or node not in self._forward:
            return seconds
        return [(1 + 1 / _BACKWARD) * duration for duration in seconds]

    def _new_table(self, producer: int, made: Degrees, reader: int, read: Degrees) -> Table:
        if reader < self._n_forward <= producer:
            return self._waiting(len(self.parts(self._forward[producer], made)), reader, read)
        if reader < self._n_forward:
            return super()._new_table(producer, made, reader, read)
        if reader in self._first_of:
            return self._summed(producer, reader, read)
        if producer < self._n_forward:  # the loss: the gradient of a result is where the result is
            n = len(self.parts(producer, made))
            return Table([[] for _ in range(n)], [[i] for i in range(n)], [0.0] * n)
        return self._gradients(self._forward[reader], read, self._forward[producer], made)

    def _waiting(self, n: int, reader: int, read: Degrees) -> Table:
        """Return that each part of a microbatch waits for the same one of an earlier microbatch."""
        n_read = len(self.parts(reader, read))
        return Table([[] for _ in range(n)], [[i] if i < n_read else [] for i in range(n)], [0.0] * n_read)

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
        # All members of a group sum up their gradients where they are. The last backward pass sends them:
        # that of the first operator in the last microbatch.
        group = self.groups[node]
        last = group[-len(group) // self.microbatches]
        if producer in (self._backward[last], self._sync[node]):
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
        nbytes: float = weight.nbytes * share * self._times.get(self._origin[op.name][0], 1.0)
        if op.op_type != "Gather":
            return nbytes
        # The gradient of a table has only the rows that were looked up. They are gathered, not summed up.
        looked_up = self.microbatches * (self.graph.spec(op.outputs[0]).nbytes or 0)
        rows: float = min(nbytes, looked_up * share / 2)
        return rows


def _groups(problem: TrainingProblem) -> dict[int, list[int]]:
    by_weights: dict[object, int] = {}
    found: dict[int, list[int]] = {}
    for node, twin in sorted(problem.twins.items(), key=lambda pair: pair[0] != pair[1]):
        weights = tuple(problem.weights_of(node))
        first = by_weights.setdefault(weights or twin, node)
        found.setdefault(first, []).append(node)
    return found
