"""Suite `workflows`: the ten recipes of WfCommons, as one graph each and as WfCommons' own Dask programs.

WfCommons (Coleman et al., "WfCommons: A framework for enabling scientific workflow research and development",
FGCS 2022; LGPL-3) generates workflows after traces of real ones. They are written once, in WfFormat, and are
the same in each process. `from_num_tasks` gives the most tasks; the sizes of a program are the real numbers.

Graphs consist of sleeps. Durations keep their proportions: four workers need `BOUND_S` for up to 1,000 tasks
at best, and more in proportion. Results have the sizes of the tasks' output files, times a factor so that all
results of a graph fit in `MOST_NBYTES`. The results of the last tasks, which no task reads, are left out. The
value of a task is a hash of its id and the values of its parents, so a wrong edge changes the answer.

WfCommons' programs call `Client.submit` for each task. They run with `--simulate`: the real kernels are not
in the package. All tasks sleep equally long then, since each gets a copy of the same random generator; the
limits are a tenth of WfCommons' own. The time from the first submission to the last result counts.

The recipe of rnaseq has no edges in WfCommons 1.6, so that its graph is a bag of tasks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import runpy
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from dask.typing import Key
from distributed import Client
from packaging.version import Version

from ferroflow_dask.bench.public.base import Clock, Options, Other, Program, Suite
from ferroflow_dask.bench.public.taps import driven, preloads
from ferroflow_dask.exceptions import ResultError, UsageError
from ferroflow_dask.replay import Job, JobGraph, load_record, simulate
from ferroflow_dask.replay.job import in_static_order
from ferroflow_dask.whole_files import replacing, write_text

RECIPES = (
    *("blast", "bwa", "cycles", "epigenomics", "genome"),
    *("montage", "rnaseq", "seismology", "soykb", "srasearch"),
)
#: Recipes of the quick form.
SOME = RECIPES[::2]
#: Tasks of the smallest graphs from which WfCommons makes these recipes, where it refuses fewer.
LEAST = {"bwa": 106, "seismology": 103}
SIZES, FULL_SIZES = (100,), (100, 1_000, 10_000)
#: WfCommons' own programs, in which a task takes `SLEEP_S`. One is enough for a quick look, as each run
#: starts an interpreter.
OWN, FULL_OWN = ("blast-100",), tuple(f"{recipe}-{n}" for n in (100, 1_000) for recipe in RECIPES)
SEED = 1

#: Commit 51bd62c: before, Dask programs passed ids of parents, which are no futures, and had no edges.
FIRST_WITH_EDGES = Version("1.2")

#: Duration of a graph of 1,000 tasks on `WORKERS` at best [s], and of all its results together [B].
BOUND_S, WORKERS, MOST_NBYTES = 1.5, 4, 256 * 2**20
#: Shortest and longest sleep of a task in WfCommons' programs [s].
SLEEP_S = (0.01, 0.11)

#: Workers of the simulated clusters, tasks of the simulated workflows, and the topology.
SIMULATED_WORKERS, SIMULATED_TASKS, TOPOLOGY = (16, 256, 1_000), 1_000, "narval"
#: Mean durations of simulated tasks [s]; None for those that the recipe gives.
SIMULATED_MEANS_S = (1.0, 0.1, None)


# Generation, which has a process of its own: WfCommons uses global random generators and orders of sets


def _version() -> Version:
    try:
        found = Version(version("wfcommons"))
    except PackageNotFoundError as error:
        raise UsageError("wfcommons must be installed, got none; pip install wfcommons==1.6") from error
    if found < FIRST_WITH_EDGES:
        raise UsageError(
            f"wfcommons must be {FIRST_WITH_EDGES} or later, got {found}, whose Dask programs submit each "
            "task without its parents; pip install wfcommons==1.6"
        )
    return found


def _generate(folder: Path, names: Iterable[str]) -> None:
    """Write workflows, and then how many tasks and edges they have."""
    sizes = {}
    for name in names:
        with replacing(folder / f"{name}.json") as path:
            _workflow(name).write_json(path)
        tasks = load_record(folder / f"{name}.json").tasks
        n_edges = sum(len(task.dependencies) for task in tasks.values())
        sizes[name] = {"tasks": len(tasks), "edges": n_edges}
    write_text(folder / "sizes.json", json.dumps(_read_sizes(folder) | sizes))


def _workflow(name: str) -> Any:
    recipe, _, n = name.partition("-")
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 -- WfCommons uses it
    recipes = import_module("wfcommons.wfchef.recipes")
    made = getattr(recipes, f"{recipe.capitalize()}Recipe").from_num_tasks(max(int(n), LEAST.get(recipe, 0)))
    return import_module("wfcommons").WorkflowGenerator(made).build_workflow(recipe)


def _read_sizes(folder: Path) -> dict[str, dict[str, int]]:
    try:
        found: dict[str, dict[str, int]] = json.loads((folder / "sizes.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found


def _written(options: Options, sizes: Sequence[int]) -> tuple[Path, dict[str, dict[str, int]]]:
    """Return the folder of the workflows, which are written if they are missing, and their sizes."""
    folder = (options.data / f"wfcommons-{_version()}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{recipe}-{n}" for n in sizes for recipe in RECIPES]
    if left := [name for name in names if name not in _read_sizes(folder)]:
        _drive(["generate", str(folder), *left], folder, {})
    found = _read_sizes(folder)
    return folder, {name: found[name] for name in names}


def _path() -> str:
    """Return where programs are looked for: first those of this environment."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def _drive(arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    """Run this module in a process of its own, in a folder; raises `ResultError`."""
    fixed = {"PYTHONHASHSEED": "0", "PATH": _path()}
    status, output = driven([sys.executable, "-m", __name__, *arguments], folder, {**fixed, **environment})
    if status:
        last = output.strip().rpartition("\n")[-1]
        raise ResultError(f"{arguments[0]} of WfCommons must end with status 0, got {status}: {last:.300}")


# One graph of each workflow


@lru_cache(4)
def read_graph(path: Path) -> JobGraph:
    """Return the graph of a workflow, with durations and sizes as they run."""
    job = load_record(path)
    tasks, read = job.tasks, {key for task in job.tasks.values() for key in task.dependencies}
    duration = BOUND_S * max(1, len(tasks) / 1_000) / job.bound_s(WORKERS)
    size = min(1, MOST_NBYTES / max(1, sum(tasks[key].nbytes for key in read)))
    scaled = {
        key: dataclasses.replace(
            task, duration_s=task.duration_s * duration, nbytes=int(task.nbytes * size) if key in read else 0
        )
        for key, task in tasks.items()
    }
    return JobGraph(scaled, job.graphs[0].wanted)


def task_key(key: Key, salt: str) -> Key:
    """Return the key of a task in a run, from its name and its id."""
    name, own = _parts(key)
    return (f"{name}-{salt}", own)


def _parts(key: Key) -> tuple[str, str]:
    assert isinstance(key, tuple)
    return str(key[0]), str(key[1])


def _step(own: str, seconds: float, nbytes: int, parents: Sequence[tuple[str, Any]]) -> tuple[str, Any]:
    time.sleep(seconds)
    return _digest(own, [digest for digest, _ in parents]), np.ones(nbytes, np.uint8)


def _digest(own: str, parents: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join((own, *parents)).encode(), digest_size=16).hexdigest()


def run_graph(path: Path, client: Client, clock: Clock) -> dict[str, str]:
    """Run a workflow as one graph; return the value of each last task."""
    graph = read_graph(path)
    # Dask must not take a task for that of the run before.
    key_of = partial(task_key, salt=uuid.uuid4().hex)
    with clock:
        tasks = {
            key_of(key): (
                *(_step, _parts(key)[1], task.duration_s, task.nbytes),
                [key_of(parent) for parent in task.dependencies],
            )
            for key, task in graph.tasks.items()
        }
        found = client.get(tasks, [key_of(key) for key in graph.wanted])
    return {_parts(key)[1]: digest for key, (digest, _) in zip(graph.wanted, found, strict=True)}


def expected_digests(path: Path) -> dict[str, str]:
    """Return the value of each last task without a cluster."""
    graph = read_graph(path)
    digests: dict[Key, str] = {}
    for key, task in graph.tasks.items():
        digests[key] = _digest(_parts(key)[1], [digests[parent] for parent in task.dependencies])
    return {_parts(key)[1]: digests[key] for key in graph.wanted}


# WfCommons' own programs


def run_own(name: str, client: Client, clock: Clock) -> dict[str, Any]:
    """Run WfCommons' program on the cluster of a client; return its tasks, and edges in the wrong order."""
    environment = {"DASK_SCHEDULER_ADDRESS": client.scheduler_info()["address"], **preloads(client)}
    with TemporaryDirectory() as folder:
        with clock:
            _drive(["translated", name], Path(folder), environment)
        result = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
    clock.set(result.pop("seconds"))
    return dict(result)


def expected_own(path: Path) -> dict[str, Any]:
    """Return the answer of WfCommons' program."""
    return {"tasks": sorted(_parts(key)[1] for key in load_record(path).tasks), "late": []}


def _translated(name: str) -> None:
    """Translate a workflow into a Dask program of WfCommons in this folder, and run it."""
    workflow = _workflow(name)
    for task in workflow.tasks.values():
        for file in task.input_files:
            file.size = 0  # inputs would be written in full, and are not read
    translator = import_module("wfcommons.wfbench.translator").DaskTranslator(workflow)
    shortest, longest = SLEEP_S
    translator._dask_wftasks_codelines = partial(
        translator._dask_wftasks_codelines,
        simulate_minimum_execution_time=shortest,
        simulate_maximum_execution_time=longest,
    )
    folder = Path.cwd() / "program"
    translator.translate(folder)
    # The same as its main block, but for the clock and the client. Its `build_dask_client`, which users are
    # asked to change, starts a cluster and allows no address.
    program = runpy.run_path(str(folder / "dask_workflow.py"), run_name="wfcommons_program")
    with Client() as client:
        start = time.perf_counter()
        tasks = program["run_workflow"](client, True)
        seconds = time.perf_counter() - start
    found = sorted(name for name, task in tasks.items() if task.execution_time is not None)
    result = {"seconds": seconds, "tasks": found, "late": _late(workflow, folder / "data")}
    write_text("result.json", json.dumps(result))


def _late(workflow: Any, data: Path) -> list[str]:
    """Return the edges whose child wrote its files before its parent did; a lost file is an edge, too."""
    written: dict[str, list[int]] = {}
    late = []
    for own, task in workflow.tasks.items():
        paths = [data / file.file_id for file in task.output_files]
        late += [f"{own} lacks a file" for path in paths if not path.exists()]
        written[own] = [path.stat().st_mtime_ns for path in paths if path.exists()]
    for parent, child in workflow.edges:
        if written[parent] and written[child] and min(written[child]) < max(written[parent]):
            late.append(f"{parent} after {child}")
    return late


# Virtual time


def simulated(options: Options, mean_s: float | None) -> Iterator[Other]:
    """Yield the makespans of the recipes in virtual time, under stock Dask's policy and the plugin's.

    Parameters
    ----------
    options : Options
    mean_s : float or None
        Mean duration of a task [s]; other durations keep their proportions. As generated if None.
    """
    folder, sizes = _written(options, (SIMULATED_TASKS,))
    for name in sizes:
        job = load_record(folder / f"{name}.json")
        factor = 1.0 if mean_s is None else mean_s * len(job.tasks) / job.work_s
        tasks = {
            key: dataclasses.replace(task, duration_s=task.duration_s * factor)
            for key, task in job.tasks.items()
        }
        # As a client sends them, and as the plugin orders what it bundles.
        scaled = Job((JobGraph(in_static_order(tasks), job.graphs[0].wanted),), job.name)
        program = f"{name}, tasks of {scaled.work_s / len(tasks):.3g} s"
        for n in SIMULATED_WORKERS if options.is_full else SIMULATED_WORKERS[:2]:
            for outcome in simulate(scaled, TOPOLOGY, ["dask", "ferroflow"], workers=n):
                seconds, by = outcome.makespan_s, outcome.policy
                yield Other(program=program, by=by, seconds=seconds, workers=n, cluster="virtual")


# The suite


def programs(options: Options) -> Sequence[Program]:
    """Return the graphs of each size, followed by WfCommons' own programs."""
    folder, sizes = _written(options, FULL_SIZES if options.is_full else SIZES)
    graphs = [name for name in sizes if options.is_full or name.partition("-")[0] in SOME]
    program = partial(Program, suite="workflows", source=f"WfCommons {_version()}, LGPL-3")
    found = []
    for name in graphs:
        path = folder / f"{name}.json"
        run, expected = partial(run_graph, path), partial(expected_digests, path)
        found.append(program(name=name, run=run, sizes=sizes[name], expected=expected))
    why = "" if which("wfbench", path=_path()) else "wfbench, a program of WfCommons, is not on the PATH"
    program = partial(program, skipped=why)
    for name in FULL_OWN if options.is_full else OWN:
        run, expected_of = partial(run_own, name), partial(expected_own, folder / f"{name}.json")
        own = f"{name}-translated"
        found.append(program(name=own, run=run, sizes=sizes[name], expected=expected_of))
    return found


def _in_virtual_time(options: Options) -> Iterator[Other]:
    for mean_s in SIMULATED_MEANS_S if options.is_full else SIMULATED_MEANS_S[:1]:
        yield from simulated(options, mean_s)


SUITE = Suite(
    "workflows",
    "The ten recipes of WfCommons (Coleman et al., FGCS 2022, LGPL-3) as graphs of sleeps. The recipe of "
    "rnaseq has no edges. The suffix *translated* marks Dask programs of WfCommons, which submit each task "
    "by `Client.submit`.",
    programs,
    needs=("wfcommons",),
    others=_in_virtual_time,
)


if __name__ == "__main__":
    if sys.argv[1] == "generate":
        _generate(Path(sys.argv[2]), sys.argv[3:])
    else:
        _translated(sys.argv[2])
