"""Several Dask tasks as the function of one task: small to send, run one after another.

A Dask `Task` object takes about 20 µs to unpickle, on the scheduler and again on a worker. A step of
`ExecuteTasks` is a tuple, which is faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from dask._task_spec import Alias, DataNode, GraphNode, Task, TaskRef
from dask.typing import Key
from dask.utils import key_split
from distributed import Reschedule
from distributed.utils import thread_state  # type: ignore[attr-defined]

from ferroflow_dask.bundling.isolation import Isolation, NotIsolatedError
from ferroflow_dask.bundling.results import Results
from ferroflow_dask.bundling.run import Run

#: Topic under which workers report the prefixes of tasks that must run separately.
TOPIC = "ferroflow-bundles"
#: Bundles that gave up in this process, by the key of their last task.
_given_up: dict[Key, None] = {}
_KEPT = 10_000

#: The class of a task whose size is unknown; all others are above (`averages.size_class`).
UNKNOWN_CLASS = 0
#: Graph nodes that compute nothing: data, and aliases of other keys.
NO_WORK = (DataNode, Alias)

#: Index of the function; its arguments (None for each value); positions and numbers of the values; numbers of
#: the values that no later step reads. Numbers count the arguments first, then the results of steps.
Step = tuple[int, tuple[Any, ...], tuple[tuple[int, int], ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class ExecuteTasks:
    """Run several tasks one after another; the function of a Dask task.

    Parameters
    ----------
    functions : tuple of callable
        The functions that steps call, each once.
    steps : tuple of Step
        In an order in which they can run.
    keys : tuple of Key
        Key of the task of each step.
    arguments : tuple of (int, int or None)
        For each value from another task: the number of the result that has it, and the item of that result;
        None for all of it.
    exports : tuple of int
        Numbers of the values that are returned; -1 for one that has left the bundle.
    stands_for : mapping of (str, int) to int
        Number of tasks by task prefix and class of size. Durations are learned for these and not for the
        bundle's prefix.
    cost_s : float
        Expected duration [s].
    delivered : mapping of int to Key, optional
        The steps whose values are delivered under their own keys.
    returns_results : bool, optional
        Whether the values are returned as `Results`, also a single one.
    is_early : bool, optional
        Whether the first values are delivered at once.
    """

    functions: tuple[Callable[..., Any], ...]
    steps: tuple[Step, ...]
    keys: tuple[Key, ...]
    arguments: tuple[tuple[int, int | None], ...]
    exports: tuple[int, ...]
    stands_for: Mapping[tuple[str, int], int]
    cost_s: float
    delivered: Mapping[int, Key] = field(default_factory=dict)
    returns_results: bool = False
    is_early: bool = False

    @property
    def is_single(self) -> bool:
        """Whether the task returns one value: that of a chain, under its own key."""
        return not self.returns_results

    @property
    def reads(self) -> list[tuple[int, ...]]:
        """The numbers of the values that each step reads."""
        return [tuple([number for _, number in read]) for _, _, read, _ in self.steps]

    def computes(self, step: int) -> bool:
        """Return whether a step calls a function of its task, and does not only hand on a value."""
        return self.functions[self.steps[step][0]] is not _same

    def __call__(self, *results: Any) -> Any:
        """Return the exported value of a chain, otherwise `Results`.

        Raises
        ------
        distributed.Reschedule
            The scheduler should split the bundle: it reads or returns an iterator.
        """
        run = Run(self, results)
        self._check_lazy(enumerate(run.arguments()))
        outputs = run()
        self._check_lazy(zip(run.exports(), outputs, strict=True))
        return outputs[0] if self.is_single else Results(outputs, run.delivers_all())

    def _check_lazy(self, values: Iterable[tuple[int, Any]]) -> None:
        """Give up if some values, given with their numbers, are iterators.

        Dask's bags pass an iterator from a task to its only reader. If the bundle of the reader runs again
        for another graph, the iterator is exhausted.
        """
        n_arguments = len(self.arguments)
        for number, value in values:
            if not hasattr(type(value), "__next__"):
                continue
            readers = [
                key
                for key, (_, _, read, _) in zip(self.keys, self.steps, strict=True)
                if any(n == number for _, n in read)
            ]
            lazy = readers if number < n_arguments else [self.keys[number - n_arguments]]
            self._give_up({key_split(key) for key in lazy})

    def _give_up(self, prefixes: Iterable[str]) -> None:
        """Ask the scheduler, once in each process, to split the bundle and to keep some prefixes separate."""
        worker = running_worker()
        if worker is None:
            return
        if self.keys[-1] in _given_up:
            return
        _given_up[self.keys[-1]] = None
        _forget_oldest(_given_up)
        for prefix in prefixes:
            worker.log_event(TOPIC, {"prefix": prefix})
        raise Reschedule


def running_worker() -> Any:
    """Return the worker that runs the task of this thread; None if none does."""
    # `get_worker` would be noted as a call by the task.
    return getattr(thread_state, "execution_state", {}).get("worker")


def _forget_oldest(noted: dict[Any, Any]) -> None:
    if len(noted) > _KEPT:
        del noted[next(iter(noted))]


def bundle_in(task: object) -> ExecuteTasks | None:
    """Return the function of a Dask task if it runs several tasks, otherwise None."""
    # Dask's optimizations copy tasks without their annotations, but with their functions.
    function = getattr(task, "func", None)
    return function if isinstance(function, ExecuteTasks) else None


def is_call(task: GraphNode) -> TypeGuard[Task]:
    """Return whether a task consists of a function and its arguments only."""
    return type(task) is Task


@dataclass(frozen=True, slots=True, eq=False)
class _CallTask:
    """A task with nested arguments, called with the values of the keys in `needed`."""

    task: GraphNode
    needed: tuple[Key, ...]

    def __call__(self, *values: Any) -> Any:
        return self.task(dict(zip(self.needed, values, strict=True)))


def _same(value: Any) -> Any:
    return value


def sequence_of(
    tasks: Sequence[GraphNode],
    arguments: Mapping[Key, tuple[int, int | None]],
    exports: Sequence[Key | None],
    cost_s: float,
    delivered: Sequence[Key] = (),
    *,
    returns_results: bool = False,
    is_early: bool = False,
    size_classes: Mapping[Key, int] | None = None,
    isolation: Isolation | None = None,
) -> ExecuteTasks:
    """Return a function that runs several tasks one after another.

    Parameters
    ----------
    tasks : sequence of GraphNode
        In an order in which they can run.
    arguments : mapping of Key to (int, int or None)
        Where the results of other tasks are found; see `ExecuteTasks.arguments`.
    exports : sequence of Key or None
        The tasks whose results are returned; None for one that has left the bundle.
    cost_s : float
        Expected duration [s].
    delivered : sequence of Key, optional
        The tasks whose results are delivered under their own keys.
    returns_results, is_early : bool, optional
        As in `ExecuteTasks`.
    size_classes : mapping of Key to int, optional
        As in `Bundle`.
    isolation : Isolation, optional
        Gives steps their own copies of what they may change; steps share all objects without it.

    Raises
    ------
    NotIsolatedError
        Tasks cannot have their own copies.
    """
    number = {key: i for i, key in enumerate([*arguments, *[task.key for task in tasks]])}
    functions: dict[int, tuple[int, Callable[..., Any]]] = {}
    calls = []
    for function, given, read in _calls(tasks, isolation):
        at, _ = functions.setdefault(id(function), (len(functions), function))
        calls.append((at, given, tuple([(place, number[key]) for place, key in read])))
    needed = {number[key] for key in exports if key is not None}  # by what comes later, as seen from the end
    steps: list[Step] = []
    for step, (at, given, values) in zip(
        range(len(number) - 1, len(arguments) - 1, -1), reversed(calls), strict=True
    ):
        gone = [value for value in dict.fromkeys([*[n for _, n in values], step]) if value not in needed]
        needed.update(gone)
        steps.append((at, given, values, tuple(gone)))
    return ExecuteTasks(
        tuple(function for _, function in functions.values()),
        tuple(reversed(steps)),
        tuple([task.key for task in tasks]),
        tuple(arguments.values()),
        tuple([-1 if key is None else number[key] for key in exports]),
        _names(tasks, size_classes or {}),
        cost_s,
        {number[key] - len(arguments): key for key in delivered},
        returns_results,
        is_early,
    )


def _names(tasks: Sequence[GraphNode], size_classes: Mapping[Key, int]) -> dict[tuple[str, int], int]:
    return dict(
        Counter(
            (key_split(task.key), size_classes.get(task.key, UNKNOWN_CLASS))
            for task in tasks
            if not isinstance(task, NO_WORK)
        )
    )


#: A function, its arguments, and which of them are results of which tasks.
_Call = tuple[Callable[..., Any], tuple[Any, ...], list[tuple[int, Key]]]


def _calls(tasks: Sequence[GraphNode], isolation: Isolation | None) -> list[_Call]:
    """Return the calls of tasks; some call functions with their own copies."""
    calls = [_call(task) for task in tasks]
    if isolation is None or len(tasks) == 1:
        return calls
    found, failed = isolation.to_copy(tasks), []
    for step in found.steps:
        function, given, read = calls[step]
        places = [place for place, _ in read]
        try:
            own = isolation.own_copies(function, given, places, found.shared)
        except Exception:  # noqa: BLE001 -- whatever the objects of the task raise
            failed.append(tasks[step].key)
        else:
            calls[step] = own, (None,) * len(given), read
    if failed:
        raise NotIsolatedError(failed)
    return calls


def _call(task: GraphNode) -> _Call:
    """Return a task's function, its arguments, and which of them are results of which tasks."""
    if isinstance(task, DataNode):
        return _same, (task.value,), []
    if isinstance(task, Alias):
        return _same, (None,), [(0, task.target)]
    if is_call(task) and not task.kwargs and not any(isinstance(a, GraphNode) for a in task.args):
        read = [(place, a.key) for place, a in enumerate(task.args) if isinstance(a, TaskRef)]
        return task.func, tuple([None if isinstance(a, TaskRef) else a for a in task.args]), read
    needed = tuple(sorted(task.dependencies, key=str))
    return _CallTask(task, needed), (None,) * len(needed), list(enumerate(needed))
