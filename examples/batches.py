"""Batch inference: compare `map_batches` with onnxruntime, with Dask's own functions and with Ray Data.

    python batches.py MODEL.onnx --rows 64 --batch 8
    python batches.py texts --rows 2000 --batch 32 --ray
    python batches.py trees --rows 1000000 --batch 50000 --ray

These programs compute the same rows with the same onnxruntime, in turn:

- one session with two threads,
- Dask's `map_blocks` or `map_partitions` on two workers, with a session in each worker,
- with `--ray`, Ray Data's `map_batches` with two actors, each with a session,
- `map_batches` on the same workers.

The rows of a model are random. If it has a fixed batch size, all programs use a copy without it.
`texts` is a table of texts of 5 to 500 words and an encoder of sentences. `trees` is a table of numbers
and gradient boosting, which needs skl2onnx. The script prints medians and ranges,
and CPU times, which other programs on the machine hardly change.
"""

import argparse
import tempfile
import time
import zlib
from functools import partial
from pathlib import Path

import dask.array as da
import numpy as np
import onnx
import onnxruntime
from distributed import Client, LocalCluster, get_worker, wait

import ferroflow_dask
from ferroflow_dask.graph.batching import batching_of
from ferroflow_dask.graph.to_onnx import to_onnx

#: Of the encoder of sentences.
WORDS, WIDTH, HIDDEN = 2**15, 256, 1024


def open_session(path, n_threads):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = n_threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def session_here(path):
    """Return the session of this worker."""
    worker = get_worker()
    if not hasattr(worker, "sessions"):
        worker.sessions = {}
    if path not in worker.sessions:
        worker.sessions[path] = open_session(path, 1)
    return worker.sessions[path]


def block(x, path):
    """Compute a block on its worker."""
    return run_rows(session_here(path), x)


def run_rows(session, x):
    (entry,) = session.get_inputs()
    return session.run(None, {entry.name: x})[0]


class Actor:
    """A worker of Ray Data."""

    def __init__(self, path, compute):
        self.session = open_session(path, 1)
        self.compute = compute

    def __call__(self, batch):
        return {"y": self.compute(self.session, batch)}


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


def tokens(texts):
    """Return the numbers of words, padded with 0 to the longest text."""
    numbers = [[zlib.crc32(word.encode()) % (WORDS - 1) + 1 for word in text.split()] for text in texts]
    padded = np.zeros((len(numbers), max(map(len, numbers))), np.int64)
    for row, found in zip(padded, numbers, strict=True):
        row[: len(found)] = found
    return padded


def encoder():
    """Return a model of padded words: embeddings, two layers, and the mean over the words of a text."""
    rng = np.random.default_rng(0)
    builder = ferroflow_dask.GraphBuilder("encoder")

    def weight(*shape):
        return builder.constant(rng.standard_normal(shape, dtype=np.float32) / np.float32(shape[0] ** 0.5))

    words = builder.input("words", "int64", ("texts", "length"))
    value = builder.op("Gather", weight(WORDS, WIDTH), words)
    value = builder.op("Relu", builder.op("MatMul", value, weight(WIDTH, HIDDEN)))
    value = builder.op("MatMul", value, weight(HIDDEN, WIDTH))
    is_word = builder.op("Cast", builder.op("Greater", words, builder.constant(np.int64(0))), to=1)
    mask = builder.op("Unsqueeze", is_word, builder.constant(np.int64([2])))
    axis = builder.constant(np.int64([1]))
    total = builder.op("ReduceSum", builder.op("Mul", value, mask), axis, keepdims=0)
    builder.output(y=builder.op("Div", total, builder.op("ReduceSum", mask, axis, keepdims=0)))
    return builder.build()


def write_texts(folder, options):
    """Write a table of texts and the encoder; return the model, its path, and how rows become its input."""
    import pandas as pd

    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 501, options.rows)
    texts = [" ".join(map(str, rng.integers(0, 10**5, length))) for length in lengths]
    write_table(pd.DataFrame({"text": texts}), folder, 4 * options.batch)
    model, path = encoder(), f"{folder}/model.onnx"
    onnx.save(with_weights(model.graph), path)
    return model, path, lambda frame: tokens(frame["text"])


def write_trees(folder, options):
    """Write a table of numbers and a model of trees, as `write_texts`."""
    import pandas as pd
    from skl2onnx import to_onnx as from_sklearn
    from sklearn.ensemble import GradientBoostingRegressor

    rng = np.random.default_rng(0)
    x = rng.standard_normal((options.rows, 20), dtype=np.float32)
    trained = GradientBoostingRegressor(n_estimators=50, max_depth=5).fit(
        x[:20_000], x[:20_000, :5].prod(axis=1)
    )
    write_table(pd.DataFrame(x).add_prefix("x"), folder, options.batch)
    path = f"{folder}/model.onnx"
    onnx.save(from_sklearn(trained, x[:1]), path)
    return ferroflow_dask.load_onnx(path), path, lambda frame: frame.to_numpy("float32")


def write_table(frame, folder, rows):
    for i in range(0, len(frame), rows):
        frame[i : i + rows].to_parquet(f"{folder}/{i:09}.parquet", index=False)


def in_pieces(read, rows, session, frame):
    """Compute a table in pieces of so many rows."""
    pieces = [read(frame[i : i + rows]) for i in range(0, len(frame), rows)]
    return np.concatenate([run_rows(session, piece) for piece in pieces])


def partition(frame, path, compute):
    return as_column(compute(session_here(path), frame), frame.index)


def as_column(rows, index=None):
    """Return rows as a column of numbers, or of arrays if a row has several numbers."""
    import pandas as pd

    return pd.Series(rows[:, 0] if rows.shape[1] == 1 else list(rows), index, name="y")


def as_array(column):
    return np.stack(column) if column.dtype == object else column.to_numpy()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, help="with one input and one output; or texts, or trees")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--ray", action="store_true", help="compare with Ray Data, too")
    options = parser.parse_args()
    tables = {"texts": write_texts, "trees": write_trees}
    if str(options.model) in tables:
        with tempfile.TemporaryDirectory() as folder:
            measure_table(*tables[str(options.model)](folder, options), folder, options)
        return
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
        model = model.scatter(client)  # as the others' workers, which read them from a file
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
        if options.ray:
            ways = {"Ray Data, 2 actors": by_ray(rows, path, options), **ways}
        compare(ways, expected, options, client)


def start_ray():
    import ray

    # Two CPUs are for actors. Ray Data needs others to read.
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray


def by_ray(rows, path, options):
    ray = start_ray()
    data = ray.data.from_numpy([rows[i : i + options.batch] for i in range(0, len(rows), options.batch)])
    data = data.materialize()
    actors = {"concurrency": 2, "num_cpus": 1, "batch_size": options.batch}

    def compute(session, batch):
        return run_rows(session, batch["data"])

    def run():
        found = data.map_batches(Actor, fn_constructor_args=(path, compute), **actors)
        return np.concatenate([batch["y"] for batch in found.iter_batches(batch_size=None)])

    return run


def measure_table(model, path, read, folder, options):
    import dask.dataframe as dd

    pieces = partial(in_pieces, read, options.batch)
    with LocalCluster(n_workers=2, threads_per_worker=1) as cluster, Client(cluster) as client:
        ferroflow_dask.install(client)
        model = model.scatter(client)
        session = open_session(path, 2)
        (output,) = model.outputs

        def table():
            return dd.read_parquet(f"{folder}/*.parquet")

        def in_one_session():
            return pieces(session, table().compute(scheduler="sync"))

        expected = in_one_session()
        meta = as_column(expected[:1])[:0]

        def by_map_partitions():
            found = table().map_partitions(partition, path, pieces, meta=meta)
            return as_array(client.compute(found).result())

        def by_map_batches():
            found = model.map_batches(table(), preprocess=read, batch_size=options.batch)
            return as_array(client.compute(found[output]).result())

        ways = {
            "one session, 2 threads": in_one_session,
            "map_partitions, 2 workers": by_map_partitions,
            "map_batches, 2 workers": by_map_batches,
        }
        if options.ray:
            ways = {"Ray Data, 2 actors": table_by_ray(path, read, folder, options), **ways}
        compare(ways, expected, options, client)


def table_by_ray(path, read, folder, options):
    ray = start_ray()
    actors = {"concurrency": 2, "num_cpus": 1, "batch_size": options.batch, "batch_format": "pandas"}

    def compute(session, frame):
        return run_rows(session, read(frame))

    def run():
        data = ray.data.read_parquet(folder, file_extensions=["parquet"])
        found = data.map_batches(Actor, fn_constructor_args=(path, compute), **actors)
        return np.concatenate([batch["y"] for batch in found.iter_batches(batch_size=None)])

    return run


def cpu_s(client):
    """Return the CPU time of this process and of the workers so far."""
    return time.process_time() + sum(client.run(time.process_time).values())


def compare(ways, expected, options, client):
    """Run all programs in turn, check their results and print their rates and CPU times."""
    rates, cpu_times = ({way: [] for way in ways} for _ in range(2))
    for repetition in range(-1, options.repeat):  # the first repetition opens sessions
        for way, compute in ways.items():
            cpu_start, start = cpu_s(client), time.perf_counter()
            found = compute()
            spent = time.perf_counter() - start
            cpu = cpu_s(client) - cpu_start
            np.testing.assert_allclose(
                found.reshape(expected.shape), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max()
            )
            if repetition >= 0:
                rates[way].append(len(expected) / spent)
                cpu_times[way].append(cpu)
    tell(rates, cpu_times)


def tell(rates, cpu_times):
    *others, ours = rates
    for way, found in rates.items():
        print(f"{way}: {np.median(found):,.1f} rows/s ({min(found):,.1f}–{max(found):,.1f})")
    for other in others:
        ratios = np.divide(rates[ours], rates[other])
        print(
            f"{ours} / {other}: {np.median(rates[ours]) / np.median(rates[other]):.2f} of medians; "
            f"turn by turn {np.median(ratios):.2f} ({ratios.min():.2f}–{ratios.max():.2f})"
        )
    for way, found in cpu_times.items():
        if not way.startswith("Ray"):  # the time of its actors is not known here
            print(f"{way}: {np.median(found):.3f} s of CPU time in client and workers")


if __name__ == "__main__":
    main()
