"""Libraries with custom operators: loaded wherever a session is opened."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import dask
import numpy as np
import pytest
from models import mlp, model_of
from onnx import TensorProto
from onnx.helper import make_node as node

from ferroflow_dask import load_onnx
from ferroflow_dask.exceptions import KernelError, KernelNotFoundError, UsageError
from ferroflow_dask.kernels import registry, segments

X = np.ones((2, 784), np.float32)

#: The entry point of such a library. It adds no operators, and notes that it was called.
SOURCE = """
#include <stdio.h>
void* RegisterCustomOps(void* options, const void* api) {
    FILE* notes = fopen("NOTES", "a");
    fputs("x", notes);
    fclose(notes);
    return 0;
}
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, library = tmp_path / "custom.c", tmp_path / "libcustom.so"
    source.write_text(SOURCE.replace("NOTES", str(tmp_path / "notes")))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.mark.parametrize("granularity", ["whole", "ops"])
def test_a_library_is_loaded_for_each_session(library: Path, granularity: str) -> None:
    segments.plans.clear()  # other tests may have opened sessions for the same ops
    registry._dispatchers.clear()
    with dask.config.set({"ferroflow.kernels.custom-op-libraries": [str(library)]}):
        found = load_onnx(mlp(seed=7, hidden=9)).bind(x=X, granularity=granularity).compute(scheduler="sync")
    assert found["y"].shape == (2, 10)
    assert (library.parent / "notes").read_text()


def custom() -> bytes:
    domains = {"acme": 1}
    nodes = [node("Frobnicate", ["x"], ["z"], domain="acme"), node("Neg", ["z"], ["y"])]
    model = model_of(nodes, {"x": (TensorProto.FLOAT, [2])}, ["y"], domains=domains)
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    model.graph.output[0].type.tensor_type.shape.dim.add(dim_value=2)
    return bytes(model.SerializeToString())


def test_an_operator_of_another_domain_is_left_to_the_libraries(library: Path) -> None:
    x = np.ones(2, np.float32)
    with pytest.raises(KernelNotFoundError, match=r"no kernel for op .*acme.Frobnicate"):
        load_onnx(custom()).bind(x=x)
    with dask.config.set({"ferroflow.kernels.custom-op-libraries": [str(library)]}):
        bound = load_onnx(custom()).bind(x=x)
        # This library does not have it.
        with pytest.raises((KernelError, KernelNotFoundError), match=r"Frobnicate.*not a registered"):
            bound.compute(scheduler="sync")


def test_a_library_that_is_not_there_is_named() -> None:
    settings = {"ferroflow.kernels.custom-op-libraries": ["/nowhere/libx.so"]}
    message = (
        "the setting ferroflow.kernels.custom-op-libraries has '/nowhere/libx.so', which onnxruntime cannot"
    )
    with dask.config.set(settings), pytest.raises(UsageError, match=message):
        load_onnx(mlp(seed=8, hidden=9)).bind(x=X, granularity="whole").compute(scheduler="sync")
