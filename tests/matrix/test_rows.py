"""Rows of the matrix on clusters of threads: the plugin changes nothing that programs observe."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest

from matrix.rows import ROWS
from matrix.trial import BUNDLES, PLAIN, STOCK, Result, Variant, all_short, problem_of

_ROWS = [name for name, row in ROWS.items() if not row.needs_processes]


@pytest.fixture(scope="module")
def results() -> Iterator[Callable[..., Result]]:
    """Return a function that runs a row under a policy; stock is run once for all."""
    with all_short():
        variants = {policy: Variant(policy) for policy in (STOCK, PLAIN, BUNDLES)}
        found: dict[str, Result] = {}

        def result_of(name: str, policy: str, *, again: bool = False) -> Result:
            if policy != STOCK:
                return variants[policy].run(ROWS[name])
            if again or name not in found:
                found[name] = variants[STOCK].run(ROWS[name])
            return found[name]

        yield result_of
        for variant in variants.values():
            variant.close()


@pytest.mark.cluster
@pytest.mark.filterwarnings("default:.*differs:UserWarning")  # a row that depends on time runs again
@pytest.mark.parametrize("policy", [PLAIN, BUNDLES])
@pytest.mark.parametrize("name", _ROWS)
def test_the_program_observes_what_it_observes_in_stock(
    name: str, policy: str, results: Callable[..., Result]
) -> None:
    stock = results(name, STOCK)
    assert not stock.hangs
    assert not stock.raises, stock.observed
    problem = problem_of(ROWS[name], stock, results(name, policy), policy)
    if problem is not None and ROWS[name].is_timed:
        warnings.warn(f"{name}: {problem}", stacklevel=1)
        problem = problem_of(ROWS[name], results(name, STOCK, again=True), results(name, policy), policy)
    assert problem is None
