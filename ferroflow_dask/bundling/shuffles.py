"""P2P shuffles and rechunks of little data as plain tasks, which can be bundled.

P2P moves any amount of data, through disks, and for that has fixed costs: each transfer and each unpack talks
to an extension of its worker, and a barrier to that of the scheduler. The plain tasks have the same outputs
under the same keys. Three layers of them move the data: each input is split, one task gathers all pieces, and
each output is put together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from dask._task_spec import Alias, GraphNode, List, Task, TaskRef
from dask.typing import Key
from dask.utils import key_split

try:  # private names: without them, shuffles stay with P2P
    from distributed.shuffle._arrow import check_dtype_support
    from distributed.shuffle._core import P2PBarrierTask

    from ferroflow_dask.bundling import shuffle_tasks
except ImportError:
    _CAN_REPLACE = False
else:
    _CAN_REPLACE = True

Graph = Mapping[Key, GraphNode]

#: Functions of P2P tasks, and the positions of the identifiers of their shuffles among the arguments.
_TRANSFERS = {
    "_shuffle_transfer": 1,
    "shuffle_transfer": 1,
    "rechunk_transfer": 1,
    "assign_index_merge_transfer": 4,
}
_UNPACKS = {"shuffle_unpack": (0,), "rechunk_unpack": (0,), "merge_unpack": (0, 1)}
#: Prefixes of the tasks by which Dask merges chunks before a rechunk by P2P.
_RECHUNKED = frozenset({"rechunk-merge", "rechunk-split"})
#: Data of so many times the expected size are reported: the next shuffle of them is planned by the new size.
_DOUBT = 8
_MODULES = ("distributed.shuffle.", "dask.dataframe.dask_expr.")
_MERGE_OPTIONS = (
    "how",
    "left_on",
    "right_on",
    "result_meta",
    "suffixes",
    "left_index",
    "right_index",
    "indicator",
)


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


def parts_and_sources(graph: Graph) -> tuple[set[Key], dict[str, list[Key]]]:
    """Return the keys of the P2P tasks that come before outputs, and those of the data by shuffle."""
    parts = {key for key, task in graph.items() if isinstance(task, P2PBarrierTask)}
    inputs: defaultdict[str, list[Key]] = defaultdict(list)
    for task in graph.values():
        name = _name(task)
        if isinstance(task, Task) and name in _TRANSFERS:
            parts.add(task.key)
            inputs[str(task.args[_TRANSFERS[name]])].append(task.args[0].key)
    return parts, {one: _sources(graph, keys) for one, keys in inputs.items()}


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
            if _name(inner[output]) in _TRANSFERS:
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
    return _name(task) in _TRANSFERS or _name(task) in _UNPACKS or _holds_part(task)


def _name(task: GraphNode) -> str | None:
    """Return the name of the P2P function that a task calls; None if it calls another one."""
    function = getattr(task, "func", None)
    module = getattr(function, "__module__", None) or ""
    return getattr(function, "__name__", None) if module.startswith(_MODULES) else None


@dataclass(frozen=True, slots=True)
class PlainShuffles:
    """A graph in which plain tasks stand for P2P shuffles.

    Parameters
    ----------
    tasks : dict of Key to GraphNode
    outputs : dict of Key to float
        Output partitions that plain tasks return, with the sizes of the data of their shuffles [B].
    origins : dict of Key to Key
        For each new key: that of a P2P task in its place.
    kept : dict of Key to (str, list of Key)
        For the barriers of shuffles that stay: the identifier of the shuffle, and the keys of its data.
    unknown : list of list of Shuffle
        Those of them whose size is unknown, together if they are the sides of a join.
    measured : dict of str to float
        Sizes of data that exist, by the identifiers of their shuffles [B].
    """

    tasks: dict[Key, GraphNode]
    outputs: dict[Key, float] = field(default_factory=dict)
    origins: dict[Key, Key] = field(default_factory=dict)
    kept: dict[Key, tuple[str, list[Key]]] = field(default_factory=dict)
    unknown: list[list[Shuffle]] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)


def with_plain_tasks(
    graph: Graph, nbytes_of: Callable[[list[Shuffle]], float | None], most_nbytes: float = inf
) -> PlainShuffles:
    """Replace P2P shuffles by plain tasks.

    Parameters
    ----------
    graph : mapping of Key to GraphNode
        From `unfused`.
    nbytes_of : callable
        Returns the size of the data of a shuffle [B], of both together if they are the sides of a join;
        None if it stays, infinite if it stays because the size is unknown.
    most_nbytes : float, optional
        More data, and more than expected, are reported [B].
    """
    found = PlainShuffles(dict(graph))
    for group in _groups(graph):
        nbytes = nbytes_of(group)
        if nbytes is None or nbytes == inf:
            found.kept.update({one.barrier.key: (one.id, one.sources(graph)) for one in group})
            if nbytes is not None:
                found.unknown.append(group)
            continue
        by_id = {shuffle.barrier.spec.id: shuffle for shuffle in group}
        unpacks = {task.key: task for shuffle in group for task in shuffle.unpacks}
        for shuffle in group:
            for old in (shuffle.barrier, *shuffle.transfers):
                del found.tasks[old.key]
            for new, old in _gathering(shuffle, max(nbytes, min(_DOUBT * nbytes, most_nbytes))):
                found.tasks[new.key] = new
                found.origins[new.key] = old.key
        found.tasks.update({key: _unpacking(task, by_id) for key, task in unpacks.items()})
        found.outputs.update(dict.fromkeys(unpacks, nbytes))
    return found


def _groups(graph: Graph) -> Iterator[list[Shuffle]]:
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
        name = _name(task)
        if not isinstance(task, Task):
            continue
        if name in _TRANSFERS:
            shuffles[task.args[_TRANSFERS[name]]].transfers.append(task)
        elif name in _UNPACKS:
            # Both sides of a join of a frame with itself are the same shuffle.
            ids = {str(task.args[i]) for i in _UNPACKS[name]}
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


def _gather_key(spec: Any) -> str:
    return f"shuffle-gather-{spec.id}"


def _gathering(shuffle: Shuffle, most_nbytes: float) -> Iterator[tuple[Task, Task]]:
    """Yield the tasks that gather the pieces of all inputs, each with the P2P task in its place.

    They report the size of the data if it exceeds `most_nbytes` [B].
    """
    spec = shuffle.barrier.spec
    gather = _gather_key(spec)
    if hasattr(spec, "old"):
        indices = [task.args[2] for task in shuffle.transfers]
        chunks = List(*(task.args[0] for task in shuffle.transfers))
        task = Task(gather, shuffle_tasks.gather_chunks, shuffle.id, most_nbytes, chunks, indices)
        yield task, shuffle.barrier
        return
    splits: list[TaskRef] = []
    for task in shuffle.transfers:
        key: Key = (f"shuffle-split-{spec.id}", len(splits))
        splits.append(TaskRef(key))
        if _name(task) == "assign_index_merge_transfer":
            frame, on, column, n_partitions, _, partition, is_index = task.args
            arguments = (frame, on, column, n_partitions, partition)
            options = {"is_index": is_index, "drop_column": spec.drop_column}
            yield Task(key, shuffle_tasks.split_to_merge, *arguments, **options), task
        else:
            frame, _, partition = task.args
            yield Task(key, shuffle_tasks.split_frame, frame, spec.column, partition, spec.drop_column), task
    yield Task(gather, shuffle_tasks.gather_pieces, shuffle.id, most_nbytes, List(*splits)), shuffle.barrier


def _unpacking(task: Task, shuffles: Mapping[str, Shuffle]) -> Task:
    """Return the task that puts an output together."""
    specs = [shuffles[task.args[i]].barrier.spec for i in _UNPACKS[str(_name(task))]]
    gathered = [TaskRef(_gather_key(spec)) for spec in specs]
    if _name(task) == "rechunk_unpack":
        from dask.array.rechunk import old_to_new

        (spec,) = specs
        recipe = [axis[i] for axis, i in zip(old_to_new(spec.old, spec.new), task.args[1], strict=True)]
        return Task(task.key, shuffle_tasks.unpack_chunk, *gathered, recipe)
    shapes = [(spec.meta, spec.column, spec.drop_column) for spec in specs]
    if _name(task) == "shuffle_unpack":
        return Task(task.key, shuffle_tasks.unpack_frame, *gathered, task.args[1], *shapes[0])
    options = dict(zip(_MERGE_OPTIONS, task.args[5:], strict=True))
    sides = [List(one, *shape) for one, shape in zip(gathered, shapes, strict=True)]
    return Task(task.key, shuffle_tasks.unpack_merged, *sides, task.args[2], options)
