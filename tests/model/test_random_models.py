"""Random models: where onnxruntime runs, all granularities run and agree."""

from __future__ import annotations

import pytest
from random_models import disagreement
from random_operators import problems

N, PART = 60, 12
#: Models with all operators: of one node, and of up to thirty.
N_EACH, N_MANY = 40, 10


@pytest.mark.parametrize("first", range(0, N, PART))
def test_random_models_agree_with_onnxruntime(first: int) -> None:
    found = {seed: disagreement(seed) for seed in range(first, first + PART)}
    assert not {seed: told for seed, told in found.items() if told}
    assert sum(told == "" for told in found.values()) >= PART // 2


@pytest.mark.parametrize(("n", "is_each"), [(N_EACH, True), (N_MANY, False)], ids=["one node", "many nodes"])
@pytest.mark.filterwarnings("ignore")
def test_models_of_all_operators_agree_with_onnxruntime_or_the_reference(n: int, is_each: bool) -> None:
    found = [problems(seed, is_each) for seed in range(n)]
    assert not [wrong for wrong, _, _ in found if wrong]
    assert sum(is_run for _, _, is_run in found) >= 0.8 * n
