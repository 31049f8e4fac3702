"""Some tasks of Dask's as the function of one: small to send, and run one after another.

Dask's `Task` objects take some 20 µs each to unpickle, which they would be on the scheduler and on a worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from dask._task_spec import Alias, DataNode, GraphNode, Task, TaskRef
from dask.typing import Key
from dask.utils import key_split

from ferroflow_dask.bundling.results import Results

#: Data in the graph, other names for results.
NO_WORK = (DataNode, Alias)

#: Function, arguments (None where a value goes), which values go where, and those that nobody reads later.
#: A value that comes from elsewhere has the number of its argument; those that steps make follow.
Step = tuple[int, tuple[Any, ...], tuple[tuple[int, int], ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class ExecuteTasks:
    """The function of a Dask task: run some tasks one after another.

    Parameters
    ----------
    functions : tuple of callable
        Those that steps call, each once.
    steps : tuple of Step
        In an order in which they can run.
    keys : tuple of Key
        Of the task in each step.
    arguments : tuple of (int, int or None)
        For each value that they need of others the number of the result that it is in, and which item of
        it, None for all of it.
    exports : tuple of int
        The values that are wanted.
    stands_for : mapping of str to int, optional
        How many tasks of which names run: they, not the name of the Dask task, are learned of. None where
        it is one, under its own name.
    cost_s : float, optional
        How long they should take [s]. None where it is one.
    """

    functions: tuple[Callable[..., Any], ...]
    steps: tuple[Step, ...]
    keys: tuple[Key, ...]
    arguments: tuple[tuple[int, int | None], ...]
    exports: tuple[int, ...]
    stands_for: Mapping[str, int] | None = None
    cost_s: float | None = None

    def __call__(self, *results: Any) -> Any:
        """Return the result that is wanted, or `Results` of several."""
        values = [results[i] if item is None else results[i][item] for i, item in self.arguments]
        functions = self.functions
        for at, (function, arguments, read, gone) in enumerate(self.steps):
            operands = list(arguments)
            for place, number in read:
                operands[place] = values[number]
            try:
                values.append(functions[function](*operands))
            except Exception as error:
                error.add_note(f"in task {self.keys[at]!r}, which ferroflow has bundled with others")
                raise
            del operands
            for number in gone:
                values[number] = None
        outputs = tuple(values[number] for number in self.exports)
        return outputs[0] if len(outputs) == 1 else Results(outputs)

    def __dask_tokenize__(self) -> tuple[object, ...]:
        # Dask knows tasks by their keys; what they should take is no part of what they do.
        return (type(self).__qualname__, self.keys, self.arguments, self.exports)


def bundle_in(task: object) -> ExecuteTasks | None:
    """Return what a task of Dask's runs if it stands for several."""
    # Dask's optimizations copy tasks, with annotations left behind, but keep their functions.
    function = getattr(task, "func", None)
    is_bundle = isinstance(function, ExecuteTasks) and function.stands_for is not None
    return function if is_bundle else None


class UnfusedTask(Task):
    """A task that Dask makes no part of another.

    Dask optimizes collections when they are computed, those that have been optimized, too. What it fuses once
    more has another name than it would have had, and under the same key reads other tasks.
    """

    __slots__ = ()

    @property
    def block_fusion(self) -> bool:
        """Whether `fuse_linear_task_spec` leaves it alone."""
        return True


class BundleTask(UnfusedTask):
    """A task that calls `ExecuteTasks`.

    Dask's bags give iterators to what is fused with the only task that reads them; a bundle may read twice.
    """

    __slots__ = ()


def is_call(task: GraphNode) -> TypeGuard[Task]:
    """Return whether a task is no more than its function and arguments."""
    return type(task) in (Task, UnfusedTask)


def unfused(task: GraphNode) -> GraphNode:
    """Return a task that Dask leaves as it is, with the same key, which does the same."""
    if type(task) is not Task:
        return task
    return UnfusedTask(task.key, task.func, *task.args, _data_producer=task.data_producer, **task.kwargs)


@dataclass(frozen=True, slots=True, eq=False)
class _CallTask:
    """A task whose arguments are more than values: called with those of `needed`."""

    task: GraphNode
    needed: tuple[Key, ...]

    def __call__(self, *values: Any) -> Any:
        return self.task(dict(zip(self.needed, values, strict=True)))


def _same(value: Any) -> Any:
    return value


def sequence_of(
    tasks: Sequence[GraphNode],
    arguments: Mapping[Key, tuple[int, int | None]],
    exports: Sequence[Key],
    cost_s: float,
) -> ExecuteTasks:
    """Return the function that runs some tasks.

    Parameters
    ----------
    tasks : sequence of GraphNode
        In an order in which they can run.
    arguments : mapping of Key to (int, int or None)
        Where they find what they need of others, as in `ExecuteTasks`.
    exports : sequence of Key
        The tasks whose results are wanted.
    cost_s : float
        How long they should take [s].
    """
    number = {key: i for i, key in enumerate([*arguments, *(task.key for task in tasks)])}
    functions: dict[int, tuple[int, Callable[..., Any]]] = {}
    calls = []
    for task in tasks:
        function, given, read = _call(task)
        at, _ = functions.setdefault(id(function), (len(functions), function))
        calls.append((at, given, tuple([(place, number[key]) for place, key in read])))
    needed = {number[key] for key in exports}  # by what comes later, as seen from the end
    steps: list[Step] = []
    for step, (at, given, values) in zip(
        range(len(number) - 1, len(arguments) - 1, -1), reversed(calls), strict=True
    ):
        gone = [value for value in dict.fromkeys([*(n for _, n in values), step]) if value not in needed]
        needed.update(gone)
        steps.append((at, given, values, tuple(gone)))
    is_one = len(tasks) == 1
    return ExecuteTasks(
        tuple(function for _, function in functions.values()),
        tuple(reversed(steps)),
        tuple(task.key for task in tasks),
        tuple(arguments.values()),
        tuple(number[key] for key in exports),
        None if is_one else _names(tasks),
        None if is_one else cost_s,
    )


def _names(tasks: Sequence[GraphNode]) -> dict[str, int]:
    return dict(Counter(key_split(task.key) for task in tasks if not isinstance(task, NO_WORK)))


def _call(task: GraphNode) -> tuple[Callable[..., Any], tuple[Any, ...], list[tuple[int, Key]]]:
    """Return a function, its arguments, and which of them are results of which tasks."""
    if isinstance(task, DataNode):
        return _same, (task.value,), []
    if isinstance(task, Alias):
        return _same, (None,), [(0, task.target)]
    if is_call(task) and not task.kwargs and not any(isinstance(a, GraphNode) for a in task.args):
        read = [(place, a.key) for place, a in enumerate(task.args) if isinstance(a, TaskRef)]
        return task.func, tuple([None if isinstance(a, TaskRef) else a for a in task.args]), read
    needed = tuple(task.dependencies)
    return _CallTask(task, needed), (None,) * len(needed), list(enumerate(needed))
