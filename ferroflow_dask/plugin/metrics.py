"""What the shell has learned and done, and devices with it, on Dask's page of Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import dask
from distributed import Status

if TYPE_CHECKING:
    from ferroflow_dask.plugin.stealing import FerroflowStealing


class _Collector:
    """The one collector of this process: of the shell that was put in place last, of those that are there.

    Dask's own numbers are those of the scheduler that started last, too.
    """

    def __init__(self) -> None:
        #: In the order in which they were put in place.
        self.shells: WeakKeyDictionary[FerroflowStealing, None] = WeakKeyDictionary()

    def describe(self) -> list[Any]:
        """Return nothing, so that registering needs no shell."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the present numbers."""
        of_running = [shell for shell in self.shells if shell.scheduler.status == Status.running]
        if not of_running:
            return
        shell = of_running[-1]
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        namespace = dask.config.get("distributed.dashboard.prometheus.namespace")
        prefix = f"{namespace}_scheduler_ferroflow" if namespace else "scheduler_ferroflow"
        steals = CounterMetricFamily(
            f"{prefix}_steals", "Tasks asked of another worker, and how that ended", labels=["outcome"]
        )
        for outcome, n in shell.steals.items():
            steals.add_metric([outcome], n)
        yield steals
        successors = CounterMetricFamily(
            f"{prefix}_successors", "Tasks sent before their inputs, and how that ended", labels=["outcome"]
        )
        for outcome, n in shell.messages.successors.outcomes.items():
            successors.add_metric([outcome], n)
        yield successors
        results = CounterMetricFamily(
            f"{prefix}_small_results", "Results that workers told, and that came with a task", labels=["what"]
        )
        for what, n in shell.messages.inlining.counts.items():
            results.add_metric([what], n)
        yield results
        counters, of_devices = shell.device_totals.of(shell.scheduler.workers.values())
        for name, (told, value) in counters.items():
            yield CounterMetricFamily(f"{prefix}_{name}", told, value=value)
        for name, (told, value) in (shell.gauges() | of_devices).items():
            yield GaugeMetricFamily(f"{prefix}_{name}", told, value=value)


_COLLECTOR = _Collector()
_is_registered = False


def show(shell: FerroflowStealing) -> None:
    """Show a shell's numbers from now on, where prometheus_client is installed."""
    global _is_registered  # noqa: PLW0603 -- prometheus_client's registry belongs to the process, too
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return
    if not _is_registered:
        REGISTRY.register(_COLLECTOR)
        _is_registered = True
    _COLLECTOR.shells[shell] = None


def hide(shell: FerroflowStealing) -> None:
    """Show a shell's numbers no longer."""
    _COLLECTOR.shells.pop(shell, None)
