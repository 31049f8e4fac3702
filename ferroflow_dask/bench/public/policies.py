"""Sides by name: stock Dask, the plugin, the plugin with another policy or without a feature."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import dask

from ferroflow_dask.bench.public.host import Prepare, plugin
from ferroflow_dask.exceptions import UnknownNameError
from ferroflow_dask.policy import policy_names
from ferroflow_dask.scheduler.features import found_features

#: Dask as it is, and once more: the two differ by noise.
STOCK, AGAIN = "dask", "dask-again"
#: The plugin as it is, once more, and without a feature.
OURS = "ferroflow"
OURS_AGAIN, WITHOUT = f"{OURS}-again", f"{OURS}-without-"
_ENVIRONMENT = "DASK_FERROFLOW__"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the plugin on one side, by the end of their names in the environment.

    Parameters
    ----------
    values : mapping of str to str
    """

    values: Mapping[str, str]

    def apply(self) -> None:
        """Set them in this process, and in those that it starts."""
        os.environ.update({f"{_ENVIRONMENT}{name}": value for name, value in self.values.items()})
        dask.config.refresh()


#: What `Rules` has of a side: a function that prepares it, settings of the plugin, or None for stock Dask.
SideOf = Prepare | Settings | None


def names() -> tuple[str, ...]:
    """Return the names of all sides."""
    without = (f"{WITHOUT}{kind.name}" for kind in found_features())
    return (STOCK, AGAIN, *policy_names(), OURS_AGAIN, *without)


def sides_of(chosen: Iterable[str]) -> dict[str, SideOf]:
    """Return sides by name, each once.

    Raises
    ------
    UnknownNameError
        A name is that of no policy; the message lists all.
    """
    return {name: _side_of(name) for name in chosen}


def _side_of(name: str) -> SideOf:
    if name not in names():
        raise UnknownNameError.of("policy", name, names())
    if name in (STOCK, AGAIN):
        return None
    if name in (OURS, OURS_AGAIN):
        return plugin
    if name.startswith(WITHOUT):
        return Settings({f"FEATURES__{name.removeprefix(WITHOUT).upper()}": "False"})
    # Bundles would hide the decisions of a policy.
    return Settings({"POLICY": name, "FEATURES__BUNDLES": "False"})
