"""Random batches, and what onnxruntime computes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime

RNG = np.random.default_rng(0)


def expected(model: onnx.ModelProto, **inputs: Any) -> list[Any]:
    return list(onnxruntime.InferenceSession(model.SerializeToString()).run(None, inputs))


def rows(n: int, *shape: int) -> Any:
    return RNG.standard_normal((n, *shape), dtype=np.float32)
