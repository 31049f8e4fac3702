"""A model with large weights: seconds and peak memory of client and worker, compared with onnxruntime's.

    python tests/large_weights.py FOLDER [width]

Writes ten matrix products of `width` (8,192 by default: 2.7 GB) to the folder, and removes them in the end.
Each program runs in new processes: one onnxruntime session, `bind` and `map_batches` on a cluster with one
worker. Its first answer includes loading. All have one thread. Peak memory is the largest resident set.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

N_LAYERS, N_ROWS = 10, 4


def write(folder: Path, width: int) -> Path:
    """Write the model and its weights."""
    rng = np.random.default_rng(0)
    names = [f"h{i}" for i in range(N_LAYERS + 1)]
    tensors = []
    with (folder / "weights.bin").open("wb") as file:
        for i in range(N_LAYERS):
            tensor = TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[width, width])
            tensor.data_location = TensorProto.EXTERNAL
            facts = {"location": "weights.bin", "offset": file.tell(), "length": 4 * width * width}
            for key, value in facts.items():
                tensor.external_data.add(key=key, value=str(value))
            weight = rng.standard_normal((width, width), np.float32)
            weight /= np.float32(width**0.5)
            file.write(weight.tobytes())
            tensors.append(tensor)
    nodes = [helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(N_LAYERS)]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", width]) for n in (names[0], names[-1])]
    graph = helper.make_graph(nodes, "large", ends[:1], ends[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path = folder / "large.onnx"
    onnx.save(model, path)
    return path


def peak_nbytes() -> int:
    """Return the largest resident set of this process so far."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return 1024 * int(line.split()[1])


def facts() -> tuple[float, int]:
    """Return CPU time and peak memory of this process."""
    return time.process_time(), peak_nbytes()


def by_session(path: str, x: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what computes an answer in a session, and the facts of its workers."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options)
    return lambda: session.run(None, {"h0": x})[0], lambda: None


def on_cluster(path: str, x: Any, is_batches: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what computes an answer on a worker, and the facts of the worker."""
    from distributed import Client, LocalCluster

    import ferroflow_dask

    cluster = LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None, memory_limit=0)
    client = Client(cluster)
    start = time.perf_counter()
    model = ferroflow_dask.load_onnx(path)

    def compute() -> Any:
        bound = model.map_batches(x) if is_batches else model.bind(h0=x)
        found = client.compute(bound).result()
        return found if is_batches else next(iter(found.values()))

    compute.start = start  # type: ignore[attr-defined] # a cluster that runs is what a user has
    return compute, lambda: next(iter(client.run(facts).values()))


def measure(way: str, path: str, width: int) -> dict[str, Any]:
    """Return seconds and memory of one program."""
    x = np.random.default_rng(1).standard_normal((N_ROWS, width), np.float32)
    start = time.perf_counter()
    compute, of_worker = (
        by_session(path, x) if way == "session" else on_cluster(path, x, way == "map_batches")
    )
    start = getattr(compute, "start", start)
    mean = float(np.abs(compute()).mean())
    first_s = time.perf_counter() - start
    (client_s, _), worker = facts(), of_worker()
    next_s = []
    for _ in range(5):
        start = time.perf_counter()
        compute()
        next_s.append(time.perf_counter() - start)
    worker_peak = None if worker is None else of_worker()[1]
    return {
        "way": way,
        "mean": mean,
        "first_s": first_s,
        "next_s": min(next_s),
        "client_cpu_s": client_s,
        "client_peak": peak_nbytes(),
        "worker_cpu_s": None if worker is None else worker[0],
        "worker_peak": worker_peak,
    }


def main(folder: str, width: str = "8192") -> None:
    """Measure all programs and print a table in Markdown."""
    path = write(Path(folder), int(width))
    try:
        nbytes = (path.parent / "weights.bin").stat().st_size
        rows = []
        for way in ("session", "bind", "map_batches"):
            command = [sys.executable, __file__, "--measure", way, str(path), width]
            found = subprocess.run(command, check=True, capture_output=True, text=True)
            rows.append(json.loads(found.stdout.splitlines()[-1]))
    finally:
        for file in (path, path.parent / "weights.bin"):
            file.unlink()
    assert np.allclose([row["mean"] for row in rows], rows[0]["mean"], rtol=1e-3)
    print(f"{nbytes / 1e9:.2f} GB of weights")
    print("| | first answer | next answers | CPU time to the first answer | peak of client | of worker |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        worker = row["worker_cpu_s"] is not None
        cpu = f"{row['client_cpu_s']:.1f} s" + (f", worker {row['worker_cpu_s']:.1f} s" if worker else "")
        of_worker = f"{row['worker_peak'] / 1e9:.2f} GB" if worker else "–"
        times = f"{row['first_s']:.1f} s | {row['next_s']:.2f} s"
        print(f"| {row['way']} | {times} | {cpu} | {row['client_peak'] / 1e9:.2f} GB | {of_worker} |")


if __name__ == "__main__":
    if sys.argv[1] == "--measure":
        print(json.dumps(measure(sys.argv[2], sys.argv[3], int(sys.argv[4]))))
    else:
        main(*sys.argv[1:])
