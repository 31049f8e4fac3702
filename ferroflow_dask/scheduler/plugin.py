"""Scheduler plugin: installs the stealing extension on a scheduler, and uninstalls it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from ferroflow_dask import config
from ferroflow_dask.exceptions import ClusterError
from ferroflow_dask.scheduler import _distributed, learned_file
from ferroflow_dask.scheduler.extension import FerroflowStealing, extension_on
from ferroflow_dask.scheduler.features import check_names
from ferroflow_dask.scheduler.lifecycle import PLUGIN_NAME
from ferroflow_dask.scheduler.settings import configured_policy
from ferroflow_dask.scheduler.steal_exchange import STEALING, drain, exchange


class FerroflowPlugin(SchedulerPlugin):
    """Scheduler plugin that replaces Dask's stealing extension by ferroflow's.

    Parameters
    ----------
    policy : str, optional
        Name of the policy; the setting `ferroflow.policy` of the scheduler if left out.
    without : iterable of str, optional
        Names of features that are switched off, besides those of the settings `ferroflow.features`.
    **options
        Arguments of the policy, such as `seed` of the random one; they override the configuration.

    See Also
    --------
    install : registers the plugin through a client or a cluster.
    """

    name = PLUGIN_NAME

    def __init__(self, policy: str | None = None, *, without: Iterable[str] = (), **options: Any) -> None:
        # Bad options and settings raise here, not in the scheduler's log.
        configured_policy(policy, options)
        _checked_latency_s()
        if unknown := config.unknown_settings():
            warnings.warn(f"ferroflow: {'; '.join(unknown)}", stacklevel=3)
        self.policy = policy
        self.without = check_names(without)
        self.options = options
        #: What the plugin has put on a scheduler.
        self.extension: FerroflowStealing | None = None
        #: The features of a running installation, by name: `on`, or why a feature is off.
        self.features: dict[str, str] = {}
        #: What they have done, by name and kind.
        self.counts: dict[str, dict[str, int]] = {}

    def __repr__(self) -> str:
        """Return the call that makes the plugin."""
        own = {"policy": self.policy, "without": self.without}
        given = {name: value for name, value in own.items() if value} | self.options
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"extension": None}

    async def start(self, scheduler: Scheduler) -> None:
        """Install the extension, wholly or not at all; called by distributed when it registers the plugin."""
        if missing := _distributed.missing_names(scheduler):
            raise ClusterError(f"this distributed lacks {', '.join(missing)}; Dask keeps scheduling")
        present = scheduler.extensions.get(STEALING)
        if isinstance(present, FerroflowStealing) and present.installed_by is self:
            return  # a scheduler that starts starts its plugins again
        policy = configured_policy(self.policy, self.options)
        latency_s = _checked_latency_s()
        learned_file.check_place(config.get_path("learned"))
        replaced = None if present is None else type(present)
        states: dict[str, Any] = {}
        if isinstance(present, FerroflowStealing):
            replaced = present.replaced
            states = present.parts.features.states()

        def make(scheduler: Scheduler) -> FerroflowStealing:
            self.extension = FerroflowStealing(
                scheduler, policy, latency_s, replaced, states=states, without=self.without
            )
            self.extension.installed_by = self
            return self.extension

        await exchange(scheduler, make)
        if scheduler.plugins.get(PLUGIN_NAME) is not self:
            scheduler.plugins.pop(PLUGIN_NAME, None)  # distributed registers this plugin next


async def install_on(scheduler: Scheduler, plugin: FerroflowPlugin) -> None:
    """Install the plugin on a scheduler in this process."""
    await plugin.start(scheduler)
    scheduler.add_plugin(plugin, name=PLUGIN_NAME)


async def uninstall_from(scheduler: Scheduler) -> None:
    """Undo all changes to a scheduler, those that an earlier attempt has left included."""
    extension = extension_on(scheduler)
    if extension is not None:
        await drain(scheduler, extension)
    else:  # an attempt before may have put Dask's back, and left changes
        extension = getattr(scheduler.plugins.get(PLUGIN_NAME), "extension", None)
    if extension is not None:
        extension.lifecycle.leave()
        await extension.changes.settled()


def installed_on(scheduler: Scheduler) -> FerroflowPlugin | None:
    """Return the plugin that schedules, also if it was taken off the scheduler's list of plugins."""
    extension = extension_on(scheduler)
    if extension is None or extension.error is not None:
        return None
    plugin = extension.installed_by
    if not isinstance(plugin, FerroflowPlugin):
        return None
    plugin.features = dict.fromkeys((one.name for one in extension.features), "on") | extension.off
    plugin.counts = {one.name: dict(counts) for one in extension.features if (counts := one.counts())}
    return plugin


def _checked_latency_s() -> float:
    """Return the setting `ferroflow.latency` [s] after a check of all settings that are not a policy's."""
    config.get_bytes("inline-limit")
    for name in config.switches():
        config.is_on(name)
    config.respects_observers()
    config.get_path("learned")
    config.get_seconds("policy-limit")
    return config.get_seconds("latency")
