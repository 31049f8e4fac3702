"""Batch inference of an ONNX model: compare `map_batches` with plain onnxruntime and with `map_blocks`.

    python batches.py MODEL.onnx --rows 64 --batch 8

Three programs compute the same rows with the same onnxruntime, in turn:

- one session with two threads,
- Dask's `map_blocks` on two workers, with a session in each worker,
- `map_batches` on the same workers.

If the model has a fixed batch size, all three use a copy without it. The script prints medians and ranges.
"""

import argparse
import tempfile
import time
from pathlib import Path

import dask.array as da
import numpy as np
import onnx
import onnxruntime
from distributed import Client, LocalCluster, get_worker, wait

import ferroflow_dask
from ferroflow_dask.graph.batching import batching_of
from ferroflow_dask.graph.to_onnx import to_onnx


def open_session(path, n_threads):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = n_threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def block(x, path):
    """Compute a block on its worker, in the session of this worker."""
    worker = get_worker()
    if not hasattr(worker, "session"):
        worker.session = open_session(path, 1)
    (entry,) = worker.session.get_inputs()
    return worker.session.run(None, {entry.name: x})[0]


def random_rows(n, spec):
    """Return random rows; integers lie between 0 and 255."""
    rng = np.random.default_rng(0)
    shape = (n, *(dim if isinstance(dim, int) else 1 for dim in spec.shape[1:]))
    if spec.dtype.kind == "f":
        return rng.standard_normal(shape).astype(spec.dtype)
    return rng.integers(0, 256, shape).astype(spec.dtype)


def with_weights(graph):
    """Return an ONNX model that contains its large constants."""
    model = to_onnx(graph)
    for i, tensor in enumerate(model.graph.initializer):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            value = np.asarray(graph.constants[tensor.name])
            model.graph.initializer[i].CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, help="with one input and one output")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=9)
    options = parser.parse_args()
    given = ferroflow_dask.load_onnx(options.model)
    ((name, spec),) = given.inputs.items()
    rows = random_rows(options.rows, spec)
    batching = batching_of(given.graph, {name: spec})
    if batching.rows is not None:
        parser.error(f"{options.model}: {batching}")
    with tempfile.TemporaryDirectory() as folder:
        path = str(options.model)
        if batching.freed_of is not None:
            path = f"{folder}/model.onnx"
            onnx.save(with_weights(batching.graph), path)
        measure(given, path, rows, options)


def measure(model, path, rows, options):
    with LocalCluster(n_workers=2, threads_per_worker=1) as cluster, Client(cluster) as client:
        ferroflow_dask.install(client)
        model = model.place(client)  # as the others' workers, which read them from a file
        x = client.persist(da.from_array(rows, chunks=(options.batch, *rows.shape[1:])))
        wait(x)
        session = open_session(path, 2)

        def in_one_session():
            starts = range(0, len(rows), options.batch)
            feeds = ({session.get_inputs()[0].name: rows[i : i + options.batch]} for i in starts)
            return np.concatenate([session.run(None, feed)[0] for feed in feeds])

        expected = in_one_session()

        def by_map_blocks():
            axes = {"drop_axis": list(range(1, x.ndim)), "new_axis": list(range(1, expected.ndim))}
            chunks = (x.chunks[0], *((size,) for size in expected.shape[1:]))
            y = da.map_blocks(block, x, path=path, meta=expected[:0], chunks=chunks, **axes)
            return client.compute(y).result()

        def by_map_batches():
            return client.compute(model.map_batches(x)).result()

        ways = {
            "one session, 2 threads": in_one_session,
            "map_blocks, 2 workers": by_map_blocks,
            "map_batches, 2 workers": by_map_batches,
        }
        rates = {way: [] for way in ways}
        for repetition in range(-1, options.repeat):  # the first repetition opens sessions
            for way, compute in ways.items():
                start = time.perf_counter()
                found = compute()
                spent = time.perf_counter() - start
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
                if repetition >= 0:
                    rates[way].append(len(rows) / spent)
        tell(rates)


def tell(rates):
    *others, ours = rates
    for way, found in rates.items():
        print(f"{way}: {np.median(found):,.1f} rows/s ({min(found):,.1f}–{max(found):,.1f})")
    for other in others:
        ratios = np.divide(rates[ours], rates[other])
        print(
            f"{ours} / {other}: {np.median(rates[ours]) / np.median(rates[other]):.2f} of medians; "
            f"turn by turn {np.median(ratios):.2f} ({ratios.min():.2f}–{ratios.max():.2f})"
        )


if __name__ == "__main__":
    main()
