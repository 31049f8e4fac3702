"""Random programs of which some tasks fail: with bundles, clients see what they see in stock Dask."""

from __future__ import annotations

import pytest
from random_failures import compare

pytestmark = pytest.mark.cluster


def test_clients_see_the_errors_and_values_of_stock() -> None:
    wrong, share = compare(range(12))
    assert wrong == []
    assert share > 0.5
