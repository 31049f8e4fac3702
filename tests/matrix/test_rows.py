"""Rows of the matrix on clusters of threads: the plugin changes nothing that programs observe."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from matrix.rows import ROWS
from matrix.trial import BUNDLES, PLAIN, STOCK, Result, Variant, all_short, problem_of

_ROWS = [name for name, row in ROWS.items() if not row.needs_processes]


@pytest.fixture(scope="module")
def results() -> Iterator[Callable[[str, str], Result]]:
    """Return a function that runs a row under a policy, once."""
    with all_short():
        variants = {policy: Variant(policy) for policy in (STOCK, PLAIN, BUNDLES)}
        found: dict[tuple[str, str], Result] = {}

        def result_of(name: str, policy: str) -> Result:
            if (name, policy) not in found:
                found[name, policy] = variants[policy].run(ROWS[name])
            return found[name, policy]

        yield result_of
        for variant in variants.values():
            variant.close()


@pytest.mark.cluster
@pytest.mark.parametrize("policy", [PLAIN, BUNDLES])
@pytest.mark.parametrize("name", _ROWS)
def test_the_program_observes_what_it_observes_in_stock(
    name: str, policy: str, results: Callable[[str, str], Result]
) -> None:
    stock = results(name, STOCK)
    assert not stock.hangs
    assert problem_of(ROWS[name], stock, results(name, policy), policy) is None
