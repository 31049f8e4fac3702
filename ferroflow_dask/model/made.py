"""Where models come from: files, a builder, the built-in graphs."""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING, Any

from ferroflow_dask.graph.builder import Builder
from ferroflow_dask.graph.from_onnx import graph_from_onnx
from ferroflow_dask.graph.generate import generate_graph
from ferroflow_dask.model.model import Model

if TYPE_CHECKING:
    from onnx import ModelProto


class GraphBuilder(Builder):
    """Collect inputs, constants and ops, then `build` a model.

    Parameters
    ----------
    name : str, optional
    opset : int, optional
        Version of ONNX's operator set that the ops are written in.

    Examples
    --------
    >>> import numpy as np
    >>> builder = GraphBuilder("layer")
    >>> x = builder.input("x", "float32", ("batch", 3))
    >>> w = builder.constant(np.eye(3, dtype="float32"), name="w")
    >>> builder.output(y=builder.op("Relu", builder.op("MatMul", x, w)))
    >>> model = builder.build()
    >>> model
    <Model 'layer': 2 ops, 2 sources, 3 edges, outputs ['y']>
    >>> print(model.graph.spec("y"))
    float32[batch, 3]
    """

    def build(self) -> Model:
        """Return the model.

        Raises
        ------
        GraphError
            No output was marked, or two outputs carry one value or one name.
        """
        return Model(self.to_graph())


def load_onnx(
    model: str | os.PathLike[str] | bytes | IO[bytes] | ModelProto,
    name: str | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
) -> Model:
    """Import an ONNX model with its weights.

    Parameters
    ----------
    model : str, path, bytes, file object or ModelProto
        A file in ONNX's format or in onnxruntime's own (`.ort`): its path, its URL, its content, or the file
        opened with `open(path, "rb")`. Or the message. URLs are those of fsspec, like `s3://bucket/m.onnx`.
    name : str, optional
        Name of the model. The default is the file's, or that of the message's graph.
    folder : str or path, optional
        Where weights in other files are. The default is the folder of the model's file. No file outside of
        this folder is read.

    Returns
    -------
    Model
        Initializers that are also listed as inputs are its `defaults`. Functions of the model are expanded.

    Raises
    ------
    UsageError
        `model` is of another type, or a file that was opened for text.
    ModelError
        The file is missing, is no ONNX model, is damaged or not valid, or weights are missing or lie
        outside its folder. The message is one line that names the file.
    """
    return Model(graph_from_onnx(model, name, folder))


def generate(name: str, *, seed: int = 0, **arguments: Any) -> Model:
    """Return one of the built-in models.

    Parameters
    ----------
    name : str
        One of the names below.
    seed : int, optional
        Seed of the random constants.
    **arguments
        Sizes of that model; the published ones if left out:

        - `imbalanced`: `n_heavy=4`, `heavy_ms=200` [ms], `n_fast=200`, `fast_ms=1` [ms]
        - `wide`: `width=8` chains of `depth=5` ops of 1 ms, those of the part `skew=0.25` of 5 ms
        - `large-wide`: `width=320`, `depth=1`, `skew=0.47`
        - `xlarge-wide`: `width=1280`, `depth=1`, `skew=0.003`
        - `skewed`: `n=100` ops, half of them 1 ms, half `factor=10` [ms]
        - `transformer`: `layers=1`, `seq_len=128`, `d_model=512`, `n_heads=8`
        - `large-transformer`: the same with `layers=8`
        - `xlarge-transformer`: the same with `layers=32`
        - `resnet`: `channels=64`
        - `matmul-chain`: `n_ops=50` products of (`m=512`, m) matrices
        - `matmul-parallel`: `n_branches=16` chains of `ops_per_branch=8` products, `m=512`
        - `uniform`: `n=50` products, `dim=64`

    Returns
    -------
    Model
        It has no inputs. Its outputs are the values that no op reads.

    Raises
    ------
    UnknownNameError
        There is no such model.
    UsageError
        The model does not have an argument, or a value is out of range.

    Examples
    --------
    >>> generate("wide", width=8, depth=5, skew=0.25)
    <Model 'wide': 40 ops, 1 sources, 40 edges, outputs ['slow_5', 'slow_10', 'fast_15', 'fast_20']…>
    """
    return Model(generate_graph(name, seed=seed, **arguments))
