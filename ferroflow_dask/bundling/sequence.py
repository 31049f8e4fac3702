"""Several Dask tasks as the function of one task: small to send, run one after another.

A Dask `Task` object takes about 20 µs to unpickle, on the scheduler and again on a worker. A step of
`ExecuteTasks` is a tuple, which is faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any, TypeGuard

from dask._task_spec import Alias, DataNode, GraphNode, Task, TaskRef
from dask.typing import Key
from dask.utils import key_split
from distributed import Reschedule
from distributed.utils import thread_state  # type: ignore[attr-defined]

from ferroflow_dask.bundling.deliveries import Deliveries
from ferroflow_dask.bundling.isolation import Isolation, NotIsolatedError
from ferroflow_dask.bundling.results import Results

#: Topic under which workers report the prefixes of tasks that must run separately.
TOPIC = "ferroflow-bundles"
#: A bundle is late if it takes so many times its expected duration, and so much longer [s]. On a busy machine
#: several times the expected duration is usual.
_LATE, _LATE_S = 5.0, 0.25
#: Assumed time for a task of its own, and for splitting a bundle [s].
_TASK_S, _SPLIT_S = 1e-3, 0.02
#: Bundles that gave up in this process, by the key of their last task.
_given_up: dict[Key, None] = {}
#: Of late bundles of this process, by the prefixes of their tasks: the expected duration of a task, and when
#: they gave up [s].
_too_short_s: dict[frozenset[str], tuple[float, float]] = {}
#: A bundle that expects up to so many times as much for a task is as wrong as a late one, for so long [s]:
#: the late one may only have shared its cores with others.
_AS_WRONG, _AS_WRONG_S = 2.0, 5.0
_KEPT = 10_000

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
        Numbers of the values that are returned.
    stands_for : mapping of str to int, optional
        Number of tasks by task prefix. Durations are learned for these prefixes and not for the bundle's.
        None for a single task, which keeps its own prefix.
    cost_s : float, optional
        Expected duration [s]. None for a single task.
    delivered : mapping of int to Key, optional
        The steps whose values are delivered under their own keys.
    """

    functions: tuple[Callable[..., Any], ...]
    steps: tuple[Step, ...]
    keys: tuple[Key, ...]
    arguments: tuple[tuple[int, int | None], ...]
    exports: tuple[int, ...]
    stands_for: Mapping[str, int] | None = None
    cost_s: float | None = None
    delivered: Mapping[int, Key] = field(default_factory=dict)

    def __call__(self, *results: Any) -> Any:
        """Return the exported value, or `Results` of several.

        Raises
        ------
        distributed.Reschedule
            The scheduler should split the bundle: it reads or returns an iterator, it takes much longer than
            expected, or a task of it did.
        """
        values = [results[i] if item is None else results[i][item] for i, item in self.arguments]
        self._check_lazy(range(len(values)), values)
        if self._is_as_wrong():
            self._give_up()
        late_s, half = self._late_s(), len(self.steps) // 2
        deliveries = Deliveries(self.delivered) if self.delivered else None
        # Stopping repeats no work if each value has been delivered.
        may_stop = deliveries is not None and len(self.delivered) == len(self.steps) and deliveries.is_open
        each_s, before_s = self._usual_s(), perf_counter()
        try:
            for at, step in enumerate(self.steps):
                thread_state.ferroflow_key = self.keys[at]
                self._run(at, step, values)
                if deliveries is not None:
                    deliveries.add(at, values[-1])
                if at >= half and not may_stop:
                    continue
                now_s = perf_counter()
                if at < half and now_s > late_s:
                    self._note_late()
                    self._give_up()
                if may_stop and is_outlier(now_s - before_s, each_s, len(self.steps) - 1 - at):
                    self._give_up()
                before_s = now_s
        finally:
            thread_state.ferroflow_key = None
            if deliveries is not None:
                deliveries.flush()
        self._check_lazy(self.exports, values)
        outputs = tuple(values[number] for number in self.exports)
        is_delivered = deliveries is not None and deliveries.is_open and len(self.delivered) == len(outputs)
        return outputs[0] if len(outputs) == 1 else Results(outputs, is_delivered)

    def _run(self, at: int, step: Step, values: list[Any]) -> None:
        """Run a task, append its value, and drop the values that no later task reads."""
        function, arguments, read, gone = step
        operands = list(arguments)
        for place, number in read:
            operands[place] = values[number]
        try:
            values.append(self.functions[function](*operands))
        except Exception as error:
            error.add_note(f"in task {self.keys[at]!r}, which ferroflow has bundled with others")
            raise
        del operands
        for number in gone:
            values[number] = None

    def _late_s(self) -> float:
        """Return the time after which the bundle takes much longer than expected [s]."""
        return inf if self.cost_s is None else perf_counter() + _LATE * self.cost_s + _LATE_S

    def _usual_s(self) -> float:
        """Return the duration of a task that is not unusual [s]."""
        if self.cost_s is None or not self.stands_for:
            return inf
        return usual_s(self.cost_s, len(self.steps), len(self.stands_for))

    def _note_late(self) -> None:
        """Remember what was expected: other bundles of the graph should not start only to give up, too."""
        assert self.stands_for is not None
        assert self.cost_s is not None
        _too_short_s[frozenset(self.stands_for)] = self.cost_s / len(self.steps), perf_counter()
        _forget_oldest(_too_short_s)

    def _is_as_wrong(self) -> bool:
        """Return whether a bundle of the same prefixes was late that expected about as much."""
        if not _too_short_s or self.stands_for is None or self.cost_s is None:
            return False
        each_s, when_s = _too_short_s.get(frozenset(self.stands_for), (0.0, 0.0))
        is_recent = when_s + _AS_WRONG_S > perf_counter()
        return is_recent and self.cost_s / len(self.steps) <= _AS_WRONG * each_s

    def _check_lazy(self, numbers: Iterable[int], values: Sequence[Any]) -> None:
        """Give up if some of the values are iterators.

        Dask's bags pass an iterator from a task to its only reader. If the bundle of the reader runs again
        for another graph, the iterator is exhausted.
        """
        if self.stands_for is None:
            return
        n_arguments = len(self.arguments)
        for number in numbers:
            if not hasattr(type(values[number]), "__next__"):
                continue
            readers = [
                key
                for key, (_, _, read, _) in zip(self.keys, self.steps, strict=True)
                if any(n == number for _, n in read)
            ]
            lazy = readers if number < n_arguments else [self.keys[number - n_arguments]]
            self._give_up({key_split(key) for key in lazy})

    def _give_up(self, prefixes: Iterable[str] = ()) -> None:
        """Ask the scheduler to split the bundle, once in each process; else the bundle runs on.

        Tasks of the given prefixes are not bundled again.
        """
        # `get_worker` would be noted as a call by the task.
        worker = getattr(thread_state, "execution_state", {}).get("worker")
        if worker is None:  # no worker runs it
            return
        if self.keys[-1] in _given_up:
            return
        _given_up[self.keys[-1]] = None
        _forget_oldest(_given_up)
        for prefix in prefixes:
            worker.log_event(TOPIC, {"prefix": prefix})
        raise Reschedule


def usual_s(cost_s: float, n_tasks: int, n_prefixes: int) -> float:
    """Return the duration of a task that is not unusual, in a bundle of an expected duration [s].

    Tasks of several prefixes may differ: each may take as long as all were expected to.
    """
    return cost_s / n_tasks if n_prefixes == 1 else cost_s


def is_outlier(taken_s: float, usual_s: float, n_left: int) -> bool:
    """Return whether a bundle should stop after a task, so that other workers can run the rest.

    Tasks of one prefix may differ much in their durations. After one that took unusually long, the next ones
    may take as long: they should not wait for each other. Tasks that run one by one cost more. The time that
    the long task was late pays for that.

    Parameters
    ----------
    taken_s, usual_s : float
        Duration of the task, and what is usual [s].
    n_left : int
        Tasks that have not run.
    """
    late_s = taken_s - usual_s
    return n_left > 0 and taken_s > _LATE * usual_s and late_s > _SPLIT_S + n_left * _TASK_S


def _forget_oldest(noted: dict[Any, Any]) -> None:
    if len(noted) > _KEPT:
        del noted[next(iter(noted))]


def bundle_in(task: object) -> ExecuteTasks | None:
    """Return the function of a Dask task if it runs several tasks, otherwise None."""
    # Dask's optimizations copy tasks without their annotations, but with their functions.
    function = getattr(task, "func", None)
    is_bundle = isinstance(function, ExecuteTasks) and function.stands_for is not None
    return function if is_bundle else None


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
    exports: Sequence[Key],
    cost_s: float,
    delivered: Sequence[Key] = (),
    *,
    isolation: Isolation | None = None,
) -> ExecuteTasks:
    """Return a function that runs several tasks one after another.

    Parameters
    ----------
    tasks : sequence of GraphNode
        In an order in which they can run.
    arguments : mapping of Key to (int, int or None)
        Where the results of other tasks are found; see `ExecuteTasks.arguments`.
    exports : sequence of Key
        The tasks whose results are returned.
    cost_s : float
        Expected duration [s].
    delivered : sequence of Key, optional
        The tasks whose results are delivered under their own keys.
    isolation : Isolation, optional
        Gives steps their own copies of what they may change; steps share all objects without it.

    Raises
    ------
    NotIsolatedError
        Tasks cannot have their own copies.
    """
    number = {key: i for i, key in enumerate([*arguments, *(task.key for task in tasks)])}
    functions: dict[int, tuple[int, Callable[..., Any]]] = {}
    calls = []
    for function, given, read in _calls(tasks, isolation):
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
        {number[key] - len(arguments): key for key in delivered},
    )


def _names(tasks: Sequence[GraphNode]) -> dict[str, int]:
    return dict(Counter(key_split(task.key) for task in tasks if not isinstance(task, NO_WORK)))


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
    needed = tuple(task.dependencies)
    return _CallTask(task, needed), (None,) * len(needed), list(enumerate(needed))
