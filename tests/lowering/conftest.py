"""A fixture of tests that compute where they are."""

from __future__ import annotations

from collections.abc import Iterator

import dask
import pytest


@pytest.fixture
def _no_cluster() -> Iterator[None]:
    """Compute here, even if a test of another file has left a client."""
    with dask.config.set(scheduler="sync"):
        yield
