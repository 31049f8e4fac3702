"""Two clients at once: neither waits for the other's end, and whoever Dask puts first comes first.

Dask's rule: a task with a higher priority of its client comes first; then one of an earlier generation;
then one that its graph has earlier. Graphs that arrive within `fifo_timeout` share a generation, so that
their tasks take turns. The rule must not depend on which of the clients declares costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import pytest

from ferroflow_dask.virtual import VirtualCluster, VirtualTask

P = 4
TASK_S = 1 / 128
LATENCY_S = 1 / 2048
#: When the second graph arrives: while each worker runs its third task.
LATER_S = 2.5 * TASK_S
N = 100
#: What is not the second one's to have: two tasks on each worker that have ended, one that runs and, as
#: Dask's queue has it, one that was sent to wait there.
HEAD_START = P * (2 + 1 + 1)
#: How much later than with Dask a client may have its results.
SMALL_FACTOR = 1.3


def task(is_declared: bool, rest: int = 1, **more: Any) -> VirtualTask:
    """Return a task that is followed by `rest - 1` others."""
    known = {"ferroflow_cost": TASK_S, "ferroflow_rank": rest * TASK_S} if is_declared else {}
    return VirtualTask(TASK_S, annotations=known, **more)


def independent(name: str, is_declared: bool) -> dict[Any, VirtualTask]:
    """Return tasks that Dask keeps in its queue."""
    return {(name, i): task(is_declared) for i in range(N)}


def chains(name: str, is_declared: bool) -> dict[Any, VirtualTask]:
    """Return ten chains of ten tasks."""
    return {
        (name, i): task(is_declared, 10 - i % 10, dependencies=((name, i - 1),) if i % 10 else ())
        for i in range(N)
    }


def fan(name: str, is_declared: bool) -> dict[Any, VirtualTask]:
    """Return one task and 99 that need its result."""
    leaves = {(name, i): task(is_declared, dependencies=((name, 0),)) for i in range(1, N)}
    return {(name, 0): task(is_declared, 2)} | leaves


@dataclass
class Run:
    """The clients' letters in the order of completions, and when each client had all its results [s]."""

    order: str
    ends: dict[str, float]

    def before_end_of(self, client: str) -> str:
        return self.order[: self.order.rindex(client) + 1]

    def widest_gap(self) -> int:
        """Return by how many tasks one client was ahead at most, while neither had ended."""
        done, widest = Counter(a=0, b=0), 0
        for client in self.order:
            done[client] += 1
            if max(done.values()) < N:
                widest = max(widest, abs(done["a"] - done["b"]))
        return widest


def run(
    policy: str,
    first: dict[Any, VirtualTask],
    second: dict[Any, VirtualTask],
    *,
    fifo_timeout_s: float,
    priorities: tuple[int, int] = (0, 0),
) -> Run:
    cluster = VirtualCluster(P, policy=policy, latency_s=LATENCY_S)
    cluster.submit(first, "a", priority=priorities[0], fifo_timeout_s=fifo_timeout_s)
    later = {"client": "b", "priority": priorities[1], "fifo_timeout_s": fifo_timeout_s}
    cluster.at(LATER_S, cluster.submit, second, **later)
    cluster.run()
    cluster.check()
    ends = {str(key[0]): time for key, time in map(astuple, cluster.record.completions)}
    return Run(letters(cluster), ends)


def letters(cluster: VirtualCluster) -> str:
    """Return the clients of the completed tasks, in order."""
    return "".join(key[0] for key, _ in map(astuple, cluster.record.completions))


Shape = Callable[[str, bool], dict[Any, VirtualTask]]
ALL_SHAPES = pytest.mark.parametrize("shape", [independent, chains, fan], ids=lambda shape: shape.__name__)
#: Whether a and b declare costs.
ALL_KNOWLEDGE = pytest.mark.parametrize(
    "declared",
    [
        pytest.param((False, False), id="both unknown"),
        pytest.param((True, True), id="both declared"),
        pytest.param((True, False), id="first declared"),
        pytest.param((False, True), id="second declared"),
    ],
)


@ALL_SHAPES
@ALL_KNOWLEDGE
@pytest.mark.parametrize("fifo_timeout_s", [60.0, 0.0], ids=["one generation", "two generations"])
def test_graphs_of_one_generation_take_turns_and_those_of_two_end_as_with_dask(
    shape: Shape, declared: tuple[bool, bool], fifo_timeout_s: float
) -> None:
    graphs = shape("a", declared[0]), shape("b", declared[1])
    ours, stock = (run(policy, *graphs, fifo_timeout_s=fifo_timeout_s) for policy in ("ferroflow", "dask"))
    if fifo_timeout_s:
        # A chain goes on where its last task ended, so whole chains get ahead.
        assert ours.widest_gap() <= (HEAD_START if shape is not chains else 40)
        assert ours.order.index("b") <= HEAD_START
        assert ours.order.index("a") == 0
    for client in "ab":
        assert ours.ends[client] <= SMALL_FACTOR * stock.ends[client]


@ALL_KNOWLEDGE
def test_a_client_of_higher_priority_comes_first_also_if_it_comes_later(declared: tuple[bool, bool]) -> None:
    graphs = independent("a", declared[0]), independent("b", declared[1])
    later = run("ferroflow", *graphs, fifo_timeout_s=60.0, priorities=(0, 10)).before_end_of("b")
    assert later.count("a") <= HEAD_START
    earlier = run("ferroflow", *graphs, fifo_timeout_s=60.0, priorities=(10, 0)).before_end_of("a")
    assert earlier.count("b") <= P  # of the same instant


# The same on one worker, small enough to be read. One task runs and one waits there when b arrives.


@ALL_KNOWLEDGE
@pytest.mark.parametrize(("priorities", "order"), [((0, 10), "aabbbaaa"), ((10, 0), "aaaaabbb")])
def test_priorities_on_one_worker(
    declared: tuple[bool, bool], priorities: tuple[int, int], order: str
) -> None:
    first = {("a", i): task(declared[0]) for i in range(5)}
    second = {("b", i): task(declared[1]) for i in range(3)}
    cluster = VirtualCluster(1, policy="ferroflow", latency_s=LATENCY_S)
    cluster.submit(first, "a", priority=priorities[0])
    cluster.at(TASK_S / 2, cluster.submit, second, "b", priority=priorities[1])
    cluster.run()
    cluster.check()
    assert letters(cluster) == order


def test_ranks_reorder_a_graph_within_its_own_places() -> None:
    """A client that declares huge ranks gains nothing over one that declares small ones."""

    def order(scale: float) -> str:
        def graph(name: str, factor: float) -> dict[Any, VirtualTask]:
            ranks = {i: {"ferroflow_cost": TASK_S, "ferroflow_rank": factor * (i + 1)} for i in range(N)}
            return {(name, i): VirtualTask(TASK_S, annotations=ranks[i]) for i in range(N)}

        return run("ferroflow", graph("a", 1.0), graph("b", scale), fifo_timeout_s=60.0).order

    assert order(1e6) == order(1.0) == order(1e-6)
