"""Metrics: steals, prefetched tasks, inlined results and devices on Dask's Prometheus page."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import dask
from distributed import Status

from ferroflow_dask.scheduler.changes import FAILURES, CallChange, Change

if TYPE_CHECKING:
    from ferroflow_dask.scheduler.extension import FerroflowStealing

logger = logging.getLogger("ferroflow_dask")

#: Help texts of the counters.
_STEALS = "Steal requests, and how they ended"
_PREFETCHED = "Tasks sent before their inputs existed, and how that ended"
_INLINED = "Results that workers sent to the scheduler, and that it sent with a task"


class _Collector:
    """The one collector of this process: shows the extension that was installed last.

    Dask's own numbers are those of the scheduler that started last, too.
    """

    def __init__(self) -> None:
        #: In the order of installation.
        self.extensions: WeakKeyDictionary[FerroflowStealing, None] = WeakKeyDictionary()

    def describe(self) -> list[Any]:
        """Return nothing, so that registering needs no extension."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the present numbers; a failure is logged, since Dask's own metrics are on the same page."""
        try:
            yield from list(self._families())
        except FAILURES:
            logger.warning("ferroflow: metrics are not available", exc_info=True)

    def _families(self) -> Iterator[Any]:
        running = [one for one in self.extensions if one.scheduler.status == Status.running]
        if not running:
            return
        extension = running[-1]
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        namespace = dask.config.get("distributed.dashboard.prometheus.namespace")
        prefix = f"{namespace}_scheduler_ferroflow" if namespace else "scheduler_ferroflow"
        messages = extension.messages
        for name, help_text, label, counts in (
            ("steals", _STEALS, "outcome", extension.steals),
            ("prefetched_tasks", _PREFETCHED, "outcome", messages.prefetch.outcomes),
            ("inlined_results", _INLINED, "what", messages.inlining.counts),
        ):
            family = CounterMetricFamily(f"{prefix}_{name}", help_text, labels=[label])
            for kind, n in counts.items():
                family.add_metric([kind], n)
            yield family
        counters, of_devices = extension.device_totals.of(extension.scheduler.workers.values())
        for name, (help_text, value) in counters.items():
            yield CounterMetricFamily(f"{prefix}_{name}", help_text, value=value)
        for name, (help_text, value) in (extension.gauges() | of_devices).items():
            yield GaugeMetricFamily(f"{prefix}_{name}", help_text, value=value)


_COLLECTOR = _Collector()
_is_registered = False


def collector_change(extension: FerroflowStealing) -> Change:
    """Return the change that shows an extension's metrics, if prometheus_client is installed."""
    return CallChange("Prometheus collector", lambda: _show(extension), lambda: _hide(extension))


def _show(extension: FerroflowStealing) -> None:
    global _is_registered  # noqa: PLW0603 -- prometheus_client's registry belongs to the process, too
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return
    if not _is_registered:
        REGISTRY.register(_COLLECTOR)
        _is_registered = True
    _COLLECTOR.extensions[extension] = None


def _hide(extension: FerroflowStealing) -> None:
    _COLLECTOR.extensions.pop(extension, None)
