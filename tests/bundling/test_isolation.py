"""Steps of a bundle: which get their own copies, and what these are."""

from __future__ import annotations

import abc
import functools
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import toolz
from assume_short import AllShort
from dask._task_spec import DataNode, Dict, GraphNode, List, Task, TaskRef
from distributed.protocol.pickle import dumps, loads

from ferroflow_dask.bundling.bundle import Bundle
from ferroflow_dask.bundling.graphs import bundle_graph, written_task
from ferroflow_dask.bundling.isolation import OwnCopies
from ferroflow_dask.bundling.reach import Reach
from ferroflow_dask.cluster_profile import ClusterProfile

N_TASKS = 4

#: Functions that cloudpickle pickles by value, as those of a script.
MAIN: dict[str, Any] = {"__name__": "__main__", "np": np, "abc": abc}
exec(
    """
SEEN, LIMIT, number = [], (1, 2), 0

def own(values, *rest): values.append(1); return list(values)
def pure(x, *rest): return np.sqrt(x) + len(rest) + LIMIT[0]
def calls_pure(x): return pure(x)
def default(x, values=[]): return own(values)
def named_default(x, *, values={}): values[x] = x; return dict(values)
def global_list(x): return own(SEEN)
def calls_global_list(x): return [global_list(i) for i in range(2)]
def inner_function(x): return (lambda: own(SEEN))()
def reads_itself(x): return reads_itself(x - 1) if x > 0 else 0
def assigns(x):
    global number
    number += 1
    return number
def reads_number(x): return number
def by_globals(x): globals()["number"] = number + 1; return number
def attribute(x): attribute.n = getattr(attribute, "n", 0) + 1; return attribute.n
def local_attribute(x):
    class Inner: pass
    inner = Inner()
    inner.n = x
    return inner.n
def closure(values): return lambda x: own(values)
def assigning_closure():
    n = 0
    def inner(x):
        nonlocal n
        n += 1
        return n
    return inner
def assigns_its_own(x):
    n = 0
    def inner():
        nonlocal n
        n += 1
    inner()
    return n
def is_same(first, second): first.append(1); return second["x"][0] is first, len(first)
class Counter:
    def __init__(self): self.n = 0
    def add(self, x): self.n += 1; return self.n
    def __call__(self, x): return self.add(x)
class Plain(abc.ABC):
    def __init__(self, x): self.x = x
    @property
    def value(self): return self.x
    @staticmethod
    def of(x): return Plain(x)
def uses_class(x): return Plain.of(x).value
""",
    MAIN,
)


def calls(function: Any, *shared: Any, **named: Any) -> list[GraphNode]:
    """Return tasks that call a function with a number and the same objects."""
    return [Task(f"x-{i}", function, i, *shared, **named) for i in range(N_TASKS)]


def first(function: Any, *shared: Any) -> list[GraphNode]:
    """Return tasks that call a function with the same objects."""
    return [Task(f"x-{i}", function, *shared) for i in range(N_TASKS)]


def arrived(tasks: Sequence[GraphNode]) -> list[Any]:
    """Return tasks as a scheduler gets them from a client: in one pickle."""
    found: list[Any] = loads(cloudpickle.dumps(list(tasks)))
    return found


def bundle_of(tasks: Sequence[Any], *, shares_objects: bool = False) -> Any:
    """Return the task of a bundle that returns all values."""
    keys = tuple(task.key for task in tasks)
    return written_task("bundle", Bundle(tuple(tasks), keys, {}, shares_objects=shares_objects), 1.0)


def n_copied(tasks: Sequence[Any]) -> int:
    """Return the number of steps that get their own copies."""
    call = bundle_of(tasks).func
    return sum(isinstance(call.functions[at], OwnCopies) for at, *_ in call.steps)


def values_of(task: Any) -> list[Any]:
    """Return the values of a bundle on a worker."""
    return list(loads(dumps(task))({}).values)


def one_by_one(tasks: Sequence[Any]) -> list[Any]:
    """Return the values of tasks of which each is pickled by itself."""
    values: dict[Any, Any] = {}
    for task in tasks:
        values[task.key] = loads(dumps(task))({key: values[key] for key in task.dependencies})
    return list(values.values())


def chain(function: Any, *shared: Any) -> list[GraphNode]:
    return [Task(f"x-{i}", function, *shared, TaskRef(f"x-{i - 1}") if i else None) for i in range(N_TASKS)]


def fused(*shared: Any) -> list[GraphNode]:
    """Return tasks into which Dask has fused one that changes an object."""
    parts = [
        (Task(f"a-{i}", np.add, i, 1), Task(f"x-{i}", MAIN["own"], *shared, TaskRef(f"a-{i}")))
        for i in range(4)
    ]
    return [Task.fuse(*both) for both in parts]


CHANGING: dict[str, Callable[[], list[GraphNode]]] = {
    "a list": lambda: first(MAIN["own"], []),
    "a list in a tuple, and by itself": lambda: first(
        toolz.compose(MAIN["own"], operator.itemgetter(0)), ([],)
    ),
    "a list that is given by name": lambda: calls(lambda x, values: MAIN["own"](values), values=[]),
    "an array": lambda: first(lambda array: np.add(array, 1, out=array).tolist(), np.zeros(2)),
    "an array that a library function changes": lambda: calls(np.add, 1, np.zeros(())),
    "an array that is named `out`": lambda: calls(np.add, 1, out=np.zeros(())),
    "an item that an operator sets": lambda: [
        Task(f"x-{i}", toolz.compose(dict, lambda d, i: d.update({i: i}) or d), shared, i)
        for shared in [{}]
        for i in range(N_TASKS)
    ],
    "a default": lambda: calls(MAIN["default"]),
    "a default by name": lambda: calls(MAIN["named_default"]),
    "a global list": lambda: calls(MAIN["global_list"]),
    "a global list of another function": lambda: calls(MAIN["calls_global_list"]),
    "a global list of an inner function": lambda: calls(MAIN["inner_function"]),
    "a global name": lambda: calls(MAIN["assigns"]),
    "a global name, by `globals`": lambda: calls(MAIN["by_globals"]),
    "a closure": lambda: calls(MAIN["closure"]([])),
    "a name of a closure": lambda: calls(MAIN["assigning_closure"]()),
    "an attribute": lambda: calls(MAIN["attribute"]),
    "a partial's list": lambda: calls(functools.partial(MAIN["own"], [])),
    "an object of a script": lambda: calls(MAIN["Counter"]()),
    "a method of an object": lambda: calls(MAIN["Counter"]().add),
    "a list in a task's list": lambda: [
        Task(f"x-{i}", lambda pair: MAIN["own"](pair[0]), List(shared, i))
        for shared in [[]]
        for i in range(4)
    ],
    "a list in a task's dictionary": lambda: [
        Task(f"x-{i}", lambda d: MAIN["own"](d["x"]), Dict({"x": shared}))
        for shared in [[]]
        for i in range(4)
    ],
    "a list of fused tasks": lambda: fused([]),
    "a list of a chain": lambda: chain(MAIN["own"], []),
    "a list that contains itself": lambda: first(lambda values: MAIN["own"](values)[1:], _loop()),
    "a list in a frame": lambda: first(
        lambda frame: MAIN["own"](frame["x"][0]), pd.DataFrame({"x": pd.Series([[]], dtype=object)})
    ),
    "a list that two functions change": lambda: [
        *calls(MAIN["global_list"]),
        *(Task(f"y-{i}", MAIN["calls_global_list"], i) for i in range(2)),
    ],
    "a name that one function assigns and another reads": lambda: [
        *calls(MAIN["assigns"]),
        *(Task(f"y-{i}", MAIN["reads_number"], i) for i in range(2)),
    ],
    "a list that a library function reads": lambda: [
        task
        for shared in [[]]
        for task in (*first(MAIN["own"], shared), *(Task(f"y-{i}", len, shared) for i in range(2)))
    ],
    "a literal that two keys have": lambda: [
        task
        for shared in [[]]
        for i in range(2)
        for task in (DataNode(f"d-{i}", shared), Task(f"x-{i}", MAIN["own"], TaskRef(f"d-{i}")))
    ],
    "one object that is given twice": lambda: [
        Task(f"x-{i}", MAIN["is_same"], shared, {"x": [shared]}) for shared in [[]] for i in range(4)
    ],
}


def _loop() -> list[Any]:
    values: list[Any] = []
    values.append(values)
    return values


@pytest.mark.parametrize("name", CHANGING)
def test_a_bundle_has_the_values_of_its_tasks_if_they_change(name: str) -> None:
    tasks = arrived(CHANGING[name]())
    expected = one_by_one(tasks)
    assert values_of(bundle_of(tasks)) == expected
    assert n_copied(tasks)


UNCHANGED: dict[str, Callable[[], list[GraphNode]]] = {
    "share a list, but call library functions": lambda: calls(operator.contains, []),
    "share a list, and give library functions to others": lambda: first(toolz.pluck, 0, [[1]]),
    "share immutable objects": lambda: calls(
        MAIN["pure"], (1, ("a", None)), slice(1, 2), np.float64(1), b"1"
    ),
    "share a dtype, a class and a function": lambda: calls(MAIN["pure"], np.dtype("f4"), MAIN["Plain"], len),
    "share nothing": lambda: [Task(f"x-{i}", MAIN["own"], []) for i in range(N_TASKS)],
    "call a function that calls a pure one": lambda: calls(MAIN["calls_pure"]),
    "call a function that calls itself": lambda: calls(MAIN["reads_itself"]),
    "call a function that sets an attribute of a new object": lambda: calls(
        lambda x: [setattr(x, "a", 1)] and 1
    ),
    "call a function that assigns to a name of its own": lambda: calls(MAIN["assigns_its_own"]),
    "use a class without data": lambda: calls(MAIN["uses_class"]),
    "are literals that library functions read": lambda: [
        node
        for shared in [[1]]
        for i in range(2)
        for node in (DataNode(f"d-{i}", shared), Task(f"x-{i}", len, TaskRef(f"d-{i}")))
    ],
    "are fused of a library function with a list and another function without": lambda: [
        Task.fuse(Task(f"a-{i}", len, shared), Task(f"x-{i}", MAIN["pure"], TaskRef(f"a-{i}")))
        for shared in [[1]]
        for i in range(N_TASKS)
    ],
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_steps_are_not_copied_if_they(name: str) -> None:
    assert n_copied(arrived(UNCHANGED[name]())) == 0


def test_only_the_steps_that_may_change_an_object_are_copied() -> None:
    shared: list[int] = []
    tasks = [Task("x-0", MAIN["own"], shared), Task("x-1", len, shared), Task("x-2", MAIN["pure"], 1)]
    assert n_copied(arrived(tasks)) == 1


@pytest.mark.parametrize("is_one_function", [True, False])
def test_a_shared_object_is_pickled_once(is_one_function: bool) -> None:
    array = np.zeros(1_000_000, "u1")
    functions = [lambda x, array: array.sum() for _ in range(50)]
    tasks = arrived([Task(f"x-{i}", functions[i * (not is_one_function)], i, array) for i in range(50)])
    task = bundle_of(tasks)
    assert n_copied(tasks) == 50
    assert array.nbytes < len(dumps(task)) < 1.1 * array.nbytes
    assert len({id(task.func.functions[at].shared) for at, *_ in task.func.steps}) == 1


def test_bundles_of_a_graph_have_the_same_pickle() -> None:
    tasks = {
        task.key: task for task in arrived([Task(f"x-{i}", MAIN["own"], s) for s in [[]] for i in range(40)])
    }
    found = bundle_graph(tasks, tasks.keys(), ClusterProfile((1,) * 4), AllShort(seconds=1e-4), "0")
    bundles = [found.tasks[key] for key, bundle in found.bundles.items() if len(bundle.tasks) > 1]
    shared = {id(function.shared) for task in bundles for function in task.func.functions}
    assert len(bundles) > 1
    assert len(shared) == 1


def test_steps_share_their_objects_in_one_process() -> None:
    tasks = first(MAIN["own"], [])
    assert bundle_of(tasks, shares_objects=True)({}).values == tuple([1] * n for n in range(1, N_TASKS + 1))


def test_tasks_stay_separate_if_their_objects_cannot_be_pickled() -> None:
    shared = [threading.Lock()]
    tasks: dict[Any, Any] = {f"x-{i}": Task(f"x-{i}", MAIN["own"], shared) for i in range(20)}
    tasks |= {f"y-{i}": Task(f"y-{i}", MAIN["own"], [[]]) for i in range(20)}
    for shares_objects in (False, True):
        found = bundle_graph(
            tasks,
            tasks.keys(),
            ClusterProfile((1,) * 4),
            AllShort(seconds=1e-4),
            "0",
            shares_objects=shares_objects,
        )
        bundled = {
            one.key for bundle in found.bundles.values() if len(bundle.tasks) > 1 for one in bundle.tasks
        }
        assert {key.partition("-")[0] for key in bundled} == ({"x", "y"} if shares_objects else {"y"})
        assert all(found.tasks[f"x-{i}"] is tasks[f"x-{i}"] for i in range(20)) is not shares_objects


def test_each_object_of_many_steps_is_looked_at_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    n_parts = 0
    stock = Reach.parts

    def parts(self: Reach, value: Any) -> Any:
        nonlocal n_parts
        n_parts += 1
        return stock(self, value)

    monkeypatch.setattr(Reach, "parts", parts)
    shared = [[i] for i in range(1_000)]
    tasks = arrived([Task(f"x-{i}", MAIN["pure"], i, shared, (shared,)) for i in range(500)])
    assert n_copied(tasks) == 500
    assert n_parts < 4 * (len(shared) + 3 * len(tasks))
