"""Random models: where onnxruntime runs, all granularities run and agree."""

from __future__ import annotations

import pytest
from random_models import disagreement

N, PART = 60, 12


@pytest.mark.parametrize("first", range(0, N, PART))
def test_random_models_agree_with_onnxruntime(first: int) -> None:
    found = {seed: disagreement(seed) for seed in range(first, first + PART)}
    assert not {seed: told for seed, told in found.items() if told}
    assert sum(told == "" for told in found.values()) >= PART // 2
