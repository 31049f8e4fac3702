"""Detect file types with magika's model on a Dask cluster.

    pip install magika
    python file_types.py FILE…

The package magika contains the model.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from distributed import Client

import ferroflow_dask


def magika_folder() -> Path:
    """Return the folder of magika's newest model."""
    spec = find_spec("magika")
    if spec is None or spec.origin is None:
        sys.exit("the model comes with magika: pip install magika")
    return sorted((Path(spec.origin).parent / "models").glob("*/model.onnx"))[-1].parent


def features(path: Path, config: dict) -> list[int]:
    """Return the model's input for a file: its first and last bytes, without outer white space."""
    content = path.read_bytes()
    block = config["block_size"]
    first = content[:block].lstrip()[: config["beg_size"]]
    last = content[-block:].rstrip()[-config["end_size"] :]
    padding = config["padding_token"]
    return [
        *first,
        *[padding] * (config["beg_size"] - len(first)),
        *[padding] * (config["end_size"] - len(last)),
        *last,
    ]


def main(paths: list[Path]) -> None:
    folder = magika_folder()
    config = json.loads((folder / "config.min.json").read_text())
    model = ferroflow_dask.load_onnx(folder / "model.onnx")
    x = np.array([features(path, config) for path in paths], np.int32)
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=":0") as client:
        ferroflow_dask.install(client)
        scores = client.compute(model.map_batches(x, batch=16)).result()
    for path, row in zip(paths, scores, strict=True):
        best = row.argmax()
        print(f"{path.name}: {config['target_labels_space'][best]} ({row[best]:.0%})")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python file_types.py FILE…")
    main([Path(name) for name in sys.argv[1:]])
