"""P2P shuffles and rechunks in graphs: the tasks of each, and those that a join reads together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dask._task_spec import Alias, GraphNode, Task
from dask.typing import Key
from dask.utils import key_split

try:  # private names: without them, shuffles stay with P2P
    from distributed.shuffle._arrow import check_dtype_support
    from distributed.shuffle._core import P2PBarrierTask
except ImportError:
    _CAN_REPLACE = False
else:
    _CAN_REPLACE = True

Graph = Mapping[Key, GraphNode]
#: For each axis: the old chunks that a new one consists of, and which part of each.
Recipe = Sequence[Sequence[tuple[int, slice]]]

#: Functions of P2P tasks, and the positions of the identifiers of their shuffles among the arguments.
TRANSFERS = {
    "_shuffle_transfer": 1,
    "shuffle_transfer": 1,
    "rechunk_transfer": 1,
    "assign_index_merge_transfer": 4,
}
UNPACKS = {"shuffle_unpack": (0,), "rechunk_unpack": (0,), "merge_unpack": (0, 1)}
#: Prefixes of the tasks by which Dask merges chunks before a rechunk by P2P.
_RECHUNKED = frozenset({"rechunk-merge", "rechunk-split"})
_MODULES = ("distributed.shuffle.", "dask.dataframe.dask_expr.")


@dataclass(eq=False)
class Shuffle:
    """A P2P shuffle or rechunk in a graph.

    Parameters
    ----------
    barrier : P2PBarrierTask
    transfers, unpacks : list of Task
        The tasks that read the inputs, and those that return the outputs.
    """

    barrier: Any
    transfers: list[Task] = field(default_factory=list)
    unpacks: list[Task] = field(default_factory=list)

    @property
    def id(self) -> str:
        """The identifier, which is the same for the same shuffle of the same data."""
        return str(self.barrier.spec.id)

    @property
    def n_pieces(self) -> int:
        """Pieces of inputs that outputs get."""
        spec = self.barrier.spec
        if hasattr(spec, "old"):
            return sum(math.prod(map(len, recipe)) for recipe in self.recipes.values())
        return len(self.transfers) * len(self.unpacks)

    @cached_property
    def recipes(self) -> dict[Key, Recipe]:
        """Return which parts of old chunks each output of a rechunk consists of."""
        from dask.array.rechunk import old_to_new

        axes = old_to_new(self.barrier.spec.old, self.barrier.spec.new)
        return {
            task.key: [axis[i] for axis, i in zip(axes, task.args[1], strict=True)] for task in self.unpacks
        }

    def sources(self, graph: Graph) -> list[Key]:
        """Return the keys of the data that are shuffled."""
        return _sources(graph, (task.args[0].key for task in self.transfers))


def has_p2p(graph: Graph) -> bool:
    """Return whether there is a P2P shuffle in a graph that could be replaced."""
    kinds = set(map(type, graph.values())) if _CAN_REPLACE else ()
    return any(issubclass(kind, P2PBarrierTask) for kind in kinds)


def _sources(graph: Graph, inputs: Iterable[Key]) -> list[Key]:
    """Return the inputs of a shuffle; for those that Dask has rechunked before, what they consist of."""
    found: dict[Key, None] = {}
    stack = list(inputs)[::-1]
    while stack:
        key = stack.pop()
        if key in graph and key_split(key) in _RECHUNKED:
            stack += sorted(graph[key].dependencies, key=str)
        else:
            found[key] = None
    return list(found)


def parts_before_outputs(graph: Graph) -> set[Key]:
    """Return the keys of the P2P tasks that come before outputs."""
    return {
        key for key, task in graph.items() if isinstance(task, P2PBarrierTask) or name_of(task) in TRANSFERS
    }


def unfused(graph: Graph) -> dict[Key, GraphNode]:
    """Take apart the tasks into which Dask has fused a part of a P2P shuffle."""
    tasks = dict(graph)
    aliases: set[Key] = set()
    stack = [key for key, task in tasks.items() if _holds_part(task)]
    while stack:
        key = stack.pop()
        inner, output, *_ = tasks[key].args  # type: ignore[attr-defined]
        if output != key:
            tasks[key] = Alias(key, output)
            if name_of(inner[output]) in TRANSFERS:
                aliases.add(key)
        tasks |= inner  # in place of an alias of the fused task
        stack += [one for one, task in inner.items() if _holds_part(task)]
    if aliases:  # barriers read transfers under their own keys
        for key in aliases.difference(*(task.dependencies for task in tasks.values())):
            del tasks[key]
    return tasks


def _holds_part(task: GraphNode) -> bool:
    return (
        isinstance(task, Task) and task.has_subgraph() and any(map(_is_or_holds_part, task.args[0].values()))
    )


def _is_or_holds_part(task: GraphNode) -> bool:
    return name_of(task) in TRANSFERS or name_of(task) in UNPACKS or _holds_part(task)


def name_of(task: GraphNode) -> str | None:
    """Return the name of the P2P function that a task calls; None if it calls another one."""
    function = getattr(task, "func", None)
    module = getattr(function, "__module__", None) or ""
    return getattr(function, "__name__", None) if module.startswith(_MODULES) else None


def groups_of(graph: Graph) -> Iterator[list[Shuffle]]:
    """Yield the shuffles of a graph that can be replaced, those together that a join reads together."""
    shuffles = {
        str(task.spec.id): Shuffle(task) for task in graph.values() if isinstance(task, P2PBarrierTask)
    }
    partners: defaultdict[str, set[str]] = defaultdict(set)
    understood = {one for one, shuffle in shuffles.items() if _is_supported(shuffle.barrier.spec)}
    n_readers: defaultdict[Key, int] = defaultdict(int)
    for task in graph.values():
        for key in task.dependencies:
            n_readers[key] += 1
        name = name_of(task)
        if not isinstance(task, Task):
            continue
        if name in TRANSFERS:
            shuffles[task.args[TRANSFERS[name]]].transfers.append(task)
        elif name in UNPACKS:
            # Both sides of a join of a frame with itself are the same shuffle.
            ids = {str(task.args[i]) for i in UNPACKS[name]}
            for one in ids:
                shuffles[one].unpacks.append(task)
                partners[one].update(ids)
    for one, shuffle in shuffles.items():
        keys = {task.key for task in shuffle.transfers}
        n_read_barrier = n_readers[shuffle.barrier.key]
        # Anything else may read what P2P tasks yield in a way that is not known here.
        if (
            keys != set(shuffle.barrier.dependencies)
            or any(n_readers[key] != 1 for key in keys)
            or n_read_barrier != len(shuffle.unpacks)
        ):
            understood.discard(one)
    while shuffles:
        joined, stack = set[str](), [str(next(iter(shuffles)))]
        while stack:
            one = stack.pop()
            if one not in joined:
                joined.add(one)
                stack += partners[one]
        group = [shuffles.pop(one) for one in [*shuffles] if one in joined]
        if joined <= understood:
            yield group


def _is_supported(spec: Any) -> bool:
    """Return whether P2P supports the data: else it has to raise its error."""
    if hasattr(spec, "meta"):
        try:
            check_dtype_support(spec.meta)
        except (TypeError, AttributeError):  # AttributeError if two columns have the same name
            return False
    return True
