"""GPU measurements: matrix products, batch inference and a mixed graph, in a few minutes.

    python examples/gpu.py                # writes gpu.jsonl and prints a summary
    ferroflow report gpu.jsonl

A run of products starts with the un-lowered graph and placed constants. It ends when all outputs are on the
device and the device is synchronised. The time to gather the outputs is printed separately. The rates are
compared with the same device in the same process without Dask. `--emulated` runs the script without a GPU.

Tested on an emulated device only.
"""

import argparse
import json
import time
import uuid
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import dask.array as da
import numpy as np
import onnx
from dask import delayed
from distributed import wait
from onnx import numpy_helper

import ferroflow_dask
from ferroflow_dask.bench import bench_row
from ferroflow_dask.cost import AnalyticCost
from ferroflow_dask.deploy import DeviceChoice, device_client, local_client
from ferroflow_dask.devices import drain
from ferroflow_dask.devices.workers import device_usage
from ferroflow_dask.lowering import device_here

OUTPUT = Path("gpu.jsonl")
INVOCATION = uuid.uuid4().hex
MODEL = Path(onnx.__file__).parent / "backend/test/data/light/light_resnet50.onnx"
#: Products: branches, ops per branch, size, precision, and the required share of the rate without Dask.
PRODUCTS = (
    (16, 64, 2048, "fp32", 0.90),
    (16, 64, 4096, "fp32", 0.95),
    (32, 64, 512, "fp32", 1.00),
    (16, 64, 2048, "tf32", 0.60),
    # Too short for a share of the peak.
    (32, 4, 256, "fp32", 0.0),
    (16, 4, 512, "fp32", 0.0),
    (16, 8, 2048, "fp32", 0.0),
    (64, 1, 2048, "fp32", 0.0),
    (8, 8, 4096, "fp32", 0.0),
)
SMALL = ((4, 16, 128, "fp32", 0.0), (4, 16, 128, "tf32", 0.0))
#: Largest relative error of an output against double precision, in the Frobenius norm. TF32 has ten bits of
#: mantissa, so 64 products in TF32 have an error of about 2e-3.
TOLERANCE = {"fp32": 2e-4, "tf32": 2e-2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--emulated", action="store_true", help="small sizes on an emulated device")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cpus", type=int, default=8, help="CPU workers of the mixed graph and of batches")
    parser.add_argument("--images", type=int, default=512)
    options = parser.parse_args()
    for precision in ("fp32", "tf32"):
        with cluster(options.emulated, 0, precision) as client:
            for case in SMALL if options.emulated else PRODUCTS:
                if case[3] == precision:
                    products(client, case, options.repeat)
    batches(options)
    mixed(options)
    print(f"rows: {OUTPUT}; ferroflow report {OUTPUT}")


@contextmanager
def cluster(is_emulated, cpus, precision="fp32"):
    """Start a GPU worker and `cpus` CPU workers."""
    choice = DeviceChoice("emulated") if is_emulated else DeviceChoice("cuda", 0, precision)
    with device_client(choice, cpus) as client:
        ferroflow_dask.install(client)
        yield client


def write(client, workload, arguments, policy, repetition, *, seconds, ops):
    row = bench_row(
        client,
        workload,
        arguments,
        policy=policy,
        repetition=repetition,
        makespan_s=seconds,
        ops=ops,
        invocation=INVOCATION,
    )
    with OUTPUT.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def products(client, case, repeat):
    branches, ops_per_branch, m, precision, asked = case
    n_ops = branches * ops_per_branch
    gpu = client.submit(gpu_name, pure=False).result()
    sizes = {"n_branches": branches, "ops_per_branch": ops_per_branch, "m": m}
    arguments = {**sizes, "precision": precision, "gpu": gpu}
    model = ferroflow_dask.generate("matmul-parallel", **sizes)
    placed = model.scatter(client)
    profile = ferroflow_dask.calibrate(client)
    x, w = (np.asarray(value) for value in model.graph.constants.values())
    x_there, w_there = client.scatter([x, w], hash=False)
    spent = {"device": [], "ferroflow": [], "dask": []}
    for repetition in range(-1, repeat):  # the first run warms up
        seconds = client.submit(without_dask, x_there, w_there, branches, ops_per_branch, pure=False).result()
        before = device_usage(client)
        start = time.perf_counter()
        bound = placed.bind(profile=profile, granularity="bundles")
        outputs = client.persist(bound)
        wait(outputs)
        client.run(drain)
        ours_s = time.perf_counter() - start
        found = client.compute(outputs).result()
        gather_s = time.perf_counter() - start - ours_s
        usage = device_usage(client).since(before)
        assert usage.ops == n_ops, usage
        one = next(iter(found.values()))
        error = client.submit(error_of, x_there, w_there, ops_per_branch, one).result()
        assert error < TOLERANCE[precision], f"{precision}: outputs are wrong by {error:.2g}"
        stock_s = stock_dask_cuda(client, x, w, branches, ops_per_branch)
        for policy, took_s in (("device", seconds), ("ferroflow", ours_s), ("dask", stock_s)):
            if repetition >= 0 and took_s is not None:
                spent[policy].append(took_s)
                write(client, "matmul-parallel", arguments, policy, repetition, seconds=took_s, ops=n_ops)
    rate, own = n_ops / np.median(spent["ferroflow"]), n_ops / np.median(spent["device"])
    print(
        f"matmul-parallel {branches}×{ops_per_branch}, {m}², {precision}: {rate:,.0f} ops/s resident, "
        f"{rate / own:.2f} of {own:,.0f} without Dask (asked {asked:.2f}); "
        + (f"stock dask-cuda {n_ops / np.median(spent['dask']):,.0f}; " if spent["dask"] else "")
        + f"{usage.batches} batches of {usage.mean_batch:.3g}; error {error:.1g}; gather {gather_s:.3f} s"
    )


def gpu_name():
    """Return the name of the worker's GPU, as its driver has it; "emulated" without one."""
    device = device_here().device
    if device.name == "emulated":
        return device.name
    import cupy

    with device.use():
        return cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()


def without_dask(x, w, branches, ops_per_branch):
    """Return the device's time for the same products without Dask, one launch per product [s]."""
    device = device_here().device
    with device.use():
        a, b = device.to_device(x), device.to_device(w)
        device.record().synchronize()
        start = time.perf_counter()
        kept = []
        for _ in range(branches):
            value = a
            for _ in range(ops_per_branch):
                value = device.product(value, b)
            kept.append(value)
        device.record().synchronize()
        return time.perf_counter() - start


def error_of(x, w, ops_per_branch, found):
    """Return the relative error of an output against double precision on the device."""
    device = device_here().device
    with device.use():
        value, b = (device.to_device(array.astype(np.float64)) for array in (x, w))
        for _ in range(ops_per_branch):
            value = device.product(value, b)
        expected = device.to_host(value)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def stock_dask_cuda(client, x, w, branches, ops_per_branch):
    """Return the time of stock Dask with CuPy arrays, one task per product [s]; None without CuPy."""
    try:
        import cupy
    except ImportError:
        return None
    ferroflow_dask.uninstall(client)
    try:
        first, second = client.submit(cupy.asarray, x, pure=False), client.submit(cupy.asarray, w, pure=False)
        wait([first, second])
        start = time.perf_counter()
        outputs = []
        for _ in range(branches):
            value = delayed(first)
            for _ in range(ops_per_branch):
                value = delayed(cupy.matmul, pure=False)(value, delayed(second))
            outputs.append(value)
        wait(client.persist(outputs))
        client.run(lambda: __import__("cupy").cuda.Device().synchronize())
        return time.perf_counter() - start
    finally:
        ferroflow_dask.install(client)


def batches(options):
    """Compare a ResNet-50 of random weights on one GPU and on CPU workers with onnxruntime."""
    n = 16 if options.emulated else options.images
    chunk = 8 if options.emulated else 64
    model = ferroflow_dask.load_onnx(resnet50())
    images = np.random.default_rng(0).standard_normal((n, 3, 224, 224), dtype=np.float32)
    rates, answers = {}, {}
    for name, cpus in (("GPU", 0), ("CPU", options.cpus)):
        with cluster(options.emulated, 0) if name == "GPU" else local_client(cpus) as client:
            ferroflow_dask.install(client)
            spent = []
            for repetition in range(-1, options.repeat):  # the first run warms up
                # New copies for each run: the device keeps arrays that it has read.
                x = client.persist(da.from_array(images, chunks=(chunk, 3, 224, 224), name=False))
                wait(x)
                start = time.perf_counter()
                answers[name] = client.compute(model.map_batches(x)).result()
                seconds = time.perf_counter() - start
                if repetition >= 0:
                    spent.append(seconds)
                    arguments = {"images": n, "on": name}
                    write(
                        client, "light_resnet50", arguments, "ferroflow", repetition, seconds=seconds, ops=n
                    )
            rates[name] = n / np.median(spent)
    # The error relative to the differences between images: most of each answer is equal for all images.
    own = answers["CPU"] - answers["CPU"].mean(axis=0)
    error = np.linalg.norm(answers["GPU"] - answers["CPU"]) / np.linalg.norm(own)
    assert error < 1e-3, f"light_resnet50: outputs are wrong by {error:.2g}"
    print(
        f"light_resnet50: {rates['GPU']:,.0f} images/s on one GPU, {rates['CPU']:,.0f} on {options.cpus} CPU "
        f"workers: {rates['GPU'] / rates['CPU']:.1f}×; error {error:.1g}"
    )


def resnet50():
    """Return a ResNet-50 up to its logits, with random weights. The file has constant weights only."""
    model = onnx.load(MODEL)
    rng = np.random.default_rng(0)
    shapes = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    normalizations = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    factors = {name for node in normalizations for name in (node.input[1], node.input[4])}
    constants = [node for node in model.graph.node if node.op_type == "ConstantOfShape"]
    for node in constants:
        shape = shapes[node.input[0]]
        if node.output[0] in factors:  # variances are among them, so no value may be near 0
            weight = rng.uniform(0.8, 1.2, shape)
        else:  # He et al., "Delving Deep into Rectifiers", 2015
            weight = rng.standard_normal(shape) * (2 / np.prod(shape[1:])) ** 0.5
        model.graph.initializer.append(numpy_helper.from_array(weight.astype(np.float32), node.output[0]))
        model.graph.node.remove(node)
    softmax = model.graph.node.pop()  # a softmax hides all logits except the largest
    model.graph.output[0].name = softmax.input[0]
    model.ir_version = 8  # since IR version 4, weights need not be inputs
    return model


def mixed_model(n_slow, n_products, m):
    """Return a model with sleeping ops and matrix products, which do not depend on each other."""
    builder = ferroflow_dask.GraphBuilder("mixed")
    root = builder.constant(np.float32([1]), name="root")
    rng = np.random.default_rng(0)
    matrix = builder.constant(rng.standard_normal((m, m), dtype=np.float32) / m**0.5, name="matrix")
    slow = [builder.op("Slow", root, domain="ferroflow", duration=0.05) for _ in range(n_slow)]
    chains = []
    for _ in range(8):
        value = matrix
        for _ in range(n_products // 8):
            value = builder.op("MatMul", value, matrix)
        chains.append(value)
    builder.output(**{f"y{i}": value for i, value in enumerate((*slow, *chains))})
    return builder.build()


def mixed(options):
    """Time the mixed graph on a GPU, on CPUs, and on both."""
    n_slow, n_products, m = (8, 16, 128) if options.emulated else (64, 256, 2048)
    model = mixed_model(n_slow, n_products, m)
    seconds = {}
    for name, has_gpu, cpus in (
        ("GPU", True, 0),
        ("CPUs", False, options.cpus),
        ("both", True, options.cpus),
    ):
        with cluster(options.emulated, cpus) if has_gpu else local_client(cpus) as client:
            ferroflow_dask.install(client)
            profile = ferroflow_dask.calibrate(client)
            placed = model.scatter(client)
            on_cpu = AnalyticCost(profile.flop_rate, profile.memory_bandwidth)
            on_gpu = AnalyticCost(profile.gpu_flop_rate, profile.gpu_memory_bandwidth) if has_gpu else None
            spent = []
            for repetition in range(-1, options.repeat):
                start = time.perf_counter()
                outputs = client.persist(placed.bind(costs=on_cpu, gpu_costs=on_gpu))
                wait(outputs)
                client.run(drain)
                if repetition >= 0:
                    spent.append(time.perf_counter() - start)
                    arguments = {"slow": n_slow, "products": n_products, "m": m, "on": name}
                    n_ops = n_slow + n_products
                    write(client, "mixed", arguments, "ferroflow", repetition, seconds=spent[-1], ops=n_ops)
                del outputs
            seconds[name] = np.median(spent)
    told = ", ".join(f"{name} {spent:.3f} s" for name, spent in seconds.items())
    print(f"mixed graph, {n_slow} × 50 ms and {n_products} products of {m}²: {told}")


if __name__ == "__main__":
    main()
