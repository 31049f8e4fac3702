"""Plain tasks in place of P2P shuffles and rechunks; they can be bundled.

P2P moves any amount of data, through disks, and for that has fixed costs: each transfer and each unpack talks
to an extension of its worker, and a barrier to that of the scheduler. The plain tasks have the same outputs
under the same keys. Each input is split, and each output is put together. Of little data, one task in
between gathers all pieces, and all of them move with it. Of more data, each output has its own piece of each
input, so that every byte moves once (a direct shuffle).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any

from dask._task_spec import GraphNode, List, Task, TaskRef
from dask.typing import Key

from ferroflow_dask.bundling.shuffles import UNPACKS, Graph, Recipe, Shuffle, groups_of, name_of

with suppress(ImportError):  # of private names: without them, shuffles stay with P2P
    from ferroflow_dask.bundling import shuffle_tasks

#: Data of so many times the expected size are reported: the next shuffle of them is planned by the new size.
_DOUBT = 8
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
    unknown, large : list of list of Shuffle
        Those of them whose size is unknown, and the others; together if they are the sides of a join.
    measured : dict of str to float
        Sizes of data that exist, by the identifiers of their shuffles [B].
    pieces : dict of Key to float
        The tasks that yield pieces of direct shuffles, with the expected sizes of these [B].
    """

    tasks: dict[Key, GraphNode]
    outputs: dict[Key, float] = field(default_factory=dict)
    origins: dict[Key, Key] = field(default_factory=dict)
    kept: dict[Key, tuple[str, list[Key]]] = field(default_factory=dict)
    unknown: list[list[Shuffle]] = field(default_factory=list)
    large: list[list[Shuffle]] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    pieces: dict[Key, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Choice:
    """How a shuffle runs, or the two sides of a join.

    Parameters
    ----------
    nbytes : float, optional
        Size of the data, of both sides together [B].
    is_plain : bool, optional
        Whether plain tasks stand for it.
    is_direct : bool, optional
        Whether each output has its own piece of each input.
    is_unknown : bool, optional
        Whether it stays because the size is unknown.
    most_nbytes : float, optional
        More data, and more than expected, are reported [B].
    """

    nbytes: float = inf
    is_plain: bool = False
    is_direct: bool = False
    is_unknown: bool = False
    most_nbytes: float = inf


def with_plain_tasks(graph: Graph, choose: Callable[[list[Shuffle]], Choice]) -> PlainShuffles:
    """Replace P2P shuffles by plain tasks.

    Parameters
    ----------
    graph : mapping of Key to GraphNode
        From `unfused`.
    choose : callable
        Takes a shuffle, or both if they are the sides of a join.
    """
    found = PlainShuffles(dict(graph))
    for group in groups_of(graph):
        choice = choose(group)
        if not choice.is_plain:
            found.kept.update({one.barrier.key: (one.id, one.sources(graph)) for one in group})
            (found.unknown if choice.is_unknown else found.large).append(group)
            continue
        nbytes = choice.nbytes
        reported_nbytes = max(nbytes, min(_DOUBT * nbytes, choice.most_nbytes))
        for shuffle in group:
            for old in (shuffle.barrier, *shuffle.transfers):
                del found.tasks[old.key]
        unpacks = {task.key: task for shuffle in group for task in shuffle.unpacks}
        plain = [_plain(shuffle, choice.is_direct, reported_nbytes) for shuffle in group]
        for one in plain:
            found.tasks.update({new.key: new for new, _ in one.tasks})
            found.origins.update({new.key: old.key for new, old in one.tasks})
        pieces = [key for one in plain for key in one.pieces]
        found.pieces.update({key: nbytes / len(pieces) for key in pieces})
        by_id = {one.shuffle.barrier.spec.id: one for one in plain}
        found.tasks.update({key: _unpacking(task, by_id) for key, task in unpacks.items()})
        found.outputs.update(dict.fromkeys(unpacks, nbytes))
    return found


@dataclass(frozen=True, slots=True)
class _Plain:
    """Plain tasks of a shuffle up to its outputs.

    Parameters
    ----------
    shuffle : Shuffle
    tasks : list of (Task, Task)
        Each with the P2P task in whose place it is.
    parts : dict of Key to tuple
        The first arguments of the functions that put each output together.
    pieces : list of Key
        Of a direct shuffle: the tasks that each yield a piece of an input for an output.
    """

    shuffle: Shuffle
    tasks: list[tuple[Task, Task]]
    parts: dict[Key, tuple[Any, ...]]
    pieces: list[Key] = field(default_factory=list)


def _plain(shuffle: Shuffle, is_direct: bool, most_nbytes: float) -> _Plain:
    """Return the tasks of a shuffle; they report the size of the data if it exceeds `most_nbytes` [B]."""
    is_rechunk = hasattr(shuffle.barrier.spec, "old")
    make = (_plain_rechunk, _direct_rechunk) if is_rechunk else (_plain_frames, _direct_frames)
    return make[is_direct](shuffle, most_nbytes)


def _splits(shuffle: Shuffle) -> Iterator[tuple[int, Task, Task]]:
    """Yield the number of each input partition, the task that splits it, and the transfer in its place.

    Keys have the numbers of partitions: graphs with the same shuffle may have only some of them.
    """
    spec = shuffle.barrier.spec
    name = f"shuffle-split-{spec.id}"
    for task in shuffle.transfers:
        if name_of(task) == "assign_index_merge_transfer":
            frame, on, column, n_partitions, _, partition, is_index = task.args
            arguments = (frame, on, column, n_partitions, partition)
            options = {"is_index": is_index, "drop_column": spec.drop_column}
            split = Task((name, partition), shuffle_tasks.split_to_merge, *arguments, **options)
        else:
            frame, _, partition = task.args
            key, split_frame = (name, partition), shuffle_tasks.split_frame
            split = Task(key, split_frame, frame, spec.column, partition, spec.drop_column)
        yield partition, split, task


def _partition_of(unpack: Task) -> int:
    """Return the number of the output partition that a task returns."""
    return int(unpack.args[2 if name_of(unpack) == "merge_unpack" else 1])


def _plain_frames(shuffle: Shuffle, most_nbytes: float) -> _Plain:
    tasks = [(split, old) for _, split, old in _splits(shuffle)]
    gather = f"shuffle-gather-{shuffle.id}"
    splits = List(*(TaskRef(one.key) for one, _ in tasks))
    tasks.append(
        (Task(gather, shuffle_tasks.gather_pieces, shuffle.id, most_nbytes, splits), shuffle.barrier)
    )
    parts = {
        task.key: (Task(None, shuffle_tasks.gathered_shards, TaskRef(gather), _partition_of(task)),)
        for task in shuffle.unpacks
    }
    return _Plain(shuffle, tasks, parts)


def _direct_frames(shuffle: Shuffle, most_nbytes: float) -> _Plain:
    found, inputs = _Plain(shuffle, [], {}), list[tuple[int, TaskRef]]()
    for partition, split, old in _splits(shuffle):
        key: Key = (f"shuffle-apart-{shuffle.id}", partition)
        task = Task(key, shuffle_tasks.split_apart, split.func, *split.args, **split.kwargs)
        found.tasks.append((task, old))
        inputs.append((partition, TaskRef(key)))
    name = f"shuffle-shard-{shuffle.id}"
    for task in shuffle.unpacks:
        to = _partition_of(task)
        shards = [Task((name, i, to), shuffle_tasks.shard_of, one, to) for i, one in inputs]
        found.parts[task.key] = (_taken(found, shards, shuffle_tasks.direct_shards, most_nbytes),)
    return found


def _taken(found: _Plain, pieces: list[Task], function: Callable[..., Any], most_nbytes: float) -> Task:
    """Add the pieces of an output, and return the call that takes them and checks their size."""
    shuffle = found.shuffle
    found.tasks.extend((one, shuffle.barrier) for one in pieces)
    found.pieces.extend(one.key for one in pieces)
    refs = List(*(TaskRef(one.key) for one in pieces))
    return Task(None, function, shuffle.id, most_nbytes, len(shuffle.unpacks), refs)


def _plain_rechunk(shuffle: Shuffle, most_nbytes: float) -> _Plain:
    gather = f"shuffle-gather-{shuffle.id}"
    indices = [task.args[2] for task in shuffle.transfers]
    chunks = List(*(task.args[0] for task in shuffle.transfers))
    task = Task(gather, shuffle_tasks.gather_chunks, shuffle.id, most_nbytes, chunks, indices)
    parts = {
        key: (Task(None, shuffle_tasks.gathered_parts, TaskRef(gather), recipe), _shape(recipe))
        for key, recipe in shuffle.recipes.items()
    }
    return _Plain(shuffle, [(task, shuffle.barrier)], parts)


def _direct_rechunk(shuffle: Shuffle, most_nbytes: float) -> _Plain:
    found = _Plain(shuffle, [], {})
    chunks = {task.args[2]: task.args[0] for task in shuffle.transfers}
    for task in shuffle.unpacks:
        recipe, name = shuffle.recipes[task.key], (f"shuffle-piece-{shuffle.id}", *task.args[1])
        pieces = [
            Task((*name, i), shuffle_tasks.piece_of, chunks[old], slices)
            for i, (old, slices) in enumerate(shuffle_tasks.parts_of(recipe))
        ]
        parts = _taken(found, pieces, shuffle_tasks.direct_parts, most_nbytes)
        found.parts[task.key] = parts, _shape(recipe)
    return found


def _shape(recipe: Recipe) -> tuple[int, ...]:
    return tuple(map(len, recipe))


def _unpacking(task: Task, plain: Mapping[str, _Plain]) -> Task:
    """Return the task that puts an output together."""
    sides = [plain[task.args[i]] for i in UNPACKS[str(name_of(task))]]
    parts = [one.parts[task.key] for one in sides]
    specs = [one.shuffle.barrier.spec for one in sides]
    if name_of(task) == "rechunk_unpack":
        return Task(task.key, shuffle_tasks.unpack_chunk, *parts[0])
    frames = [
        (*shards, spec.meta, spec.column, spec.drop_column) for shards, spec in zip(parts, specs, strict=True)
    ]
    if name_of(task) == "shuffle_unpack":
        return Task(task.key, shuffle_tasks.unpack_frame, *frames[0])
    options = dict(zip(_MERGE_OPTIONS, task.args[5:], strict=True))
    return Task(task.key, shuffle_tasks.unpack_merged, *(List(*one) for one in frames), options)
