"""Write mlp.onnx (Gemm ×3, Relu ×2, [batch, 784] → [batch, 10], seeded weights) and its input x.npy."""

import sys

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def mlp(seed: int = 0) -> onnx.ModelProto:
    rng = np.random.default_rng(seed)
    nodes, weights, value = [], [], "x"
    for i, (n, m) in enumerate([(784, 128), (128, 64), (64, 10)]):
        kernel = rng.standard_normal((m, n), dtype=np.float32) / np.float32(np.sqrt(n))
        bias = rng.standard_normal(m, dtype=np.float32)
        weights += [numpy_helper.from_array(kernel, f"w{i}"), numpy_helper.from_array(bias, f"b{i}")]
        result = "y" if i == 2 else f"h{i}"
        nodes.append(helper.make_node("Gemm", [value, f"w{i}", f"b{i}"], [result], f"gemm_{i}", transB=1))
        if i < 2:
            nodes.append(helper.make_node("Relu", [result], [f"r{i}"], f"relu_{i}"))
        value = f"r{i}"
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 784])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 10])
    graph = helper.make_graph(nodes, "mlp", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "."
    onnx.save(mlp(), f"{folder}/mlp.onnx")
    np.save(f"{folder}/x.npy", np.random.default_rng(1).standard_normal((32, 784), dtype=np.float32))
    print(f"wrote {folder}/mlp.onnx and {folder}/x.npy")
