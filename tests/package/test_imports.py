"""Import cost: which third-party packages each module loads, and that public names resolve lazily."""

import subprocess
import sys

import pytest

import ferroflow_dask

HEAVY = ("bokeh", "click", "dask_jobqueue", "onnx", "onnxruntime", "pandas", "rich")
#: Packages that the graph, its kernels and the scheduler's side must not be loaded by.
OWN_HEAVY = ("devices", "graph", "kernels", "lowering")

LOADED = """
import importlib, sys
import distributed  # may load some of them itself
before = set(sys.modules)
importlib.import_module(sys.argv[1])
print(*sorted({*sys.modules} - before))
"""


def loaded_by(module: str) -> set[str]:
    """Return the modules that an import loads in a new process, in addition to distributed's."""
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOADED, module], check=True, capture_output=True, text=True
    )
    return set(found.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "ferroflow_dask",
        "ferroflow_dask.annotations",
        "ferroflow_dask.clients",
        "ferroflow_dask.bundling",
        "ferroflow_dask.bundling.graphs",
        "ferroflow_dask.policy",
        "ferroflow_dask.scheduler",
        "ferroflow_dask.simulation",
    ],
)
def test_the_import_loads_no_heavy_package(module: str) -> None:
    loaded = loaded_by(module)
    assert module in loaded
    heavy = {name for name in loaded if name.partition(".")[0] in HEAVY}
    own = {name for name in loaded if name in {f"ferroflow_dask.{package}" for package in OWN_HEAVY}}
    assert heavy | own == set()


def test_annotations_can_be_imported_without_dask() -> None:
    """A scheduler reads them for each task; they are plain constants."""
    found = loaded_by("ferroflow_dask.annotations")
    assert {name for name in found if name.startswith("ferroflow_dask.")} == {
        "ferroflow_dask.annotations",
        "ferroflow_dask.config",
        "ferroflow_dask.exceptions",
        "ferroflow_dask.printable",
    }


@pytest.mark.parametrize("name", ferroflow_dask.__all__)
def test_each_public_name_resolves(name: str) -> None:
    assert getattr(ferroflow_dask, name).__name__ == name
    assert name in dir(ferroflow_dask)


def test_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'ferroflow_dask' has no attribute 'instal'"):
        _ = ferroflow_dask.instal
