"""`ferroflow doctor`: what is installed, what this machine allows, and a short run of a cluster."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ferroflow_dask.cli.errors import Failure
from ferroflow_dask.exceptions import FerroflowError

_PACKAGES = ("ferroflow-dask", "dask", "distributed", "numpy", "onnx", "bokeh", "dask-jobqueue")
#: Optional packages by the name of their module, and what they are for.
_MODULES = {
    "onnxruntime": "fast kernels; without it models run by onnx.reference",
    "pandas": "data frames, batch jobs and benchmarks",
    "pyarrow": "data frames and Parquet files",
    "cupy": "matrix products on GPUs",
    "dask_cuda": "clusters of GPU workers",
    "selenium": "pictures of reports",
}
#: Optional programs, any of some names, and what they are for.
_PROGRAMS = {
    ("sbatch",): "clusters of SLURM jobs",
    ("nvidia-smi",): "GPUs",
    ("chromium", "chromium-browser", "google-chrome"): "pictures of reports",
}
#: Each worker process needs about ten open files, and the scheduler some for each worker.
_FEW_FILES = 1024


class Finding(NamedTuple):
    """A line of the report; `is_good` is None if the item is optional and missing."""

    name: str
    value: str
    is_good: bool | None = True


@click.command()
def doctor() -> None:
    """Show versions, optional parts and limits, and run a small cluster; status 1 if it fails."""
    table = Table(show_header=False, box=None)
    findings = [*_versions(), *_optional(), *_limits(), *_self_test()]
    for one in findings:
        mark = {True: Text("ok", "green"), False: Text("FAILS", "red"), None: Text("–")}[one.is_good]
        table.add_row(mark, Text(one.name), Text(one.value))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    failed = [one.name for one in findings if one.is_good is False]
    if failed:
        raise Failure(f"{', '.join(failed)}: see the lines marked FAILS")


def _versions() -> Iterator[Finding]:
    yield Finding("python", sys.version.partition(" ")[0])
    for package in _PACKAGES:
        try:
            yield Finding(package, version(package))
        except PackageNotFoundError:
            yield Finding(package, "not installed", False)


def _optional() -> Iterator[Finding]:
    for module, purpose in _MODULES.items():
        found = importlib.util.find_spec(module) is not None
        yield Finding(module, purpose if found else f"not installed: {purpose}", found or None)
    for names, purpose in _PROGRAMS.items():
        path = next(filter(None, map(shutil.which, names)), None)
        yield Finding(names[0], path or f"not found: {purpose}", True if path else None)


def _limits() -> Iterator[Finding]:
    yield Finding("cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} may be used")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = f"; raise the limit for many workers: ulimit -n {hard}" if soft <= _FEW_FILES < hard else ""
    yield Finding("open files", f"at most {soft:,}{more}")


def _self_test() -> Iterator[Finding]:
    """Run a graph with the plugin, and compare its values; show which features are on."""
    from ferroflow_dask import generate
    from ferroflow_dask.deploy.local import local_client
    from ferroflow_dask.scheduler import install, installed

    graph = generate("wide", width=8, depth=2)
    try:
        with local_client(2, 1, False) as client:
            install(client)
            found = client.compute(graph.bind()).result()
            plugin = installed(client)
    except FerroflowError as error:
        yield Finding("self-test", " ".join(str(error).split()), False)
        return
    if plugin is None:
        yield Finding("self-test", "the plugin has ended during a run", False)
        return
    for name, state in plugin.features.items():
        counts = ", ".join(f"{what} {n}" for what, n in plugin.counts.get(name, {}).items())
        shown = (f"on: {counts}" if counts else "on") if state == "on" else f"off: {state}"
        yield Finding(f"feature {name}", shown, state == "on" or None)
    expected = graph.evaluate()
    is_right = found.keys() == expected.keys() and all((found[one] == expected[one]).all() for one in found)
    verdict = "right" if is_right else "wrong"
    yield Finding("self-test", f"{len(found)} outputs of a small cluster are {verdict}", is_right)
