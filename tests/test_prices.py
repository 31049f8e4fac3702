"""What tasks on workers are expected to take follows what Dask has learned since they were sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ferroflow_dask.plugin.prices import Prices


class Tasks:
    """Tasks of one name on workers, with Dask's average for them."""

    def __init__(self) -> None:
        self.prefix = SimpleNamespace(name="f", duration_average=-1.0)
        self.told: dict[str, float] = {}
        self.n_told = 0
        scheduler: Any = SimpleNamespace(_get_prefix_duration=self._average)
        self.prices = Prices(scheduler, self._reprice)
        self.sent: list[Any] = []

    def _average(self, prefix: Any) -> float:
        return 0.5 if prefix.duration_average < 0 else float(prefix.duration_average)

    def _reprice(self, key: Any, seconds: float) -> None:
        self.told[key] = seconds
        self.n_told += 1

    def send(self, n: int) -> None:
        for _ in range(n):
            # A task of Dask's is itself a key of sets.
            self.sent.append(type("Task", (), {"key": f"f-{len(self.sent)}", "prefix": self.prefix})())
            self.prices.sent(self.sent[-1])

    def end(self, average_s: float) -> None:
        ts = self.sent.pop()
        self.prices.left(ts)
        self.prefix.duration_average = average_s
        self.told.pop(ts.key, None)
        self.prices.ended(ts)


def test_the_first_end_prices_all_that_were_guessed() -> None:
    tasks = Tasks()
    tasks.send(9)
    tasks.end(5.0)
    assert tasks.told == {f"f-{i}": 5.0 for i in range(8)}


def test_a_first_task_that_is_unlike_the_others_is_not_believed_for_ever() -> None:
    tasks = Tasks()
    tasks.send(100)
    tasks.end(5.0)  # it has compiled what the others run
    for i in range(20):
        tasks.end(0.005 + 5.0 * 0.5**i)
    assert set(tasks.told.values()) == {tasks.told["f-0"]}
    assert tasks.told["f-0"] < 0.1


def test_an_average_that_wavers_costs_few_prices_for_each_end() -> None:
    tasks = Tasks()
    n = 2000
    tasks.send(n)
    for i in range(n - 1):
        tasks.end(1.0 if i % 2 else 0.001)
    assert tasks.n_told < 10 * n


def test_nothing_is_kept_of_a_name_that_is_on_no_worker() -> None:
    tasks = Tasks()
    tasks.send(2)
    tasks.end(1.0)
    tasks.end(1.0)
    assert not tasks.prices._names
