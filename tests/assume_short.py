"""Pytest plugin for Dask's own tests: each cluster has our extension, and all tasks are taken to be short.

`PYTHONPATH=tests pytest -p assume_short …` bundles graphs on their first run. See `tests/upstream.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ferroflow_dask.bundling.averages import Averages

#: Assumed for a task of which nothing is known [s].
DURATION_S = 1e-3


class AllShort(dict[str, Averages]):
    """Averages of all prefixes but some: each is known and short."""

    def __init__(self, excluded: frozenset[str] = frozenset(), seconds: float = DURATION_S) -> None:
        super().__init__()
        self._excluded = excluded
        self._averages = Averages(seconds, 100.0)

    def get(self, name: Any, default: Any = None) -> Averages:
        """Return the averages of a prefix; None for an excluded one."""
        return default if name in self._excluded else self._averages

    def __contains__(self, name: object) -> bool:
        return True


def assume_short() -> None:
    """Let all extensions of this process take tasks of any prefix for short."""
    from ferroflow_dask.scheduler.graphs.graphs import Graphs

    def learned(self: Graphs) -> Mapping[str, Averages]:
        return AllShort(frozenset(self._learned.separate))

    Graphs.learned = learned  # type: ignore[method-assign]


def pytest_configure(config: pytest.Config) -> None:
    """Install the extension in each scheduler of this process."""
    import distributed.scheduler

    from ferroflow_dask.scheduler.extension import FerroflowStealing

    distributed.scheduler.DEFAULT_EXTENSIONS["stealing"] = FerroflowStealing
    assume_short()
