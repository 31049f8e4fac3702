"""Settings: the policy that the configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferroflow_dask import config
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
    return make_policy(name or config.get("policy"), **(options or {}))
