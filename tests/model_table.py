"""A table of models: each in each granularity, compared with onnxruntime.

    python tests/model_table.py [--variants] [--quick] [--sklearn] [FILE.onnx …]

Without files, the light models of onnx; with `--sklearn`, models of skl2onnx instead. `--variants` adds each
model as onnxruntime has optimised it at each level, and quantised in both forms. `--quick` measures only the
default, and checks the others.

A result is right if it is that of one session. Some models, above all those with QDQ nodes, give other
results if onnxruntime does not optimise them. Then those are right, too, and counted. Times are CPU times of
warm runs with one thread, of all programs in turn. The default is within the bound if it takes at most 1.15
times as long as the session, and 5 ms. A model over the bound is measured again, twice at most.
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from agreement import assert_same
from models import light_models, randomize
from sklearn_models import sklearn_models

from ferroflow_dask import ClusterProfile, Model, load_onnx
from ferroflow_dask.exceptions import BindError

#: Of symbolic dimensions, tried in this order; models of audio and text take few.
_SIZES = (2, 1, 32, 64, 256, 512, 576, 16000)
_GRANULARITIES = ("default", "whole", "bundles", "ops", "map_batches")
#: Warm runs of each program; fewer if they take longer than this in all [s].
_RUNS, _ENOUGH_S = 7, 1.0
#: Runs at least; granularities in many tasks are slow, and not compared with a bound.
_LEAST_RUNS = {"session": 3, "default": 3, "whole": 3}
_MORE_TRIES = 2
_MOST_RATIO, _MOST_MORE_S = 1.15, 5e-3
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


@dataclass
class Row:
    """A model in the table.

    Parameters
    ----------
    name : str
    group : str
        Models of one line of the summary.
    session_s : float
        CPU time of one session.
    right : list of str
        Placements that are right.
    seconds : dict of str to float
        CPU times by granularity.
    wrong : list of str
        Placements that are not.
    unoptimised : list of str
        Placements whose results are those of a session without optimisations.
    reason : str
        Why the default is over the bound; empty if it is not.
    """

    name: str
    group: str
    session_s: float
    right: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    unoptimised: list[str] = field(default_factory=list)
    reason: str = ""

    @property
    def ratios(self) -> dict[str, float]:
        """CPU times as multiples of the session's."""
        return {way: found / self.session_s for way, found in self.seconds.items()}

    @property
    def is_within(self) -> bool:
        """Whether the default takes hardly longer than the session."""
        return self.seconds.get("default", np.inf) <= _MOST_RATIO * self.session_s + _MOST_MORE_S

    def __str__(self) -> str:
        cells = [f"{way} {ratio:.2f}{'*' * (way in self.unoptimised)}" for way, ratio in self.ratios.items()]
        cells += [f"{way}{'*' * (way in self.unoptimised)}" for way in self.right if way not in self.seconds]
        cells += [f"{way} WRONG" for way in self.wrong]
        return f"{self.name:48} {1e3 * self.session_s:8.1f} ms  {', '.join(cells)}  {self.reason}"


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


def granularities(model: Model, values: dict[str, Any]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield how a model is computed."""
    profile = ClusterProfile((1, 1))
    yield "default", lambda: model.bind(values).compute(scheduler="sync")
    yield "whole", lambda: model.bind(values, granularity="whole").compute(scheduler="sync")
    yield (
        "bundles",
        lambda: model.bind(values, granularity="bundles", profile=profile).compute(scheduler="sync"),
    )
    yield "ops", lambda: model.bind(values, granularity="ops").compute(scheduler="sync")
    yield "map_batches", lambda: in_batches(model, values)


def in_batches(model: Model, values: dict[str, Any]) -> dict[str, Any]:
    """Compute all rows as one batch."""
    import dask
    from dask.array import from_array

    n = max((value.shape[0] for value in values.values() if value.ndim), default=0)
    rows = {k: from_array(v, chunks=-1) if v.ndim and len(v) == n else v for k, v in values.items()}
    found = model.map_batches(rows, check_rows=False)
    found = found if isinstance(found, dict) else {model.outputs[0]: found}
    return dict(zip(found, dask.compute(*found.values(), scheduler="sync"), strict=True))


def row_of(path: str, name: str, group: str, values: dict[str, Any] | None, is_quick: bool) -> Row | str:
    """Return a model's row, or why there is none."""
    if not loads(path, options()):
        return f"{name:48} onnxruntime does not load it"
    session = onnxruntime.InferenceSession(path, options())
    values = values or values_for(session)
    if values is None:
        return f"{name:48} no inputs found"
    names = [entry.name for entry in session.get_outputs()]
    expected = dict(zip(names, session.run(None, values), strict=True))
    model, row, calls = load_onnx(path), Row(name, group, 0), {}
    for granularity, compute in granularities(model, values):
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


def variants(path: str, folder: str, given: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    """Yield the model as onnxruntime has optimised it, and quantised unless its values are given."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    values = None if given else values_for(onnxruntime.InferenceSession(path, options()))

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


def models_of(arguments: list[str], folder: str) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    """Yield the group and the file of each model, with values if it does not take any."""
    files = [argument for argument in arguments if not argument.startswith("--")]
    if "--sklearn" in arguments:
        for name, model, values in sklearn_models():
            onnx.save(model, f"{folder}/{name}.onnx")
            yield "scikit-learn", f"{folder}/{name}.onnx", values
    elif not files:
        for path in light_models():
            onnx.save(randomize(onnx.load(path), seed=1), f"{folder}/{path.stem}.onnx")
            yield "light", f"{folder}/{path.stem}.onnx", None
            Path(f"{folder}/{path.stem}.onnx").unlink()
    for file in files:
        yield "files", file, None


def rows_of(arguments: list[str]) -> Iterator[Row | str]:
    """Yield the rows of the table."""
    with tempfile.TemporaryDirectory() as folder:
        for group, file, values in models_of(arguments, folder):
            stem = Path(file).stem
            with tempfile.TemporaryDirectory() as made:
                found = [("", file)]
                if "--variants" in arguments:
                    found += variants(file, made, values)
                for variant, path in found:
                    form = "quantised" if variant[:1] == "Q" else "optimised" if variant else "as given"
                    name = f"{stem} {variant}".strip()
                    try:
                        yield row_of(path, name, f"{group}, {form}", values, "--quick" in arguments)
                    except Exception as error:  # noqa: BLE001 -- a finding, too
                        yield Row(name, group, np.nan, wrong=[f"{type(error).__name__}: {error}"[:200]])


def summary(rows: list[Row]) -> str:
    """Return lines of a table in Markdown: right results, and medians of ratios to a session."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    lines = [
        f"| models | number | right | {' | '.join(_GRANULARITIES)} | within the bound |",
        f"|{'---|' * (len(_GRANULARITIES) + 4)}",
    ]
    for group, of_group in groups.items():
        n_right = sum(len(row.right) for row in of_group)
        n_all = n_right + sum(len(row.wrong) for row in of_group)
        found = [[row.ratios[way] for row in of_group if way in row.seconds] for way in _GRANULARITIES]
        cells = [f"{statistics.median(ratios):.2f}" if ratios else "–" for ratios in found]
        n_within = sum(row.is_within for row in of_group)
        right = f"{n_right} of {n_all}"
        lines.append(f"| {group} | {len(of_group)} | {right} | {' | '.join(cells)} | {n_within} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the table; return how many granularities were wrong."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    rows = []
    for row in rows_of(arguments):
        print(row, flush=True)
        if isinstance(row, Row):
            rows.append(row)
    n_wrong = sum(len(row.wrong) for row in rows)
    n_right = sum(len(row.right) for row in rows)
    n_unoptimised = sum(len(row.unoptimised) for row in rows)
    n_within = sum(row.is_within for row in rows)
    print(summary(rows))
    print(f"{n_right} of {n_right + n_wrong} are right, {n_unoptimised} as without optimisations")
    print(f"the default is within the bound for {n_within} of {len(rows)} models")
    return n_wrong


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
