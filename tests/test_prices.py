"""What tasks on workers are expected to take follows what was learned since they were sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ferroflow_dask.scheduler.cost_model import CostModel
from ferroflow_dask.scheduler.repricing import Repricing
from ferroflow_dask.virtual import VirtualCluster, VirtualTask

#: Of two groups with one name: what tasks of the first take, and those of the second [s].
SHORT_S, LONG_S = 0.1, 2.0


class Tasks:
    """Tasks of one name on workers, of one group or more, with Dask's average for them."""

    def __init__(self) -> None:
        self.prefix = SimpleNamespace(name="f", duration_average=-1.0)
        self.told: dict[str, float] = {}
        self.n_told = 0
        self.durations = CostModel()
        self.prices = Repricing(self.durations, self._reprice)
        self.sent: dict[str, list[Any]] = {}

    def _reprice(self, key: Any, seconds: float) -> None:
        self.told[key] = seconds
        self.n_told += 1

    def send(self, n: int, group: str = "f") -> None:
        sent = self.sent.setdefault(group, [])
        for _ in range(n):
            about = {
                "key": f"{group}-{len(sent)}",
                "prefix": self.prefix,
                "group": SimpleNamespace(name=group),
                "annotations": {},
                "run_spec": None,
            }
            sent.append(type("Task", (), about)())  # a task of Dask's is itself a key of sets
            self.prices.sent(sent[-1])

    def end(self, average_s: float, group: str = "f", seconds: float | None = None) -> None:
        ts = self.sent[group].pop()
        self.prices.left(ts)
        self.durations.record(ts, average_s if seconds is None else seconds, 8)
        self.prefix.duration_average = average_s
        self.told.pop(ts.key, None)
        self.prices.ended(ts)

    def of(self, group: str) -> list[float]:
        """Return what the tasks of a group that are on workers were last told to take [s]."""
        return [self.told[ts.key] for ts in self.sent[group] if ts.key in self.told]


@pytest.mark.parametrize("group", ["f", "f-1"])
def test_the_first_end_prices_all_that_were_guessed(group: str) -> None:
    tasks = Tasks()
    tasks.send(9, group)
    tasks.send(3, "f-2")
    tasks.end(5.0, group)
    assert tasks.told == {f"{group}-{i}": 5.0 for i in range(8)} | {f"f-2-{i}": 5.0 for i in range(3)}


@pytest.mark.parametrize("group", ["f", "f-1"])
def test_a_first_task_that_is_unlike_the_others_is_not_believed_for_ever(group: str) -> None:
    tasks = Tasks()
    tasks.send(100, group)
    tasks.end(5.0, group)  # it has compiled what the others run
    for i in range(20):
        tasks.end(0.005 + 5.0 * 0.5**i, group, seconds=0.005)
    assert len(set(tasks.of(group))) == 1
    assert tasks.of(group)[0] < 0.1


def test_the_first_end_of_a_group_prices_all_of_the_group_and_no_others() -> None:
    tasks = Tasks()
    tasks.send(100, "f-1")
    tasks.send(100, "f-3")
    tasks.end(0.1, "f-1")
    tasks.send(100, "f-2")
    tasks.end(1.05, "f-2", seconds=2.0)
    assert tasks.of("f-2") == [pytest.approx(1.525)] * 99
    assert tasks.of("f-1") == [0.1] * 99
    assert tasks.of("f-3") == [0.1] * 100


def test_tasks_of_a_group_without_an_end_follow_the_names_average() -> None:
    tasks = Tasks()
    tasks.send(20, "f-1")
    tasks.send(20, "f-2")
    for average_s in (0.1, 1.0, 1.0, 1.0):
        tasks.end(average_s, "f-1", seconds=0.1)
    assert tasks.of("f-2") == [1.0] * 20  # three ends more are one in eight of them
    assert tasks.of("f-1") == [pytest.approx((4 * 0.1 + 1.0) / 5)] * 16


def test_tasks_that_are_sent_later_belong_to_the_account_of_their_group() -> None:
    tasks = Tasks()
    tasks.send(1, "f-1")
    tasks.end(0.1, "f-1")
    tasks.send(4, "f-1")
    tasks.send(4, "f-2")
    tasks.end(2.0, "f-2")
    assert tasks.of("f-1") == []
    tasks.end(2.0, "f-1")
    assert tasks.of("f-1") == [pytest.approx((2 * 0.67 + 2.0) / 3)] * 3


@pytest.mark.parametrize("n_groups", [1, 20, 2000])
def test_an_average_that_wavers_costs_few_prices_for_each_end(n_groups: int) -> None:
    tasks = Tasks()
    n = 2000
    tasks.send(n // 2)
    groups = [f"f-{i}" for i in range(n_groups)]
    for group in groups:
        tasks.send(max(1, n // 2 // n_groups), group)
    n_sent = sum(map(len, tasks.sent.values()))
    for i in range(n_sent - 1):
        of = [group for group in ("f", groups[i % n_groups]) if tasks.sent[group]] or [
            group for group in groups if tasks.sent[group]
        ]
        tasks.end(1.0 if i % 2 else 0.001, of[i % len(of)])
    assert tasks.n_told < 10 * n_sent


@pytest.mark.parametrize("groups", [["f"], ["f-1"], ["f", "f-1", "f-2"]], ids="+".join)
def test_nothing_is_kept_of_what_is_on_no_worker(groups: list[str]) -> None:
    tasks = Tasks()
    for group in groups:
        tasks.send(3, group)
    for _ in range(2):
        for group in groups:
            tasks.end(1.0, group)
    for group in groups:  # one of each is taken away instead
        tasks.prices.left(tasks.sent[group].pop())
    assert not tasks.prices._names
    assert not tasks.prices._accounts


def on(worker: int, **more: Any) -> dict[str, Any]:
    return {"workers": [worker], **more}


def test_a_group_that_is_longer_than_its_name_is_shared_out_once_one_of_it_has_ended() -> None:
    cluster = VirtualCluster(3, latency_s=1 / 1024)
    earlier = {("x-0a1", i): VirtualTask(SHORT_S, annotations=on(i)) for i in range(3)}
    earlier["f-0a1", 0] = VirtualTask(SHORT_S)  # what is known of the name
    cluster.submit(earlier, keep=earlier)
    cluster.run()
    began = cluster.time.now
    # There are 4 s of short tasks on worker 0, and 16 s of long ones on worker 1. Worker 2 has time soon
    # after the first of these has ended.
    graph = {
        (group, i): VirtualTask(
            seconds, (("x-0a1", worker),), annotations=on(worker, allow_other_workers=True)
        )
        for group, n, seconds, worker in (("f-0b1", 40, SHORT_S, 0), ("f-0c1", 8, LONG_S, 1))
        for i in range(n)
    }
    busy_s = LONG_S + 0.01
    graph["busy"] = VirtualTask(busy_s, (("x-0a1", 2),), annotations=on(2, ferroflow_cost=busy_s))
    cluster.submit(graph)
    cluster.run(until=began + busy_s + SHORT_S)
    groups = [[ts.group.name for ts in ws.processing] for ws in cluster.scheduler.workers.values()]
    assert set(groups[0]) == {"f-0b1"}
    assert groups[1] == ["f-0c1"] * 4
    assert groups[2] == ["f-0c1"] * 3
    cluster.run()
    cluster.check()
