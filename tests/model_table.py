"""A table of models: each in each placement, compared with onnxruntime.

    python tests/model_table.py [--variants] FILE.onnx …

Without files, the light models of onnx. `--variants` adds each model as onnxruntime has optimised it at each
level, and quantised in both forms. Times are CPU times of warm runs with one thread.
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from agreement import assert_same
from models import light_models, randomize

from ferroflow_dask import ClusterProfile, Model, load_onnx
from ferroflow_dask.exceptions import BindError

#: Of symbolic dimensions, tried in this order; models of audio and text take few.
_SIZES = (2, 1, 32, 64, 256, 512, 576, 16000)
_RUNS = 5
_LEVELS = {"basic": 1, "extended": 2, "all": 99}
_TYPES = {
    "float": "f4",
    "float16": "f2",
    "double": "f8",
    "int64": "i8",
    "int32": "i4",
    "uint8": "u1",
    "bool": "?",
}


def options(level: int = 99) -> Any:
    """Return options of a session with one thread."""
    found = onnxruntime.SessionOptions()
    found.intra_op_num_threads = 1
    found.log_severity_level = 4
    found.graph_optimization_level = onnxruntime.GraphOptimizationLevel(level)
    return found


def values_for(session: Any) -> dict[str, Any] | None:
    """Return inputs with which a session runs; None if none were found."""
    for size in _SIZES:
        rng = np.random.default_rng(0)
        values = {}
        for entry in session.get_inputs():
            shape = [dim if isinstance(dim, int) and dim > 0 else size for dim in entry.shape]
            dtype = np.dtype(_TYPES.get(entry.type[7:-1], "f4"))
            is_rate = entry.name == "sr"  # of audio
            drawn = rng.random(shape) if dtype.kind == "f" else rng.integers(0, 2, shape)
            values[entry.name] = np.asarray(16000 if is_rate else drawn).astype(dtype)
        try:
            session.run(None, values)
        except Exception:  # noqa: BLE001 -- onnxruntime's errors have no base of their own
            continue
        return values
    return None


def loads(path: str, session_options: Any) -> bool:
    """Return whether onnxruntime loads a model."""
    try:
        onnxruntime.InferenceSession(path, session_options)
    except Exception:  # noqa: BLE001
        return False
    return True


def seconds(call: Callable[[], Any]) -> float:
    """Return the median CPU time of warm runs [s]."""
    found = []
    for _ in range(_RUNS):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return statistics.median(found)


def placements(model: Model, values: dict[str, Any]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield how a model is computed."""
    profile = ClusterProfile((1, 1))
    yield "default", lambda: model.bind(values).compute(scheduler="sync")
    yield "whole", lambda: model.bind(values, placement="whole").compute(scheduler="sync")
    yield (
        "bundles",
        lambda: model.bind(values, placement="bundles", profile=profile).compute(scheduler="sync"),
    )
    yield "ops", lambda: model.bind(values, placement="ops").compute(scheduler="sync")
    yield "batches", lambda: in_batches(model, values)


def in_batches(model: Model, values: dict[str, Any]) -> dict[str, Any]:
    """Compute all rows as one batch."""
    import dask
    from dask.array import from_array

    n = max((value.shape[0] for value in values.values() if value.ndim), default=0)
    rows = {k: from_array(v, chunks=-1) if v.ndim and len(v) == n else v for k, v in values.items()}
    found = model.map_batches(rows, check_rows=False)
    found = found if isinstance(found, dict) else {model.outputs[0]: found}
    return dict(zip(found, dask.compute(*found.values(), scheduler="sync"), strict=True))


def row(path: str, name: str) -> tuple[int, int, str]:
    """Return how many placements were right, of how many, and a line."""
    session = onnxruntime.InferenceSession(path, options())
    values = values_for(session)
    if values is None:
        return 0, 0, f"{name:44} no inputs found"
    names = [entry.name for entry in session.get_outputs()]
    expected = dict(zip(names, session.run(None, values), strict=True))
    session_s = seconds(lambda: session.run(None, values))
    model, cells, n_right, n_all = load_onnx(path), [], 0, 0
    for placement, compute in placements(model, values):
        try:
            found = compute()
            for output, value in expected.items():
                scale = max(1.0, float(np.abs(value).max())) if getattr(value, "size", 0) else 1.0
                assert_same(found[output], value, 1e-2, 1e-3 * scale)
        except BindError as error:
            if placement != "batches":
                raise
            cells.append("batches –")  # of models without batches
            print(f"  {name}: {error}"[:200], file=sys.stderr)
            continue
        except (Exception, AssertionError) as error:  # noqa: BLE001 -- whatever fails is a finding
            cells.append(f"{placement} WRONG")
            print(
                f"  {name} {placement}: {type(error).__name__} {' '.join(str(error).split())}"[:300],
                file=sys.stderr,
            )
            n_all += 1
            continue
        n_right, n_all = n_right + 1, n_all + 1
        cells.append(
            f"{placement} {seconds(compute) / session_s:.2f}" if placement == "default" else placement
        )
        if placement == "default":
            default_s = seconds(compute)
            cells.append(
                "ok"
                if default_s <= 1.15 * session_s + 5e-3
                else f"SLOW +{1e3 * (default_s - session_s):.0f} ms"
            )
    return n_right, n_all, f"{name:44} {1e3 * session_s:8.1f} ms  {', '.join(cells)}"


def variants(path: str, folder: str) -> Iterator[tuple[str, str]]:
    """Yield the model as onnxruntime has optimised it, and quantised."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    values = values_for(onnxruntime.InferenceSession(path, options()))

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = [values]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    made = {"": path}
    for form in (QuantFormat.QDQ, QuantFormat.QOperator) if values else ():
        target = f"{folder}/{form.name}.onnx"
        try:
            quantize_static(path, target, Reader(), quant_format=form)
        except Exception as error:  # noqa: BLE001 -- not each model can be quantised
            print(f"  {path} is not quantised: {type(error).__name__} {error}"[:160], file=sys.stderr)
        else:
            made[form.name] = target
    for form_name, source in made.items():
        if form_name and loads(source, options()):
            yield form_name, source
        for level, number in _LEVELS.items():
            target = f"{folder}/{form_name}-{level}.onnx"
            optimising = options(number)
            optimising.optimized_model_filepath = target
            # onnxruntime cannot load all that it has quantised or optimised.
            if loads(source, optimising) and loads(target, options()):
                yield f"{form_name} {level}".strip(), target


def main(arguments: list[str]) -> int:
    """Print the table; return how many placements were wrong."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    with_variants = "--variants" in arguments
    files = [argument for argument in arguments if argument != "--variants"]
    right = total = 0
    with tempfile.TemporaryDirectory() as folder:
        if not files:
            for path in light_models():
                files.append(f"{folder}/{path.stem}.onnx")
                onnx.save(randomize(onnx.load(path), seed=1), files[-1])
        for file in files:
            rows = [(Path(file).stem, file)]
            with tempfile.TemporaryDirectory() as made:
                if with_variants:
                    rows += [(f"{Path(file).stem} {name}", path) for name, path in variants(file, made)]
                for name, path in rows:
                    try:
                        n_right, n_all, line = row(path, name)
                    except Exception as error:  # noqa: BLE001 -- a finding, too
                        n_right, n_all, line = 0, 1, f"{name:44} {type(error).__name__}: {error}"[:300]
                    right, total = right + n_right, total + n_all
                    print(line, flush=True)
    print(f"{right} of {total} are right")
    return total - right


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
