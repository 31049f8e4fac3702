"""Learned numbers, and the file that a scheduler with such numbers leaves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ferroflow_dask.annotations import KIND_ANNOTATION
from ferroflow_dask.scheduler.learned import Learned
from ferroflow_dask.scheduler.learned_file import LearnedFile


def task(name: str, *, kind: str | None = None, reads: tuple[int, ...] = ()) -> Any:
    return SimpleNamespace(
        key=(name, 0),
        prefix=SimpleNamespace(name=name),
        annotations={} if kind is None else {KIND_ANNOTATION: kind},
        dependencies=[SimpleNamespace(nbytes=nbytes) for nbytes in reads],
        run_spec=None,
    )


def taught(*names: str, seconds: float = 1.0, n: int = 3) -> Learned:
    """Return numbers that were learned of some tasks of each prefix."""
    learned = Learned()
    for name in names:
        teach(learned, name, seconds, n)
    return learned


def teach(learned: Learned, name: str, seconds: float, n: int = 3) -> None:
    for _ in range(n):
        learned.costs.record(task(name), seconds, 8, "a")


def seconds_of(found: Learned) -> dict[str, float]:
    return {name: duration_s for name, (duration_s, _) in found.costs.means().items()}


def keep(path: Path, learned: Learned) -> None:
    """Write the numbers of a scheduler that ends."""
    file = LearnedFile(path)
    file.read_into(learned)
    file.write(learned.exported(), is_last=True)
