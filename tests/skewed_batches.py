"""Batches of skewed durations in virtual time, and the errors of their predicted times.

    python tests/skewed_batches.py [SEEDS]

It prints a line for each kind of batch: the error of predictions for the last half of 20 batches, the least
error of a prediction that knows the distribution of durations, and how many intervals hold.
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ferroflow_dask.dashboard.progress import GraphProgress

#: Number of tasks, and the deviation of the logarithm of their durations.
LOG_NORMAL = {
    "log-normal durations": (200, 1.0),
    "log-normal durations of a long tail": (200, 1.3),
    "few log-normal durations": (40, 1.0),
    "few log-normal durations of a long tail": (40, 1.3),
    "log-normal durations of which one or two last longer than all others": (40, 2.0),
}
KINDS = (
    "every fourth takes 20 times as long",
    "one in four takes 20 times as long, at random",
    *LOG_NORMAL,
)
_BATCHES = 20


class Task:
    """What progress needs of a scheduler's task."""

    def __init__(self, key: str, *dependencies: Task) -> None:
        self.key, self.dependencies, self.dependents, self.state = key, dependencies, [], "waiting"
        for other in dependencies:
            other.dependents.append(self)


@dataclass
class Predicted:
    """Predictions of batches, and the times that these took [s]."""

    errors: list[float] = field(default_factory=list)
    covered: list[bool] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def least_error(self, others: Sequence[float]) -> float:
        """Return the relative error of the prediction that is the best one for other times.

        That is their median with weights 1 / t.
        """
        ordered = np.sort(others)
        weights = np.cumsum(1 / ordered)
        best_s = ordered[np.searchsorted(weights, weights[-1] / 2)]
        return float(np.mean(np.abs(1 - best_s / np.array(self.times))))


def batch(n: int, kind: str, rng: np.random.Generator) -> tuple[list[Task], dict[str, float]]:
    """Return a graph of tasks whose durations no task declares, and these."""
    seconds: dict[str, float] = {}

    def task(key: str, duration_s: float, *before: Task) -> Task:
        seconds[key] = duration_s
        return Task(key, *before)

    root = task(f"load-{n}", 0.05)
    if kind == "every fourth takes 20 times as long":
        middle = [task(f"work-{n}-{i}", 0.2 if i % 4 == 0 else 0.01, root) for i in range(40)]
    elif kind == "one in four takes 20 times as long, at random":
        middle = [task(f"work-{n}-{i}", 0.2 if rng.random() < 0.25 else 0.01, root) for i in range(40)]
    else:
        n_tasks, deviation = LOG_NORMAL[kind]
        middle = [task(f"work-{n}-{i}", float(rng.lognormal(-3, deviation)), root) for i in range(n_tasks)]
    return [root, *middle, task(f"sum-{n}", 0.1, *middle)], seconds


def run(
    tasks: list[Task], seconds: Mapping[str, float], now_s: float = 0.0, progress: GraphProgress | None = None
) -> float:
    """Compute a graph on four threads in virtual time; return when it ends."""
    if progress is not None:
        progress.add(tasks, 4, now_s)  # type: ignore[arg-type]
    missing = {task.key: len(task.dependencies) for task in tasks}
    ready, running = deque(task for task in tasks if not missing[task.key]), []
    while ready or running:
        while ready and len(running) < 4:
            task = ready.popleft()
            heapq.heappush(running, (now_s + seconds[task.key] + 0.002, task.key, task))
        now_s, key, task = heapq.heappop(running)
        if progress is not None:
            progress.done(key, now_s, seconds[key])
        for dependent in task.dependents:
            missing[dependent.key] -= 1
            if not missing[dependent.key]:
                ready.append(dependent)
    return now_s


def predicted_batches(kind: str, seeds: int) -> Predicted:
    """Run 20 batches for each seed, and return the last half of them."""
    found = Predicted()
    for seed in range(seeds):
        progress, rng, now_s = GraphProgress(lambda _: None), np.random.default_rng(seed), 0.0
        for n in range(_BATCHES):
            tasks, seconds = batch(n, kind, rng)
            began_s, now_s = now_s, run(tasks, seconds, now_s, progress)
            took_s, predicted = now_s - began_s, progress.predicted
            assert predicted is not None
            if n >= _BATCHES // 2:
                found.errors.append(abs(predicted.seconds - took_s) / took_s)
                found.covered.append(predicted.low <= took_s <= predicted.high)
                found.times.append(took_s)
            for task in tasks:
                progress.forget(task.key, now_s)
    return found


def other_times(kind: str, n: int) -> list[float]:
    """Return the times of other batches of a kind [s]."""
    rng = np.random.default_rng(100)
    return [run(*batch(i, kind, rng)) for i in range(n)]


def main(seeds: int) -> None:
    """Print the errors of all kinds."""
    for kind in KINDS:
        found = predicted_batches(kind, seeds)
        least = found.least_error(other_times(kind, 1000))
        print(
            f"{kind}: error {np.mean(found.errors):.1%}, least error {least:.1%}, "
            f"{np.mean(found.covered):.0%} of the intervals hold"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
