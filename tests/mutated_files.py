"""Mutated files of every format that the package reads: `python tests/mutated_files.py 20000`.

Each reader must return, or raise an error of this package in one line. `--only FORMAT --first N` repeats one.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import math
import random
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from bench_rows import fields
from feature_faults import _model
from mutants import mutant

from ferroflow_dask.bench.public.report import report
from ferroflow_dask.bench.rows import read_rows
from ferroflow_dask.cluster_profile import ClusterProfile
from ferroflow_dask.deploy import calibration
from ferroflow_dask.deploy.slurm.sections import job_kind, slurm_template
from ferroflow_dask.exceptions import FerroflowError
from ferroflow_dask.graph import generate_graph, graph_from_onnx
from ferroflow_dask.graph.files import read_graph, write_graph
from ferroflow_dask.lowering import bind_graph
from ferroflow_dask.replay import load_record, save_wfformat, simulate_job
from ferroflow_dask.scheduler.learned import Known, Learned
from ferroflow_dask.scheduler.learned_file import as_json, read_numbers
from ferroflow_dask.strategy import Strategy, partition, whole_on
from ferroflow_dask.strategy.files import as_json as strategy_json
from ferroflow_dask.strategy.files import read_strategy
from ferroflow_dask.topology import load_topology

#: A file that takes longer to read ends the process; reading all of them takes no more memory [s], [B].
HUNG_S, MOST_NBYTES = 10.0, 2**30
#: In place of any value.
_ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 0.5, -0.0, 3, 10**6, 2**63, 10**30, 1e308, -1e308, math.nan, math.inf, -math.inf),
    *("", "x", "0", "-1", "nan", "1e9", "\x00", "\x1b[31m", "é" * 50, "a" * 5000, "../../etc/passwd", "\n"),
    *([], {}, [[]], [{}], {"x": 1}, [None], [1, "a"]),
)
#: In place of a part of the text.
_TEXTS = (
    *('"', "'", "{", "}", "[", "]", ":", ",", "-", "\n", "\n\n", "\t", "\\", "\x00", "#", "&a [*a]", "*a"),
    *("[" * 50_000, '{"a":' * 20_000, "9" * 6000, "2001-99-99", "!!python/object:os.system x", "NaN", "~"),
    *("\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "%", "? ", "- ", "<<: ", "| ", "1e999"),
)


@dataclass(frozen=True)
class Format:
    """A format with a valid file.

    Parameters
    ----------
    suffix : str
    valid : str
    read : callable
        Reads the file of a path, and uses the content.
    load, dump : callable, optional
        For a structure between text and values; JSON by default.
    """

    suffix: str
    valid: str
    read: Callable[[Path], Any]
    load: Callable[[str], Any] = json.loads
    dump: Callable[[Any], str] = json.dumps


def _record() -> str:
    rows = [
        [f"('x', {i})", 0, 0.01 * (i + 1), 100, [i - 1] if i else [], i % 2, 0.1 * i, i > 2] for i in range(5)
    ]
    return json.dumps(
        {
            "format": "ferroflow record",
            "version": 1,
            "policy": "dask",
            "threads": [1, 2],
            "core_share": 1.0,
            "makespan_s": 0.5,
            "graphs": [{"waits": False, "delay_s": 0.0}],
            "tasks": rows,
            "transfers": [],
        }
    )


def _simulate(path: Path) -> None:
    job = load_record(path)
    if len(job.tasks) < 100 and sum(task.duration_s for task in job.tasks.values()) < 1e6:
        simulate_job(job, load_topology("this-machine"), "dask", engine="light", repeat=1)


def _workflow() -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(_record())
        save_wfformat(load_record(path), path, datetime.now(UTC))
        return path.read_text()


_TOPOLOGY = """\
version: 1
name: two racks
racks:
  - {name: a, link: {latency_s: 1.0e-5, bandwidth: 1.0e+9}}
  - {name: b, link: {latency_s: 1.0e-5, bandwidth: 1.0e+9}}
hosts:
  - name: one
    count: 2
    cores: 4
    rack: a
    link: {latency_s: 1.0e-5, bandwidth: 1.0e+9}
    inside: {latency_s: 1.0e-6, bandwidth: 5.0e+9}
    workers: [{count: 2, threads: 2, speed: 1.5, memory_nbytes: 1000000}]
  - {name: two, rack: b, workers: [{kind: gpu}], link: {latency_s: 1.0e-5, bandwidth: 1.0e+9}}
scheduler: one-0
client: two
runtime: {graph_task_s: 1.0e-4}
"""


def _strategy_text() -> str:
    graph = _with_shapes()
    strategy = whole_on(graph, "0")
    return strategy_json(Strategy(("0", "1"), strategy.operators))


def _with_shapes() -> Any:
    return generate_graph("matmul-chain", n_ops=3, m=8)


def _graph_text() -> str:
    with tempfile.TemporaryDirectory() as folder:
        write_graph(_model().graph, Path(folder) / "g.json")
        return (Path(folder) / "g.json").read_text()


def _profile(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_identity", lambda _: "id")
        patch.setattr(calibration, "profiles_file", lambda: path)
        patch.setattr(calibration, "_durations_file", lambda: path)
        calibration.load_durations(None)  # type: ignore[arg-type]
        profile = calibration.load_profile(None)  # type: ignore[arg-type]
    if profile is not None and profile.n_threads < 1000:
        bind_graph(_with_shapes(), profile=profile, granularity="auto")


def learned_numbers() -> Format:
    """Return the format of learned numbers."""
    sizes = [
        {"size_nbytes": 2.0**n, "mean_s": 0.01, "mean_nbytes": 8.0, "most_nbytes": 80.0}
        | {"n_cold": 1, "n_warm": n, "n_sized": n + 1}
        for n in (3, 20)
    ]
    numbers: dict[str, Any] = {
        "round_trip_s": 2e-3,
        "pause_s": None,
        "separate": ["read"],
        "kinds_s": {"MatMul": 0.1},
    }
    numbers["shuffled"] = {"1a2b": 1e6}
    return Format(".json", as_json({**numbers, "prefixes": {"sum": sizes, "add": sizes[:1]}}), _learned)


def _learned(path: Path) -> None:
    """Restore learned numbers, and expect tasks of known and unknown sizes by them."""
    learned = Learned()
    learned.restore(read_numbers(path))
    for averages in Known(learned.costs, learned.separate).values():
        for size in (0.0, 2.0**20, 2.0**40) if averages is not None else ():
            averages.of_size(size)
    as_json(learned.exported())


def _rows(path: Path) -> None:
    report(read_rows([path]))


def _formats() -> Mapping[str, Format]:
    row = json.dumps(fields())
    profile = {"id": ClusterProfile((1, 1)).as_dict()}
    yaml_text = {"load": yaml.safe_load, "dump": yaml.safe_dump}
    return {
        "record": Format(".json", _record(), _simulate),
        "workflow": Format(".json", _workflow(), _simulate),
        "topology": Format(".yaml", _TOPOLOGY, load_topology, **yaml_text),
        "strategy": Format(
            ".json", _strategy_text(), lambda path: partition(_with_shapes(), read_strategy(path))
        ),
        "graph": Format(".json", _graph_text(), read_graph),
        "profile": Format(".json", json.dumps(profile), _profile),
        "jobqueue": Format(".yaml", slurm_template(), lambda path: job_kind("slurm", path), **yaml_text),
        "learned": learned_numbers(),
        "report": Format(".jsonl", row + "\n", _rows, dump=lambda value: json.dumps(value) + "\n"),
    }


# Mutants


def mutated(one: Format, rng: random.Random) -> bytes:
    """Return the valid file with changes to its values, its text or its bytes."""
    how = rng.randrange(4)
    if how < 2:
        value = copy.deepcopy(one.load(one.valid))
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            value = _with_change(value, rng)
        try:
            return one.dump(value).encode("utf-8", "surrogatepass")
        except (ValueError, yaml.YAMLError):
            return repr(value).encode("utf-8", "surrogatepass")
    content = bytearray(one.valid.encode())
    if how == 2:
        at = rng.randrange(len(content))
        content[at : at + rng.randrange(5)] = rng.choice(_TEXTS).encode("utf-8", "surrogatepass")
    else:
        for _ in range(rng.choice((1, 3))):
            content[rng.randrange(len(content))] = rng.randrange(256)
    if rng.random() < 0.1:
        del content[rng.randrange(len(content)) :]
    return bytes(content)


def _with_change(value: Any, rng: random.Random) -> Any:
    """Change one place of a structure."""
    places = [((), value), *_places(value, ())]
    path, found = rng.choice(places)
    if not path:
        return rng.choice(_ODD) if rng.random() < 0.2 else value
    parent = value
    for step in path[:-1]:
        parent = parent[step]
    last, how = path[-1], rng.randrange(5)
    if how == 0:
        del parent[last]
    elif how == 1 and isinstance(parent, list):
        parent.insert(last, copy.deepcopy(found))
    elif how == 1:
        parent[rng.choice((f"{last}x", "", "x", 3))] = found
    elif how == 2:
        parent[last] = copy.deepcopy(rng.choice(places)[1])
    else:
        parent[last] = rng.choice(_ODD)
    return value


def _places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield (*path, name), inner
        yield from _places(inner, (*path, name))


# Runs


class Reader:
    """Reads mutated files by their numbers."""

    def __init__(self, folder: Path, only: str = "") -> None:
        self._folder = folder
        self._formats = _formats()
        self._names = [only] if only else ["model", *self._formats]
        self.counts: Counter[str] = Counter()

    def read(self, number: int) -> str:
        """Read a file; return what is wrong."""
        name = self._names[number % len(self._names)]
        began = time.monotonic()
        problem = ""
        try:
            self._read(name, number)
            outcome = "read"
        except FerroflowError as error:
            outcome = "refused"
            text = str(error)
            if "\n" in text or not text or len(text) > 2000:
                problem = f"the error must be one short line, got {text[:300]!r}"
            elif not text.isprintable():
                problem = f"the error has control characters: {text[:300]!r}"
        except Exception as error:  # noqa: BLE001 -- any is a defect
            outcome = "WRONG"
            problem = f"{type(error).__name__}: {str(error)[:300]}"
        if time.monotonic() - began > HUNG_S:
            problem += " (it took too long)"
        self.counts[f"{name}: {outcome}"] += 1
        return problem and f"{name} {number}: {problem}"

    def _read(self, name: str, number: int) -> None:
        if name == "model":
            graph_from_onnx(mutant(number))
            return
        one = self._formats[name]
        path = self._folder / f"file{one.suffix}"
        path.write_bytes(mutated(one, random.Random(f"{name} {number}")))
        one.read(path)


def main() -> None:
    """Read mutated files and print what went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("n", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        reader = Reader(Path(folder), options.only)
        for number in range(options.first, options.first + options.n):
            faulthandler.dump_traceback_later(HUNG_S, exit=True)
            problem = reader.read(number)
            faulthandler.cancel_dump_traceback_later()
            if problem:
                wrong += 1
                print(problem, flush=True)
    for outcome, n in sorted(reader.counts.items()):
        print(f"{n:>6} {outcome}")
    nbytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{options.n} files, {wrong} wrong, at most {nbytes / 2**20:.0f} MiB")
    sys.exit(bool(wrong) or nbytes > MOST_NBYTES)


if __name__ == "__main__":
    main()
