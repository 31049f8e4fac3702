"""Random programs whose bundles are divided at random moments: each task runs once and has Dask's value."""

from __future__ import annotations

import pytest
from random_divisions import TRIGGERS, compare

pytestmark = pytest.mark.cluster


def test_tasks_of_divided_bundles_run_once_and_have_the_same_values() -> None:
    wrong, counts = compare(range(8 * len(TRIGGERS)))
    assert wrong == []
    assert counts["divided"] > 8
