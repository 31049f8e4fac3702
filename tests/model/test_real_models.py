"""Trained models from PyPI packages: what onnxruntime computes, however they are placed and scheduled."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import onnxruntime
import pytest
from distributed import Client

from ferroflow_dask import ClusterProfile, Model, install
from ferroflow_dask.graph import Graph, graph_from_onnx
from ferroflow_dask.kernels.ort_graph import open_graph
from ferroflow_dask.kernels.session_settings import SessionSettings
from ferroflow_dask.lowering import bind_graph, scatter

pytestmark = pytest.mark.cluster
EXAMPLES = Path(__file__).parents[2] / "examples"


def model_file(package: str, pattern: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    return sorted((Path(spec.origin).parent / "models").glob(pattern))[-1]


MODELS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "magika": ("magika", "*/model.onnx", (6, 2048)),
    "text detection": ("rapidocr_onnxruntime", "*_det_infer.onnx", (3, 3, 160, 160)),
    "text direction": ("rapidocr_onnxruntime", "*_cls_infer.onnx", (5, 3, 48, 192)),
    "text recognition": ("rapidocr_onnxruntime", "*_rec_infer.onnx", (5, 3, 48, 160)),
}


def in_batches(graph: Graph, x: Any) -> Any:
    return Model(graph).map_batches(da.from_array(x, chunks=(2, *x.shape[1:])))


def as_one_task(graph: Graph, x: Any) -> Any:
    return bind_graph(graph, {next(iter(graph.inputs)): x}, granularity="whole")


def in_bundles(graph: Graph, x: Any) -> Any:
    return bind_graph(graph, {next(iter(graph.inputs)): x}, profile=ClusterProfile((1, 1)))


def op_by_op(graph: Graph, x: Any) -> Any:
    return bind_graph(graph, {next(iter(graph.inputs)): x})


@pytest.mark.parametrize("granularity", [in_batches, as_one_task, in_bundles, op_by_op])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_what_onnxruntime_gives(name: str, granularity: Any, process_client: Client) -> None:
    package, pattern, shape = MODELS[name]
    path = model_file(package, pattern)
    graph = scatter(graph_from_onnx(path), process_client)
    ((input_name, spec),) = graph.inputs.items()
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, shape).astype(spec.dtype) if name == "magika" else rng.random(shape, np.float32)
    (expected,) = onnxruntime.InferenceSession(path).run(None, {input_name: x})
    for policy in ("ferroflow", "ring", "static", "random"):
        install(process_client, policy)
        found = process_client.compute(granularity(graph, x)).result()
        if isinstance(found, dict):
            (found,) = found.values()
        np.testing.assert_allclose(
            found, expected, rtol=1e-4, atol=1e-5 * max(1.0, np.abs(expected).max()), err_msg=policy
        )


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_one_session(name: str) -> None:
    session = open_graph(graph_from_onnx(model_file(*MODELS[name][:2])), {}, SessionSettings(1))
    assert not isinstance(session, str), session


def run_example(name: str, *arguments: object) -> str:
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_tells_what_files_are(tmp_path: Path) -> None:
    model_file("magika", "*/model.onnx")
    table = tmp_path / "table"
    table.write_text("name,value\n" + "".join(f"row {i},{i * i}\n" for i in range(100)))
    told = run_example("file_types.py", EXAMPLES / "bench.png", __file__, table)
    assert [line.split(" (")[0] for line in told.splitlines()] == [
        "bench.png: png",
        f"{Path(__file__).name}: python",
        "table: csv",
    ]


def test_the_example_reads_text(tmp_path: Path) -> None:
    model_file("rapidocr_onnxruntime", "*_rec_infer.onnx")
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (640, 200), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(40)
    draw.text((20, 20), "Work stealing", fill="black", font=font)
    draw.text((20, 110), "ferroflow 2026", fill="black", font=font)
    image.save(tmp_path / "text.png")
    read = run_example("read_text.py", tmp_path / "text.png")
    assert "stealing" in read
    assert "ferroflow" in read
