"""A table of models: each in each granularity, compared with onnxruntime.

    python tests/model_table.py [--variants] [--quick] [--sklearn] [--save FILE.csv] [FILE.onnx …]

Without files, the light models of onnx; with `--sklearn`, models of skl2onnx instead. `--variants` adds each
model as onnxruntime has optimised it at each level, and quantised in both forms. `--quick` measures only the
default, and checks the others. `--save` appends the rows to a file, which `tests/model_rows.py` sums up.

A result is right if it is that of one session. Some models, above all those with QDQ nodes, give other
results if onnxruntime does not optimise them. Then those are right, too, and counted. Times are CPU times of
warm runs with one thread, of all programs in turn. The default is within the bound if it takes at most 1.15
times as long as the session, and 5 ms. A model over the bound is measured again, twice at most.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from agreement import assert_same
from model_rows import Row, save, summary, table
from models import light_models, randomize
from random_models import granularities
from sklearn_models import sklearn_models

from ferroflow_dask import load_onnx
from ferroflow_dask.exceptions import BindError

#: Of symbolic dimensions, tried in this order; models of audio and text take few.
_SIZES = (2, 1, 32, 64, 256, 512, 576, 16000)
#: Warm runs of each program; fewer if they take longer than this in all [s].
_RUNS, _ENOUGH_S = 7, 1.0
#: Runs at least; granularities in many tasks are slow, and not compared with a bound.
_LEAST_RUNS = {"session": 3, "default": 3, "whole": 3}
_MORE_TRIES = 2
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
    entries = session.get_inputs()
    batches = {entry.shape[0] for entry in entries if entry.shape and isinstance(entry.shape[0], str)}
    has_lengths = any(_is_length(entry) for entry in entries)
    for size in (_SIZES[-1],) if has_lengths else _SIZES:
        rng = np.random.default_rng(0)
        values = {}
        for entry in entries:
            shape = [
                dim if isinstance(dim, int) and dim > 0 else min(size, 2) if dim in batches else size
                for dim in entry.shape
            ]
            dtype = np.dtype(_TYPES.get(entry.type[7:-1], "f4"))
            drawn = rng.random(shape) if dtype.kind == "f" else rng.integers(0, 2, shape)
            if entry.name == "sr" or _is_length(entry):  # of audio
                drawn = np.full(shape, 16000)
            values[entry.name] = np.asarray(drawn).astype(dtype)
        try:
            session.run(None, values)
        except Exception:  # noqa: BLE001 -- onnxruntime's errors have no base of their own
            continue
        return values
    return None


def _is_length(entry: Any) -> bool:
    """Return whether an input is the number of samples of each recording."""
    return str(entry.name).endswith("_lens")


def loads(path: str, session_options: Any) -> bool:
    """Return whether onnxruntime loads a model."""
    try:
        onnxruntime.InferenceSession(path, session_options)
    except Exception:  # noqa: BLE001
        return False
    return True


def cpu_s(call: Callable[[], Any]) -> float:
    """Return the CPU time of a run [s]."""
    start = time.process_time()
    call()
    return time.process_time() - start


def measure(session: Callable[[], Any], calls: dict[str, Callable[[], Any]], row: Row) -> None:
    """Measure programs in turn."""
    found: dict[str, list[float]] = defaultdict(list)
    for i in range(_RUNS):
        for way, call in {"session": session, **calls}.items():
            if i < _LEAST_RUNS.get(way, 1) or sum(found[way]) < _ENOUGH_S:
                found[way].append(cpu_s(call))
    row.session_s = statistics.median(found.pop("session"))
    row.seconds.update({way: statistics.median(times) for way, times in found.items()})


def row_of(path: str, name: str, group: str, values: dict[str, Any] | None, is_quick: bool) -> Row:
    """Return a model's row."""
    if not loads(path, options()):
        return Row(name, group, np.nan, reason="onnxruntime does not load it")
    session = onnxruntime.InferenceSession(path, options())
    values = values or values_for(session)
    if values is None:
        return Row(name, group, np.nan, reason="no inputs found")
    names = [entry.name for entry in session.get_outputs()]
    expected = dict(zip(names, session.run(None, values), strict=True))
    model, row, calls = load_onnx(path), Row(name, group, 0), {}
    for granularity, compute in granularities(model, values, model.outputs):
        try:
            found = compute()
            if not is_same(found, expected):
                plain = onnxruntime.InferenceSession(path, options(0)).run(None, values)
                same = is_same(found, dict(zip(names, plain, strict=True)))
                (row.unoptimised if same else row.wrong).append(granularity)
                if not same:
                    continue
        except BindError as error:
            print(f"  {name} {granularity}: {error}"[:200], file=sys.stderr)
            if granularity != "map_batches":  # some models have no batches
                row.wrong.append(granularity)
        except Exception as error:  # noqa: BLE001 -- whatever fails is a finding
            told = " ".join(str(error).split())
            print(f"  {name} {granularity}: {type(error).__name__} {told}"[:300], file=sys.stderr)
            row.wrong.append(granularity)
        else:
            row.right.append(granularity)
            if granularity == "default" or not is_quick:
                calls[granularity] = compute
    measure(lambda: session.run(None, values), calls, row)
    for _ in range(_MORE_TRIES):
        if not row.is_within and "default" in calls:
            measure(lambda: session.run(None, values), {"default": calls["default"]}, row)
    if not row.is_within:
        kept = [str(part) for part in model.providers() if part.reason]
        more_ms = 1e3 * (row.seconds.get("default", np.nan) - row.session_s)
        row.reason = f"over by {more_ms:.0f} ms: {'; '.join(kept) or 'one session'}"
    return row


def is_same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Return whether outputs agree."""
    try:
        for output, value in expected.items():
            is_number = isinstance(value, np.ndarray) and value.size and value.dtype.kind in "fiu"
            scale = max(1.0, float(np.abs(value).max())) if is_number else 1.0
            one = found[output]
            if isinstance(value, list) and isinstance(one, np.ndarray):
                one = one.tolist()  # dicts, as an array
            assert_same(one, value, 1e-2, 1e-3 * scale)
    except AssertionError:
        return False
    return True


def quantised(path: str, target: str, form: Any, values: dict[str, Any]) -> str:
    """Quantise a model; return why it cannot be, or nothing."""
    from onnxruntime.quantization import CalibrationDataReader, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = [values]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    reason, prepared = "", f"{target}.prepared.onnx"
    for is_prepared in (False, True):
        try:
            if is_prepared:
                quant_pre_process(path, prepared, skip_symbolic_shape=True)
            quantize_static(prepared if is_prepared else path, target, Reader(), quant_format=form)
        except Exception as error:  # noqa: BLE001 -- not each model can be quantised
            told = " ".join(str(error).split())
            reason = reason or f"quantising fails: {type(error).__name__} {told}"[:160]
            continue
        if not has_quantised(onnx.load(target, load_external_data=False).graph):
            return "onnxruntime quantises none of its ops"
        return "" if loads(target, options()) else "onnxruntime does not load what it has quantised"
    return reason


def has_quantised(graph: onnx.GraphProto) -> bool:
    """Return whether a graph has quantised ops."""
    return any(node.op_type.startswith(("Q", "DequantizeLinear")) for node in graph.node)


def variants(path: str, folder: str, given: dict[str, Any] | None) -> Iterator[tuple[str, str | None, str]]:
    """Yield the model as onnxruntime has optimised it, and quantised unless its values are given.

    A variant has no file if onnxruntime does not make or load it; then the reason follows.
    """
    from onnxruntime.quantization import QuantFormat

    made = {"": path}
    values = None if given else values_for(onnxruntime.InferenceSession(path, options()))
    for form in (QuantFormat.QDQ, QuantFormat.QOperator) if values else ():
        target = f"{folder}/{form.name}.onnx"
        reason = quantised(path, target, form, values)
        if reason:
            yield form.name, None, reason
        else:
            made[form.name] = target
            yield form.name, target, ""
    for form_name, source in made.items():
        for level, number in _LEVELS.items():
            name, target = f"{form_name} {level}".strip(), f"{folder}/{form_name}-{level}.onnx"
            optimising = options(number)
            optimising.optimized_model_filepath = target
            is_loaded = loads(source, optimising) and loads(target, options())
            yield name, target if is_loaded else None, "onnxruntime does not load what it has optimised"


def models_of(asked: argparse.Namespace, folder: str) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    """Yield the group and the file of each model, with values if it does not take any."""
    if asked.sklearn:
        for name, model, values in sklearn_models():
            onnx.save(model, f"{folder}/{name}.onnx")
            yield "scikit-learn", f"{folder}/{name}.onnx", values
    elif not asked.files:
        for path in light_models():
            onnx.save(randomize(onnx.load(path), seed=1), f"{folder}/{path.stem}.onnx")
            yield "light", f"{folder}/{path.stem}.onnx", None
            Path(f"{folder}/{path.stem}.onnx").unlink()
    for file in asked.files:
        yield "files", file, None


def rows_of(asked: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of the table."""
    with tempfile.TemporaryDirectory() as folder:
        for group, file, values in models_of(asked, folder):
            stem = Path(file).stem
            with tempfile.TemporaryDirectory() as made:
                found: list[tuple[str, str | None, str]] = [("", file, "")]
                if asked.variants:
                    found += variants(file, made, values)
                for variant, path, reason in found:
                    form = "quantised" if variant[:1] == "Q" else "optimised" if variant else "as given"
                    name, of_form = f"{stem} {variant}".strip(), f"{group}, {form}"
                    if path is None:
                        yield Row(name, of_form, np.nan, reason=reason)
                        continue
                    try:
                        yield row_of(path, name, of_form, values, asked.quick)
                    except Exception as error:  # noqa: BLE001 -- a finding, too
                        yield Row(name, of_form, np.nan, wrong=[f"{type(error).__name__}: {error}"[:200]])


def main() -> int:
    """Print the table; return how many granularities were wrong."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for option in ("--variants", "--quick", "--sklearn"):
        parser.add_argument(option, action="store_true")
    parser.add_argument("--save", metavar="FILE.csv")
    parser.add_argument("files", nargs="*", metavar="FILE.onnx")
    asked, rows = parser.parse_args(), []
    for row in rows_of(asked):
        print(row, flush=True)
        rows.append(row)
        if asked.save:
            save(row, asked.save)
    print(summary(table(rows)))
    return sum(len(row.wrong) for row in rows)


if __name__ == "__main__":
    sys.exit(bool(main()))
