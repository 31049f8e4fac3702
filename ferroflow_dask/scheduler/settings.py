"""Settings: the policy that the configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferroflow_dask import config
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.policy import Policy, make_policy


def configured_policy(name: str | None = None, options: Mapping[str, Any] | None = None) -> Policy:
    """Make a policy from the configuration.

    Parameters
    ----------
    name : str, optional
        `ferroflow.policy` if left out.
    options : mapping, optional
        Arguments of the policy.
    """
    try:
        return make_policy(name or config.get("policy"), **(options or {}))
    except UsageError as error:
        for option in options or ():
            setting = option.replace("_", "-")
            if f"got {option!r}" in str(error) and config.is_setting(setting):
                raise UsageError(
                    f"{option} is a setting, and no option of a policy; call "
                    f"dask.config.set({{'ferroflow.{setting}': …}}) where the scheduler runs, before install"
                ) from error
        raise
