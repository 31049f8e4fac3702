"""Metrics: steals, prefetched tasks, inlined results and devices on Dask's Prometheus page."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import dask
from distributed import Status

from ferroflow_dask.scheduler.changes import FAILURES, CallChange, Change
from ferroflow_dask.scheduler.core import Core
from ferroflow_dask.scheduler.features.base import Feature

logger = logging.getLogger("ferroflow_dask")


class _Collector:
    """The one collector of this process: shows the plugin that was installed last.

    Dask's own numbers are those of the scheduler that started last, too.
    """

    def __init__(self) -> None:
        #: In the order of installation.
        self.cores: WeakKeyDictionary[Core, None] = WeakKeyDictionary()

    def describe(self) -> list[Any]:
        """Return nothing, so that registering needs no plugin."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the present numbers; a failure is logged, since Dask's own metrics are on the same page."""
        try:
            yield from list(self._families())
        except FAILURES:
            logger.warning("ferroflow: metrics are not available", exc_info=True)

    def _families(self) -> Iterator[Any]:
        running = [core for core in self.cores if core.scheduler.status == Status.running]
        if not running:
            return
        core = running[-1]
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        namespace = dask.config.get("distributed.dashboard.prometheus.namespace")
        prefix = f"{namespace}_scheduler_ferroflow" if namespace else "scheduler_ferroflow"
        for name, counts in core.parts().counts().items():
            family = CounterMetricFamily(f"{prefix}_{name}", counts.help_text, labels=[counts.label])
            for kind, n in counts.values.items():
                family.add_metric([kind], n)
            yield family
        counters, of_devices = core.device_totals.of(core.scheduler.workers.values())
        for name, (help_text, value) in counters.items():
            yield CounterMetricFamily(f"{prefix}_{name}", help_text, value=value)
        for name, (help_text, value) in {**core.parts().gauges(), **of_devices}.items():
            yield GaugeMetricFamily(f"{prefix}_{name}", help_text, value=value)


_COLLECTOR = _Collector()
_is_registered = False


class Metrics(Feature):
    """Shows the plugin's metrics."""

    name = "metrics"
    summary = "Counts and learned values on Dask's Prometheus page"
    reason = "shows how the plugin works: `tests/scheduler/test_plugin.py`"

    def unavailable(self) -> str:
        """Return whether the package of the metrics is missing."""
        return "" if importlib.util.find_spec("prometheus_client") else "prometheus_client is not installed"

    def changes(self) -> Iterable[Change]:
        """Show the metrics."""
        yield CallChange("Prometheus collector", self._show, self._hide)

    def _show(self) -> None:
        global _is_registered  # noqa: PLW0603 -- prometheus_client's registry belongs to the process, too
        from prometheus_client import REGISTRY

        if not _is_registered:
            REGISTRY.register(_COLLECTOR)
            _is_registered = True
        _COLLECTOR.cores[self.core] = None

    def _hide(self) -> None:
        _COLLECTOR.cores.pop(self.core, None)
