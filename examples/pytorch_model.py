"""Export a PyTorch model to ONNX and compute it on two workers; needs torch and onnxscript.

pip install '.[examples]'
python pytorch_model.py
"""

import tempfile

import numpy as np
import torch
from distributed import Client, LocalCluster

import ferroflow_dask


def classifier():
    """Return a small convolutional network with random weights."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 10),
    ).eval()


def main():
    model = classifier()
    images = np.random.default_rng(0).standard_normal((64, 3, 32, 32), dtype=np.float32)
    with torch.no_grad():
        expected = model(torch.from_numpy(images)).numpy()
    with tempfile.TemporaryDirectory() as folder:
        torch.onnx.export(
            model,
            (torch.from_numpy(images[:2]),),
            f"{folder}/classifier.onnx",
            input_names=["images"],
            output_names=["scores"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            verbose=False,
        )
        loaded = ferroflow_dask.load_onnx(f"{folder}/classifier.onnx")
        with LocalCluster(n_workers=2, threads_per_worker=1) as cluster, Client(cluster) as client:
            found = client.compute(loaded.map_batches(images, batch=16)).result()
    difference = np.abs(found - expected).max()
    print(f"{len(found)} images, {found.shape[1]} scores each; difference from PyTorch: {difference:.0e}")


if __name__ == "__main__":
    main()
